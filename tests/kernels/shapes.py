"""The machines that are booted, and how each looks in the lab's form of a description."""

import tomllib
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from launcher.cpulist import format_cpulist, parse_cpulist

from .guest.init import Scenario

Data = dict[str, Any]
"""A machine description in the lab's form."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A machine as QEMU is asked for it.

    Dies, cores and threads are powers of two, so that APIC ids leave no gaps and are QEMU's CPU numbers.
    """

    name: str
    scenarios: tuple[Scenario, ...]
    packages: int = 2
    dies: int = 1
    """Dies of a package; each has a last-level cache, and is a NUMA node."""
    cores: int = 4
    """Cores of a die."""
    threads: int = 2
    numbering: str = "far"
    """How the firmware lists threads: `far` (siblings N/2 apart, as on servers), `adjacent`, or `odd-even`
    (far, and the packages in turn)."""
    memory: tuple[int, ...] = (512, 256)
    """MiB of each NUMA node: those of the dies, 0 for one without memory, then any without CPUs."""
    numa: bool = True
    """Whether the firmware tells of NUMA at all."""
    distance: tuple[int, int] = (12, 21)
    """To other NUMA nodes of the same package, and to another package's."""
    gpus: tuple[int, ...] = ()
    """NUMA node of each GPU, in PCI order."""
    isolated: str = ""
    """`isolcpus` of the kernel's command line."""
    cgroup: int = 2
    """Version of the control groups."""

    @property
    def count(self) -> int:
        """Hardware threads."""
        return self.packages * self.dies * self.cores * self.threads

    def order(self) -> tuple[int, ...]:
        """APIC ids in the order of the firmware's table, in which the kernel numbers CPUs."""
        packages, cores, threads = range(self.packages), range(self.dies * self.cores), range(self.threads)
        if self.numbering == "odd-even":
            places = [(package, core, thread) for thread, core, package in product(threads, cores, packages)]
        elif self.numbering == "far":
            places = [(package, core, thread) for thread, package, core in product(threads, packages, cores)]
        else:
            places = list(product(packages, cores, threads))
        return tuple(
            (package * len(cores) + core) * self.threads + thread for package, core, thread in places
        )

    def node_of(self, apic: int) -> int:
        """NUMA node of a CPU."""
        return apic // (self.cores * self.threads) if self.numa else 0

    def package_of(self, node: int) -> int:
        """Package of a NUMA node; one without CPUs is beside the last package."""
        return min(node // self.dies, self.packages - 1)

    def distance_of(self, one: int, other: int) -> int:
        """SLIT distance."""
        near, far = self.distance
        if one == other:
            return 10
        return near if self.package_of(one) == self.package_of(other) else far

    def list_common(self) -> frozenset[int]:
        """CPUs of a process that no cpuset narrows: the kernel keeps isolated ones from the first one on."""
        return frozenset(range(self.count)) - parse_cpulist(self.isolated)

    def list_bridges(self) -> list[tuple[int | None, int, list[int]]]:
        """Host bridges with GPUs: the node, the bus number, and the bus of each GPU."""
        if not self.numa:
            return [(None, 0, list(range(1, len(self.gpus) + 1)))] if self.gpus else []
        runs = [(node, len(list(run))) for node, run in groupby(self.gpus)]
        return [
            (node, bus, list(range(bus + 1, bus + 1 + size)))
            for (node, size), bus in zip(runs, range(16, 256, 16), strict=False)
        ]

    def describe(self, scenario: Scenario) -> Data:
        """The machine with what a scenario leaves of it, in the lab's form."""
        order, half = self.order(), self.count // 2
        cpus = [
            frozenset(cpu for cpu, apic in enumerate(order) if self.node_of(apic) == node)
            for node in range(len(self.memory))
        ]
        threads = {"adjacent": 2} if self.numbering == "adjacent" else {"offset": half}
        with_memory = frozenset(node for node, mib in enumerate(self.memory) if mib)
        return {
            "name": self.name,
            "numa": [
                {
                    "id": node,
                    "package": self.package_of(node),
                    "cpus": format_cpulist(cpus[node]),
                    "gib": mib / 1024,
                    "kind": "normal" if cpus[node] else "memory",
                }
                for node, mib in enumerate(self.memory)
            ],
            "threads": threads if self.threads > 1 else {"none": True},
            "distance": list(self.distance),
            "gpus": self.describe_gpus(),
            "offline": format_cpulist(frozenset(scenario.offline)),
            "isolated": self.isolated,
            "allowed_cpus": scenario.cpus or format_cpulist(self.list_common() - frozenset(scenario.offline)),
            "allowed_mems": scenario.mems or format_cpulist(with_memory),
        }

    def describe_gpus(self) -> list[Data]:
        """The GPUs in PCI order; -1 is the kernel's word for a device without a node."""
        return [
            {"bdf": f"0000:{bus:02x}:00.0", "numa": -1 if node is None else node, "model": "QEMU virtio-gpu"}
            for node, _, buses in self.list_bridges()
            for bus in buses
        ]


def load_shapes() -> tuple[Shape, ...]:
    """Read tests/data/kernels.toml."""

    def freeze(row: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}

    rows = tomllib.loads((Path(__file__).parents[1] / "data/kernels.toml").read_text())["shape"]
    jobs = [tuple(Scenario(**freeze(job)) for job in row.pop("scenarios")) for row in rows]
    return tuple(Shape(scenarios=own, **freeze(row)) for row, own in zip(rows, jobs, strict=True))


SHAPES = load_shapes()
