"""A machine's cores as a bar of cells, one bar for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import gcd

from rich.text import Text

from launcher.plan.model import Plan, RankPlan

MOST_CELLS = 56
"""Cells that a bar has at most; on larger machines a cell stands for several cores."""
LEAST_MOST = 40
"""Columns for which a bar may push other columns out."""
OWN, WORKERS, OTHER, BARRED = range(4)
STYLES = ("green", "yellow", "dim", "dim red")
BLOCKS, LETTERS = "█▒·x", "#+.x"
"""Marks of the kinds of cells, for consoles with block characters and without."""
Cell = tuple[frozenset[int], ...]
"""The PUs of each core that it stands for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The cells of a NUMA node, or of its part in a package."""

    package: int
    node: int
    cells: tuple[Cell, ...]
    border: str = ""
    """What stands before it: a package's border, a NUMA node's, or nothing."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """How a machine's cores are drawn in a given width."""

    segments: tuple[Segment, ...]
    scale: int
    """Cores that a cell stands for at most."""
    usable: frozenset[int]
    """CPUs that the job may use and that nothing sets apart."""
    marks: str

    @property
    def width(self) -> int:
        """Columns that a bar takes."""
        return sum(len(segment.border) + len(segment.cells) for segment in self.segments)

    @property
    def is_even(self) -> bool:
        """Whether all cells stand for as many cores."""
        return all(len(cell) == self.scale for segment in self.segments for cell in segment.cells)

    def find_min_width(self, ranks: Sequence[RankPlan]) -> int:
        """Columns of a bar whose cells are no larger than the smallest rank's part, within reason."""
        sizes = [sum(map(len, segment.cells)) for segment in self.segments]
        cores = [pus for segment in self.segments for cell in segment.cells for pus in cell]
        part = max(1, min(sum(not pus.isdisjoint(rank.cpus) for pus in cores) for rank in ranks))
        borders = sum(len(segment.border) for segment in self.segments)
        return min(LEAST_MOST, borders + sum(-(-size // part) for size in sizes))

    def title(self) -> str:
        """The NUMA nodes' numbers above their cells, if they fit."""
        words = "node " if all(len(segment.cells) > 6 for segment in self.segments) else ""
        parts = []
        for segment in self.segments:
            text, room = f"{words}{segment.node}", len(segment.cells)
            parts.append(segment.border + (text if len(text) <= room else "").ljust(room))
        return "".join(parts)

    def draw_cores(self, rank: RankPlan) -> Text:
        """A rank's bar."""
        kinds = [[self.classify_cell(cell, rank) for cell in segment.cells] for segment in self.segments]
        if kinds and all(kind != OWN for row in kinds for kind in row):
            self.mark_largest_cell(kinds, rank)
        bar = Text(no_wrap=True)
        for segment, row in zip(self.segments, kinds, strict=True):
            bar.append(segment.border, "dim")
            for kind, run in groupby(row):
                bar.append(self.marks[kind] * len(list(run)), STYLES[kind])
        return bar

    def classify_cell(self, cell: Cell, rank: RankPlan) -> int:
        """What most of a cell's cores are to a rank; of halves the first, so that no two ranks have one."""
        kinds = [self.classify_core(pus, rank) for pus in cell]
        return max(kinds, key=kinds.count)

    def classify_core(self, pus: frozenset[int], rank: RankPlan) -> int:
        """What a core is to a rank."""
        if pus & rank.cpus:
            return OWN
        if pus & rank.worker_cpus:
            return WORKERS
        return OTHER if pus & self.usable else BARRED

    def mark_largest_cell(self, kinds: list[list[int]], rank: RankPlan) -> None:
        """Mark the cell where a rank has most of its cores, when it has the most of none."""
        places = [(at, i) for at, segment in enumerate(self.segments) for i in range(len(segment.cells))]
        counts = [sum(bool(pus & rank.cpus) for pus in self.segments[at].cells[i]) for at, i in places]
        at, i = places[counts.index(max(counts))]
        kinds[at][i] = OWN


def make_ruler(plan: Plan, room: int, *, blocks: bool) -> Ruler:
    """Fit a machine's cores into `room` columns; NUMA nodes' borders go first if that is too few."""
    machine = plan.machine
    groups: dict[tuple[int, int], dict[int, set[int]]] = {}
    for cpu in sorted(machine.cpus, key=lambda cpu: (cpu.package, cpu.node, cpu.id)):
        groups.setdefault((cpu.package, cpu.node), {}).setdefault(cpu.core, set()).add(cpu.id)
    places = list(groups)
    borders = ["", *(find_border(before, after, blocks) for before, after in pairwise(places))]
    if 2 * len(places) > room:
        borders = [""] * len(places)
    cells = min(MOST_CELLS, room - len("".join(borders)))
    sizes = [len(cores) for cores in groups.values()]
    core_of = {cpu.id: cpu.core for cpu in machine.cpus}
    shares = {len({core_of[pu] for pu in rank.cpus if pu in core_of}) for rank in plan.ranks}
    scale = choose_scale(sizes, cells, gcd(*sizes, *shares))
    segments = tuple(
        Segment(*place, cut_cells([frozenset(pus) for pus in groups[place].values()], scale), border)
        for place, border in zip(places, borders, strict=False)
    )
    allowed = machine.allowed_cpus.intersection(cpu.id for cpu in machine.cpus)
    usable = allowed - machine.isolated or allowed
    return Ruler(segments, scale, usable, BLOCKS if blocks else LETTERS)


def find_border(before: tuple[int, int], after: tuple[int, int], blocks: bool) -> str:
    """The border between two segments: of packages, or of the NUMA nodes of one."""
    if before[0] == after[0]:
        return "│" if blocks else ":"
    return "┃" if blocks else "|"


def choose_scale(sizes: Sequence[int], cells: int, unit: int) -> int:
    """Cores for each cell, so that nodes of these sizes fit, each with a cell at least.

    As few as can be, or somewhat more if that divides the nodes and the ranks' shares (`unit`) evenly.
    """
    largest = max(sizes, default=1)
    fits = (scale for scale in range(1, largest) if sum(-(-size // scale) for size in sizes) <= cells)
    smallest = next(fits, largest)
    even = (scale for scale in range(smallest, 2 * smallest + 2) if unit % scale == 0)
    return next(even, smallest)


def cut_cells(cores: Sequence[frozenset[int]], scale: int) -> tuple[Cell, ...]:
    """Divide a node's cores into cells of about equal size."""
    count = -(-len(cores) // scale)
    ends = [at * len(cores) // count for at in range(count + 1)]
    return tuple(tuple(cores[start:end]) for start, end in pairwise(ends))
