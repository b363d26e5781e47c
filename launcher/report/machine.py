"""A machine as hwloc shows it: packages, NUMA nodes, last-level caches, cores and devices.

`launch topo` prints it as a tree, with the distances between NUMA nodes; `render_machine` draws it as lstopo
does, in nested boxes in the colours of the ranks that have what is in them.
"""

import io
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from launcher.cpulist import format_cpulist
from launcher.errors import MachineError
from launcher.plan.model import Cpu, Gpu, Machine, Nic, NumaNode, Plan, RankPlan
from launcher.plan.topology import gather_cores, split_classes
from launcher.text import clean_text, count_things, format_size, shorten_cpulist

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Device = Gpu | Nic
_T = TypeVar("_T")
_LEVELS = {"Package": "package", "NUMANode": "node", "Cache": "l3", "Class": "capacity", "Core": "core"}
"""The levels from the outside in, with the field of a CPU that tells them apart."""
_MOST_GROUPS = 16
"""Rows of the largest matrix of distances that fits 80 columns."""
_GAP = "  "

DRAWS = find_spec("matplotlib") is not None
PALETTE = (
    *("#88ccee", "#cc6677", "#ddcc77", "#117733", "#332288"),
    *("#44aa99", "#aa4499", "#999933", "#882255"),
)
"""Paul Tol's "muted" scheme (https://personal.sron.nl/~pault/, SRON/EPS/TN/09-002); ranks beyond the ninth
begin again, with their own numbers."""
_FILLS = {"Package": "#ebebeb", "NUMANode": "#fafafa", "Cache": "#f0f0f0", "Class": "#f7f7f7"}
_MOST_RANKS = 256
"""Ranks that are listed in the legend."""
_CORE, _LINE, _CARD, _ROW, _SPACE = 38, 15, 210, 560, 6
"""Pixels: a core's width, a line's height, the widths of a card and of a row of the legend, gaps."""
_NARROW, _WIDE = 720, 1240
"""Widths of pictures, of few cores and of many."""


# The parts


@dataclass(frozen=True, slots=True)
class Switch:
    """A PCI switch with at least two cards below it."""

    pci: str
    """Address of the last bridge that they have in common."""
    members: tuple["Device | Switch", ...]


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
        """Return how many objects of a kind are below it."""
        own = (max(1, len(part.numbers)) if part.kind == kind else 0 for part in self.parts)
        return sum(own) + sum(part.count_kind(kind) for part in self.parts)

    @property
    def counts(self) -> str:
        """What a machine has of each, in words."""
        kinds = {"package": "Package", "NUMA node": "NUMANode", "core": "Core"}
        counts = [count_things(self.count_kind(kind), noun) for noun, kind in kinds.items()]
        return ", ".join((*counts, count_things(len(self.pus), "PU")))

    @property
    def size(self) -> str:
        """Its size, for each if it stands for several; empty if there is none to show."""
        each = " each" if len(self.numbers) > 1 else ""
        return f"{format_size(self.size_kib)}{each}" if self.size_kib else ""


def build_parts(machine: Machine) -> Part:
    """Return the tree of a machine's online CPUs, nodes and devices."""
    cores = gather_cores(machine, frozenset(cpu.id for cpu in machine.cpus))
    classes = {core.capacity: at for at, found in enumerate(split_classes(cores)) for core in found}
    places = Counter(l3 for l3, _, _ in {(cpu.l3, cpu.node, cpu.package) for cpu in machine.cpus})
    memory = {node.id: node.memory_kib for node in machine.nodes}
    caches = {cache.id: cache for cache in machine.caches}
    devices = _place_devices(machine)
    first_cpus = {cpu.node: cpu for cpu in reversed(machine.cpus)}

    def find_number(cpu: Cpu, level: str) -> int:
        number: int = getattr(cpu, _LEVELS[level])
        return classes.get(number, 0) if level == "Class" else number

    def divide(cpus: Sequence[Cpu], levels: Sequence[str]) -> tuple[Part, ...]:
        """Divide CPUs by the first level, and each share by the next ones."""
        shares: dict[int, list[Cpu]] = {}
        for cpu in cpus if levels else ():
            shares.setdefault(find_number(cpu, levels[0]), []).append(cpu)
        return tuple(build(levels[0], number, share, levels[1:]) for number, share in shares.items())

    def build(kind: str, number: int, cpus: Sequence[Cpu], levels: Sequence[str]) -> Part:
        size_kib, label = 0, ""
        if kind == "NUMANode":
            size_kib = memory.get(number, 0)
        elif kind == "Cache":
            cache = caches.get(number)
            size_kib, label = (cache.size_kib, f"L{cache.level}") if cache else (0, "LLC")
            label = f"shared {label}" if places[number] > 1 else label  # above several nodes or packages
        elif kind == "Class":
            low, high = min(cpu.capacity for cpu in cpus), max(cpu.capacity for cpu in cpus)
            span = str(low) if low == high else f"{low}-{high}"
            label = f"{'efficiency' if number else 'performance'} (capacity {span})"
        # A node whose CPUs are in several packages shows its devices with the first of them.
        own = devices.get(number, ()) if kind == "NUMANode" and cpus[0] == first_cpus[number] else ()
        pus = tuple(cpu.id for cpu in cpus)
        return Part(kind, (number,), pus, size_kib, label, divide(cpus, levels), own)

    crossed = any(len({cpu.package for cpu in machine.cpus if cpu.node == n.id}) > 1 for n in machine.nodes)
    levels = ["NUMANode", "Package"] if crossed else ["Package", "NUMANode"]  # VMs have packages in a node
    levels += ["Cache"] if machine.caches else []  # else they are assumed, not known
    levels += ["Class", "Core"] if len(set(classes.values())) > 1 else ["Core"]
    return Part(
        kind="Machine",
        pus=tuple(cpu.id for cpu in machine.cpus),
        size_kib=machine.memory_kib,
        label=machine.name,
        parts=(*divide(machine.cpus, levels), *_build_bare(machine, devices)),
        devices=devices.get(None, ()),
    )


def _build_bare(
    machine: Machine, devices: Mapping[int | None, tuple[Device | Switch, ...]]
) -> Iterable[Part]:
    """Give the NUMA nodes without CPUs; those that are alike are one part, unless devices are next to it."""
    with_cpus = {cpu.node for cpu in machine.cpus}
    groups: dict[tuple[int, str, int], list[int]] = {}
    for node in machine.nodes:
        # Memory that was plugged in as movable (CXL, persistent) is not normal either.
        label = "no CPUs" if node.normal else "no CPUs, GPU or expansion memory"
        label = label if node.memory_kib else "no CPUs, no memory"
        place = node.id if node.id in devices else -1
        if node.id not in with_cpus:
            groups.setdefault((node.memory_kib, label, place), []).append(node.id)
    for (size_kib, label, place), numbers in groups.items():
        yield Part("NUMANode", tuple(numbers), (), size_kib, label, devices=devices.get(place, ()))


def _place_devices(machine: Machine) -> dict[int | None, tuple[Device | Switch, ...]]:
    """Sort the GPUs and NICs by the NUMA node that they are next to; None if that is not known."""
    known = {node.id for node in machine.nodes} | {cpu.node for cpu in machine.cpus}
    places: dict[int | None, list[Device]] = {}
    devices: list[Device] = [*machine.gpus, *machine.nics]
    for device in devices:
        node = device.node if device.node in known else None
        if node is None and isinstance(device, Gpu) and len(machine.nodes) > 1:
            near = {cpu.node for cpu in machine.cpus if cpu.id in device.local_cpus}
            node = min(near) if len(near) == 1 else None
        places.setdefault(node, []).append(device)
    return {place: _group_devices(found) for place, found in places.items()}


def _group_devices(devices: Sequence[Device], depth: int = 2) -> tuple[Device | Switch, ...]:
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
        if len({device.pci.partition(".")[0] for device in members}) < 2:
            found += members
            continue
        shared = depth
        path = members[0].path
        while all(len(one.path) > shared and one.path[shared] == path[shared] for one in members):
            shared += 1
        found.append(Switch(path[shared - 1], _group_devices(members, shared + 1)))
    return tuple(found)


def _describe_device(device: Device) -> tuple[str, ...]:
    """Return what is known of a device: name, address, and what it is."""
    if isinstance(device, Gpu):
        memory = format_size(device.memory_mib * 1024) if device.memory_mib else ""
        mig = count_things(len(device.mig), "MIG instance") if device.mig else ""
        name = clean_text(device.name) or ("AMD GPU" if device.vendor == "amd" else "")
        return f"GPU {device.index}", clean_text(device.pci), *filter(None, (name, memory, mig))
    rate = f"{device.rate_gbps:g} Gb/s" if device.rate_gbps else ""
    link = clean_text(f"{device.link_layer} {rate}")
    state = "active" if link and device.active else "" if device.active else "down"
    return f"NIC {clean_text(device.name)}", clean_text(device.pci), *filter(None, (link, state))


# The tree


def print_topology(console: Console, machine: Machine, *, explain: bool = False) -> None:
    """Print the tree, what the job may use of it, distances, limits, and the probe's warnings.

    `explain` shows every core by itself.
    """
    root = build_parts(machine)
    head = _GAP.join(filter(None, ("Machine", clean_text(root.label), root.size, root.counts)))
    tree = Tree(Text(head, style="bold"), guide_style="dim")
    _TreeView(machine, explain).add_parts(tree, root)
    console.print(tree)
    limits = machine.limits
    known = {
        "CPU time of": None if limits.cpus is None else f"{limits.cpus:g} CPUs",
        "memory": None if limits.memory_kib is None else format_size(limits.memory_kib),
        "/dev/shm": None if limits.shm_kib is None else format_size(limits.shm_kib),  # noqa: S108  a heading
    }
    online = frozenset(cpu.id for cpu in machine.cpus)
    absent = frozenset(range(max(online, default=-1) + 1)) - online
    rest = {
        "job": [_describe_allowed(machine, online)],
        "limits": [", ".join(f"{name} {value}" for name, value in known.items() if value)],
        "not online": [f"PUs {shorten_cpulist(absent)} (offline, or no such CPUs)" if absent else ""],
        "distances": describe_distances(machine.nodes),
        "source": [clean_text(machine.source, 1000)],
    }
    for name, lines in rest.items():
        for at, line in enumerate(filter(None, lines)):
            console.print(Text(f"{'' if at else name:<10} {line}"))
    for warning in machine.warnings:
        console.print(Text(f"warning: {clean_text(warning, 400)}", style="yellow"))


def _describe_allowed(machine: Machine, online: frozenset[int]) -> str:
    """Say in a sentence what the job may use."""
    allowed = online & machine.allowed_cpus
    nodes = frozenset(node.id for node in machine.nodes if node.memory_kib)
    mems = nodes & machine.allowed_mems
    part = f"{len(allowed)} of {count_things(len(online), 'PU')} ({shorten_cpulist(allowed)})"
    cpus = part if allowed != online else f"all {count_things(len(online), 'PU')}"
    memory = "all NUMA nodes" if mems == nodes else f"NUMA nodes {format_cpulist(mems) or '(none)'}"
    spared = allowed & machine.isolated
    left = spared and spared < allowed
    rest = f"; the isolated PUs {shorten_cpulist(spared)} are left alone" if left else ""
    return f"may use {cpus} and the memory of {memory}{rest}"


@dataclass(frozen=True, slots=True)
class _TreeView:
    """What decides how a part is shown."""

    machine: Machine
    every_core: bool
    """Each core and each cache by itself, even if neighbours are alike."""

    def add_parts(self, branch: Tree, part: Part) -> None:
        """Hang what is below a part on its branch: parts, alike neighbours on one line, then devices."""
        parts = (self._find_only_cache(part) or part).parts
        shown = [child for child in parts if self.every_core or child.kind != "Core"]
        for _, found in groupby(shown, key=self._find_likeness):
            alike = tuple(found)
            twig = branch.add(self._render(alike))
            if len(alike) == 1:
                self.add_parts(twig, alike[0])
        for device in part.devices:
            self._add_device(branch, device)

    def _add_device(self, branch: Tree, device: Device | Switch) -> None:
        if isinstance(device, Switch):
            twig = branch.add(Text(f"PCI switch {clean_text(device.pci)}"))
            for member in device.members:
                self._add_device(twig, member)
        else:
            style = "green" if isinstance(device, Gpu) else "cyan"
            branch.add(Text(_GAP.join(_describe_device(device)), style=style))

    def _find_only_cache(self, part: Part) -> Part | None:
        """Return the only cache of a package or node, which stands on the same line."""
        only = part.parts[0] if len(part.parts) == 1 and part.kind in ("Package", "NUMANode") else None
        return only if only and only.kind == "Cache" and not self.every_core else None

    def _find_likeness(self, part: Part) -> Hashable:
        """Return what neighbours have in common that stand on one line."""
        marks = self._describe_marks(part)
        partly = any(mark.startswith(("allowed ", "isolated ")) for mark in marks)
        below = any(child.kind != "Core" for child in (self._find_only_cache(part) or part).parts)
        if self.every_core or below or part.devices or partly or part.kind == "NUMANode":
            return part
        return (self._describe_title(part, numbered=False), part.count_kind("Core"), len(part.pus), marks)

    def _describe_title(self, part: Part, *, numbered: bool) -> str:
        """Return what a part is: kind, number and size, with its only cache."""
        if part.kind in ("Cache", "Class"):
            return f"{part.label} {part.size}".rstrip()
        name, cache = part.kind, self._find_only_cache(part)
        if numbered:
            name += f"{'s' if len(part.numbers) > 1 else ''} {format_cpulist(frozenset(part.numbers))}"
        within = self._describe_title(cache, numbered=False) if cache else ""
        return _GAP.join(filter(None, (name, part.size, part.label, within)))

    def _describe_marks(self, part: Part) -> tuple[str, ...]:
        """Say what of a part the job may not use, or stays free of at boot."""
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

    def _render(self, alike: Sequence[Part]) -> Text:
        """Return the line of a part, or of several that are alike."""
        first, last, several = alike[0], alike[-1], len(alike) > 1
        title = self._describe_title(first, numbered=not several)
        if len(first.parts) == 1 and first.parts[0].kind == "NUMANode" and first.parts[0].pus == first.pus:
            return Text(title)  # all the rest stands on the node's line
        words = [f"{len(alike)} x {title}" if several else title]
        if cores := first.count_kind("Core"):
            words.append(count_things(cores, "core") + (" each" if several else ""))
        if first.pus:
            span = shorten_cpulist(first.pus) + (f" to {shorten_cpulist(last.pus)}" if several else "")
            words.append(f"{'PUs' if several or len(first.pus) > 1 else 'PU'} {span}")
        line = Text(_GAP.join(words))
        for mark in self._describe_marks(first):
            line.append(f"{_GAP}({mark})", style="yellow")
        return line


def describe_distances(nodes: Sequence[NumaNode]) -> list[str]:
    """Return the lines of the matrix; a sentence if all nodes are as far from each other, none for one node.

    Nodes are alike when each is as far from any third one as the others, as those of a package often are;
    on the diagonal, the distance is that within the group.
    """
    far = {(node.id, other.id): node.distance(other.id) for node in nodes for other in nodes}
    ids = [node.id for node in nodes]
    if len(nodes) < 2:
        return []

    def alike(a: int, b: int) -> bool:
        """Tell whether the matrix stays the same if two nodes change places."""
        swap = {a: b, b: a}
        return all(far[swap.get(x, x), swap.get(y, y)] == distance for (x, y), distance in far.items())

    groups: list[list[int]] = []
    for node in ids:
        same = next((group for group in groups if all(alike(node, other) for other in group)), None)
        if same is None:
            groups.append([node])
        else:
            same.append(node)
    if len(groups) == 1:
        first, second, *_ = groups[0]
        return [f"{far[first, first]} within a NUMA node, {far[first, second]} between nodes"]
    if len(groups) > _MOST_GROUPS:
        apart = [distance for (a, b), distance in far.items() if a != b]
        return [f"{min(apart)} to {max(apart)} between nodes, without order: format=json has them all"]
    names = [format_cpulist(frozenset(group)) for group in groups]
    rows = [["nodes", *names]]
    for name, group in zip(names, groups, strict=True):
        rows.append([name, *(str(far[group[0], other[-1]]) for other in groups)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


# The picture


def render_machine(plan: Plan, note: str, form: str) -> bytes:
    """Draw a plan's machine and its ranks as `svg`, `png` or `pdf`; `note` stands below the title.

    Raises MachineError without matplotlib.
    """
    if not DRAWS:
        install = "pip install 'launch-ranks[report]'"
        raise MachineError(f"a picture needs matplotlib, which is not installed: {install}")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    root = build_parts(plan.machine)
    width = _NARROW if root.count_kind("Core") <= 32 else _WIDE
    output = io.BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks
        mpl.rcdefaults()
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "launch", "text.parse_math": False})
        figure = Figure()
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        picture = _Picture(plan, axes)
        ranks = count_things(len(plan.ranks), "rank")
        picture.write(12, 18, clean_text(root.label) or "Machine", width, size=17)
        picture.write(12, 38, ", ".join(filter(None, (root.counts, root.size, ranks, note))), width)
        bottom = picture.draw_inside(root, _Place(12, 48, width - 24, 1))
        bottom = picture.draw_legend(root, _Place(12, bottom + 12, width - 24, 1))
        axes.set(xlim=(0, width), ylim=(bottom + 12, 0))
        axes.axis("off")
        figure.set_size_inches(width / 72, (bottom + 12) / 72)  # 72 dots an inch: a dot is a pixel
        metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
        figure.savefig(output, format=form, dpi=144, facecolor="white", metadata=metadata)
    return output.getvalue()


_Fills = tuple[str, ...]
"""Colours side by side."""
_FREE: _Fills = ("#ffffff",)
_FORBIDDEN: _Fills = ("#e8e8e8",)
_ISOLATED: _Fills = ("#c8c8c8",)
"""Fills of what is no rank's; outside the job's cpuset, hatched; set apart at boot, and left alone."""


def find_colour(rank: int) -> str:
    """Return the colour of a rank."""
    return PALETTE[rank % len(PALETTE)]


def lighten(colour: str) -> str:
    """Return the light tint of a colour."""
    return "#" + "".join(f"{255 - (255 - value) * 3 // 10:02x}" for value in bytes.fromhex(colour[1:]))


def _colour(ranks: Collection[int], tint: Callable[[str], str] = str) -> _Fills:
    """Return the colours of some ranks, each once."""
    return tuple(dict.fromkeys(tint(find_colour(rank)) for rank in sorted(ranks)))


def _find_ink(fills: _Fills) -> str:
    """Return black or white, whichever reads better (relative luminance of WCAG 2, simplified)."""
    lights = [
        0.2 * red + 0.7 * green + 0.1 * blue for red, green, blue in (bytes.fromhex(f[1:]) for f in fills)
    ]
    return "#ffffff" if sum(lights) / len(lights) < 125 else "#222222"


def _name_ranks(letter: str, ranks: Collection[int]) -> str:
    """Return a short name for some ranks: `R0`, `w2-5`; `R0+3` is rank 0 and three more."""
    text = format_cpulist(frozenset(ranks))
    return f"{letter}{text if len(text) <= 5 else f'{min(ranks)}+{len(ranks) - 1}'}"


class _Place(NamedTuple):
    """Where something is drawn, in pixels from the top left, over what is less deep."""

    x: float
    y: float
    width: float
    depth: int


class _Picture:
    """Draws the parts of a machine as nested boxes in the colours of the ranks that have them.

    What draws something returns where it ends.
    """

    def __init__(self, plan: Plan, axes: "Axes") -> None:
        self.plan = plan
        self.axes = axes
        self.ranks: dict[int, list[int]] = {}
        """By PU, the ranks whose own process runs there."""
        self.workers: dict[int, list[int]] = {}
        """By PU, the ranks that have nothing but DataLoader workers there."""
        for rank in plan.ranks:
            for pu in rank.cpus:
                self.ranks.setdefault(pu, []).append(rank.local_rank)
            for pu in rank.worker_cpus - rank.cpus:
                self.workers.setdefault(pu, []).append(rank.local_rank)

    def find_owner(self, pus: Collection[int]) -> tuple[_Fills, str]:
        """Return the fills of PUs, and the label of a core that has them."""
        machine = self.plan.machine
        owners = {rank for pu in pus for rank in self.ranks.get(pu, ())}
        workers = {rank for pu in pus for rank in self.workers.get(pu, ())}
        if owners:
            return _colour(owners), _name_ranks("R", owners)
        if workers:
            return _colour(workers, lighten), _name_ranks("w", workers)
        if not machine.allowed_cpus.intersection(pus):
            return _FORBIDDEN, ""
        return (_ISOLATED, "iso") if machine.isolated.issuperset(pus) else (_FREE, "")

    def draw_inside(self, part: Part, place: _Place) -> float:
        """Draw what is inside a part: cores, what has CPUs, what has none, and devices."""
        cores = [child for child in part.parts if child.kind == "Core"]
        framed = [child for child in part.parts if child.kind != "Core"]
        y = self.draw_row(cores, self.draw_core, place, _CORE)
        for found in ([one for one in framed if one.pus], [one for one in framed if not one.pus]):
            least = max(map(_find_least, found), default=0.0)
            y = self.draw_row(found, self.draw_part, place._replace(y=y), least, stretched=True)
        return self.draw_row(part.devices, self.draw_device, place._replace(y=y), _CARD)

    def draw_row(
        self,
        things: Sequence[_T],
        draw: Callable[[_T, _Place], float],
        place: _Place,
        least: float,
        *,
        stretched: bool = False,
        gap: float = _SPACE,
    ) -> float:
        """Draw things at least so wide beside each other, in as many rows as they need.

        If they are `stretched`, they fill the width that there is.
        """
        x, y, width, _ = place
        columns = max(1, min(len(things), int((width + gap) // (least + gap))))
        each = min(least, width)
        if stretched:
            columns = ceil(len(things) / max(1, ceil(len(things) / columns))) or 1
            each = (width - gap * (columns - 1)) / columns
        for at in range(0, len(things), columns):
            row = enumerate(things[at : at + columns])
            y = gap + max(
                draw(thing, place._replace(x=x + number * (each + gap), y=y, width=each))
                for number, thing in row
            )
        return y

    def draw_part(self, part: Part, place: _Place) -> float:
        """Draw a package, a node, a cache or a class of cores."""
        words = [part.label, part.size]
        if part.kind not in ("Cache", "Class"):
            numbers = clean_text(shorten_cpulist(part.numbers), 40)
            users = [one.local_rank for one in self.plan.ranks if one.memory.nodes & {*part.numbers}]
            memory = f"memory of {_name_ranks('R', users)}" if users and part.kind == "NUMANode" else ""
            name = f"{part.kind}{'s' if len(part.numbers) > 1 else ''} {numbers}"
            words = [name, part.size, part.label, memory]
        head = ", ".join(filter(None, words))
        return self.draw_box(place, [head], (_FILLS[part.kind],), partial(self.draw_inside, part))

    def draw_core(self, core: Part, place: _Place) -> float:
        """Draw a core: who has it, and its PUs below each other."""

        def draw_pu(pu: int, at: _Place) -> float:
            return self.draw_box(at, [str(pu)], self.find_owner((pu,))[0], name=f"pu{pu}", centred=True)

        pus = partial(self.draw_row, core.pus, draw_pu, least=_CORE, gap=0)
        return self.draw_box(place, [self.find_owner(core.pus)[1]], ("#dcdcdc",), pus, centred=True)

    def draw_device(self, device: Device | Switch, place: _Place) -> float:
        """Draw a card for a GPU or a NIC with the ranks that use it, or a box for a switch around them."""
        if isinstance(device, Switch):
            head = f"PCI switch {clean_text(device.pci)}"
            row = partial(self.draw_row, device.members, self.draw_device, least=_CARD, stretched=True)
            return self.draw_box(place, [head], ("#f3eee2",), row)
        name, pci, *more = _describe_device(device)
        if isinstance(device, Gpu):
            used = [one.local_rank for one in self.plan.ranks if one.gpu and one.gpu.pci == device.pci]
            lines = [f"{name}, {pci}", *more[:1], ", ".join(more[1:])]
        else:
            used = [one.local_rank for one in self.plan.ranks if one.nic == device.name]
            lines = [name, pci, " ".join(more)]
        if used:
            lines[0] = f"{_name_ranks('R', used)}: {lines[0]}"
        kind = "gpu" if isinstance(device, Gpu) else "nic"
        name = f"{kind}{clean_text(device.pci)}" if used else ""
        return self.draw_box(place, [*filter(None, lines)], _colour(used) or _FREE, name=name)

    def draw_box(
        self,
        place: _Place,
        lines: Sequence[str],
        fills: _Fills,
        draw_inside: Callable[[_Place], float] | None = None,
        *,
        name: str = "",
        centred: bool = False,
    ) -> float:
        """Draw a rectangle with lines of text and what is inside; `name` identifies it in an SVG."""
        from matplotlib.patches import Rectangle

        x, y, width, depth = place
        for at, line in enumerate(lines):
            left = x + width / 2 if centred else x + _SPACE
            align = "center" if centred else "left"
            self.write(left, y + 11 + at * _LINE, line, width - 4, size=9, align=align, ink=_find_ink(fills))
        inset = 1 if centred else _SPACE
        bottom = y + _LINE * len(lines) + (0 if centred else 4)
        if draw_inside:
            bottom = draw_inside(_Place(x + inset, bottom, width - 2 * inset, depth + 1))
        stripe = width / len(fills)
        for at, fill in enumerate(fills):
            patch = Rectangle((x + at * stripe, y), stripe, bottom - y, facecolor=fill, zorder=depth)
            self.axes.add_patch(patch).set_gid(f"{name}-{at}" if name else None)
        hatch, edge = ("/////", "#c4c4c4") if fills == _FORBIDDEN else (None, "#888888")
        frame = Rectangle((x, y), width, bottom - y, fill=False, hatch=hatch, linewidth=0.7)
        frame.set(edgecolor=edge, zorder=depth + 0.5)
        self.axes.add_patch(frame)
        return bottom

    def draw_legend(self, root: Part, place: _Place) -> float:
        """Draw swatches with their meaning, the ranks and the marks that occur, in columns."""
        ranks = self.plan.ranks
        rows = [
            (f"R{one.local_rank}", _colour([one.local_rank]), _describe_rank(one))
            for one in ranks[:_MOST_RANKS]
        ]
        if len(ranks) > _MOST_RANKS:
            rows.append(("", _FREE, f"and {len(ranks) - _MOST_RANKS} more ranks: launch plan lists them all"))
        labels = {self.find_owner(pus)[1] for pus in _list_cores(root)}
        if crowd := min((label for label in labels if "+" in label), default=""):
            rows.append((crowd, _FREE, f"rank {crowd[1:].replace('+', ' and ')} more"))
        found = {self.find_owner((cpu.id,)) for cpu in self.plan.machine.cpus}
        if any(label.startswith("w") for _, label in found):
            rank = min(rank for ranks in self.workers.values() for rank in ranks)
            rows.append((f"w{rank}", _colour([rank], lighten), f"DataLoader workers of rank {rank} alone"))
        for fills, label, text in (
            (_FORBIDDEN, "", "not allowed: outside this job's cpuset"),
            (_ISOLATED, "iso", "isolated at boot, left alone"),
            (_FREE, "", "no rank's"),
        ):
            rows += [(label, fills, text)] if (fills, label) in found else []
        columns = max(1, int(place.width // _ROW))
        each, height = place.width / columns, ceil(len(rows) / columns)
        for at, (label, fills, text) in enumerate(rows):
            column, row = divmod(at, height)
            left, top = place.x + column * each, place.y + row * (_LINE + 4)
            self.draw_box(_Place(left, top, _CORE, 2), [label], fills, centred=True)
            self.write(left + _CORE + _SPACE, top + 11, text, each - _CORE - _SPACE, size=9)
        return place.y + height * (_LINE + 4)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        room: float,
        *,
        size: int = 11,
        align: str = "left",
        ink: str = "#222222",
    ) -> None:
        """Write a line of text that ends with the room there is, y being its baseline."""
        most = max(1, int(room / (0.58 * size)))
        shown = text if len(text) <= most else f"{text[: most - 1]}…"
        self.axes.text(x, y, shown, fontsize=size, color=ink, ha=align, va="baseline", zorder=99)


def _list_cores(part: Part) -> Iterable[tuple[int, ...]]:
    """Give the PUs of each core below a part."""
    for child in part.parts:
        if child.kind == "Core":
            yield child.pus
        else:
            yield from _list_cores(child)


def _find_least(part: Part) -> float:
    """Return the least width of a part: one card, or four cores, or what is inside."""
    cores = sum(child.kind == "Core" for child in part.parts)
    inside = max((_find_least(child) for child in part.parts if child.kind != "Core"), default=0.0)
    card = _CARD if part.devices or not cores else _CARD * 0.8
    return max(inside, min(4, cores) * (_CORE + _SPACE), card) + 2 * _SPACE


def _describe_rank(rank: RankPlan) -> str:
    """Return what a rank has: GPU, CPUs, workers' CPUs, memory, NIC."""
    apart, nodes = rank.worker_cpus - rank.cpus, shorten_cpulist(rank.memory.nodes)
    cells = (
        f"rank {rank.local_rank}",
        f"GPU {rank.gpu.index} {rank.gpu.pci}" if rank.gpu else "no GPU",
        f"PU{'s' if len(rank.cpus) > 1 else ''} {shorten_cpulist(rank.cpus)}",
        f"workers also {shorten_cpulist(apart)}" if apart else "",
        f"memory on node {nodes} ({rank.memory.policy})" if nodes else "memory anywhere",
        f"NIC {rank.nic}" if rank.nic else "",
    )
    return "   ".join(clean_text(cell, 48) for cell in cells if cell)
