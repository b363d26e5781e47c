"""torchrun's `--numa-binding` on machines that are written out as files.

Run as a process: a line of JSON on stdin, {"root": DIR, "gpus": [PCI address, …], "ranks": N}, is answered by
a line on stdout, {MODE: {"cpus": [cpulist, …]} or {"error": TEXT}}.

torch.numa.binding runs as it is installed, through the function that torchrun calls for each rank. Only the
names by which it looks at the machine lead elsewhere: `open` and `os.listdir` below the tree,
`os.sched_getaffinity` to the tree's Cpus_allowed_list, `torch.cuda` to the tree's GPUs in PCI bus order, and
`shutil.which` to a numactl, which torchrun insists on, whether this machine has it or not.
"""

import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from torch.numa import binding

from launcher.cpulist import parse_cpulist

PREFIX = "--physcpubind="


def show_machine(root: str, gpus: list[str]) -> None:
    """Let torch.numa.binding see the machine below `root`."""
    status = Path(f"{root}/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    allowed = parse_cpulist(fields["Cpus_allowed_list"])

    def open_below(path: str) -> IO[str]:
        return Path(f"{root}{path}").open(encoding="utf-8")

    def get_device_properties(index: int) -> SimpleNamespace:
        if not gpus:
            raise RuntimeError("No CUDA GPUs are available")
        domain, bus, rest = gpus[index].split(":")
        numbers = (int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16))
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        return SimpleNamespace(**dict(zip(names, numbers, strict=True)))

    cuda = SimpleNamespace(device_count=lambda: len(gpus), get_device_properties=get_device_properties)
    vars(binding).update(
        open=open_below,
        os=SimpleNamespace(
            sched_getaffinity=lambda pid: set(allowed),
            listdir=lambda path: os.listdir(f"{root}{path}"),  # noqa: PTH208  # os.listdir is what is replaced
            path=os.path,
        ),
        torch=SimpleNamespace(cuda=cuda),
        shutil=SimpleNamespace(which=lambda name: f"/usr/bin/{name}"),
    )


def list_commands(mode: binding.AffinityMode, ranks: int) -> list[tuple[str, ...]]:
    """The command line that torchrun would run each rank with."""
    options = binding.NumaOptions(affinity_mode=mode)
    wrap = binding._maybe_wrap_command_args_with_numa_binding
    return [wrap(("program",), gpu_index=rank, numa_options=options) for rank in range(ranks)]


def answer(request: dict[str, Any]) -> dict[str, object]:
    """What each mode makes of a machine: the ranks' cpulists, or what torchrun would end with."""
    show_machine(request["root"], request["gpus"])
    found: dict[str, object] = {}
    for mode in binding.AffinityMode:
        try:
            commands = list_commands(mode, request["ranks"])
        except (AttributeError, NameError):  # binding looks at the machine in a way that is not replaced here
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace(request["root"], "")
            found[mode.value] = {"error": text}
        else:
            found[mode.value] = {"cpus": [read_cpus(words) for words in commands]}
    return found


def read_cpus(words: tuple[str, ...]) -> str:
    """The cpulist of a rank's command line."""
    tool, option, *_ = words
    if tool != "numactl" or not option.startswith(PREFIX):
        raise AssertionError(f"torchrun runs a rank as {words}, which is not understood here")
    return option.removeprefix(PREFIX)


def main() -> None:
    """Answer requests until stdin ends."""
    logging.disable(logging.CRITICAL)  # binding logs a traceback for what it then raises
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
