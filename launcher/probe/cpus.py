"""The online CPUs with their cores, packages, last-level caches and capacities."""

from launcher.plan.model import Cache, Cpu
from launcher.probe.allowed_cpus import CPU
from launcher.probe.caches import group_cpus, read_caches
from launcher.probe.capacity import read_capacities
from launcher.probe.sysfs import Tree


def read_cpu_topology(
    tree: Tree, online: frozenset[int], place: dict[int, int]
) -> tuple[tuple[Cpu, ...], tuple[Cache, ...]]:
    """The online CPUs and the last-level caches, each in ascending order; `place` has the NUMA nodes."""
    cores = read_cores(tree, place)
    firsts = sorted(set(cores.values()))
    packages = {first: read_package(tree, first, place[first]) for first in firsts}
    above, caches = read_caches(tree, firsts, place)
    capacities = read_capacities(tree, firsts)
    cpus = (
        Cpu(cpu, core, packages[core], place[cpu], above[core], capacities.get(core, 1024))
        for cpu in sorted(online)
        for core in (cores[cpu],)
    )
    return tuple(cpus), caches


def read_cores(tree: Tree, place: dict[int, int]) -> dict[int, int]:
    """The lowest online CPU of each CPU's core."""
    cores, bad = group_cpus(
        tree, "thread_siblings_list", sorted(place), lambda cpu: read_siblings(tree, cpu, place)
    )
    if bad:
        text = "thread_siblings_list of CPUs {items} is {value}: each is taken as a core of its own"
        tree.add_warning(text, *bad, path=f"{CPU}cpu{bad[0]}/topology/thread_siblings_list")
    cores.update((cpu, cpu) for cpu in bad)
    return cores


def read_siblings(tree: Tree, cpu: int, place: dict[int, int]) -> frozenset[int] | None:
    """The threads of a CPU's core, under the file's old or new name; a core never spans NUMA nodes."""
    here = f"{CPU}cpu{cpu}/topology/"
    threads = tree.read_list(f"{here}thread_siblings_list") or tree.read_list(f"{here}core_cpus_list")
    far = [other for other in threads or () if place.get(other, place[cpu]) != place[cpu]]
    if far:
        tree.add_warning(
            "CPUs {items} are on another NUMA node than a sibling thread: taken as of other cores", *far
        )
    return threads and threads.difference(far)


def read_package(tree: Tree, cpu: int, node: int) -> int:
    """Physical package of a CPU; its NUMA node where the firmware gives none (-1 in some ARM guests)."""
    path = f"{CPU}cpu{cpu}/topology/physical_package_id"
    package = tree.read_int(path)
    if package is not None and package >= 0:
        return package
    tree.add_warning(
        "physical_package_id of CPUs {items} is {value}: one package a NUMA node assumed", cpu, path=path
    )
    return node
