"""A machine as hwloc shows it: a tree of packages, NUMA nodes, last-level caches and cores, with devices."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.model import Cpu, Gpu, Machine, Nic, NumaNode
from launcher.text import clean_text, count_things, format_size

Device = Gpu | Nic
LEVELS = {"Package": "package", "NUMANode": "node", "Cache": "l3", "Class": "capacity", "Core": "core"}
"""The levels from the outside in, with the field of a CPU that tells them apart."""


def describe_gpu(gpu: Gpu) -> tuple[str, ...]:
    """What is known of a GPU: its product name, memory, MIG instances."""
    memory = format_size(gpu.memory_mib * 1024) if gpu.memory_mib else ""
    mig = count_things(len(gpu.mig), "MIG instance") if gpu.mig else ""
    name = clean_text(gpu.name) or ("AMD GPU" if gpu.vendor == "amd" else "")
    return tuple(filter(None, (name, memory, mig)))


def describe_nic(nic: Nic) -> tuple[str, ...]:
    """What is known of a NIC: its link with the rate, whether it is up."""
    rate = f"{nic.rate_gbps:g} Gb/s" if nic.rate_gbps else ""
    link = clean_text(f"{nic.link_layer} {rate}")
    state = "active" if link and nic.active else "" if nic.active else "down"
    return tuple(filter(None, (link, state)))


@dataclass(frozen=True, slots=True)
class Switch:
    """A PCI switch with at least two cards below it."""

    pci: str
    """Address of the last bridge that they have in common."""
    members: tuple["Device | Switch", ...]


def group_devices(devices: Iterable[Device], depth: int = 2) -> tuple[Device | Switch, ...]:
    """Group devices by their path's first `depth` entries, the host bridge and the bridges after it.

    What shares the first bridge below the host bridge, a root port with one link, is behind one switch.
    Devices of unknown path stand alone, as do the functions of one card.
    """
    groups: dict[tuple[str, ...], list[Device]] = {}
    for at, device in enumerate(devices):
        known = len(device.path) >= depth
        groups.setdefault(device.path[:depth] if known else ("", str(at)), []).append(device)
    found: list[Device | Switch] = []
    for members in groups.values():
        found += close_group(members, depth)
    return tuple(found)


def close_group(members: Sequence[Device], depth: int) -> Sequence[Device | Switch]:
    """Make a switch of devices that share `depth` entries, unless they are one card."""
    if len({device.pci.partition(".")[0] for device in members}) < 2:
        return members
    shared = depth
    while all(len(d.path) > shared and d.path[shared] == members[0].path[shared] for d in members):
        shared += 1
    return [Switch(members[0].path[shared - 1], group_devices(members, shared + 1))]


@dataclass(frozen=True, slots=True)
class Part:
    """One object of the tree, in hwloc's terms."""

    kind: str
    """`Machine`, `Package`, `NUMANode`, `Cache`, `Core`, or `Class`: the like cores of a hybrid machine."""
    numbers: tuple[int, ...] = ()
    """The kernel's number, a cache's or a core's lowest PU; several for like nodes without CPUs."""
    pus: tuple[int, ...] = ()
    """Its online PUs in ascending order."""
    size_kib: int = 0
    """Of its memory or its cache; 0 if it has none, or none is known."""
    label: str = ""
    """What more there is to say: a cache's level, a node's kind of memory, a class of cores."""
    parts: tuple["Part", ...] = ()
    devices: tuple[Device | Switch, ...] = ()
    """Those next to a NUMA node; under the machine, those next to none that is known."""

    def count_kind(self, kind: str) -> int:
        """How many objects of a kind are below it."""
        return sum(
            (part.kind == kind) * max(1, len(part.numbers)) + part.count_kind(kind) for part in self.parts
        )

    def list_counts(self) -> list[str]:
        """What a machine has of each, in words."""
        kinds = {"package": "Package", "NUMA node": "NUMANode", "core": "Core"}
        counts = [count_things(self.count_kind(kind), noun) for noun, kind in kinds.items()]
        return [*counts, count_things(len(self.pus), "PU")]

    def describe_size(self) -> str:
        """Its size, for each if it stands for several; empty if there is none to show."""
        each = " each" if len(self.numbers) > 1 else ""
        return f"{format_size(self.size_kib)}{each}" if self.size_kib else ""


@dataclass(frozen=True, slots=True)
class Builder:
    """What building the tree looks up."""

    machine: Machine
    classes: Mapping[int, int]
    """Class of the cores of a capacity, 0 for the most capable."""
    devices: Mapping[int | None, tuple[Device | Switch, ...]]
    """Devices by NUMA node, None for those next to none that is known."""
    spread: frozenset[int]
    """Last-level caches above several NUMA nodes (sub-NUMA clustering) or packages."""

    def divide_cpus(self, cpus: Sequence[Cpu], levels: Sequence[str]) -> tuple[Part, ...]:
        """Divide CPUs by the first level, and each share by the next ones."""
        if not levels:
            return ()
        shares: dict[int, list[Cpu]] = {}
        for cpu in cpus:
            shares.setdefault(self.find_number(cpu, levels[0]), []).append(cpu)
        return tuple(self.build_part(levels[0], at, share, levels[1:]) for at, share in shares.items())

    def find_number(self, cpu: Cpu, level: str) -> int:
        """Which object of a level a CPU belongs to."""
        number: int = getattr(cpu, LEVELS[level])
        return self.classes.get(number, 0) if level == "Class" else number

    def build_part(self, kind: str, number: int, cpus: Sequence[Cpu], levels: Sequence[str]) -> Part:
        """Build one object and what is below it."""
        size_kib, label = self.find_size_and_label(kind, number, cpus)
        # A node whose CPUs are in several packages shows its devices with the first of them.
        first = kind == "NUMANode" and cpus[0] == next(c for c in self.machine.cpus if c.node == number)
        return Part(
            kind=kind,
            numbers=(number,),
            pus=tuple(cpu.id for cpu in cpus),
            size_kib=size_kib,
            label=label,
            parts=self.divide_cpus(cpus, levels),
            devices=self.devices.get(number, ()) if first else (),
        )

    def find_size_and_label(self, kind: str, number: int, cpus: Sequence[Cpu]) -> tuple[int, str]:
        """The size and the label of an object."""
        if kind == "NUMANode":
            return next((node.memory_kib for node in self.machine.nodes if node.id == number), 0), ""
        if kind == "Cache":
            cache = next((cache for cache in self.machine.caches if cache.id == number), None)
            size_kib, label = (cache.size_kib, f"L{cache.level}") if cache else (0, "LLC")
            return size_kib, f"shared {label}" if number in self.spread else label
        if kind == "Class":
            values = sorted({cpu.capacity for cpu in cpus})
            span = str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"
            return 0, f"{'efficiency' if number else 'performance'} (capacity {span})"
        return 0, ""


def build_parts(machine: Machine, classes: Mapping[int, int]) -> Part:
    """Build the tree of a machine's online CPUs, nodes and devices.

    `classes` numbers the classes of cores by their capacity, 0 for the most capable.
    """
    crossed = any(len({cpu.package for cpu in machine.cpus if cpu.node == n.id}) > 1 for n in machine.nodes)
    levels = ["NUMANode", "Package"] if crossed else ["Package", "NUMANode"]  # VMs have packages in a node
    levels += ["Cache"] if machine.caches else []  # else they are assumed, not known
    levels += ["Class", "Core"] if len(set(classes.values())) > 1 else ["Core"]
    builder = Builder(machine, classes, place_devices(machine), find_spread(machine))
    bare = [node for node in machine.nodes if node.id not in {cpu.node for cpu in machine.cpus}]
    return Part(
        kind="Machine",
        pus=tuple(cpu.id for cpu in machine.cpus),
        size_kib=machine.memory_kib,
        label=machine.name,
        parts=(*builder.divide_cpus(machine.cpus, levels), *build_bare(bare, builder.devices)),
        devices=builder.devices.get(None, ()),
    )


def find_spread(machine: Machine) -> frozenset[int]:
    """Find the last-level caches that are above several NUMA nodes or packages."""
    places = Counter(l3 for l3, _, _ in {(cpu.l3, cpu.node, cpu.package) for cpu in machine.cpus})
    return frozenset(l3 for l3, count in places.items() if count > 1)


def place_devices(machine: Machine) -> dict[int | None, tuple[Device | Switch, ...]]:
    """Sort the GPUs and NICs by the NUMA node that they are next to."""
    known = {node.id for node in machine.nodes} | {cpu.node for cpu in machine.cpus}
    places: dict[int | None, list[Device]] = {}
    devices: list[Device] = [*machine.gpus, *machine.nics]
    for device in devices:
        node = device.node if device.node in known else find_local(machine, device)
        places.setdefault(node, []).append(device)
    return {place: group_devices(devices) for place, devices in places.items()}


def find_local(machine: Machine, device: Device) -> int | None:
    """The NUMA node that has all the CPUs next to a device; None if they are in several, or unknown."""
    local = device.local_cpus if isinstance(device, Gpu) else frozenset()
    nodes = {cpu.node for cpu in machine.cpus if cpu.id in local}
    return min(nodes) if len(nodes) == 1 and len(machine.nodes) > 1 else None


def build_bare(
    nodes: Sequence[NumaNode], devices: Mapping[int | None, tuple[Device | Switch, ...]]
) -> list[Part]:
    """Build the NUMA nodes without CPUs; those that are alike are one part, unless devices are next to it."""
    groups: dict[tuple[int, str, int], list[int]] = {}
    for node in nodes:
        place = node.id if node.id in devices else -1
        groups.setdefault((node.memory_kib, describe_bare(node), place), []).append(node.id)
    return [
        Part("NUMANode", tuple(numbers), size_kib=size_kib, label=label, devices=devices.get(place, ()))
        for (size_kib, label, place), numbers in groups.items()
    ]


def describe_bare(node: NumaNode) -> str:
    """What a NUMA node without CPUs is."""
    if not node.memory_kib:
        return "no CPUs, no memory"
    # Memory that was plugged in as movable (CXL, persistent) is not normal either.
    return "no CPUs" if node.normal else "no CPUs, GPU or expansion memory"
