"""The lab's machines as the planner takes them, without the file system between."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from launcher.cpulist import format_cpulist
from launcher.plan.model import Cpu, Gpu, Machine, NumaNode, Plan

LAB = Path(__file__).parent.parent / "lab"
sys.path.insert(0, str(LAB))
fsroot = importlib.import_module("fsroot")
score = importlib.import_module("score")

Data = dict[str, Any]
"""A machine description in the lab's form."""

NAMES = sorted(path.stem for path in (LAB / "machines").glob("*.json"))


def load(name: str) -> Data:
    """One of the lab's descriptions."""
    data: Data = json.loads((LAB / "machines" / f"{name}.json").read_text())
    return data


def convert(data: Data) -> Machine:
    """The machine that a probe of the description's tree finds."""
    lab = fsroot.Description(data)
    cpus = tuple(convert_cpu(lab, number) for number in sorted(lab.online))
    nodes = tuple(
        NumaNode(
            id=entry["id"],
            memory_kib=int(entry.get("gib", 64) * 2**20),
            normal=entry.get("kind") != "gpu",
            distances=tuple((other, lab.slit(entry["id"], other)) for other in sorted(lab.nodes)),
        )
        for entry in sorted(data["numa"], key=lambda entry: entry["id"])
    )
    gpus = tuple(convert_gpu(lab, index, gpu) for index, gpu in enumerate(lab.gpus))
    allowed = frozenset(lab.allowed & lab.online)
    return Machine(cpus, nodes, gpus, allowed, frozenset(lab.allowed_mems), frozenset(lab.isolated))


def convert_cpu(lab: Any, number: int) -> Cpu:
    """One CPU."""
    node = lab.node_of(number)
    return Cpu(number, min(lab.siblings(number)), lab.package[node], node, min(lab.l3(number)))


def convert_gpu(lab: Any, index: int, gpu: Data) -> Gpu:
    """One GPU, with the local CPUs that the kernel would show."""
    known = gpu["numa"] >= 0
    near = lab.nodes[gpu["numa"]] & lab.online if known else lab.online
    uuid = gpu.get("uuid", f"GPU-{index:08x}-aaaa")
    return Gpu(index, uuid, gpu["bdf"], gpu["numa"] if known else None, frozenset(near), gpu["model"])


def describe(cpus: list[str], gpus: list[int], **more: Any) -> Data:
    """A description from the cpulist and the GPUs' nodes; each node is a package unless `packages` tells."""
    packages = more.pop("packages", range(len(cpus)))
    return {
        "name": "made up",
        "numa": [
            {"id": at, "package": packages[at], "cpus": text, "gib": 64} for at, text in enumerate(cpus)
        ],
        "gpus": [
            {"bdf": f"0000:{at:02x}:00.0", "numa": node, "model": "GPU"} for at, node in enumerate(gpus)
        ],
        **more,
    }


def masks(made: Plan) -> list[str]:
    """CPUs of each rank's own process."""
    return [format_cpulist(rank.cpus) for rank in made.ranks]


def workers(made: Plan) -> list[str]:
    """CPUs of each rank's workers."""
    return [format_cpulist(rank.worker_cpus) for rank in made.ranks]


def memory(made: Plan) -> list[str]:
    """NUMA nodes of each rank's memory."""
    return [format_cpulist(rank.memory.nodes) for rank in made.ranks]
