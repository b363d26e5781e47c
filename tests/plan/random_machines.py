"""Random machine descriptions in the lab's form: shapes that nobody wrote down."""

from itertools import accumulate
from random import Random

from launcher.cpulist import format_cpulist, parse_cpulist

from .lab_machines import Data


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
