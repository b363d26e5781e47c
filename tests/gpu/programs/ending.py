"""Ends in a chosen way after using its device: `ending.py exit|assert|memory|collective cuda|cpu`."""

import json
import os
import pickle
import sys

import torch
import torch.distributed as dist

STATUS = 7
"""Exit code of `exit`."""


def end_by_exit(device: str) -> None:
    """End with a status of the program's own."""
    torch.ones(8, device=device).sum().item()
    sys.exit(STATUS)


def end_by_assert(device: str) -> None:
    """Index beyond the end: on a GPU a device-side assert, which every later call reports."""
    values = torch.arange(4, device=device)
    values[torch.tensor([9], device=device)].sum().item()


def end_by_memory(device: str) -> None:
    """Ask for more memory than there is."""
    kept = torch.ones(1 << 20, device=device)
    torch.empty(1 << 46, dtype=torch.uint8, device=device)
    print(kept.sum())


def collect(device: str) -> None:
    """Join a group of one rank, add up, and print what the flight recorder has seen."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    value = torch.full((1024,), 3.0, device=device)
    dist.all_reduce(value)
    total = value.sum().item()
    names = [name for name in os.environ if name.startswith(("TORCH_FR_", "TORCH_NCCL_", "NCCL_"))]
    found = {
        "total": total,
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "recorded": count_recorded() if cuda else None,
        "environ": {name: os.environ[name] for name in names},
    }
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


def count_recorded() -> int | None:
    """Entries of the flight recorder; None where this torch does not give them."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return len(pickle.loads(dump()).get("entries", ())) if dump else None


ENDINGS = {"exit": end_by_exit, "assert": end_by_assert, "memory": end_by_memory, "collective": collect}

if __name__ == "__main__":
    ENDINGS[sys.argv[1]](sys.argv[2])
