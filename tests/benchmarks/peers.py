"""What others make of a machine that is written out as files, as plans that the lab's score can judge."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.cpulist import format_cpulist
from launcher.errors import LaunchError
from launcher.plan.json_form import plan_to_json
from launcher.plan.model import Request
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.plan.lab_machines import Data, fsroot

Placed = Data | str
"""A plan in JSON's form, or what the planner ended with."""
Ask = Callable[[Data, Path], Mapping[str, Placed]]
"""What the planners of one tool make of a machine: by the planner's name, from its description and tree."""

BINDINGS = ("exclusive", "numa", "socket", "l3")


def count_ranks(data: Data) -> int:
    """Ranks to place: one a GPU, four on a machine without, as the lab's score does."""
    return len(data.get("gpus", [])) or 4


def ask_launch(data: Data, root: Path) -> dict[str, Placed]:
    """The plan of each of our bindings, as `launch plan machine.root=ROOT format=json` prints it."""
    placed: dict[str, Placed] = {}
    for binding in BINDINGS:
        request = Request(nproc_per_node=count_ranks(data), binding=binding)
        try:
            placed[f"launch {binding}"] = plan_to_json(plan(probe(root), request))
        except LaunchError as error:
            placed[f"launch {binding}"] = str(error)
    return placed


@contextmanager
def start_torch() -> Iterator[Ask]:
    """Start a process with torch, and give the function that asks it; raises RuntimeError where it ends."""
    command = [sys.executable, "-m", "tests.benchmarks.torch_binding"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        write, read = process.stdin, process.stdout

        def ask(data: Data, root: Path) -> dict[str, Placed]:
            gpus = [gpu["bdf"] for gpu in data.get("gpus", [])]
            write.write(json.dumps({"root": str(root), "gpus": gpus, "ranks": count_ranks(data)}) + "\n")
            write.flush()
            line = read.readline()
            if not line:
                raise RuntimeError("torch.numa.binding did not answer: it needs torch 2.9 or later")
            return {f"torchrun {mode}": take_masks(data, made) for mode, made in json.loads(line).items()}

        yield ask


def take_masks(data: Data, made: Mapping[str, Any]) -> Placed:
    """A plan from the ranks' cpulists; torchrun sets no memory policy."""
    if "error" in made:
        return str(made["error"])
    return make_plan(data, made["cpus"], [{"policy": "default"} for _ in made["cpus"]])


def make_plan(data: Data, cpus: Sequence[str], memory: Sequence[Mapping[str, str]]) -> Data:
    """A plan in the form that the score reads; rank N is to use GPU N."""
    gpus: list[Data | None] = [{"pci": gpu["bdf"]} for gpu in data.get("gpus", [])]
    gpus = gpus or [None] * len(cpus)
    ranks = zip(gpus, cpus, memory, strict=True)
    return {
        "ranks": [
            {"local_rank": rank, "gpu": gpu, "cpus": mask, "memory": policy}
            for rank, (gpu, mask, policy) in enumerate(ranks)
        ]
    }


def ask_numa_set(data: Data, _: Path) -> dict[str, Placed]:
    """What `numactl --cpunodebind=N --membind=N` makes of each GPU's numa_node, as numa-set.sh calls it.

    numactl 2.0.16 refuses a node that is not among the allowed ones with memory (numa_parse_nodestring). The
    kernel narrows the mask to the cpuset, and refuses an empty one (sched_setaffinity(2)); isolated CPUs
    stay in. The allowed CPUs are taken to be a cpuset's: a mask set by taskset would not bind numactl.
    """
    lab = fsroot.Description(data)
    sizes = {entry["id"]: entry.get("gib", 64) for entry in data["numa"]}
    nodes = [gpu["numa"] for gpu in data.get("gpus", [])]
    if not nodes:
        return {"numa-set.sh": "nvidia-smi: No devices were found; numactl: <> is invalid"}
    for node in nodes:
        if node not in lab.allowed_mems or not sizes[node]:
            return {"numa-set.sh": f"numactl: <{node}> is invalid"}
        if not lab.nodes[node] & lab.allowed & lab.online:
            return {"numa-set.sh": "numactl: sched_setaffinity: Invalid argument"}
    cpus = [format_cpulist(lab.nodes[node] & lab.allowed & lab.online) for node in nodes]
    return {"numa-set.sh": make_plan(data, cpus, [{"policy": "bind", "nodes": str(node)} for node in nodes])}
