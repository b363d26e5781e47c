"""Draws a machine as lstopo does, in nested boxes, with the ranks of a plan and a legend, by matplotlib."""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import ceil
from typing import Any

from launcher.errors import MachineError
from launcher.plan.model import Gpu, Plan, RankPlan
from launcher.report.machine_parts import Device, Part, Switch, build_parts, describe_gpu, describe_nic
from launcher.report.rank_colours import (
    FORBIDDEN,
    FREE,
    ISOLATED,
    DrawStyle,
    RankStyles,
    find_colour,
    find_ink,
    gather_rank_styles,
    lighten,
    name_ranks,
    pick_colours,
)
from launcher.text import clean_text, count_things, shorten_cpulist

DRAWS = find_spec("matplotlib") is not None
MISSING = "a picture needs matplotlib, which is not installed: pip install 'launch-ranks[report]'"
MOST_RANKS = 256
"""Ranks that are listed in the legend."""
CORE, LINE, CARD, ROW = 38, 15, 210, 560
"""Pixels: the width of a core, the height of a PU or a line, the widths of a card and a row of the legend."""
GAP, HEAD = 6, 20
NARROW, WIDE = 720, 1240
"""Widths of pictures, of few cores and of many."""
PLAIN, SMALL = 11, 9
"""Font sizes: of headings, and of all else."""
FILLS = {"Package": "#ebebeb", "NUMANode": "#fafafa", "Cache": "#f0f0f0", "Class": "#f7f7f7"}
STYLE: dict[Any, object] = {"svg.fonttype": "none", "svg.hashsalt": "launch", "text.parse_math": False}
Draw = Callable[[float, float, float], float]
"""Draws something at x and y in a width, and returns its height."""


def render_machine(plan: Plan, classes: Mapping[int, int], note: str, form: str) -> bytes:
    """Draw a plan's machine and its ranks as `svg`, `png` or `pdf`; raises MachineError without matplotlib.

    `classes` numbers the classes of cores by their capacity; `note` stands below the title.
    """
    if not DRAWS:
        raise MachineError(MISSING)
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    root = build_parts(plan.machine, classes)
    width = NARROW if root.count_kind("Core") <= 32 else WIDE
    output = io.BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = Figure()
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        height = _Artist(axes, gather_rank_styles(plan)).draw_page(root, note, width)
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        figure.set_size_inches(width / 72, height / 72)  # 72 dots an inch: a dot is a pixel
        metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
        figure.savefig(output, format=form, dpi=144, facecolor="white", metadata=metadata)
    return output.getvalue()


@dataclass(slots=True)
class _Artist:
    """Draws parts and devices at x and y, in pixels from the top left; returns their heights."""

    axes: Any
    styles: RankStyles
    labels: set[str] = field(default_factory=set)
    """What has been written on cores, for the legend."""

    def draw_page(self, root: Part, note: str, width: float) -> float:
        """Draw title, machine and legend."""
        ranks = count_things(len(self.styles.plan.ranks), "rank")
        known = ", ".join(filter(None, (*root.list_counts(), root.describe_size(), ranks, note)))
        self.write(2 * GAP, 18, clean_text(root.label) or "Machine", width, size=17)
        self.write(2 * GAP, 38, known, width)
        bottom = 48 + self.draw_inside(root, 2 * GAP, 48, width - 4 * GAP, 1)
        return bottom + self.draw_legend(2 * GAP, bottom + 2 * GAP, width - 4 * GAP) + 4 * GAP

    def draw_inside(self, part: Part, x: float, y: float, width: float, depth: int) -> float:
        """Draw what is inside a part: what has CPUs, what has none, and devices."""
        cores = [child for child in part.parts if child.kind == "Core"]
        framed = [child for child in part.parts if child.kind != "Core"]
        bottom = y + flow([self.draw_core(core, depth + 1) for core in cores], x, y, width, CORE)
        for kind in ([part for part in framed if part.pus], [part for part in framed if not part.pus]):
            boxes = [self.draw_part(child, depth + 1) for child in kind]
            least = max(map(find_least, kind), default=0.0)
            bottom += flow(boxes, x, bottom, width, least, stretched=True)
        cards = [self.draw_device(device, depth + 1) for device in part.devices]
        return bottom + flow(cards, x, bottom, width, CARD) - y

    def draw_part(self, part: Part, depth: int) -> Draw:
        """A box for a package, a node, a cache or a class of cores."""

        def draw(x: float, y: float, width: float) -> float:
            self.write(x + GAP, y + 14, self.describe_part(part), width - 2 * GAP)
            height = HEAD + self.draw_inside(part, x + GAP, y + HEAD, width - 2 * GAP, depth)
            self.paint(x, y, width, height, DrawStyle((FILLS[part.kind],)), "#888888", depth)
            return height

        return draw

    def describe_part(self, part: Part) -> str:
        """The heading of a part."""
        size = part.describe_size()
        if part.kind in ("Cache", "Class"):
            return ", ".join(filter(None, (part.label, size)))
        plural = "s" if len(part.numbers) > 1 else ""
        numbers = clean_text(shorten_cpulist(part.numbers), 40)
        users = {rank for number in part.numbers for rank in self.styles.find_memory(number)}
        memory = f"memory of {name_ranks('R', users)}" if users and part.kind == "NUMANode" else ""
        return ", ".join(filter(None, (f"{part.kind}{plural} {numbers}", size, part.label, memory)))

    def draw_core(self, core: Part, depth: int) -> Draw:
        """A core: who has it, and its PUs below each other."""

        def draw(x: float, y: float, width: float) -> float:
            label = self.styles.find_style(core.pus).label
            self.labels.add(label)
            self.write(x + width / 2, y + 11, label, width, size=SMALL, align="center")
            for at, pu in enumerate(core.pus):
                style, top = self.styles.find_style((pu,)), y + LINE + at * LINE
                self.paint(x + 1, top, width - 2, LINE - 1, style, "#999999", depth + 1, f"pu{pu}")
                ink = find_ink(*style.fills)
                self.write(x + width / 2, top + 11, str(pu), width, size=SMALL, align="center", ink=ink)
            height = LINE * (1 + len(core.pus))
            self.paint(x, y, width, height, DrawStyle(("#dcdcdc",)), "#777777", depth)
            return height

        return draw

    def draw_device(self, device: Device | Switch, depth: int) -> Draw:
        """A card for a GPU or a NIC with the ranks that use it, or a box for a switch around them."""

        def draw_switch(x: float, y: float, width: float) -> float:
            assert isinstance(device, Switch)  # noqa: S101 - for mypy
            self.write(x + GAP, y + 14, f"PCI switch {clean_text(device.pci)}", width - 2 * GAP)
            cards = [self.draw_device(member, depth + 1) for member in device.members]
            height = HEAD + flow(cards, x + GAP, y + HEAD, width - 2 * GAP, width - 2 * GAP)
            self.paint(x, y, width, height, DrawStyle(("#f3eee2",)), "#888888", depth)
            return height

        def draw_card(x: float, y: float, width: float) -> float:
            assert not isinstance(device, Switch)  # noqa: S101 - as above
            lines = [clean_text(line, 60) for line in describe_device(device) if line]
            ranks, height = self.styles.find_device(device), LINE * len(lines) + 4
            left = CORE + GAP if ranks else GAP
            for at, line in enumerate(lines):
                self.write(x + left, y + 12 + at * LINE, line, width - left, size=SMALL)
            self.paint(x, y, width, height, FREE, "#555555", depth)
            if ranks:
                style = DrawStyle(pick_colours(ranks), name_ranks("R", ranks))
                name = f"{'gpu' if isinstance(device, Gpu) else 'nic'}{lines[0]}"
                self.swatch(x, y, height, style, depth + 1, name)
            return height

        return draw_switch if isinstance(device, Switch) else draw_card

    def draw_legend(self, x: float, y: float, width: float) -> float:
        """The ranks, in as many columns as there is room for, and the marks that occur."""
        ranks = self.styles.plan.ranks
        rows = [
            (DrawStyle((find_colour(rank.local_rank),), f"R{rank.local_rank}"), describe_rank(rank))
            for rank in ranks[:MOST_RANKS]
        ]
        if len(ranks) > MOST_RANKS:
            rows.append((FREE, f"and {len(ranks) - MOST_RANKS} more ranks: launch plan lists them all"))
        rows += self.list_marks()
        columns = max(1, int(width // ROW))
        for at, (style, text) in enumerate(rows):
            column, row = divmod(at, ceil(len(rows) / columns))
            left, top = x + column * width / columns, y + row * (LINE + 4)
            self.swatch(left, top, LINE, style, 2)
            self.write(left + CORE + GAP, top + 11, text, width / columns - CORE - GAP, size=SMALL)
        return ceil(len(rows) / columns) * (LINE + 4)

    def list_marks(self) -> list[tuple[DrawStyle, str]]:
        """The marks that occur, with their meaning."""
        found = {self.styles.find_style((cpu.id,)) for cpu in self.styles.plan.machine.cpus}
        crowd = min((label for label in self.labels if "+" in label), default="")
        marks = [(DrawStyle(label=crowd), f"rank {crowd[1:].replace('+', ' and ')} more")] if crowd else []
        if any(style.label.startswith("w") for style in found):
            rank = min(rank for ranks in self.styles.workers.values() for rank in ranks)
            style = DrawStyle((lighten(find_colour(rank)),), f"w{rank}")
            marks.append((style, f"DataLoader workers of rank {rank} alone"))
        keys = (
            (FORBIDDEN, "not allowed: outside this job's cpuset"),
            (ISOLATED, "isolated at boot, left alone"),
            (FREE, "no rank's"),
        )
        return marks + [(style, text) for style, text in keys if style in found]

    def swatch(self, x: float, y: float, height: float, style: DrawStyle, depth: int, name: str = "") -> None:
        """A label in the colours of ranks."""
        self.paint(x, y, CORE, height, style, "#777777", depth, name)
        ink = find_ink(*style.fills)
        self.write(x + CORE / 2, y + height / 2 + 4, style.label, CORE, size=SMALL, align="center", ink=ink)

    def paint(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        style: DrawStyle,
        edge: str,
        depth: int,
        name: str = "",
    ) -> None:
        """A rectangle in its colours side by side; what is deeper is drawn over it."""
        from matplotlib.patches import Rectangle

        stripe, is_plain = width / len(style.fills), len(style.fills) == 1 and not style.hatched
        for at, fill in enumerate(style.fills):
            patch = Rectangle((x + at * stripe, y), stripe, height, linewidth=0.7, zorder=depth)
            patch.set(facecolor=fill, edgecolor=edge if is_plain else "none")
            self.axes.add_patch(patch).set_gid(f"{name}-{at}" if name else None)
        if is_plain:
            return
        hatch = "/////" if style.hatched else None
        frame = Rectangle((x, y), width, height, fill=False, hatch=hatch, linewidth=0.7, zorder=depth + 0.5)
        frame.set_edgecolor("#c4c4c4" if hatch else edge)
        self.axes.add_patch(frame)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        room: float,
        *,
        size: int = PLAIN,
        align: str = "left",
        ink: str = "#222222",
    ) -> None:
        """A line of text that ends with the room there is, y being its baseline."""
        most = max(1, int(room / (0.58 * size)))
        shown = text if len(text) <= most else f"{text[: most - 1]}…"
        self.axes.text(x, y, shown, fontsize=size, color=ink, ha=align, va="baseline", zorder=99)


def find_least(part: Part) -> float:
    """The least width of a part: one card, or four cores, or what is inside."""
    cores = sum(child.kind == "Core" for child in part.parts)
    inside = max((find_least(child) for child in part.parts if child.kind != "Core"), default=0.0)
    least = max(inside, min(4, cores) * (CORE + GAP), CARD if part.devices or not cores else CARD * 0.8)
    return least + 2 * GAP


def flow(
    things: Sequence[Draw], x: float, y: float, width: float, least: float, *, stretched: bool = False
) -> float:
    """Draw things of a width in rows, as many as fit beside each other; returns the height with a gap."""
    if not things:
        return 0
    columns = min(len(things), max(1, int((width + GAP) // (least + GAP))))
    rows = ceil(len(things) / columns)
    columns = ceil(len(things) / rows) if stretched else columns
    each = (width - GAP * (columns - 1)) / columns if stretched else min(least, width)
    bottom = y
    for at in range(0, len(things), columns):
        row = things[at : at + columns]
        bottom += GAP + max(draw(x + number * (each + GAP), bottom, each) for number, draw in enumerate(row))
    return bottom - y


def describe_device(device: Device) -> Iterator[str]:
    """The lines of a card."""
    if isinstance(device, Gpu):
        name, *more = describe_gpu(device) or ("",)
        yield from (f"GPU {device.index}, {device.pci}", name, ", ".join(more))
    else:
        yield from (f"NIC {device.name}", device.pci, " ".join(describe_nic(device)))


def describe_rank(rank: RankPlan) -> str:
    """What a rank has: GPU, CPUs, workers' CPUs, memory, NIC."""
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
