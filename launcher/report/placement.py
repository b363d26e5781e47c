"""The placement for people: a row for each rank with its cores as a bar, and who set its variables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import gcd

from rich.console import Console
from rich.text import Text

from launcher.plan.model import Machine, Plan, RankPlan, Variable
from launcher.report.tables import fit_columns, make_table, measure_columns, print_line
from launcher.text import clean_text, count_things, escape_text, shorten_cpulist

_SOURCES = {"plan": "the plan", "configuration": "the configuration", "user": "you"}
_BAR = "cores"
_EASY_DROPS = ("workers also on", "cpus")
"""Columns that are left out for a bar that shows every rank's part."""
_DROPS = ("pci", "nic", "node", "memory", "threads", "workers")
"""Columns that are left out if the bar would be tiny, in this order."""
_TINY, _USELESS = 20, 8
"""Columns of a bar below which others give way to it, and below which it goes itself."""
_MOST_CELLS = 56
"""Cells that a bar has at most; on larger machines a cell stands for several cores."""
_LEAST_MOST = 40
"""Columns for which a bar may push other columns out."""
_OWN, _WORKERS, _OTHER, _BARRED = range(4)
_STYLES = ("green", "yellow", "dim", "dim red")
_MEANINGS = ("own cores", "its workers' alone", "not this rank's", "not for this job")
_BLOCKS, _LETTERS = "█▒·x", "#+.x"
"""Marks of the kinds of cells, for consoles with block characters and without."""
_LONGEST = 500
"""Characters of a value that are shown."""


def print_placement(console: Console, plan: Plan, *, explain: bool = False, full: bool = False) -> None:
    """Print a row for each rank, what `explain` asks to know of each, and the warnings.

    `full` adds a line about the machine and a legend.
    """
    if full:
        print_line(console, _describe_machine(plan.machine))
    _print_ranks(console, plan, full=full)
    for rank in plan.ranks if explain else ():
        for note in rank.notes:
            print_line(console, f"rank {rank.local_rank}: {note}", "dim")
    names = {(variable.source, variable.name) for rank in plan.ranks for variable in rank.variables}
    if explain:
        _print_variables(console, plan.ranks)
    elif full and names:
        counts = Counter(source for source, _ in names)
        parts = [f"{counts[source]} by {who}" for source, who in _SOURCES.items() if counts[source]]
        total = count_things(len(names), "variable")
        print_line(console, f"{total} set: {', '.join(parts)} (explain=true lists them)", "dim")
    for warning in plan.warnings:
        print_line(console, f"warning: {warning}", "yellow")


def _print_variables(console: Console, ranks: Sequence[RankPlan]) -> None:
    """Print a row for each variable; one that ranks have with several values has a row for each of these."""
    groups: dict[Variable, list[int]] = {}
    for rank in ranks:
        for variable in rank.variables:
            groups.setdefault(variable, []).append(rank.local_rank)
    if not groups:
        return
    alike = all(len(owners) == len(ranks) for owners in groups.values())
    titles = ("variable", "value", *(() if alike else ("ranks",)), "set by", "why")
    wrapped = ("value", "why", *(("variable",) if console.width <= 60 else ()))
    table = make_table(titles, wrapped=wrapped)
    for variable, owners in sorted(groups.items(), key=lambda item: (item[0].name, item[1])):
        who = "all" if len(owners) == len(ranks) else shorten_cpulist(owners)
        name, value, why = (
            Text(escape_text(text, _LONGEST)) for text in (variable.name, variable.value, variable.why)
        )
        source = _SOURCES.get(variable.source, variable.source)
        table.add_row(name, value, *([] if alike else [who]), source, why)
    console.print(table)


def _print_ranks(console: Console, plan: Plan, *, full: bool) -> None:
    """Print the rows, and the legend if it is asked for."""
    blocks = console.encoding.startswith("utf")
    rows = [_make_row(rank, plan.machine) for rank in plan.ranks]
    same = all(row["memory"] == f"node {row['node']}" for row in rows)
    wide = make_ruler(plan, 2 * _MOST_CELLS, blocks=blocks)
    tiny = min(wide.width, _TINY)
    sizes = measure_columns(rows)
    if _BAR in sizes:
        sizes[_BAR] = wide.width
    easy = (*_EASY_DROPS, "memory") if same else _EASY_DROPS
    widths = fit_columns(sizes, easy, console.width, {_BAR: max(tiny, wide.find_min_width(plan.ranks))})
    if _BAR in sizes:
        widths[_BAR] = wide.width
    widths = fit_columns(widths, _DROPS, console.width, {_BAR: tiny})
    room = widths.get(_BAR, 0)
    if room < min(wide.width, _USELESS):
        widths.pop(_BAR, None)
    ruler = make_ruler(plan, max(1, room), blocks=blocks)
    titles = [ruler.title if title == _BAR else title for title in widths]
    table = make_table(titles, right=("rank", "workers", "threads"))
    bars = [ruler.draw_cores(rank) for rank in plan.ranks]
    for row, bar in zip(rows, bars, strict=True):
        table.add_row(*(bar if title == _BAR else row[title] or "-" for title in widths))
    console.print(table)
    if full and _BAR in widths:
        marks = {mark for bar in bars for mark in bar.plain}
        parts = [f"{mark} {text}" for mark, text in zip(ruler.marks, _MEANINGS, strict=True) if mark in marks]
        if ruler.scale > 1:
            even = all(len(cell) == ruler.scale for segment in ruler.segments for cell in segment.cells)
            parts.append(f"1 cell = {'' if even else 'up to '}{ruler.scale} cores")
        parts.append("above: NUMA nodes")
        parts += ["memory on the rank's node"] if "memory" not in widths and same else []
        console.print("  ".join(parts), style="dim", markup=False, highlight=False)


def _make_row(rank: RankPlan, machine: Machine) -> dict[str, str]:
    """Return the cells of one rank by their titles; a column that is empty for all ranks is left out."""
    gpu = rank.gpu
    nodes = {cpu.node for cpu in machine.cpus if cpu.id in rank.cpus}
    return {
        "rank": str(rank.local_rank),
        "gpu": str(gpu.index) if gpu else "",
        "pci": gpu.pci if gpu else "",
        "mig": gpu.uuid[:12] if gpu and gpu.uuid.startswith("MIG-") else "",
        "node": shorten_cpulist(nodes),
        _BAR: "bar" if nodes else "",
        "cpus": shorten_cpulist(rank.cpus),
        "workers also on": shorten_cpulist(rank.worker_cpus - rank.cpus),
        "memory": f"node {shorten_cpulist(rank.memory.nodes)}" if rank.memory.nodes else "any",
        "workers": str(rank.num_workers),
        "threads": str(rank.omp_num_threads),
        "nic": clean_text(rank.nic or "", 24),
    }


def _describe_machine(machine: Machine) -> str:
    """Return the machine in a line, and what of it the job may use."""
    online, with_cpus = {cpu.id for cpu in machine.cpus}, {cpu.node for cpu in machine.cpus}
    nodes = {node.id for node in machine.nodes} | with_cpus
    bare = "" if nodes == with_cpus else f" ({len(with_cpus)} with CPUs)"
    models = Counter(clean_text(gpu.name) or "GPU" for gpu in machine.gpus)
    active = sum(nic.active for nic in machine.nics)
    down = "" if active == len(machine.nics) else f" ({active} active)"
    has = (
        count_things(len({cpu.package for cpu in machine.cpus}), "package"),
        count_things(len(nodes), "NUMA node") + bare,
        count_things(len({cpu.core for cpu in machine.cpus}), "core"),
        count_things(len(machine.cpus), "thread"),
        *(f"{number} x {model}" for model, number in models.items()),
        *([count_things(len(machine.nics), "NIC") + down] if machine.nics else []),
    )
    allowed = machine.allowed_cpus & online
    limits = ["this job may use all CPUs"]
    if allowed != online:
        limits = [f"this job may use {len(allowed)} CPUs ({shorten_cpulist(allowed)})"]
    if apart := machine.isolated & allowed:
        limits.append(f"{shorten_cpulist(apart)} isolated")
    if machine.limits.cpus is not None and machine.limits.cpus < len(allowed):
        limits.append(f"for the time of {machine.limits.cpus:g}")
    with_memory = {node.id for node in machine.nodes if node.normal}
    if not with_memory <= machine.allowed_mems:
        limits.append(f"memory of nodes {shorten_cpulist(machine.allowed_mems & with_memory) or 'none'}")
    return f"{clean_text(machine.name) or 'machine'}: {', '.join(has)}; {', '.join(limits)}"


# A machine's cores as a bar of cells

_Cell = tuple[frozenset[int], ...]
"""The PUs of each core that it stands for."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """The cells of a NUMA node, or of its part in a package."""

    node: int
    cells: tuple[_Cell, ...]
    border: str
    """What stands before it: a package's border, a NUMA node's, or nothing."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """How a machine's cores are drawn in a given width."""

    segments: tuple[_Segment, ...]
    scale: int
    """Cores that a cell stands for at most."""
    usable: frozenset[int]
    """CPUs that the job may use and that nothing sets apart."""
    marks: str

    @property
    def width(self) -> int:
        """Columns that a bar takes."""
        return len(self.title)

    @property
    def title(self) -> str:
        """The NUMA nodes' numbers above their cells, if they fit."""
        words = "node " if all(len(segment.cells) > 6 for segment in self.segments) else ""
        parts = []
        for segment in self.segments:
            text, room = f"{words}{segment.node}", len(segment.cells)
            parts.append(segment.border + (text if len(text) <= room else "").ljust(room))
        return "".join(parts)

    def find_min_width(self, ranks: Sequence[RankPlan]) -> int:
        """Return the columns of a bar with cells no larger than the smallest rank's part, within reason."""
        sizes = [sum(map(len, segment.cells)) for segment in self.segments]
        cores = [pus for segment in self.segments for cell in segment.cells for pus in cell]
        part = max(1, min(sum(not pus.isdisjoint(rank.cpus) for pus in cores) for rank in ranks))
        borders = sum(len(segment.border) for segment in self.segments)
        return min(_LEAST_MOST, borders + sum(-(-size // part) for size in sizes))

    def draw_cores(self, rank: RankPlan) -> Text:
        """Return a rank's bar; each cell is what most of its cores are, of halves the first.

        A rank that has the most of no cell is marked where it has most of its cores.
        """

        def classify(pus: frozenset[int]) -> int:
            if pus & rank.cpus:
                return _OWN
            if pus & rank.worker_cpus:
                return _WORKERS
            return _OTHER if pus & self.usable else _BARRED

        cells = [(segment, cell) for segment in self.segments for cell in segment.cells]
        kinds = []
        for _, cell in cells:
            found = [classify(pus) for pus in cell]
            kinds.append(max(found, key=found.count))
        if kinds and _OWN not in kinds:
            counts = [sum(bool(pus & rank.cpus) for pus in cell) for _, cell in cells]
            kinds[counts.index(max(counts))] = _OWN
        bar, at = Text(no_wrap=True), 0
        for segment in self.segments:
            bar.append(segment.border, "dim")
            for kind, run in groupby(kinds[at : at + len(segment.cells)]):
                bar.append(self.marks[kind] * len(list(run)), _STYLES[kind])
            at += len(segment.cells)
        return bar


def make_ruler(plan: Plan, room: int, *, blocks: bool) -> Ruler:
    """Fit a machine's cores into `room` columns; NUMA nodes' borders go first if that is too few."""
    machine = plan.machine
    groups: dict[tuple[int, int], dict[int, set[int]]] = {}
    for cpu in sorted(machine.cpus, key=lambda cpu: (cpu.package, cpu.node, cpu.id)):
        groups.setdefault((cpu.package, cpu.node), {}).setdefault(cpu.core, set()).add(cpu.id)
    node_border, package_border = ("│", "┃") if blocks else (":", "|")
    borders = [node_border if old[0] == new[0] else package_border for old, new in pairwise(groups)]
    borders = ["", *borders] if 2 * len(groups) - 1 <= room else [""] * len(groups)
    cells = min(_MOST_CELLS, room - len("".join(borders)))
    sizes = [len(cores) for cores in groups.values()]
    core_of = {cpu.id: cpu.core for cpu in machine.cpus}
    shares = {len({core_of[pu] for pu in rank.cpus if pu in core_of}) for rank in plan.ranks}
    scale = _choose_scale(sizes, cells, gcd(*sizes, *shares))
    segments = []
    for (place, found), border in zip(groups.items(), borders, strict=False):
        cores = [frozenset(pus) for pus in found.values()]
        count = -(-len(cores) // scale)  # of cells of about equal size
        ends = [at * len(cores) // count for at in range(count + 1)]
        segments.append(_Segment(place[1], tuple(tuple(cores[a:b]) for a, b in pairwise(ends)), border))
    allowed = machine.allowed_cpus.intersection(core_of)
    usable = allowed - machine.isolated or allowed
    return Ruler(tuple(segments), scale, usable, _BLOCKS if blocks else _LETTERS)


def _choose_scale(sizes: Sequence[int], cells: int, unit: int) -> int:
    """Return the cores for each cell, so that nodes of these sizes fit, each with a cell at least.

    As few as can be, or somewhat more if that divides the nodes and the ranks' shares (`unit`) evenly.
    """
    largest = max(sizes, default=1)
    fits = (scale for scale in range(1, largest) if sum(-(-size // scale) for size in sizes) <= cells)
    smallest = next(fits, largest)
    even = (scale for scale in range(smallest, 2 * smallest + 2) if unit % scale == 0)
    return next(even, smallest)
