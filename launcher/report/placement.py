"""The placement for people: a row for each rank with its cores as a bar, and who set its variables."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice
from math import gcd

from rich.console import Console
from rich.text import Text

from launcher.plan.model import Machine, Plan, RankPlan, Variable
from launcher.report.machine import describe_allowed, describe_machine
from launcher.report.tables import fit_columns, make_table, measure_columns, print_line
from launcher.text import clean_text, count_things, escape_text, shorten_cpulist

_SOURCES = {"plan": "the plan", "configuration": "the configuration", "user": "you"}
_BAR = "cores"
_DROPS = ("workers also on", "cpus", "pci", "nic", "node", "memory", "threads", "workers", _BAR)
"""Columns in the order in which they are left out for a bar of _LEAST columns, and it as the last."""
_MOST_CELLS, _LEAST = 56, 20
"""Cells that a bar has at most, a cell standing for several cores on larger machines, and at least."""
_OWN, _BARRED = 0, 3

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
        machine = plan.machine
        gpus = Counter(clean_text(gpu.name) or "GPU" for gpu in machine.gpus)
        parts = [*describe_machine(machine), *(f"{number} x {name}" for name, number in gpus.items())]
        print_line(console, f"{', '.join(parts)}; this job {describe_allowed(machine)}")
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
    marks = _BLOCKS if console.encoding.startswith("utf") else _LETTERS
    rows = [list_cells(one, plan.machine) for one in plan.ranks]
    same = all(row["memory"] == f"node {row['node']}" for row in rows)
    sizes: dict[str, int] = {}
    for title, size in measure_columns(rows).items():
        sizes[title] = size
        if title == "node":
            sizes[_BAR] = len(_Ruler(plan, 2 * _MOST_CELLS).title)
    drops = ("memory", *_DROPS) if same else _DROPS
    widths = fit_columns(sizes, drops, console.width, {_BAR: min(sizes.get(_BAR, 0), _LEAST)})
    ruler = _Ruler(plan, widths.get(_BAR, 1))
    titles = [ruler.title if title == _BAR else title for title in widths]
    table = make_table(titles, right=("rank", "workers", "threads"))
    bars = [ruler.draw_cores(rank, marks) for rank in plan.ranks]
    for row, bar in zip(rows, bars, strict=True):
        table.add_row(*(bar if title == _BAR else row[title] or "-" for title in widths))
    console.print(table)
    if full and _BAR in widths:
        used = {mark for bar in bars for mark in bar.plain}
        parts = [f"{mark} {text}" for mark, text in zip(marks, _MEANINGS, strict=True) if mark in used]
        parts += [f"1 cell = up to {ruler.scale} cores"] if ruler.scale > 1 else []
        parts.append("above: NUMA nodes")
        parts += ["memory on the rank's node"] if "memory" not in widths and same else []
        console.print("  ".join(parts), style="dim", markup=False, highlight=False)


def list_cells(rank: RankPlan, machine: Machine) -> dict[str, str]:
    """Return what a rank has, by the titles of columns; empty for nothing."""
    gpu = rank.gpu
    nodes = {cpu.node for cpu in machine.cpus if cpu.id in rank.cpus}
    return {
        "rank": str(rank.local_rank),
        "gpu": str(gpu.index) if gpu else "",
        "pci": gpu.pci if gpu else "",
        "mig": gpu.uuid[:12] if gpu and gpu.uuid.startswith("MIG-") else "",
        "node": shorten_cpulist(nodes),
        "cpus": shorten_cpulist(rank.cpus),
        "workers also on": shorten_cpulist(rank.worker_cpus - rank.cpus),
        "memory": f"node {shorten_cpulist(rank.memory.nodes)}" if rank.memory.nodes else "any",
        "workers": str(rank.num_workers),
        "threads": str(rank.omp_num_threads),
        "nic": clean_text(rank.nic or "", 24),
    }


class _Ruler:
    """Draws a machine's cores as a bar of cells, the NUMA nodes apart by a space, in a given width."""

    def __init__(self, plan: Plan, room: int) -> None:
        machine = plan.machine
        groups: dict[tuple[int, int], dict[int, set[int]]] = {}
        for cpu in sorted(machine.cpus, key=lambda cpu: (cpu.package, cpu.node, cpu.id)):
            groups.setdefault((cpu.package, cpu.node), {}).setdefault(cpu.core, set()).add(cpu.id)
        self.gap = " " if 2 * len(groups) <= room else ""
        cells = min(_MOST_CELLS, room - len(self.gap) * (len(groups) - 1))
        sizes = [len(cores) for cores in groups.values()]
        scales = range(1, max(sizes, default=1) + 1)
        fitting = [scale for scale in scales if sum(-(-size // scale) for size in sizes) <= cells]
        least = min(fitting, default=scales[-1])
        # Somewhat more if that divides the nodes and the ranks' shares evenly.
        core_of = {cpu.id: cpu.core for cpu in machine.cpus}
        shares = {len({core_of[pu] for pu in rank.cpus if pu in core_of}) for rank in plan.ranks}
        even = (one for one in range(least, 2 * least + 2) if gcd(*sizes, *shares) % one == 0)
        self.scale = next(even, least)
        """Cores that a cell stands for at most."""
        self.nodes: list[tuple[int, list[list[set[int]]]]] = []
        """Each NUMA node, or its part in a package, with its cells: the PUs of each of their cores."""
        for (_, node), found in groups.items():
            cores = list(found.values())
            parts = [cores[at : at + self.scale] for at in range(0, len(cores), self.scale)]
            self.nodes.append((node, parts))
        texts = [(f"node {node}", len(parts)) for node, parts in self.nodes]
        texts = texts if all(room > 6 for _, room in texts) else [(text[5:], room) for text, room in texts]
        self.title = self.gap.join((text if len(text) <= room else "").ljust(room) for text, room in texts)
        """The NUMA nodes' numbers above their cells, if they fit; as wide as a bar."""
        self.usable = machine.allowed_cpus - machine.isolated or machine.allowed_cpus

    def draw_cores(self, rank: RankPlan, marks: str) -> Text:
        """Return a rank's bar; each cell is what most of its cores are, of halves the first.

        A rank that has the most of no cell is marked where it has most of its cores.
        """
        sets = (rank.cpus, rank.worker_cpus, self.usable)
        kinds, owned = [], []
        for cell in (cell for _, cells in self.nodes for cell in cells):
            found = [next((at for at, having in enumerate(sets) if core & having), _BARRED) for core in cell]
            kinds.append(max(found, key=found.count))
            owned.append(found.count(_OWN))
        if kinds and _OWN not in kinds:
            kinds[owned.index(max(owned))] = _OWN
        bar, rest = Text(no_wrap=True), iter(kinds)
        for number, (_, cells) in enumerate(self.nodes):
            bar.append(self.gap if number else "")
            for kind, run in groupby(islice(rest, len(cells))):
                bar.append(marks[kind] * len(list(run)), _STYLES[kind])
        return bar
