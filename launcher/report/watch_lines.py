"""The lines above the table of `launch watch`: how the job goes, who holds it up, and what is to be noted."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from launcher.report.runs import STATE_COLOURS as COLOURS
from launcher.report.tables import shorten_age
from launcher.report.watch_columns import ALARM, WARN
from launcher.report.watch_table import NEWEST
from launcher.runs.run_status import RunStatus
from launcher.text import clean_text, count_things, describe_time
from launcher.watch.run_reader import RunSnapshot
from launcher.watch.stragglers import explain_straggler
from launcher.watch.watch_model import Hang, JobState

LONGEST = 400
"""Characters of a sentence."""
MOST = 3
"""Notes that are shown."""
MOST_HOSTS = 8
JUDGES_LATE = 30.0
"""Seconds after which what the judging node has written is no longer the state of now."""


def render_lines(run: RunStatus, snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the lines above the table, none of them wider than the terminal."""
    parts = [*list_headline(run, snapshot)]
    lines = pack_parts(parts, width)
    if snapshot.nodes:
        lines += pack_parts([Text(text) for text in list_counts(run, snapshot)], width)
    for text, style in list_findings(run, snapshot):
        lines += wrap_text(clean_text(text, LONGEST), style, width)
    return lines


def pack_parts(parts: Sequence[Text], width: int) -> list[Text]:
    """Put parts on lines, two spaces between them."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", part)
        else:
            lines.append(part)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def wrap_text(text: str, style: str, width: int) -> list[Text]:
    """Break a sentence into lines; those after the first are indented."""
    lines, line = [], ""
    for word in text.split():
        if line.strip() and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    found = [Text(one, style) for one in (*lines, line)]
    for one in found:
        one.truncate(width, overflow="ellipsis")
    return found


def list_headline(run: RunStatus, snapshot: RunSnapshot) -> Iterator[Text]:
    """Give how far the job is: its name, state, step, rate, time left, loss and the last step's age."""
    job = snapshot.job
    yield Text(clean_text(run.run, LONGEST), "bold")
    state = job.state if job and run.state == "running" and job.state != "ended" else run.state
    yield Text(state, {"hanging": ALARM, "starting": "cyan"}.get(state, COLOURS.get(state, "")))
    if (step := find_job_step(snapshot)) is not None:
        total = snapshot.progress.total if snapshot.progress else None
        own = max((rank.step for view in snapshot.nodes for rank in view.report.ranks), default=0)
        other = " printed" if snapshot.progress and own and abs(own - step) > max(2, own // 10) else ""
        yield Text(f"step {step}" + (f"/{total}" if total else "") + other)
    if state == "running" and (seconds := find_step_seconds(snapshot)):
        yield Text(describe_rate(seconds))
        if (left := estimate_left(snapshot, seconds)) is not None:
            yield Text(f"{describe_time(left)} left")
    for name, value in snapshot.progress.metrics if snapshot.progress else ():
        if name == "loss":
            yield Text(f"loss {value}")
    if run.state == "running" and (age := find_step_age(snapshot)) is not None:
        yield Text(f"last step {shorten_age(age)} ago", ALARM if state == "hanging" else "")


def describe_rate(seconds: float) -> str:
    """Return how fast steps are made: `2.31 steps/s`, `12.3 s/step`."""
    return f"{1 / seconds:.3g} steps/s" if 0 < seconds < 1 else f"{seconds:.3g} s/step"


def find_job_step(snapshot: RunSnapshot) -> int | None:
    """Return the step that the program has printed; if it prints none, the one that its ranks are at."""
    if snapshot.progress:
        return snapshot.progress.step
    steps = [rank.step for view in snapshot.nodes for rank in view.report.ranks]
    return snapshot.job.step if snapshot.job else min(steps, default=None)


def find_step_seconds(snapshot: RunSnapshot) -> float | None:
    """Return the seconds of a step: of printed ones over the last minutes, else of the slowest rank."""
    if snapshot.step_seconds is not None:
        return snapshot.step_seconds
    times = (rank.p50 for view in snapshot.nodes for rank in view.report.ranks if rank.p50 is not None)
    return max(times, default=snapshot.job.p50 if snapshot.job else None)


def estimate_left(snapshot: RunSnapshot, seconds: float) -> float | None:
    """Return the seconds until the last step; None if the program does not print how many there are."""
    progress = snapshot.progress
    if progress is None or not progress.total or progress.step > progress.total:
        return None
    return (progress.total - progress.step) * seconds


def find_step_age(snapshot: RunSnapshot) -> float | None:
    """Return how long ago the newest step of any rank was."""
    ages = [
        view.measure_step_age(rank.step_age)
        for view in snapshot.nodes
        for rank in view.report.ranks
        if rank.step_age is not None
    ]
    return min(ages, default=None)


def list_counts(run: RunStatus, snapshot: RunSnapshot) -> Iterator[str]:
    """Give the numbers of nodes and ranks, what these do, the attempt, the job's number and its time."""
    ranks = [rank for view in snapshot.nodes for rank in view.report.ranks]
    expected = max(view.report.nodes for view in snapshot.nodes)
    count = len(snapshot.nodes)
    missing = f" of {expected}" if expected > count else ""
    yield f"{count}{missing} node{'s' if max(count, expected) != 1 else ''}"
    yield count_things(len(ranks), "rank")
    phases = Counter(clean_text(rank.phase, 16) for rank in ranks)
    yield ", ".join(f"{number} {phase}" for phase, number in phases.most_common())
    if run.restarts:
        yield f"attempt {run.restarts}"
    if run.job_id:
        yield f"job {clean_text(run.job_id)}"
    if run.seconds is not None:
        yield f"for {describe_time(run.seconds)}"


def list_findings(run: RunStatus, snapshot: RunSnapshot) -> Iterator[tuple[str, str]]:
    """Give sentences with their style: the hang, silent nodes, stragglers, and what else there is to note."""
    job = snapshot.job
    live = run.state == "running"
    if job and live and snapshot.job_age > JUDGES_LATE:
        yield (
            f"{job.host}, which judges the job, has written nothing for {shorten_age(snapshot.job_age)}",
            WARN,
        )
    if job:
        yield from list_hangs(job, live=live)
    silent = [view.report.host for view in snapshot.nodes if view.is_silent]
    if silent and live:
        more = f" and {len(silent) - MOST_HOSTS} more" if len(silent) > MOST_HOSTS else ""
        yield f"not heard of: {', '.join(silent[:MOST_HOSTS])}{more}", ALARM
    for straggler in job.stragglers[-NEWEST:] if job else ():
        yield explain_straggler(straggler), WARN
    notes = [note for view in snapshot.nodes for note in view.report.notes]
    for note in list(dict.fromkeys((*(job.notes if job else ()), *notes)))[:MOST]:
        yield f"note: {note}", "dim"


def list_hangs(job: JobState, *, live: bool) -> Iterator[tuple[str, str]]:
    """Give the hang that goes on, or else the last one that is over."""
    if not job.hangs:
        return
    hang = job.hangs[-1]
    if live and job.state == "hanging" and hang.recovered is None:
        yield f"hang {hang.number}: {hang.verdict.sentence}", ALARM
    else:
        yield f"{count_things(len(job.hangs), 'hang')} so far, the last: {describe_hang(hang)}", "dim"


def describe_hang(hang: Hang) -> str:
    """Return what a hang was, and how long it lasted."""
    if hang.recovered is None:
        return hang.verdict.sentence
    lasted = describe_time(max(0.0, hang.recovered - hang.stalled_since))
    return f"{hang.verdict.sentence} (steps went on after {lasted})"
