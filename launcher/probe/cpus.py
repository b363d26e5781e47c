"""The online CPUs with their cores, packages, last-level caches and capacities."""

from collections.abc import Callable

from launcher.plan.model import Cpu
from launcher.probe.sysfs import Tree
from launcher.probe.usable import CPU


def read_cpus(tree: Tree, online: frozenset[int], place: dict[int, int]) -> tuple[Cpu, ...]:
    """The online CPUs in ascending order; `place` has their NUMA nodes."""
    cores = read_cores(tree, place)
    firsts = sorted(set(cores.values()))
    packages = {first: read_package(tree, first, place[first]) for first in firsts}
    caches = read_caches(tree, firsts, place)
    capacities = read_capacities(tree, firsts)
    return tuple(
        Cpu(cpu, core, packages[core], place[cpu], caches[core], capacities.get(core, 1024))
        for cpu in sorted(online)
        for core in (cores[cpu],)
    )


def group(
    tree: Tree, what: str, cpus: list[int], read: Callable[[int], frozenset[int] | None]
) -> tuple[dict[int, int], list[int]]:
    """Gather CPUs in the sets that `read` gives: the lowest member for each CPU, and the unreadable ones.

    A set is read once, from its first member; a CPU whose own file is bad is found through its peers'.
    """
    lowest: dict[int, int] = {}
    bad: list[int] = []
    known = frozenset(cpus)
    for cpu in cpus:
        if cpu in lowest:
            continue
        members = read(cpu)
        if members is None or cpu not in members:
            bad.append(cpu)
            continue
        fresh = [member for member in members if member in known and member not in lowest]
        if taken := (members & known).difference(fresh):
            tree.note(f"CPUs {{items}} are in the {what} of several CPUs: the first is taken", *taken)
        lowest.update(dict.fromkeys(fresh, min(fresh)))
    return lowest, [cpu for cpu in bad if cpu not in lowest]


def read_cores(tree: Tree, place: dict[int, int]) -> dict[int, int]:
    """The lowest online CPU of each CPU's core."""
    cores, bad = group(
        tree, "thread_siblings_list", sorted(place), lambda cpu: read_siblings(tree, cpu, place)
    )
    if bad:
        text = "thread_siblings_list of CPUs {items} is {value}: each is taken as a core of its own"
        tree.note(text, *bad, path=f"{CPU}cpu{bad[0]}/topology/thread_siblings_list")
    cores.update((cpu, cpu) for cpu in bad)
    return cores


def read_siblings(tree: Tree, cpu: int, place: dict[int, int]) -> frozenset[int] | None:
    """The threads of a CPU's core, under the file's old or new name; a core never spans NUMA nodes."""
    here = f"{CPU}cpu{cpu}/topology/"
    threads = tree.read_list(f"{here}thread_siblings_list") or tree.read_list(f"{here}core_cpus_list")
    far = [other for other in threads or () if place.get(other, place[cpu]) != place[cpu]]
    if far:
        tree.note(
            "CPUs {items} are on another NUMA node than a sibling thread: taken as of other cores", *far
        )
    return threads and threads.difference(far)


def read_package(tree: Tree, cpu: int, node: int) -> int:
    """Physical package of a CPU; its NUMA node where the firmware gives none (-1 in some ARM guests)."""
    path = f"{CPU}cpu{cpu}/topology/physical_package_id"
    package = tree.read_int(path)
    if package is not None and package >= 0:
        return package
    tree.note(
        "physical_package_id of CPUs {items} is {value}: one package a NUMA node assumed", cpu, path=path
    )
    return node


def read_caches(tree: Tree, firsts: list[int], place: dict[int, int]) -> dict[int, int]:
    """The lowest online CPU under the last-level cache of each core, keyed by the core's first CPU."""
    caches, bad = group(tree, "last-level cache", firsts, lambda cpu: read_last_cache(tree, cpu))
    if bad:
        tree.note("last-level cache of CPUs {items} is unknown: one for each NUMA node assumed", *bad)
    shared: dict[int, int] = {}
    caches.update((cpu, shared.setdefault(place[cpu], cpu)) for cpu in bad)
    return caches


def read_last_cache(tree: Tree, cpu: int) -> frozenset[int] | None:
    """The CPUs under the cache of a CPU's highest level, whatever that level is."""
    here = f"{CPU}cpu{cpu}/cache/index"
    levels = [
        (level, index)
        for index in tree.list_numbers(f"{CPU}cpu{cpu}/cache", "index")
        if 1 <= (level := tree.read_int(f"{here}{index}/level") or 0) < 10
    ]
    return tree.read_list(f"{here}{max(levels)[1]}/shared_cpu_list") if levels else None


def read_capacities(tree: Tree, firsts: list[int]) -> dict[int, int]:
    """`cpu_capacity` of each core by its first CPU; empty where the kernel knows one class of cores only."""
    if tree.read(f"{CPU}cpu{firsts[0]}/cpu_capacity") is None:
        return {}
    capacities = {}
    for cpu in firsts:
        path = f"{CPU}cpu{cpu}/cpu_capacity"
        capacity = tree.read_int(path) or 0
        if 0 < capacity <= 1024:
            capacities[cpu] = capacity
        else:
            tree.note("cpu_capacity of CPUs {items} is {value}: taken as a big core's", cpu, path=path)
    return capacities
