"""Lays out a machine as lstopo does, nested boxes, with the ranks of a plan on it and a legend."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from launcher.plan.model import Gpu, Plan, RankPlan
from launcher.report.machine_parts import Device, Part, Switch, build_parts, describe_gpu, describe_nic
from launcher.report.picture import Box, Measure, Text, arrange, center_text, frame, place_rows, stack_lines
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

SIZE = 13
"""Font size."""
MOST_RANKS = 256
"""Ranks that are listed."""
TALLEST = 24
"""Rows, if the machine is narrow."""
GAP = 16
SMALL, PLAIN, LARGE = 12, 14, 22
"""Font sizes: of PUs, of headings, of the title."""
MARGIN = 12
FILLS = {
    "package": "#ebebeb",
    "node": "#fafafa",
    "bare": "#fafafa",
    "cache": "#f0f0f0",
    "class": "#f7f7f7",
    "machine": "#ffffff",
}
KINDS = {"Package": "package", "NUMANode": "node", "Cache": "cache", "Class": "class"}


def lay_out_legend(shares: RankStyles, marks: Collection[str], measure: Measure, room: int) -> Box:
    """Lay out the legend, ranks in as many columns as fit the room; `marks` are the cores' labels."""
    plan = shares.plan
    listed = plan.ranks[:MOST_RANKS]
    keys = list_marks(shares, marks)
    labels = [f"R{rank.local_rank}" for rank in listed] + [share.label for share, _ in keys]
    writer = Writer(measure, max(26, *(measure(label, SIZE) + 6 for label in labels)))
    cells = writer.align_rows([list_rank_cells(rank) for rank in listed])
    colours = [DrawStyle((find_colour(rank.local_rank),), f"R{rank.local_rank}") for rank in listed]
    rows = [writer.draw_row(share, line) for share, line in zip(colours, cells, strict=True)]
    left = len(plan.ranks) - len(listed)
    more = [(FREE, f"and {left} more ranks: launch plan lists them all")] if left else []
    rest = [writer.draw_row(share, [(0, text)]) for share, text in (*more, *keys)]
    return place_rows([[fold_rows(rows, room)], *([row] for row in rest)], 6)


def fold_rows(rows: Sequence[Box], room: int) -> Box:
    """Put the rows of a table into columns, down and then across."""
    wide = max(row.width for row in rows) + 2 * GAP
    columns = max(1, min(room // wide, ceil(len(rows) / 8)), ceil(len(rows) / TALLEST))
    height = ceil(len(rows) / columns)
    return place_rows([[replace(row, width=wide) for row in rows[at::height]] for at in range(height)], 4)


def list_rank_cells(rank: RankPlan) -> list[str]:
    """The cells of a rank: GPU, CPUs, workers' CPUs, memory, NIC."""
    apart = rank.worker_cpus - rank.cpus
    nodes = shorten_cpulist(rank.memory.nodes)
    cells = (
        f"rank {rank.local_rank}",
        f"GPU {rank.gpu.index} {rank.gpu.pci}" if rank.gpu else "no GPU",
        f"PU{'s' if len(rank.cpus) > 1 else ''} {shorten_cpulist(rank.cpus)}",
        f"workers also {shorten_cpulist(apart)}" if apart else "",
        f"memory on node {nodes} ({rank.memory.policy})" if nodes else "memory anywhere",
        f"NIC {rank.nic}" if rank.nic else "",
    )
    return [clean_text(cell, 48) for cell in cells]


def list_marks(shares: RankStyles, marks: Collection[str]) -> list[tuple[DrawStyle, str]]:
    """The marks that occur, with their meaning."""
    found = {shares.find_style((cpu.id,)) for cpu in shares.plan.machine.cpus}
    helped = min((rank for ranks in shares.workers.values() for rank in ranks), default=0)
    workers = DrawStyle((lighten(find_colour(helped)),), f"w{helped}")
    crowd = DrawStyle(label=min((mark for mark in marks if "+" in mark), default=""))
    keys = (
        (crowd, f"rank {crowd.label[1:].replace('+', ' and ')} more"),
        (workers, f"DataLoader workers of rank {helped} alone"),
        (FORBIDDEN, "not allowed: outside this job's cpuset"),
        (ISOLATED, "isolated at boot, left alone"),
        (FREE, "no rank's"),
    )
    drawn = {workers} if any(share.label.startswith("w") for share in found) else set()
    drawn |= {crowd} if crowd.label else set()
    return [(share, text) for share, text in keys if share in found | drawn]


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes rows of a legend."""

    measure: Measure
    swatch: int
    """Width of the swatches."""

    def align_rows(self, rows: Sequence[Sequence[str]]) -> list[list[tuple[int, str]]]:
        """Give each cell the place of its column; columns that are empty take none."""
        widths = [max(self.measure(cell, SIZE) for cell in column) for column in zip(*rows, strict=True)]
        starts = [sum(width + GAP for width in widths[:at] if width) for at in range(len(widths))]
        return [[(x, cell) for x, cell in zip(starts, row, strict=True) if cell] for row in rows]

    def draw_row(self, share: DrawStyle, cells: Sequence[tuple[int, str]]) -> Box:
        """A swatch with its label, and the cells after it."""
        ink = find_ink(*share.fills)
        swatch = Box(
            "swatch",
            self.swatch,
            SIZE + 6,
            fills=share.fills,
            stroke="#777777",
            hatched=share.hatched,
            texts=center_text(self.measure, share.label, SIZE, self.swatch, baseline=SIZE + 1, colour=ink),
        )
        left = self.swatch + 8
        texts = tuple(Text(left + x, SIZE + 1, cell, SIZE, self.measure(cell, SIZE)) for x, cell in cells)
        width = max(text.x + text.width for text in texts)
        return Box("row", width, SIZE + 6, texts=texts, parts=(swatch,))


def lay_out(plan: Plan, classes: Mapping[int, int], note: str, measure: Measure) -> Box:
    """Lay out a plan's machine and its ranks, with a title and a legend.

    `classes` numbers the classes of cores by their capacity; `note` stands below the title.
    """
    root = build_parts(plan.machine, classes)
    shares = gather_rank_styles(plan)
    labels = list_labels(root, shares)
    cell = max(24, *(measure(label, SMALL) + 6 for label in (*labels, str(max(root.pus)))))
    artist = Artist(measure, shares, cell)
    machine = frame("machine", (), artist.draw_inside(root), fill=FILLS["machine"], stroke="#444444")
    ranks = count_things(len(plan.ranks), "rank")
    known = ", ".join(filter(None, (*root.list_counts(), root.describe_size(), ranks, note)))
    title = stack_lines(measure, [clean_text(root.label) or "Machine"], LARGE, 0, 0)
    below = stack_lines(measure, [known], PLAIN, 0, LARGE + 8)
    width = max(text.width for text in (*title, *below))
    head = Box("title", width, LARGE + PLAIN + 12, texts=(*title, *below))
    legend = lay_out_legend(shares, labels, measure, machine.width)
    page = place_rows([[head], [machine], [legend]], MARGIN)
    size = (page.width + 2 * MARGIN, page.height + 2 * MARGIN)
    return Box("picture", *size, fills=("#ffffff",), parts=(page.move(MARGIN, MARGIN),))


def list_labels(root: Part, shares: RankStyles) -> set[str]:
    """The labels of ranks on cores and devices."""
    machine = shares.plan.machine
    devices: list[Device] = [*machine.gpus, *machine.nics]
    cores = {shares.find_style(core.pus).label for core in list_cores(root)}
    return cores | {name_ranks("R", ranks) for ranks in map(shares.find_device, devices) if ranks}


def list_cores(part: Part) -> Iterator[Part]:
    """Give all cores below a part."""
    for child in part.parts:
        if child.kind == "Core":
            yield child
        else:
            yield from list_cores(child)


@dataclass(frozen=True, slots=True)
class Artist:
    """Draws parts and devices, each from what is inside it."""

    measure: Measure
    shares: RankStyles
    cell: int
    """Width of a PU, with room for every number and label."""

    def draw_inside(self, part: Part) -> list[Box]:
        """The groups of boxes inside a part: what has CPUs, what has none, and devices."""
        drawn = [self.draw_part(child) for child in part.parts if child.pus]
        bare = [self.draw_part(child) for child in part.parts if not child.pus]
        devices = [self.draw_device(device) for device in part.devices]
        return [arrange(boxes) for boxes in (drawn, bare, devices) if boxes]

    def draw_part(self, part: Part) -> Box:
        """A box for a package, a node, a cache, a class of cores or a core."""
        if part.kind == "Core":
            return self.draw_core(part)
        kind = KINDS[part.kind] if part.pus else "bare"
        lines = stack_lines(self.measure, self.list_headings(part), PLAIN, 5, 2)
        return frame(kind, lines, self.draw_inside(part), fill=FILLS[kind])

    def list_headings(self, part: Part) -> list[str]:
        """The heading of a part."""
        size = part.describe_size()
        if part.kind in ("Cache", "Class"):
            return [", ".join(filter(None, (part.label, size)))]
        plural = "s" if len(part.numbers) > 1 else ""
        numbers = clean_text(shorten_cpulist(part.numbers), 40)
        users = {rank for number in part.numbers for rank in self.shares.find_memory(number)}
        memory = f"memory of {name_ranks('R', users)}" if users and part.kind == "NUMANode" else ""
        words = (f"{part.kind}{plural} {numbers}", size, part.label, memory)
        return [", ".join(filter(None, words))]

    def draw_core(self, core: Part) -> Box:
        """A core: who has it, and its PUs below each other, in two columns from four on."""
        label = self.shares.find_style(core.pus).label
        pus = [self.draw_pu(pu) for pu in core.pus]
        columns = 1 if len(pus) < 4 else 2
        inside = place_rows([pus[at : at + columns] for at in range(0, len(pus), columns)], 1)
        width = inside.width + 4
        text = self.center(label, width, SMALL + 1, find_ink())
        height = inside.height + SMALL + 6
        return Box(
            "core",
            width,
            height,
            fills=("#dcdcdc",),
            stroke="#777777",
            texts=text,
            parts=(inside.move(2, SMALL + 4),),
        )

    def draw_pu(self, pu: int) -> Box:
        """A PU in the colours of those that have it."""
        share = self.shares.find_style((pu,))
        box = self.paint("pu", self.cell, SMALL + 5, replace(share, label=str(pu)))
        return replace(box, stroke="#999999", hatched=share.hatched)

    def paint(self, kind: str, width: int, height: int, share: DrawStyle) -> Box:
        """A labelled box in the colour of a rank; the colours of several make a strip below the label."""
        if len(share.fills) == 1:
            texts = self.center(share.label, width, (height + SMALL) // 2 - 1, find_ink(*share.fills))
            return Box(kind, width, height, fills=share.fills, texts=texts)
        texts = self.center(share.label, width, (height + SMALL) // 2 - 3, find_ink())
        strip = Box("strip", width - 2, 4, 1, height - 5, fills=share.fills)
        return Box(kind, width, height, fills=("#ffffff",), texts=texts, parts=(strip,))

    def center(self, text: str, width: int, baseline: int, colour: str) -> tuple[Text, ...]:
        """A small text in the middle of a width; none if it is empty."""
        return center_text(self.measure, text, SMALL, width, baseline=baseline, colour=colour)

    def draw_device(self, device: Device | Switch) -> Box:
        """A box for a GPU or a NIC with the ranks that use it, or for a switch around them."""
        if isinstance(device, Switch):
            title = stack_lines(self.measure, [f"PCI switch {clean_text(device.pci)}"], PLAIN, 5, 2)
            members = arrange([self.draw_device(member) for member in device.members])
            return frame("switch", title, [members], fill="#f3eee2")
        if isinstance(device, Gpu):
            name, *more = describe_gpu(device) or ("",)
            kind, lines = "gpu", [f"GPU {device.index}, {clean_text(device.pci)}", name, ", ".join(more)]
        else:
            kind, lines = "nic", [f"NIC {device.name}", device.pci, " ".join(describe_nic(device))]
        ranks = self.shares.find_device(device)
        share = DrawStyle(pick_colours(ranks), name_ranks("R", ranks)) if ranks else FREE
        return self.draw_card(kind, [clean_text(line, 40) for line in lines if line], share)

    def draw_card(self, kind: str, lines: Sequence[str], share: DrawStyle) -> Box:
        """A device: lines of text, and on the left a band with its ranks."""
        texts = stack_lines(self.measure, lines, SMALL, self.cell + 9 if share.label else 5, 2)
        width = max(text.x + text.width for text in texts) + 5
        height = texts[-1].y + 6
        band = self.paint("band", self.cell, height - 4, share).move(2, 2)
        parts = (band,) if share.label else ()
        return Box(kind, width, height, fills=("#ffffff",), stroke="#555555", texts=texts, parts=parts)
