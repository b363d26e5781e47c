"""Torchrun's variables, this rank's device, and the process group."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

# Imported later, its default arguments would keep the process group (see training.leave_process_group).
import torch.distributed.nn.functional
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launcher.programs.options import OptionError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """What torchrun tells a process; a process without torchrun is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    has_rendezvous: bool
    """torchrun's variables are set, and so its store can be found."""


def read_torchrun_variables() -> Ranks:
    """Read torchrun's variables; raises OptionError if one is not a number."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    defaults = ("0", "1", os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1"))
    texts = [os.environ.get(name, default) for name, default in zip(names, defaults, strict=True)]
    try:
        rank, world_size, local_rank, local_world_size = map(int, texts)
    except ValueError:
        raise OptionError(
            f"{', '.join(names)} are {', '.join(texts)}: numbers, as torchrun sets them"
        ) from None
    return Ranks(rank, world_size, local_rank, local_world_size, "RANK" in os.environ)


def choose_device(wanted: str, ranks: Ranks) -> torch.device:
    """Give this rank's device: its local rank's among the visible GPUs, the only visible one, or the CPU."""
    visible = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if visible:
        device = torch.device("cuda", ranks.local_rank % visible)
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise OptionError("--device cuda, but torch sees no GPU: give --device cpu")
    return torch.device("cpu")


def name_device(device: torch.device) -> str:
    """Name a device for people."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.machine()
    return f"cpu ({name}, {torch.get_num_threads()} threads)"


def identify_gpu(device: torch.device) -> str:
    """Name a GPU uniquely among all nodes."""
    return f"{platform.node()}/{torch.cuda.get_device_properties(device).uuid}"


def choose_backend(device: torch.device, ranks: Ranks, store: Store) -> str:
    """Choose gloo for CPUs, NCCL for GPUs, and gloo if ranks share a GPU, which NCCL refuses."""
    if device.type == "cpu":
        return "gloo"
    store.set(f"gpu/{ranks.rank}", identify_gpu(device))
    gpus = {store.get(f"gpu/{rank}") for rank in range(ranks.world_size)}
    return "cpu:gloo,cuda:nccl" if len(gpus) == ranks.world_size else "gloo"


def find_store() -> Store:
    """Meet the other ranks at torchrun's store; raises OptionError if its variables are not all there."""
    try:
        store, _, _ = next(rendezvous("env://"))
    except ValueError as error:
        raise OptionError(f"{error}: start by torchrun, or unset RANK") from None
    found: Store = store
    return found


def init_process_group(device: torch.device, ranks: Ranks) -> str:
    """Start the process group, also for a single process, and give its backend; CPU tensors go by gloo."""
    store = find_store() if ranks.has_rendezvous else HashStore()
    backend = choose_backend(device, ranks, PrefixStore("devices", store))
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return "gloo" if backend == "gloo" else "nccl"


def average_over_ranks(value: torch.Tensor) -> float:
    """Average a scalar over the ranks."""
    total = value.detach().to("cpu", torch.float32, copy=True)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def broadcast(value: Value) -> Value:
    """Give every rank what rank 0 has; a picklable value."""
    found = [value]
    dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    return found[0]
