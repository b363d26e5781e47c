"""Machines as the planner takes them: the lab's, shipped ones, others in few words, and random ones."""

import importlib
import json
import sys
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from launcher.cpulist import format_cpulist, parse_cpulist
from launcher.plan.model import (
    BindingConfig,
    Cpu,
    DataloaderConfig,
    Gpu,
    Limits,
    Machine,
    Nic,
    NumaNode,
    Plan,
    Request,
    parse_machine,
)

LAB = Path(__file__).parent.parent / "lab"
SHIPPED = Path(__file__).parents[2] / "conf" / "machine"
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
    gpus = tuple(convert_gpu(index, gpu) for index, gpu in enumerate(lab.gpus))
    allowed = frozenset(lab.allowed & lab.online)
    return Machine(cpus, nodes, gpus, allowed, frozenset(lab.allowed_mems), frozenset(lab.isolated))


def convert_cpu(lab: Any, number: int) -> Cpu:
    """One CPU."""
    node = lab.node_of(number)
    return Cpu(number, min(lab.siblings(number)), lab.package[node], node, min(lab.l3(number)))


def convert_gpu(index: int, gpu: Data) -> Gpu:
    """One GPU."""
    uuid = gpu.get("uuid", f"GPU-{index:08x}-aaaa")
    return Gpu(index, uuid, gpu["bdf"], gpu["numa"] if gpu["numa"] >= 0 else None, gpu["model"])


def describe(cpus: list[str], gpus: list[int], **more: Any) -> Data:
    """A description from the cpulist and the GPUs' nodes; each node is a package unless `packages` tells."""
    packages = more.pop("packages", range(len(cpus)))
    kinds = more.pop("kinds", ["normal"] * len(cpus))
    return {
        "name": "made up",
        "numa": [
            {"id": at, "package": packages[at], "cpus": text, "gib": 64, "kind": kinds[at]}
            for at, text in enumerate(cpus)
        ],
        "gpus": [
            {"bdf": f"0000:{at:02x}:00.0", "numa": node, "model": "GPU"} for at, node in enumerate(gpus)
        ],
        **more,
    }


def make_machine(words: str | Data) -> Machine:
    """The machine of a case: `dgx-a100` of the lab, `shipped/dgx_h100`, or what its table describes.

    Beside the keys of `describe`: `base` is the name of a machine that is changed; `gpu` are fields of all
    GPUs, `each_gpu` fields by GPU; `nics` are `NAME NODE PATH RATE LINK` in a line; `limits`, `kernel` and
    `memory_kib` are the machine's; `gib` and `distances` are of each node; `l3` is the cache of all CPUs;
    `capacities` are the CPUs'.
    """
    if isinstance(words, str):
        kind, _, name = words.rpartition("/")
        if kind == "shipped":
            return parse_machine((SHIPPED / f"{name}.json").read_text())
        return convert(load(name))
    words = dict(words)
    own = ("gpu", "each_gpu", "nics", "limits", "kernel", "memory_kib", "gib", "distances", "l3")
    changes = {key: words.pop(key) for key in (*own, "capacities") if key in words}
    machine = make_machine(words["base"]) if "base" in words else convert(describe(**words))
    gpus = [replace(gpu, **read_fields(changes.get("gpu", {}))) for gpu in machine.gpus]
    for at, more in enumerate(changes.get("each_gpu", [])):
        gpus[at] = replace(gpus[at], **read_fields(more))
    cpus, nodes = machine.cpus, machine.nodes
    if "l3" in changes:
        cpus = tuple(replace(cpu, l3=changes["l3"]) for cpu in cpus)
    if "capacities" in changes:
        sizes = changes["capacities"]
        cpus = tuple(replace(cpu, capacity=size) for cpu, size in zip(cpus, sizes, strict=True))
    for at, gib in enumerate(changes.get("gib", [])):
        nodes = (*nodes[:at], replace(nodes[at], memory_kib=gib << 20), *nodes[at + 1 :])
    for at, row in enumerate(changes.get("distances", [])):
        nodes = (*nodes[:at], replace(nodes[at], distances=tuple(enumerate(row))), *nodes[at + 1 :])
    return replace(
        machine,
        cpus=cpus,
        nodes=nodes,
        gpus=tuple(gpus),
        nics=tuple(map(read_nic, changes["nics"])) if "nics" in changes else machine.nics,
        limits=Limits(**changes.get("limits", {})),
        kernel=changes.get("kernel", machine.kernel),
        memory_kib=changes.get("memory_kib", machine.memory_kib),
    )


def read_fields(words: Data) -> Data:
    """A GPU's fields: -1 is a node that is not known, and paths are written with `/`."""
    found = dict(words)
    if found.get("node") == -1:
        found["node"] = None
    if "path" in found:
        found["path"] = tuple(found["path"].split("/"))
    if "mig" in found:
        found["mig"] = tuple(found["mig"])
    return found


def read_nic(line: str) -> Nic:
    """A NIC, `mlx5_0 0 10/11/12 200 Ethernet`, of which `-` is not known; `down` is a link that is not up."""
    name, node, path, rate, link = (*line.split(), *"----")[:5]
    return Nic(
        name=name,
        pci="",
        node=None if node == "-" else int(node),
        path=() if path == "-" else tuple(path.split("/")),
        link_layer="" if link in ("-", "down") else link,
        rate_gbps=0 if rate == "-" else float(rate),
        active=link != "down",
    )


def ask(nproc_per_node: int | None = None, binding: str = "exclusive", **more: Any) -> Request:
    """A request, its settings without the names of their sections."""
    sections: Data = {"binding": BindingConfig(policy=binding), "dataloader": DataloaderConfig()}
    for section in sections.values():
        for field in fields(section):
            if field.name in more:
                setattr(section, field.name, more.pop(field.name))
    return Request(nproc_per_node, **sections, **more)


def masks(made: Plan) -> list[str]:
    """CPUs of each rank's own process."""
    return [format_cpulist(rank.cpus) for rank in made.ranks]


def workers(made: Plan) -> list[str]:
    """CPUs of each rank's workers."""
    return [format_cpulist(rank.worker_cpus) for rank in made.ranks]


def memory(made: Plan) -> list[str]:
    """NUMA nodes of each rank's memory."""
    return [format_cpulist(rank.memory.nodes) for rank in made.ranks]


def describe_machine(random: Random) -> Data:
    """A random, sane description: 1 to 4 packages, SMT, caches, GPUs anywhere, often a narrower cpuset."""
    packages = random.choice([1, 1, 2, 2, 2, 4])
    nodes = packages * random.choice([1, 1, 2, 4])
    cpus, rule = number_cpus(random, nodes)
    numa: list[Data] = [
        {"id": at, "package": at * packages // nodes, "cpus": format_cpulist(cpus[at]), "gib": 64}
        for at in range(nodes)
    ]
    for extra in range(random.choice([0, 0, 0, 1, 4])):
        kind = random.choice(["gpu", "memory"])
        numa.append({"id": nodes + extra, "package": extra % packages, "cpus": "", "gib": 80, "kind": kind})
    description: Data = {
        "name": "random",
        "numa": numa,
        "threads": rule,
        "l3_cores": random.choice([0, 0, 2, 3, 4, 6, 8]),
        "distance": random.choice([[12, 32], [10, 20], [20, 21], [11, 32]]),
        "gpus": place_gpus(random, len(numa), nodes),
    }
    narrow(random, description, sorted(set().union(*cpus)))
    return description


def describe_overlap(random: Random) -> Data:
    """A random description in which the nodes nearest to different GPUs are likely to overlap.

    The cpuset leaves nodes out: GPUs there are near to several others, and GPUs of unknown place to all.
    """
    packages, each = random.choice([(1, 3), (2, 2), (2, 3), (2, 4), (3, 2)])
    nodes = packages * each
    sizes = [random.choice([1, 2, 3, 4, 5, 8, 12]) for _ in range(nodes)]
    ends = list(accumulate(sizes))
    lists = [f"{end - size}-{end - 1}" for end, size in zip(ends, sizes, strict=True)]
    allowed = sorted(random.sample(range(nodes), random.randint(max(1, nodes // 2), nodes)))
    places = [
        random.randrange(-1 if random.random() < 0.2 else 0, nodes) for _ in range(random.randint(2, 12))
    ]
    return {
        "name": "overlap",
        "numa": [{"id": at, "package": at // each, "cpus": lists[at], "gib": 64} for at in range(nodes)],
        "threads": {"none": True},
        "l3_cores": random.choice([0, 2, 4]),
        "distance": random.choice([[12, 32], [20, 20]]),
        "gpus": [
            {"bdf": f"0000:{at + 16:02x}:00.0", "numa": node, "model": "GPU"}
            for at, node in enumerate(places)
        ],
        "allowed_cpus": ",".join(lists[node] for node in allowed),
    }


def number_cpus(random: Random, nodes: int) -> tuple[list[set[int]], Data]:
    """CPUs of each node and the lab's `threads` rule: numbered in blocks or in turn, siblings far or near."""
    sizes = [random.choice([1, 2, 3, 4, 6, 8, 12, 13, 16, 28])] * nodes
    if random.random() < 0.25:
        sizes = [random.choice([1, 2, 3, 5, 8, 12]) for _ in range(nodes)]
    threads = random.choice([1, 2, 2, 2, 4, 8])
    cores = sum(sizes)
    far = random.random() < 0.7 and threads < 8
    in_turn = far and random.random() < 0.4 and len(set(sizes)) == 1
    cpus = []
    for node, first in enumerate(accumulate([0, *sizes[:-1]])):
        mine = range(node, cores, nodes) if in_turn else range(first, first + sizes[node])
        step = (1, cores) if far else (threads, 1)
        cpus.append({core * step[0] + t * step[1] for core in mine for t in range(threads)})
    if threads == 1:
        return cpus, {"none": True}
    return cpus, {"offset": cores} if far else {"adjacent": threads}


def place_gpus(random: Random, total: int, nodes: int) -> list[Data]:
    """GPUs as firmware shows them: all unknown, on half of the nodes, or each anywhere."""
    count = random.choice([0, 1, 2, 4, 4, 8, 8, 16])
    homes = random.sample(range(nodes), max(1, nodes // 2))
    choice = random.random()
    if choice < 0.2:
        places = [-1] * count
    elif choice < 0.5:
        places = [homes[at * len(homes) // count] for at in range(count)]
    else:
        places = [random.randrange(total if random.random() < 0.2 else nodes) for _ in range(count)]
    return [
        {"bdf": f"0000:{at + 16:02x}:00.0", "numa": node, "model": "GPU"} for at, node in enumerate(places)
    ]


def narrow(random: Random, description: Data, cpus: list[int]) -> None:
    """Leave some CPUs offline, isolated or outside the cpuset, and at times memory nodes too."""
    if random.random() < 0.15:
        offline = set(random.sample(cpus, len(cpus) // 3))
        description["offline"] = format_cpulist(offline)
        cpus = sorted(set(cpus) - offline)
    if random.random() < 0.2:
        description["isolated"] = format_cpulist(set(random.sample(cpus, len(cpus) // 2)))
    choice = random.random()
    count = random.randint(1, len(cpus))
    if choice < 0.2:
        description["allowed_cpus"] = format_cpulist(set(cpus[:count]))
    elif choice < 0.4:
        description["allowed_cpus"] = format_cpulist(set(random.sample(cpus, count)))
    elif choice < 0.5:
        entries = [entry for entry in description["numa"] if parse_cpulist(entry["cpus"]) & set(cpus)]
        kept = random.sample(entries, random.randint(1, len(entries)))
        description["allowed_cpus"] = ",".join(entry["cpus"] for entry in kept)
        description["allowed_mems"] = format_cpulist({entry["id"] for entry in kept})
