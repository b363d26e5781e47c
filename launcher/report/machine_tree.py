"""The machine as a tree of text, with the distances between NUMA nodes as a matrix."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from launcher.cpulist import format_cpulist
from launcher.plan.model import Gpu, Machine, NumaNode
from launcher.report.machine_parts import Device, Part, Switch, build_parts, describe_gpu, describe_nic
from launcher.text import clean_text, count_things, format_size, shorten_cpulist

Distances = Mapping[tuple[int, int], int]
MOST_GROUPS = 16
"""Rows of the largest matrix that fits 80 columns."""
GAP = "  "


def describe_distances(nodes: Sequence[NumaNode]) -> list[str]:
    """The lines of the matrix; a sentence if all nodes are as far from each other, none for one node.

    Nodes are alike when each is as far from any third one as the others, as those of a package often are;
    on the diagonal, the distance is that within the group.
    """
    far = {(node.id, other.id): node.distance(other.id) for node in nodes for other in nodes}
    if len(nodes) < 2:
        return []
    groups = group_nodes([node.id for node in nodes], far)
    if len(groups) == 1:
        first, second, *_ = groups[0]
        return [f"{far[first, first]} within a NUMA node, {far[first, second]} between nodes"]
    if len(groups) > MOST_GROUPS:
        return [f"{min_max(far)}, without order: format=json has them all"]
    names = [format_cpulist(frozenset(group)) for group in groups]
    rows = [["nodes", *names]]
    for name, group in zip(names, groups, strict=True):
        rows.append([name, *(str(far[group[0], other[-1]]) for other in groups)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def min_max(far: Distances) -> str:
    """The range of the distances between different nodes."""
    apart = [distance for (a, b), distance in far.items() if a != b]
    return f"{min(apart)} to {max(apart)} between nodes"


def group_nodes(ids: Sequence[int], far: Distances) -> list[list[int]]:
    """Put alike nodes together, in the order of the first of each group."""
    groups: list[list[int]] = []
    for node in ids:
        alike_nodes = next(
            (group for group in groups if all(alike(node, other, ids, far) for other in group)), None
        )
        if alike_nodes is None:
            groups.append([node])
        else:
            alike_nodes.append(node)
    return groups


def alike(a: int, b: int, ids: Sequence[int], far: Distances) -> bool:
    """Tell whether two nodes are as far from every third one, both ways, and from each other."""
    return (
        far[a, a] == far[b, b]
        and far[a, b] == far[b, a]
        and all(
            far[a, other] == far[b, other] and far[other, a] == far[other, b]
            for other in ids
            if other not in (a, b)
        )
    )


@dataclass(frozen=True, slots=True)
class View:
    """What decides how a part is shown."""

    machine: Machine
    every_core: bool
    """Each core and each cache by itself, even if neighbours are alike."""

    def find_only_cache(self, part: Part) -> Part | None:
        """The only cache of a package or node, which stands on the same line."""
        only = part.parts[0] if len(part.parts) == 1 and part.kind in ("Package", "NUMANode") else None
        return only if only and only.kind == "Cache" and not self.every_core else None

    def list_below(self, part: Part) -> tuple[Part, ...]:
        """The parts that have lines of their own below a part's line."""
        parts = (self.find_only_cache(part) or part).parts
        return tuple(child for child in parts if self.every_core or child.kind != "Core")

    def find_likeness(self, part: Part) -> Hashable:
        """What neighbours have in common that stand on one line."""
        marks = self.describe_marks(part)
        partly = any(mark.startswith(("allowed ", "isolated ")) for mark in marks)
        if self.every_core or self.list_below(part) or part.devices or partly or part.kind == "NUMANode":
            return part
        return (self.describe_title(part, numbered=False), part.count_kind("Core"), len(part.pus), marks)

    def describe_title(self, part: Part, *, numbered: bool) -> str:
        """What a part is: kind, number and size, with its only cache."""
        if part.kind in ("Cache", "Class"):
            return f"{part.label} {part.describe_size()}".rstrip()
        name, cache = part.kind, self.find_only_cache(part)
        if numbered:
            name += f"{'s' if len(part.numbers) > 1 else ''} {format_cpulist(frozenset(part.numbers))}"
        within = self.describe_title(cache, numbered=False) if cache else ""
        return GAP.join(filter(None, (name, part.describe_size(), part.label, within)))

    def describe_marks(self, part: Part) -> tuple[str, ...]:
        """What of a part the job may not use, or stays free of at boot."""
        pus = frozenset(part.pus)
        allowed, isolated = pus & self.machine.allowed_cpus, pus & self.machine.isolated
        marks = []
        if pus and not allowed:
            marks.append("not allowed")
        elif allowed != pus:
            marks.append(f"allowed {shorten_cpulist(allowed)}")
        if isolated:
            marks.append("isolated" if isolated == pus else f"isolated {shorten_cpulist(isolated)}")
        if part.kind == "NUMANode" and part.size_kib and self.machine.allowed_mems.isdisjoint(part.numbers):
            marks.append("memory not allowed")
        return tuple(marks)


def print_topology(
    console: Console, machine: Machine, classes: Mapping[int, int], *, explain: bool = False
) -> None:
    """Print the tree, what the job may use of it, distances, limits, and the probe's warnings.

    `classes` numbers the classes of cores by their capacity; `explain` shows every core by itself.
    """
    root = build_parts(machine, classes)
    view = View(machine, explain)
    tree = Tree(Text(describe_root(root), style="bold"), guide_style="dim")
    add_parts(tree, view, root)
    console.print(tree)
    for name, lines in describe_rest(machine).items():
        for at, line in enumerate(lines):
            console.print(Text(f"{'' if at else name:<10} {line}"))
    for warning in machine.warnings:
        console.print(Text(f"warning: {clean_text(warning, 400)}", style="yellow"))


def describe_root(root: Part) -> str:
    """The first line: name, memory, and how many of each."""
    words = ("Machine", clean_text(root.label), root.describe_size(), ", ".join(root.list_counts()))
    return GAP.join(filter(None, words))


def add_parts(branch: Tree, view: View, part: Part) -> None:
    """Hang what is below a part on its branch: parts, with alike neighbours on one line, then devices."""
    for _, found in groupby(view.list_below(part), key=view.find_likeness):
        alike = tuple(found)
        twig = branch.add(render_parts(view, alike))
        if len(alike) == 1:
            add_parts(twig, view, alike[0])
    for device in part.devices:
        add_device(branch, device)


def render_parts(view: View, alike: Sequence[Part]) -> Text:
    """The line of a part, or of several that are alike."""
    first, last, several = alike[0], alike[-1], len(alike) > 1
    title = view.describe_title(first, numbered=not several)
    words = [f"{len(alike)} x {title}" if several else title]
    if len(first.parts) == 1 and first.parts[0].kind == "NUMANode" and first.parts[0].pus == first.pus:
        return Text(title)  # all the rest stands on the node's line
    if first.count_kind("Core"):
        cores = count_things(first.count_kind("Core"), "core") + (" each" if several else "")
        words.append(cores)
    if first.pus:
        span = shorten_cpulist(first.pus) + (f" to {shorten_cpulist(last.pus)}" if several else "")
        words.append(f"{'PUs' if several or len(first.pus) > 1 else 'PU'} {span}")
    line = Text(GAP.join(words))
    for mark in view.describe_marks(first):
        line.append(f"{GAP}({mark})", style="yellow")
    return line


def add_device(branch: Tree, device: Device | Switch) -> None:
    """Hang a device on a branch, a switch with what is below it."""
    if isinstance(device, Switch):
        twig = branch.add(Text(f"PCI switch {clean_text(device.pci)}"))
        for member in device.members:
            add_device(twig, member)
        return
    if isinstance(device, Gpu):
        title, words = f"GPU {device.index}", describe_gpu(device)
    else:
        title, words = f"NIC {clean_text(device.name)}", describe_nic(device)
    text = GAP.join(filter(None, (title, clean_text(device.pci), *words)))
    branch.add(Text(text, style="green" if isinstance(device, Gpu) else "cyan"))


def describe_rest(machine: Machine) -> dict[str, list[str]]:
    """What stands below the tree: lines by their heading."""
    limits = machine.limits
    known = {
        "CPU time of": None if limits.cpus is None else f"{limits.cpus:g} CPUs",
        "memory": None if limits.memory_kib is None else format_size(limits.memory_kib),
        "/dev/shm": None if limits.shm_kib is None else format_size(limits.shm_kib),  # noqa: S108  a heading
    }
    found = ", ".join(f"{name} {value}" for name, value in known.items() if value)
    return {
        "job": [describe_allowed_resources(machine)],
        "limits": [found] if found else [],
        "not online": [absent] if (absent := describe_absent(machine)) else [],
        "distances": describe_distances(machine.nodes),
        "source": [clean_text(machine.source, 1000)] if machine.source else [],
    }


def describe_allowed_resources(machine: Machine) -> str:
    """What the job may use, in a sentence."""
    online = frozenset(cpu.id for cpu in machine.cpus)
    allowed = online & machine.allowed_cpus
    nodes = frozenset(node.id for node in machine.nodes if node.memory_kib)
    mems = nodes & machine.allowed_mems
    part = f"{len(allowed)} of {count_things(len(online), 'PU')} ({shorten_cpulist(allowed)})"
    cpus = part if allowed != online else f"all {count_things(len(online), 'PU')}"
    memory = "all NUMA nodes" if mems == nodes else f"NUMA nodes {format_cpulist(mems) or '(none)'}"
    spared = allowed & machine.isolated
    rest = (
        f"; the isolated PUs {shorten_cpulist(spared)} are left alone" if spared < allowed and spared else ""
    )
    return f"may use {cpus} and the memory of {memory}{rest}"


def describe_absent(machine: Machine) -> str:
    """The CPU numbers between those online, which are offline or not there."""
    online = frozenset(cpu.id for cpu in machine.cpus)
    absent = frozenset(range(max(online, default=-1) + 1)) - online
    return f"PUs {shorten_cpulist(absent)} (offline, or no such CPUs)" if absent else ""
