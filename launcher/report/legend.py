"""The legend of a picture: what each rank has, and what the marks mean."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

from launcher.plan.model import RankPlan
from launcher.report.palette import find_colour, find_ink, lighten
from launcher.report.picture import Box, Measure, Text, center_text, place_rows
from launcher.report.rank_colours import FORBIDDEN, FREE, ISOLATED, DrawStyle, RankStyles
from launcher.text import clean_text, shorten_cpulist

SIZE = 13
"""Font size."""
MOST_RANKS = 256
"""Ranks that are listed."""
TALLEST = 24
"""Rows, where the machine is narrow."""
GAP = 16


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
