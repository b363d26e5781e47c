"""The placement as a table for people, and the ranks' variables with who set each."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from launcher.plan.model import Machine, Memory, Plan, RankPlan, Variable
from launcher.report.core_bars import BARRED, MOST_CELLS, OTHER, OWN, WORKERS, Ruler, make_ruler
from launcher.text import clean_text, count_things, escape_text, shorten_cpulist

SOURCES = {"plan": "the plan", "configuration": "the configuration", "user": "you"}
LONGEST = 500
"""Characters of a value that are shown."""
NUMBERS = ("rank", "workers", "threads")
BAR = "cores"
GAP = 2
LEAST_BAR = 20
"""Columns that a bar should have before other columns give way to it."""
USELESS_BAR = 8
EASY_DROPS = ("workers also on", "cpus")
DROPS = ("pci", "nic", "node", "memory", "threads", "workers")
"""Columns in the order in which they are left out if the console is narrow."""
MEANINGS = {
    OWN: "own cores",
    WORKERS: "its workers' alone",
    OTHER: "not this rank's",
    BARRED: "not for this job",
}


def print_variables(console: Console, ranks: Sequence[RankPlan]) -> None:
    """Print a row for each variable; one that ranks have with several values has a row for each of these."""
    groups = group_variables(ranks)
    alike = all(len(owners) == len(ranks) for owners in groups.values())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("variable", no_wrap=console.width > 60)
    table.add_column("value", overflow="fold")
    if not alike:
        table.add_column("ranks")
    table.add_column("set by", no_wrap=True)
    table.add_column("why")
    for variable, owners in groups.items():
        who = "all" if len(owners) == len(ranks) else shorten_cpulist(owners)
        source = SOURCES.get(variable.source, variable.source)
        texts = [escape_text(text, LONGEST) for text in (variable.name, variable.value, variable.why)]
        table.add_row(*texts[:2], *([] if alike else [who]), source, texts[2])
    if groups:
        console.print(table, markup=False)


def group_variables(ranks: Sequence[RankPlan]) -> Mapping[Variable, list[int]]:
    """The local ranks that have each variable with a value, in the order of the names."""
    groups: dict[Variable, list[int]] = {}
    for rank in ranks:
        for variable in rank.variables:
            groups.setdefault(variable, []).append(rank.local_rank)
    return {
        variable: groups[variable] for variable in sorted(groups, key=lambda one: (one.name, groups[one]))
    }


def count_variables(ranks: Sequence[RankPlan]) -> str:
    """How many variables there are by who set them, and how to see them; empty if there are none."""
    names = {(variable.source, variable.name) for rank in ranks for variable in rank.variables}
    counts = Counter(source for source, _ in names)
    parts = [f"{counts[source]} by {who}" for source, who in SOURCES.items() if counts[source]]
    total = count_things(sum(counts.values()), "variable")
    return f"{total} set: {', '.join(parts)} (explain=true lists them)" if parts else ""


def print_placement(console: Console, plan: Plan, *, explain: bool = False, full: bool = False) -> None:
    """Print a row for each rank, what `explain` asks to know of each, and the warnings.

    `full` adds a line about the machine and a legend.
    """
    wrap = not console.is_terminal
    if full:
        console.print(describe_machine(plan.machine), markup=False, highlight=False, soft_wrap=wrap)
    print_ranks(console, plan, full=full)
    for rank in plan.ranks if explain else ():
        for note in rank.notes:
            text = escape_text(f"rank {rank.local_rank}: {note}")
            console.print(text, style="dim", markup=False, highlight=False, soft_wrap=wrap)
    if explain:
        print_variables(console, plan.ranks)
    elif full and (text := count_variables(plan.ranks)):
        console.print(text, style="dim", markup=False, highlight=False)
    for warning in plan.warnings:
        text = escape_text(f"warning: {warning}")
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=wrap)


def print_ranks(console: Console, plan: Plan, *, full: bool) -> None:
    """Print the rows, and the legend if it is asked for."""
    blocks = console.encoding.startswith("utf")
    rows = [make_rank_row(rank, plan.machine) for rank in plan.ranks]
    same = all(row["memory"] == f"node {row['node']}" for row in rows)
    wide = make_ruler(plan, 2 * MOST_CELLS, blocks=blocks)
    easy = (*EASY_DROPS, "memory") if same else EASY_DROPS
    titles, room = choose_columns(
        rows, console.width, easy, least=wide.find_min_width(plan.ranks), wanted=wide.width
    )
    ruler = make_ruler(plan, room, blocks=blocks)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title in titles:
        header = ruler.title() if title == BAR else title
        table.add_column(header, justify="right" if title in NUMBERS else "left", no_wrap=True)
    bars = [ruler.draw_cores(rank) for rank in plan.ranks]
    for row, bar in zip(rows, bars, strict=True):
        table.add_row(*(bar if title == BAR else row[title] or "-" for title in titles))
    console.print(table)
    if full and BAR in titles:
        marks = {mark for bar in bars for mark in bar.plain}
        text = describe_legend(ruler, marks, memory_hidden="memory" not in titles and same)
        console.print(text, style="dim", markup=False, highlight=False)


def make_rank_row(rank: RankPlan, machine: Machine) -> dict[str, str]:
    """Return the cells of one rank by their titles; a column that is empty for all ranks is left out."""
    gpu = rank.gpu
    is_mig = gpu is not None and gpu.uuid.startswith("MIG-")
    nodes = {cpu.node for cpu in machine.cpus if cpu.id in rank.cpus}
    return {
        "rank": str(rank.local_rank),
        "gpu": str(gpu.index) if gpu else "",
        "pci": gpu.pci if gpu else "",
        "mig": gpu.uuid[:12] if gpu and is_mig else "",
        "node": shorten_cpulist(nodes),
        BAR: "bar" if nodes else "",
        "cpus": shorten_cpulist(rank.cpus),
        "workers also on": shorten_cpulist(rank.worker_cpus - rank.cpus),
        "memory": format_memory_policy(rank.memory),
        "workers": str(rank.num_workers),
        "threads": str(rank.omp_num_threads),
        "nic": clean_text(rank.nic or "", 24),
    }


def format_memory_policy(memory: Memory) -> str:
    """Where memory comes from: a NUMA node, or anywhere."""
    return f"node {shorten_cpulist(memory.nodes)}" if memory.nodes else "any"


def choose_columns(
    rows: Sequence[Mapping[str, str]], width: int, easy: Sequence[str], *, least: int, wanted: int
) -> tuple[list[str], int]:
    """Choose columns for a console's width, and what is left for the bar, which would like `wanted`.

    `easy` columns go for the `least` that shows every rank's part, the others when the bar is tiny.
    """
    sizes = {
        title: max(len(title), *(len(row[title]) for row in rows)) + GAP
        for title in rows[0]
        if any(row[title] for row in rows)
    }
    has_bar = sizes.pop(BAR, 0) > 0
    tiny = min(wanted, LEAST_BAR)
    drops = [(title, max(tiny, least)) for title in easy] + [(title, tiny) for title in DROPS]
    for title, need in drops:
        # The last column's gap may hang over the edge.
        if width + GAP - sum(sizes.values()) >= (need + GAP) * has_bar:
            continue
        sizes.pop(title, None)
    left = width - sum(sizes.values())
    shown = has_bar and left >= min(wanted, USELESS_BAR)
    titles = [title for title in rows[0] if title in sizes or (title == BAR and shown)]
    return titles, max(1, min(wanted, left))


def describe_legend(ruler: Ruler, marks: set[str], *, memory_hidden: bool) -> str:
    """What the marks mean that occur."""
    parts = [f"{ruler.marks[kind]} {text}" for kind, text in MEANINGS.items() if ruler.marks[kind] in marks]
    if ruler.scale > 1:
        parts.append(f"1 cell = {'' if ruler.is_even else 'up to '}{ruler.scale} cores")
    parts.append("above: NUMA nodes")
    parts += ["memory on the rank's node"] if memory_hidden else []
    return "  ".join(parts)


def describe_machine(machine: Machine) -> str:
    """The machine in a line, and what of it the job may use."""
    with_cpus = {cpu.node for cpu in machine.cpus}
    nodes = {node.id for node in machine.nodes} | with_cpus
    bare = "" if nodes == with_cpus else f" ({len(with_cpus)} with CPUs)"
    models = Counter(clean_text(gpu.name) or "GPU" for gpu in machine.gpus)
    active = sum(nic.active for nic in machine.nics)
    down = "" if active == len(machine.nics) else f" ({active} active)"
    parts = (
        count_things(len({cpu.package for cpu in machine.cpus}), "package"),
        count_things(len(nodes), "NUMA node") + bare,
        count_things(len({cpu.core for cpu in machine.cpus}), "core"),
        count_things(len(machine.cpus), "thread"),
        *(f"{number} x {model}" for model, number in models.items()),
        *([count_things(len(machine.nics), "NIC") + down] if machine.nics else []),
    )
    name = clean_text(machine.name) or "machine"
    return f"{name}: {', '.join(parts)}; {', '.join(describe_limits(machine))}"


def describe_limits(machine: Machine) -> list[str]:
    """What the job may use of a machine."""
    online = {cpu.id for cpu in machine.cpus}
    allowed = machine.allowed_cpus & online
    parts = ["this job may use all CPUs"]
    if allowed != online:
        parts = [f"this job may use {len(allowed)} CPUs ({shorten_cpulist(allowed)})"]
    if apart := machine.isolated & allowed:
        parts.append(f"{shorten_cpulist(apart)} isolated")
    if machine.limits.cpus is not None and machine.limits.cpus < len(allowed):
        parts.append(f"for the time of {machine.limits.cpus:g}")
    with_memory = {node.id for node in machine.nodes if node.normal}
    if not with_memory <= machine.allowed_mems:
        parts.append(f"memory of nodes {shorten_cpulist(machine.allowed_mems & with_memory) or 'none'}")
    return parts
