"""What a plan needs of a machine: usable physical cores by NUMA node, and distances."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from launcher.errors import MachineError
from launcher.plan.model import Cpu, Gpu, Machine

UNREACHABLE = 255
"""SLIT distance if the table has no entry."""
SAME_CLASS = 0.85
"""Cores of at least this share of a class's best capacity belong to it: favoured cores differ by less
(Turbo Boost Max), efficiency cores by more."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core, as far as the job may use it."""

    id: int
    """Its lowest-numbered usable PU."""
    node: int
    package: int
    l3: int
    """The last-level cache above it."""
    capacity: int
    pus: tuple[int, ...]
    """Its usable PUs in ascending order."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The usable part of a machine."""

    cores: Mapping[int, tuple[Core, ...]]
    """By NUMA node, in ascending order; nodes with usable cores only. Within a node the cores under one
    last-level cache are consecutive."""
    core_of: Mapping[int, int]
    """The core of each usable PU."""
    distances: Mapping[int, Mapping[int, int]]

    def distance(self, node: int, other: int) -> int:
        """SLIT distance between two NUMA nodes."""
        return 10 if node == other else self.distances.get(node, {}).get(other, UNREACHABLE)

    def find_nearest(self, node: int, among: Iterable[int]) -> frozenset[int]:
        """The nodes of `among` at the smallest distance from `node`, which may be one of them."""
        far = {other: self.distance(node, other) for other in among}
        return frozenset(other for other, distance in far.items() if distance == min(far.values()))

    def find_local_nodes(self, gpu: Gpu | None) -> frozenset[int]:
        """NUMA nodes with usable cores that are nearest to a GPU; all of them if nothing is known.

        The kernel shows node -1 on VMs and one-node machines; `local_cpulist` may still know better.
        """
        node = None if gpu is None else gpu.node
        if node is not None and (node in self.cores or node in self.distances):
            return self.find_nearest(node, self.cores)
        local = gpu.local_cpus if gpu else frozenset()
        touched = (
            node for node, cores in self.cores.items() if any(local.intersection(c.pus) for c in cores)
        )
        return frozenset(touched) or frozenset(self.cores)


def build_topology(machine: Machine, reserve: int = 0) -> Topology:
    """Sort out what the job may use, less `reserve` cores. Raises MachineError if it may use nothing."""
    usable = find_usable(machine)
    if not usable:
        raise MachineError("this job may use none of the online CPUs: check the cpuset of its cgroup")
    by_node: dict[int, list[Core]] = {}
    for core in sorted(gather_cores(machine, usable), key=lambda core: (core.node, core.id)):
        by_node.setdefault(core.node, []).append(core)
    remove_reserved(by_node, reserve)
    cores = {node: group_by_cache(found) for node, found in by_node.items()}
    core_of = {pu: core.id for found in cores.values() for core in found for pu in core.pus}
    return Topology(cores, core_of, {node.id: dict(node.distances) for node in machine.nodes})


def find_usable(machine: Machine) -> frozenset[int]:
    """Allowed and online CPUs, without the isolated ones unless nothing else is left."""
    allowed = machine.allowed_cpus.intersection(cpu.id for cpu in machine.cpus)
    return allowed - machine.isolated or allowed


def gather_cores(machine: Machine, usable: frozenset[int]) -> Iterable[Core]:
    """Put the usable PUs of each physical core together."""
    pus: dict[int, list[Cpu]] = {}
    for cpu in sorted(machine.cpus, key=lambda cpu: cpu.id):
        if cpu.id in usable:
            pus.setdefault(cpu.core, []).append(cpu)
    for threads in pus.values():
        first = threads[0]
        ids = tuple(cpu.id for cpu in threads)
        yield Core(first.id, first.node, first.package, first.l3, first.capacity, ids)


def remove_reserved(by_node: dict[int, list[Core]], reserve: int) -> None:
    """Take `reserve` cores out, spread over the nodes, each time the first core of the node with most.

    The kernel's own work gathers on low-numbered CPUs. Every node keeps a core.
    """
    for _ in range(reserve):
        largest = max(by_node, key=lambda node: (len(by_node[node]), -node))
        if len(by_node[largest]) == 1:
            return
        del by_node[largest][0]


def group_by_cache(cores: Iterable[Core]) -> tuple[Core, ...]:
    """Order cores by last-level cache, the caches by their first core."""
    caches: dict[int, list[Core]] = {}
    for core in cores:
        caches.setdefault(core.l3, []).append(core)
    return tuple(core for cache in caches.values() for core in cache)


def split_classes(cores: Iterable[Core]) -> list[list[Core]]:
    """Cores of like capacity together, the most capable first; one class unless the machine is hybrid."""
    cores = tuple(cores)
    tops: list[int] = []
    for capacity in sorted({core.capacity for core in cores}, reverse=True):
        if not tops or capacity < SAME_CLASS * tops[-1]:
            tops.append(capacity)
    bounds = zip(tops, [*tops[1:], -1], strict=True)
    return [[core for core in cores if low < core.capacity <= top] for top, low in bounds]


def gather_pus(cores: Iterable[Core]) -> frozenset[int]:
    """All usable PUs of some cores."""
    return frozenset(pu for core in cores for pu in core.pus)
