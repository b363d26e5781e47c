"""What `launch watch` shows of a run: lines on the job, a row for each rank or node, and one rank in detail.

Everything here is text of rich's; `live.py` shows it on a terminal, and `print_once` prints it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report.runs import STATE_COLOURS
from launcher.report.tables import (
    fit_columns,
    make_table,
    shorten_age,
    shorten_bytes,
    shorten_seconds,
)
from launcher.runs.run_status import RunStatus
from launcher.text import clean_text, count_things, describe_time, name_some, strip_sequences
from launcher.watch.metrics import METRICS, Metric
from launcher.watch.model import Frame, GpuSample, ProcessState, Rank
from launcher.watch.run_reader import NodeView, RankDetails, RunSnapshot
from launcher.watch.stragglers import explain_straggler

WARN, ALARM = "yellow", "bold red"
_MOST_RANKS = 32
"""Ranks of a job from which on a row is a node."""
_NEWEST = 3
"""Stragglers and notes that are told of."""
_BUCKETS = 20
"""Own times that differ by less than one part of so many of their median keep the order of ranks."""
_JUDGES_LATE = 30.0
"""Seconds after which what the judging node has written is no longer the state of now."""
_LONGEST, _LONGEST_NAME = 400, 16
"""Characters of a sentence, and of a host's name."""
_DROPS = (
    *("power", "clock", "net", "temp", "cpu", "own", "p99", "sm", "rss", "delay", "mem", "held by"),
    *("gpu", "p50", "xid", "data", "step", "others", "last", "phase"),
)
"""Titles in the order in which columns are left out if the terminal is narrow."""
_IN_HEADING = ("rank", "node", "phase", "last", "mem", "power", "clock")
"""Columns that the heading and the GPU's line of an open rank have."""
SLOWEST = ""
"""The order without a column's title: the slowest first."""
_REASONS = {
    "applications_clocks_setting": "app clocks",
    "sw_power_cap": "power cap",
    "hw_slowdown": "hw slowdown",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "thermal",
    "hw_thermal_slowdown": "hw thermal",
    "hw_power_brake": "power brake",
    "hw_power_brake_slowdown": "power brake",
    "display_clock_setting": "display",
}
"""NVML's names of why clocks are low, shortened."""
_HARMLESS = ("sw_power_cap", "applications_clocks_setting", "sync_boost", "display_clock_setting")
"""Reasons that are no fault."""
_STATES = {
    "R": "is running",
    "S": "sleeps",
    "D": "waits for the disk or a device, and takes no signal",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "is gone",
}
"""States of proc(5) in words."""


@dataclass(frozen=True, slots=True)
class View:
    """What is known of the run at one moment."""

    run: RunStatus
    snapshot: RunSnapshot
    details: RankDetails | None = None
    """Of the rank that is open."""
    message: str = ""
    """Why there is no table, or what else is to be said."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a rank, or a node with its ranks."""

    view: NodeView
    ranks: tuple[Rank, ...]
    """The slowest first; one in a rank's row."""
    is_node: bool = False
    _cells: dict[str, "Cell | None"] = field(default_factory=dict, compare=False)

    def read(self, column: "Column") -> "Cell | None":
        """Return what a column shows of it; None for nothing."""
        if column.title not in self._cells:
            self._cells[column.title] = column.read(self)
        return self._cells[column.title]

    @property
    def key(self) -> tuple[str, int | None]:
        """What it is known by: the node, and the rank if it is one's."""
        return self.view.report.host, None if self.is_node else self.ranks[0].rank


@dataclass(frozen=True, slots=True)
class Cell:
    """What a column shows of a row."""

    text: str
    value: float | str
    """Orders rows."""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column; the worst, which comes first, is the greatest, unless it is `ascending`."""

    title: str
    letter: str
    """Sorts by it."""
    meaning: str
    width: int
    """Least characters, so that columns stay where they are."""
    read: Callable[[Row], Cell | None]
    ascending: bool = False
    is_text: bool = False


# Columns


def _figure(metric: Metric, get: Callable[[Rank], float | None] | None = None) -> Column:
    """Return the column of a metric of the worst of a row's ranks; `get` computes what is no rank's field."""
    read_rank, show = get or metric.read, _SHOW[metric.unit]

    def read(row: Row) -> Cell | None:
        values = [value for rank in row.ranks if (value := read_rank(rank)) is not None]
        if not values:
            return None
        value = min(values) if metric.is_least else max(values)
        style = ALARM if value >= metric.alarm else WARN if value >= metric.warn else ""
        return Cell(show(value), value, style)

    meaning = metric.meaning + (f" in {metric.unit}" if metric.unit in ("W", "MHz") else "")
    return Column(metric.title, metric.letter, meaning, metric.width, read, ascending=metric.is_least)


def _share(share: float) -> str:
    return f"{share * 100:.0f}%"


def _cores(number: float) -> str:
    return f"{number:.2f}" if number < 0.1 else f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def _measure_own(rank: Rank) -> float | None:
    """Return the seconds of a step that a rank does not wait for others; all of them if that is unknown."""
    return None if rank.p50 is None else rank.p50 * (1 - min(1.0, rank.wait_share or 0.0))


def _measure_gpu_memory(rank: Rank) -> float | None:
    """Return the share of its GPU's memory that is used."""
    if rank.gpu is None or rank.gpu.memory_used is None or not rank.gpu.memory_total:
        return None
    return rank.gpu.memory_used / rank.gpu.memory_total


def _read_rank(row: Row) -> Cell | None:
    return Cell(str(row.ranks[0].rank), row.ranks[0].rank) if row.ranks else None


def _read_node(row: Row) -> Cell:
    return Cell(clean_text(row.view.report.host, _LONGEST_NAME), row.view.report.node_rank)


def _read_phase(row: Row) -> Cell:
    """Show what the rank does, and that it, or its node, is gone; of several ranks the one that is unlike."""
    if row.view.is_silent:
        return Cell(f"silent {shorten_age(row.view.age)}", "!silent", ALARM)
    if not row.ranks:
        return Cell("no ranks", "", "dim")
    rank = min(row.ranks, key=lambda one: (not one.exit_code, one.phase == "training", one.rank))
    if rank.exit_code:
        return Cell(f"exit {rank.exit_code}", "!exit", ALARM)
    style = {"training": "", "ended": "dim", "exited": "dim", "unwatched": "dim"}.get(rank.phase, "cyan")
    return Cell(clean_text(rank.phase, _LONGEST_NAME), rank.phase, style)


def _read_age(row: Row) -> Cell | None:
    ages = [row.view.measure_step_age(rank.step_age) for rank in row.ranks if rank.step_age is not None]
    if not ages:
        return None
    limit = row.view.report.limit
    return Cell(shorten_age(max(ages)), max(ages), ALARM if limit is not None and max(ages) > limit else "")


def _read_reasons(row: Row) -> Cell | None:
    names = dict.fromkeys(name for rank in row.ranks if rank.gpu for name in rank.gpu.event_reasons)
    if not names:
        return None
    shown = ", ".join(_REASONS.get(name, clean_text(name.replace("_", " "))) for name in names)
    style = "" if all(name in _HARMLESS for name in names) else ALARM
    return Cell(clean_text(shown, _LONGEST_NAME), ("" if style else "~") + shown, style)


def _read_xids(row: Row) -> Cell | None:
    xids = dict.fromkeys(str(xid) for rank in row.ranks if rank.gpu for xid in rank.gpu.xids)
    return Cell(clean_text(",".join(xids), _LONGEST_NAME), -len(xids), ALARM) if xids else None


def _read_network(row: Row) -> Cell | None:
    rate = sum(rate for _, rate in row.view.report.nic_rates)
    return Cell(f"{shorten_bytes(rate)}/s", rate) if row.view.report.nic_rates else None


_SHOW: Mapping[str, Callable[[float], str]] = {
    "": str,
    "share": _share,
    "s/s": _share,
    "s": shorten_seconds,
    "cores": _cores,
    "bytes": shorten_bytes,
    "W": "{:.0f}W".format,
    "C": "{:.0f}C".format,
    "MHz": str,
}
"""How a value of a unit is shown."""
_OWN = Metric("", "time of a step without waiting for other ranks", "s", title="own", letter="O", width=5)
_MEMORY = Metric(
    "", "share of its GPU's memory in use", "share", title="mem", letter="E", warn=0.95, alarm=0.99
)
_FIGURES = {metric.title: _figure(metric) for metric in METRICS if metric.title}
_STEP = next(metric for metric in METRICS if metric.field == "step")
_FIGURES["step"] = _figure(_STEP, lambda rank: rank.step or None)
_FIGURES |= {"own": _figure(_OWN, _measure_own), "mem": _figure(_MEMORY, _measure_gpu_memory)}
_ORDER = ("p50", "p99", "own", "data", "others", "cpu", "delay", "rss")
_GPU_ORDER = ("gpu", "sm", "mem", "power", "temp", "clock")
COLUMNS = (
    Column("rank", "R", "the rank; of a node the slowest one", 4, _read_rank, True),
    Column("node", "N", "its node", 6, _read_node, True, True),
    Column("phase", "H", "what it does, or since when its node is silent", 8, _read_phase, True, True),
    _FIGURES["step"],
    Column("last", "L", "how long ago its last step was", 4, _read_age),
    *(_FIGURES[title] for title in (*_ORDER, *_GPU_ORDER)),
    Column("held by", "B", "why its clocks are low", 8, _read_reasons, True, True),
    Column("xid", "X", "errors of its GPU", 3, _read_xids, True),
    Column("net", "I", "what the node's NICs receive and send", 6, _read_network),
)
"""From left to right."""


# Rows


@dataclass(frozen=True, slots=True)
class Order:
    """How rows are sorted."""

    title: str = SLOWEST
    """A column's."""
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class TableView:
    """The rows and columns of a snapshot, sorted, as a terminal or a page of paper takes them."""

    rows: list[Row]
    columns: list[Column]
    order: Order
    culprits: frozenset[int]
    """Ranks that hold the others up, in a hang that goes on."""
    stragglers: frozenset[int]

    def fit(self, width: int) -> dict[str, int]:
        """Return the titles of the columns that fit, with their widths; the least important go."""
        sizes = {
            column.title: max(
                len(column.title) + (column.title == self.order.title),
                column.width,
                *(len(cell.text) for row in self.rows if (cell := row.read(column))),
            )
            for column in self.columns
        }
        drops = [*(title for title in _DROPS if title != self.order.title), self.order.title]
        return fit_columns(sizes, drops, width)

    def render(self, width: int, rows: Sequence[Row] | None = None, chosen: Row | None = None) -> Table:
        """Return the table of some rows, or of all; what stands out is marked by its rank, or its node."""
        widths = self.fit(width)
        columns = [column for column in self.columns if column.title in widths]
        table = make_table(widths, widths=widths)
        for column, shown in zip(columns, table.columns, strict=True):
            is_sorted = column.title == self.order.title
            mark = ("^" if column.ascending != self.order.reverse else "v") if is_sorted else ""
            shown.header = Text(column.title + mark, "bold underline" if is_sorted else "bold")
            shown.min_width = widths[column.title]
            shown.justify = "left" if column.is_text else "right"
        for row in self.rows if rows is None else rows:
            ranks = {rank.rank for rank in row.ranks}
            mark = ALARM if ranks & self.culprits else f"bold {WARN}" if ranks & self.stragglers else ""
            cells = []
            for column in columns:
                cell = row.read(column) or Cell("-", "", "dim")
                style = (mark if column.title in ("rank", "node") else "") or cell.style
                cells.append(Text(cell.text, f"{style} dim" if row.view.is_silent else style))
            table.add_row(*cells, style="reverse" if row is chosen else "")
        return table


def arrange(snapshot: RunSnapshot, order: Order, host: str | None = None) -> TableView:
    """Return the rows of a job, or of one of its nodes, each a node if there are many ranks.

    The worst come first, those without a value last, and equal ones by rank. Columns without a value are left
    out, and of a job on one node that node's name.
    """
    job = snapshot.job
    hang = job.hangs[-1] if job and job.hangs and job.state == "hanging" else None
    culprits = frozenset(hang.verdict.ranks) if hang and hang.recovered is None else frozenset[int]()
    stragglers = frozenset(one.rank for one in (job.stragglers[-_NEWEST:] if job else ()))
    nodes = [view for view in snapshot.nodes if host in (None, view.report.host)]
    by_node = host is None and len(nodes) > 1 and sum(len(view.report.ranks) for view in nodes) > _MOST_RANKS

    def order_rank(rank: Rank) -> tuple[bool, bool, bool, float, int]:
        own = -(_measure_own(rank) or 0.0)
        return rank.rank not in culprits, not rank.exit_code, rank.rank not in stragglers, own, rank.rank

    rows: list[Row] = []
    for view in nodes:
        ranks = view.report.ranks
        if by_node or not ranks:
            rows.append(Row(view, tuple(sorted(ranks, key=order_rank)), is_node=True))
        else:
            rows += [Row(view, (rank,)) for rank in ranks]
    rows.sort(key=lambda row: min((rank.rank for rank in row.ranks), default=0))
    column = next((column for column in COLUMNS if column.title == order.title), None)
    if column is None:
        rows = _sort_slowest(rows, culprits, stragglers)
        rows = rows[::-1] if order.reverse else rows
    else:
        cells = [(row.read(column), row) for row in rows]
        known = [(cell.value, row) for cell, row in cells if cell]
        known.sort(key=lambda pair: pair[0], reverse=column.ascending == order.reverse)
        rows = [row for _, row in known] + [row for cell, row in cells if not cell]
    several = by_node or any(row.view.report.nodes > 1 for row in rows)
    columns = [
        column
        for column in COLUMNS
        if (column.title == order.title or any(row.read(column) for row in rows))
        and (column.title != "node" or several)
    ]
    if by_node:  # what a node's row is about comes first
        columns.sort(key=lambda column: column.title != "node")
    return TableView(rows, columns, order, culprits, stragglers)


def _sort_slowest(rows: Sequence[Row], culprits: frozenset[int], stragglers: frozenset[int]) -> list[Row]:
    """Put first who holds the others up, who is gone, stragglers, and then those with the longest own time.

    Own times that hardly differ do not order rows, which would change places with each report.
    """
    times = {
        row.key: max((time for rank in row.ranks if (time := _measure_own(rank)) is not None), default=None)
        for row in rows
    }
    usual = median([time for time in times.values() if time is not None] or [0.0])

    def slowness(row: Row) -> tuple[bool, bool, bool, bool, int]:
        ranks = {rank.rank for rank in row.ranks}
        return (
            not ranks & culprits,
            not row.view.is_silent,
            not any(rank.exit_code for rank in row.ranks),
            not ranks & stragglers,
            -round((times[row.key] or 0.0) / usual * _BUCKETS) if usual else 0,
        )

    return sorted(rows, key=slowness)


def find_rank(snapshot: RunSnapshot, rank: int | None) -> Row | None:
    """Return the row of a rank; None if no node has it."""
    for view in snapshot.nodes:
        for one in view.report.ranks:
            if one.rank == rank:
                return Row(view, (one,))
    return None


# Lines on the job


def list_job_lines(view: View, width: int) -> list[Text]:
    """Return the lines above the table: how the job goes, who holds it up, and what is to be noted."""
    lines = _pack(_list_headline(view), width)
    if view.snapshot.nodes:
        lines += _pack([Text(text) for text in _list_counts(view)], width)
    lines += [Text(clean_text(text, _LONGEST), style) for text, style in _list_findings(view)]
    return lines


def _pack(parts: Iterable[Text], width: int) -> list[Text]:
    """Put parts on lines as a whole, two spaces between them."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", part)
        else:
            lines.append(part)
    return lines


def _list_headline(view: View) -> Iterator[Text]:
    """Give how far the job is: its name, state, step, rate, time left, loss and the last step's age.

    Its step is the one that the program has printed; if it prints none, the one that its ranks are at.
    """
    run, snapshot = view.run, view.snapshot
    job, progress = snapshot.job, snapshot.progress
    ranks = [rank for node in snapshot.nodes for rank in node.report.ranks]
    yield Text(clean_text(run.run, _LONGEST), "bold")
    state = job.state if job and run.state == "running" and job.state != "ended" else run.state
    colours = {**STATE_COLOURS, "hanging": ALARM, "starting": "cyan"}
    yield Text(state, colours.get(state, ""))
    steps = [rank.step for rank in ranks]
    step = progress.step if progress else job.step if job else min(steps, default=None)
    if step is not None:
        own = max(steps, default=0)
        other = " printed" if progress and own and abs(own - step) > max(2, own // 10) else ""
        yield Text(f"step {step}" + (f"/{progress.total}" if progress and progress.total else "") + other)
    seconds = snapshot.step_seconds
    if seconds is None:
        slowest = max((rank.p50 for rank in ranks if rank.p50 is not None), default=None)
        seconds = slowest if slowest is not None else job.p50 if job else None
    if state == "running" and seconds:
        yield Text(f"{1 / seconds:.3g} steps/s" if seconds < 1 else f"{seconds:.3g} s/step")
        if progress and progress.total and progress.step <= progress.total:
            yield Text(f"{describe_time((progress.total - progress.step) * seconds)} left")
    for name, value in progress.metrics if progress else ():
        if name == "loss":
            yield Text(f"loss {value}")
    ages = [
        node.measure_step_age(rank.step_age)
        for node in snapshot.nodes
        for rank in node.report.ranks
        if rank.step_age is not None
    ]
    if run.state == "running" and ages:
        yield Text(f"last step {shorten_age(min(ages))} ago", ALARM if state == "hanging" else "")


def _list_counts(view: View) -> Iterator[str]:
    """Give the numbers of nodes and ranks, what these do, the attempt, the job's number and its time."""
    run, nodes = view.run, view.snapshot.nodes
    ranks = [rank for node in nodes for rank in node.report.ranks]
    expected = max(node.report.nodes for node in nodes)
    missing = f" of {expected}" if expected > len(nodes) else ""
    yield f"{len(nodes)}{missing} node{'s' if max(len(nodes), expected) != 1 else ''}"
    yield count_things(len(ranks), "rank")
    phases = Counter(clean_text(rank.phase, _LONGEST_NAME) for rank in ranks)
    yield ", ".join(f"{number} {phase}" for phase, number in phases.most_common())
    if run.restarts:
        yield f"attempt {run.restarts}"
    if run.job_id:
        yield f"job {clean_text(run.job_id)}"
    if run.seconds is not None:
        yield f"for {describe_time(run.seconds)}"


def _list_findings(view: View) -> Iterator[tuple[str, str]]:
    """Give sentences with their style: the hang, silent nodes, stragglers, and what else there is to note."""
    job, snapshot = view.snapshot.job, view.snapshot
    live = view.run.state == "running"
    if job and live and snapshot.job_age > _JUDGES_LATE:
        late = shorten_age(snapshot.job_age)
        yield f"{job.host}, which judges the job, has written nothing for {late}", WARN
    if job and job.hangs:
        hang = job.hangs[-1]
        sentence = hang.verdict.sentence
        if live and job.state == "hanging" and hang.recovered is None:
            yield f"hang {hang.number}: {sentence}", ALARM
        else:
            if hang.recovered is not None:
                lasted = describe_time(max(0.0, hang.recovered - hang.stalled_since))
                sentence = f"{sentence} (steps went on after {lasted})"
            yield f"{count_things(len(job.hangs), 'hang')} so far, the last: {sentence}", "dim"
    silent = [node.report.host for node in snapshot.nodes if node.is_silent]
    if silent and live:
        yield f"not heard of: {name_some(silent, 8)}", ALARM
    for straggler in job.stragglers[-_NEWEST:] if job else ():
        yield explain_straggler(straggler), WARN
    notes = [note for node in snapshot.nodes for note in node.report.notes]
    for note in list(dict.fromkeys((*(job.notes if job else ()), *notes)))[:_NEWEST]:
        yield f"note: {note}", "dim"


# One rank


def list_rank_lines(row: Row, details: RankDetails | None, width: int) -> list[Text]:
    """Return which rank it is, what it does, its figures, and what it has of what was planned."""
    (rank,) = row.ranks
    cells = {column.title: cell for column in COLUMNS if (cell := row.read(column))}
    parts = [
        Text(f"rank {rank.rank} on {clean_text(row.view.report.host)}", "bold"),
        Text(f"local rank {rank.local_rank}"),
        Text(f"PID {rank.pid}"),
        Text(cells["phase"].text, cells["phase"].style),
    ]
    if last := cells.get("last"):
        parts.append(Text(f"last step {last.text} ago", last.style))
    figures = [
        Text.assemble((f"{title} ", "dim"), (cell.text, cell.style))
        for title, cell in cells.items()
        if title not in _IN_HEADING
    ]
    lines = [*_pack(parts, width), *_pack(figures, width)]
    if rank.gpu:
        lines += _pack([Text(text) for text in _describe_gpu(rank.gpu)], width)
    lines += [Text(f"note: {clean_text(note, _LONGEST)}", "dim") for note in rank.notes]
    if details and details.placement:
        as_planned = "" if details.differences else ", as planned"
        lines.append(Text(f"placement: {clean_text(details.placement, _LONGEST)}{as_planned}"))
    for difference in details.differences if details else ():
        lines.append(Text(clean_text(difference, _LONGEST), WARN))
    return lines


def _describe_gpu(gpu: GpuSample) -> Iterator[str]:
    """Give its figures together with their limits."""
    if gpu.power is not None:
        yield f"power {gpu.power:.0f}{f' of {gpu.power_limit:.0f}' if gpu.power_limit else ''} W"
    if gpu.sm_clock is not None:
        yield f"clock {gpu.sm_clock}{f' of {gpu.max_sm_clock}' if gpu.max_sm_clock else ''} MHz"
    if gpu.memory_used is not None and gpu.memory_total:
        yield f"memory {gpu.memory_used / 2**30:.1f} of {gpu.memory_total / 2**30:.1f} GiB"
    if gpu.pcie_width is not None and gpu.max_pcie_width:
        yield f"PCIe x{gpu.pcie_width} of x{gpu.max_pcie_width}"
    if gpu.pcie_replays:
        yield f"{gpu.pcie_replays} PCIe replays"


def list_stack_lines(details: RankDetails, width: int) -> list[Text]:
    """Return the stacks of the rank's threads, the main one first, and when they were taken."""
    snapshot = details.snapshot
    if snapshot is None:
        return [Text("stack: none was taken yet (t asks the node for one)", "dim")]
    process = snapshot.process
    when = f"stack {shorten_age(snapshot.age)} ago ({snapshot.origin})"
    lines = [Text(f"{when}: {describe_process(process)}")]
    for stack in sorted(process.stacks, key=lambda one: not one.is_current):
        if len(process.stacks) > 1:
            name = "main thread" if stack.is_current else f"thread {clean_text(stack.thread)}"
            lines.append(Text(f"  {name}", "dim"))
        lines += [Text(f"  {_describe_frame(frame, width - 2)}") for frame in stack.frames]
    return lines


def describe_process(process: ProcessState) -> str:
    """Say what the kernel tells of a process."""
    words = [f"it {_STATES.get(process.state, 'is in state ' + clean_text(process.state))}"]
    words += [f"in {clean_text(process.wait_channel)}"] if process.wait_channel not in ("", "0") else []
    words += [f"(system call {clean_text(process.system_call)})"] if process.system_call else []
    words += [f"and is traced by process {process.tracer}"] if process.tracer else []
    return " ".join(words)


def _describe_frame(frame: Frame, width: int) -> str:
    """Return a line of a stack: `data.py:88, read_shard`; of a long path the end."""
    text = f"{clean_text(frame.file, 2000)}:{frame.line}, {clean_text(frame.function)}"
    return text if len(text) <= width else f"...{text[3 - width :]}"


def list_output_lines(details: RankDetails) -> list[Text]:
    """Return the rank's last lines, without what a terminal acts on."""
    if not details.lines:
        return [Text("it has printed nothing", "dim")]
    lines = [Text(f"last lines (std{details.stream})", "dim")]
    for line in details.lines:
        text = strip_sequences(line.expandtabs())[:2000]
        text = "".join(char if char.isprintable() else "?" for char in text)
        lines.append(Text(text, no_wrap=True, overflow="ellipsis"))
    return lines


def print_once(console: Console, view: View, rank: int | None) -> None:
    """Print all of the table, or of a rank."""
    lines = list_job_lines(view, console.width)
    if view.message:
        lines.append(Text(clean_text(view.message, _LONGEST)))
    row = find_rank(view.snapshot, rank)
    if row is not None:
        lines = [lines[0], Text(), *list_rank_lines(row, view.details, console.width)]
        if view.details:
            lines += [*list_stack_lines(view.details, console.width), *list_output_lines(view.details)]
    for line in lines:
        console.print(line)
    table = arrange(view.snapshot, Order())
    if row is None and table.rows:
        console.print()
        console.print(table.render(console.width))
