"""What `launch watch` shows of a run: lines on the job, a row for each rank or node, and one rank in detail.

Everything here is text of rich's; `live.py` shows it on a terminal, and `print_once` prints it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.text import Text

from launcher.report.tables import (
    STATE_COLOURS,
    fit_columns,
    make_table,
    shorten_age,
    shorten_bytes,
    shorten_seconds,
)
from launcher.runs.run_status import RunStatus
from launcher.text import clean_text, count_things, describe_time, name_some, strip_sequences
from launcher.watch.metrics import METRICS
from launcher.watch.model import UNWATCHED, GpuSample, ProcessState, Rank
from launcher.watch.run_reader import NodeView, RankDetails, RunSnapshot
from launcher.watch.stragglers import explain_straggler

WARN, ALARM = "yellow", "bold red"
_MOST_RANKS = 32
"""Ranks of a job from which on a row is a node."""
_NEWEST = 3
"""Stragglers and notes that are told of."""
_BUCKETS = 20
"""Own times that differ by less than one part of so many of their median keep the order of ranks."""
_LONGEST, _LONGEST_NAME = 400, 16
"""Characters of a sentence, and of a host's name."""
_MOST_LINES = 30
"""Last lines of a rank that are shown."""
_DROPS = (
    *("power", "clock", "temp", "cpu", "own", "p99", "sm", "rss", "delay", "mem", "held by"),
    *("gpu", "p50", "xid", "data", "step", "others", "last", "phase"),
)
"""Titles in the order in which columns are left out if the terminal is narrow."""
_IN_HEADING = ("rank", "node", "phase", "last", "mem", "power", "clock")
"""Columns that the heading and the GPU's line of an open rank have."""
_HARMLESS = ("sw_power_cap", "applications_clocks_setting", "sync_boost", "display_clock_setting")
"""Why clocks are low, as NVML names it, without a fault."""
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


# The table


@dataclass(frozen=True, slots=True)
class Cell:
    """What a column shows of a row."""

    text: str
    value: float | str
    """Orders rows: the worst, which comes first, is the greatest, of columns in _LEAST_FIRST the least."""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a rank, or a node with its ranks."""

    view: NodeView
    ranks: tuple[Rank, ...]
    """The slowest first; one in a rank's row."""
    is_node: bool
    cells: Mapping[str, Cell]
    """By title; what is not known is left out."""

    @property
    def key(self) -> tuple[str, int | None]:
        """What it is known by: the node, and the rank if it is one's."""
        return self.view.report.host, None if self.is_node else self.ranks[0].rank


_ORDER = (
    *("rank", "node", "phase", "step", "last", "p50", "p99", "own", "data", "others", "cpu", "delay", "rss"),
    *("gpu", "sm", "mem", "power", "temp", "clock", "held by", "xid"),
)
"""Titles from left to right."""
_WIDTHS = {"rank": 4, "node": 6, "phase": 8, "last": 4, "own": 5, "mem": 4, "held by": 8, "xid": 3}
_WIDTHS |= {metric.title: metric.width for metric in METRICS}
"""Least characters of columns, so that they stay where they are."""
_TEXTS = ("node", "phase", "held by")
_LEAST_FIRST = ("rank", "node", "phase", "held by", "xid", *(one.title for one in METRICS if one.is_least))


_show_share = "{:.0%}".format
_SHOW: Mapping[str, Callable[[float], str]] = {
    "": str,
    "share": _show_share,
    "s/s": _show_share,
    "s": shorten_seconds,
    "cores": lambda number: f"{number:.{2 if number < 0.1 else 1 if number < 9.95 else 0}f}",
    "bytes": shorten_bytes,
    "W": "{:.0f}W".format,
    "C": "{:.0f}C".format,
    "MHz": str,
}
"""How a value of a unit is shown."""


def _measure_own(rank: Rank) -> float | None:
    """Return the seconds of a step that a rank does not wait for others; all of them if that is unknown."""
    return None if rank.p50 is None else rank.p50 * (1 - min(1.0, rank.wait_share or 0.0))


def _make_row(view: NodeView, ranks: Sequence[Rank], *, is_node: bool, mark: str = "") -> Row:
    """Return the row of a rank, or of a node with the worst of its ranks' figures.

    `mark` is the style of its rank, or its node, if that stands out.
    """
    report = view.report
    cells = {"node": Cell(clean_text(report.host, _LONGEST_NAME), report.node_rank, mark)}
    cells["phase"] = Cell("no ranks", "", "dim")
    for metric in METRICS if ranks else ():
        values = [value for rank in ranks if (value := metric.read(rank)) is not None]
        if metric.title and values and (metric.title != "step" or any(values)):
            value = min(values) if metric.is_least else max(values)
            style = ALARM if value >= metric.alarm else WARN if value >= metric.warn else ""
            cells[metric.title] = Cell(_SHOW[metric.unit](value), value, style)
    if ranks:
        cells["rank"] = Cell(str(ranks[0].rank), ranks[0].rank, mark)
        unlike = min(ranks, key=lambda one: (not one.exit_code, one.phase == "training", one.rank))
        style = "" if unlike.phase == "training" else "dim" if unlike.phase in UNWATCHED else "cyan"
        cells["phase"] = Cell(clean_text(unlike.phase, _LONGEST_NAME), unlike.phase, style)
        if unlike.exit_code:
            cells["phase"] = Cell(f"exit {unlike.exit_code}", "!exit", ALARM)
    if view.is_silent:
        cells["phase"] = Cell(f"silent {shorten_age(view.age)}", "!silent", ALARM)
    if ages := [view.measure_step_age(rank.step_age) for rank in ranks if rank.step_age is not None]:
        is_late = report.limit is not None and max(ages) > report.limit
        cells["last"] = Cell(shorten_age(max(ages)), max(ages), ALARM if is_late else "")
    if owns := [own for rank in ranks if (own := _measure_own(rank)) is not None]:
        cells["own"] = Cell(shorten_seconds(max(owns)), max(owns))
    gpus = [rank.gpu for rank in ranks if rank.gpu]
    known = (gpu for gpu in gpus if gpu.memory_total)
    if used := [gpu.memory_used / (gpu.memory_total or 1) for gpu in known if gpu.memory_used is not None]:
        style = ALARM if max(used) >= 0.99 else WARN if max(used) >= 0.95 else ""
        cells["mem"] = Cell(_show_share(max(used)), max(used), style)
    if reasons := dict.fromkeys(name for gpu in gpus for name in gpu.event_reasons):
        shown = ", ".join(reasons).replace("_", " ").removesuffix(" slowdown")
        style = "" if all(name in _HARMLESS for name in reasons) else ALARM
        cells["held by"] = Cell(clean_text(shown, _LONGEST_NAME), ("" if style else "~") + shown, style)
    if xids := dict.fromkeys(str(xid) for gpu in gpus for xid in gpu.xids):
        cells["xid"] = Cell(clean_text(",".join(xids), _LONGEST_NAME), -len(xids), ALARM)
    return Row(view, tuple(ranks), is_node, cells)


@dataclass(frozen=True, slots=True)
class TableView:
    """The rows and columns of a snapshot, sorted."""

    rows: list[Row]
    titles: list[str]
    sort: str

    def fit(self, width: int) -> dict[str, int]:
        """Return the titles of the columns that fit, with their widths; the least important go."""
        sizes = {
            title: max(
                len(title),
                _WIDTHS[title],
                *(len(row.cells[title].text) for row in self.rows if title in row.cells),
            )
            for title in self.titles
        }
        drops = [*(title for title in _DROPS if title != self.sort), self.sort]
        return fit_columns(sizes, drops, width)

    def render_row(self, row: Row, titles: Iterable[str]) -> list[Text]:
        """Return the cells of a row."""
        dim = " dim" if row.view.is_silent else ""
        cells = {title: row.cells.get(title) or Cell("-", "", "dim") for title in titles}
        return [
            Text(cell.text, cell.style + dim, justify="left" if title in _TEXTS else "right")
            for title, cell in cells.items()
        ]


def arrange(snapshot: RunSnapshot, sort: str = "", host: str | None = None) -> TableView:
    """Return the rows of a job, or of one of its nodes, each a node if there are many ranks.

    They are sorted by the column `sort`, the worst first, or else the slowest: who holds the others up, who
    is gone, stragglers, and then those with the longest own time; own times that hardly differ do not order
    rows, which would change places with each report. Those without a value come last, and equal ones by rank.
    Columns without a value are left out, and of a job on one node that node's name.
    """
    job = snapshot.job
    hang = job.hangs[-1] if job and job.hangs and job.state == "hanging" else None
    marked = {one.rank: f"bold {WARN}" for one in (job.stragglers[-_NEWEST:] if job else ())}
    marked |= dict.fromkeys(hang.verdict.ranks if hang and hang.recovered is None else (), ALARM)
    nodes = [view for view in snapshot.nodes if host in (None, view.report.host)]
    by_node = host is None and len(nodes) > 1 and sum(len(view.report.ranks) for view in nodes) > _MOST_RANKS

    def judge(ranks: Sequence[Rank], is_silent: bool = False) -> tuple[bool, ...]:
        """Order what is wrong: who holds the others up, who is gone, who is slow."""
        mark, has_failed = find_mark(ranks), any(rank.exit_code for rank in ranks)
        return mark != ALARM, not is_silent, not has_failed, not mark

    def find_mark(ranks: Sequence[Rank]) -> str:
        styles = {marked.get(rank.rank, "") for rank in ranks}
        return ALARM if ALARM in styles else max(styles, default="")

    rows: list[Row] = []
    for view in nodes:
        ranks = view.report.ranks
        slowest = sorted(ranks, key=lambda one: (*judge([one]), -(_measure_own(one) or 0.0), one.rank))
        for group in [slowest] if by_node or not ranks else [[rank] for rank in ranks]:
            rows.append(_make_row(view, group, is_node=by_node or not ranks, mark=find_mark(group)))
    rows.sort(key=lambda row: min((rank.rank for rank in row.ranks), default=0))
    if sort:
        known = [row for row in rows if sort in row.cells]
        known.sort(key=lambda row: row.cells[sort].value, reverse=sort not in _LEAST_FIRST)
        rows = known + [row for row in rows if sort not in row.cells]
    else:
        owns = {row.key: float(row.cells["own"].value) if "own" in row.cells else 0.0 for row in rows}
        usual = median([own for own in owns.values() if own] or [1.0])
        rows.sort(
            key=lambda row: (
                *judge(row.ranks, row.view.is_silent),
                -round(owns[row.key] / usual * _BUCKETS),
            )
        )
    several = by_node or any(row.view.report.nodes > 1 for row in rows)
    titles = [title for title in _ORDER if title == sort or any(title in row.cells for row in rows)]
    titles = [title for title in titles if title != "node" or several]
    if by_node:  # what a node's row is about comes first
        titles.sort(key=lambda title: title != "node")
    return TableView(rows, titles, sort)


def find_rank(snapshot: RunSnapshot, rank: int | None) -> Row | None:
    """Return the row of a rank; None if no node has it."""
    for view in snapshot.nodes:
        for one in view.report.ranks:
            if one.rank == rank:
                return _make_row(view, (one,), is_node=False)
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
        yield Text(f"step {step}" + (f"/{progress.total}" if progress and progress.total else ""))
    slowest = max((rank.p50 for rank in ranks if rank.p50 is not None), default=job.p50 if job else None)
    seconds = slowest if snapshot.step_seconds is None else snapshot.step_seconds
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
    for note in job.notes[:_NEWEST] if job else ():
        yield f"note: {note}", "dim"


# One rank


def list_rank_lines(row: Row, details: RankDetails | None, width: int) -> list[Text]:
    """Return which rank it is, what it does, its figures, its placement, its stack and its last lines."""
    (rank,) = row.ranks
    parts = [
        Text(f"rank {rank.rank} on {clean_text(row.view.report.host)}", "bold"),
        Text(f"local rank {rank.local_rank}"),
        Text(f"PID {rank.pid}"),
        Text(row.cells["phase"].text, row.cells["phase"].style),
    ]
    if last := row.cells.get("last"):
        parts.append(Text(f"last step {last.text} ago", last.style))
    figures = [
        Text.assemble((f"{title} ", "dim"), (row.cells[title].text, row.cells[title].style))
        for title in _ORDER
        if title in row.cells and title not in _IN_HEADING
    ]
    lines = [*_pack(parts, width), *_pack(figures, width)]
    if rank.gpu:
        lines += _pack([Text(text) for text in _describe_gpu(rank.gpu)], width)
    lines += [Text(f"note: {clean_text(note, _LONGEST)}", "dim") for note in rank.notes]
    if details is None or details.rank != rank.rank:
        return lines
    if details.placement:
        as_planned = "" if details.differences else ", as planned"
        lines.append(Text(f"placement: {clean_text(details.placement, _LONGEST)}{as_planned}"))
    lines += [Text(clean_text(difference, _LONGEST), WARN) for difference in details.differences]
    return [*lines, *_list_stack_lines(details, width), *_list_output_lines(details)]


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


def _list_stack_lines(details: RankDetails, width: int) -> Iterator[Text]:
    """Give the stacks of the rank's threads, the main one first, and when they were taken."""
    snapshot = details.snapshot
    if snapshot is None:
        yield Text("stack: none was taken yet (t asks the node for one)", "dim")
        return
    process = snapshot.process
    when = f"stack {shorten_age(snapshot.age)} ago ({snapshot.origin})"
    yield Text(f"{when}: {describe_process(process)}")
    for stack in sorted(process.stacks, key=lambda one: not one.is_current):
        if len(process.stacks) > 1:
            name = "main thread" if stack.is_current else f"thread {clean_text(stack.thread)}"
            yield Text(f"  {name}", "dim")
        for frame in stack.frames:
            text = f"{clean_text(frame.file, 2000)}:{frame.line}, {clean_text(frame.function)}"
            yield Text(f"  {text}" if len(text) <= width - 2 else f"  ...{text[5 - width :]}")


def describe_process(process: ProcessState) -> str:
    """Say what the kernel tells of a process."""
    words = [f"it {_STATES.get(process.state, 'is in state ' + clean_text(process.state))}"]
    words += [f"in {clean_text(process.wait_channel)}"] if process.wait_channel not in ("", "0") else []
    words += [f"(system call {clean_text(process.system_call)})"] if process.system_call else []
    words += [f"and is traced by process {process.tracer}"] if process.tracer else []
    return " ".join(words)


def _list_output_lines(details: RankDetails) -> Iterator[Text]:
    """Give the rank's last lines, without what a terminal acts on."""
    title = f"last lines (std{details.stream})" if details.lines else "it has printed nothing"
    yield Text(title, "dim")
    for line in details.lines[-_MOST_LINES:]:
        text = strip_sequences(line.expandtabs())[:2000]
        text = "".join(char if char.isprintable() else "?" for char in text)
        yield Text(text, no_wrap=True, overflow="ellipsis")


def print_once(console: Console, view: View, rank: int | None) -> None:
    """Print all of the table, or of a rank."""
    lines = list_job_lines(view, console.width)
    if view.message:
        lines.append(Text(clean_text(view.message, _LONGEST)))
    row = find_rank(view.snapshot, rank)
    if row is not None:
        lines = [lines[0], Text(), *list_rank_lines(row, view.details, console.width)]
    for line in lines:
        console.print(line)
    found = arrange(view.snapshot)
    if row is None and found.rows:
        widths = found.fit(console.width)
        table = make_table(widths, right={*widths} - {*_TEXTS}, widths=widths)
        for one in found.rows:
            table.add_row(*found.render_row(one, widths))
        console.print()
        console.print(table)
