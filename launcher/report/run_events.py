"""What happened in a run, and when: hangs, stragglers, restarts, requeues, checkpoints."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.runs.attempt_progress import list_attempts, read_mtime
from launcher.runs.manifest import read_time
from launcher.runs.run_status import AttemptStatus
from launcher.text import describe_time
from launcher.watch.metrics_log import MetricsEvent
from launcher.watch.watch_model import Hang, JobState, NodeReport, Straggler

KINDS = ("hang", "straggler", "restart", "requeue", "checkpoint")
"""In the order in which they are shown."""
MOST_CHECKPOINTS = 1000
SAME_START = 5.0
"""Seconds that the filesystem's clock and the nodes' may differ."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    kind: str
    """One of KINDS."""
    time: float
    text: str
    until: float | None = None
    """When it was over; None if it took no time worth showing, or is not over."""


def list_events(
    path: Path,
    attempts: Sequence[AttemptStatus],
    samples: Sequence[NodeReport],
    job: JobState | None,
    *,
    told: Sequence[MetricsEvent],
    hangs: Sequence[Hang],
    end: float,
) -> tuple[Event, ...]:
    """Return all that is known to have happened, by time.

    `told` are the events of the nodes' metrics, and `end` is when the run ended, or now.
    """
    known = (*(() if hangs else ("hang",)), *(() if job else ("straggler",)))
    found = itertools.chain(
        list_starts(attempts),
        (Event(one.event, one.time, one.sentence) for one in told if one.event in known),
        list_restarts(path, samples, [read_time(one.started) for one in attempts]),
        list_checkpoints(path, samples),
        (make_hang_event(hang, end) for hang in hangs),
        (make_straggler_event(one) for one in (job.stragglers if job else ())),
    )
    return tuple(sorted(found, key=lambda event: event.time))


def list_starts(attempts: Sequence[AttemptStatus]) -> Iterator[Event]:
    """Give the starts after the first one."""
    for before, attempt in itertools.pairwise(attempts):
        time = read_time(attempt.started)
        if time is not None:
            requeued = before.state == "requeued"
            why = f" ({before.reason})" if before.reason else ""
            text = f"requeued{why}" if requeued else f"started again after it had {before.state}{why}"
            yield Event("requeue" if requeued else "restart", time, text)


def list_restarts(
    path: Path, samples: Sequence[NodeReport], starts: Sequence[float | None]
) -> Iterator[Event]:
    """Give the restarts of the ranks within an attempt of the job; `starts` are those of the attempts."""
    first: dict[int, float] = {}
    for sample in samples:
        first[sample.attempt] = min(first.get(sample.attempt, sample.time), sample.time)
    found = []
    for number in sorted(list_attempts(path)):
        time = first.get(number) or read_mtime(path / "logs" / str(number))
        if number and time is not None:
            found.append(Event("restart", time, f"the ranks were started again (restart {number})"))
    for start in starts[1:]:
        # The first ranks after a start of the job are part of it.
        same = next((one for one in found if start is not None and one.time >= start - SAME_START), None)
        found = [one for one in found if one is not same]
    yield from found


def list_checkpoints(path: Path, samples: Sequence[NodeReport]) -> Iterator[Event]:
    """Give when checkpoints were written into the run directory, or else when ranks were saving."""
    times: list[float] = []
    try:
        entries = itertools.islice((path / "checkpoints").iterdir(), MOST_CHECKPOINTS)
        times = [time for entry in entries if (time := read_mtime(entry)) is not None]
    except OSError:
        pass
    if times:
        yield from (Event("checkpoint", time, "") for time in sorted(times))
        return
    saving = False
    for sample in sorted(samples, key=lambda one: one.time):
        now = any(state.phase == "saving" for state in sample.ranks)
        if now and not saving:
            yield Event("checkpoint", sample.time, "")
        saving = now


def make_hang_event(hang: Hang, end: float) -> Event:
    """Return a hang as an event, to its recovery or to the run's end."""
    until = end if hang.recovered is None else hang.recovered
    text = f"hang {hang.number}, {describe_time(max(0.0, until - hang.stalled_since))}"
    return Event("hang", hang.stalled_since, f"{text}: {hang.verdict.sentence}", until)


def make_straggler_event(found: Straggler) -> Event:
    """Return a straggler as an event."""
    excess = f"{100 * found.excess:.0f}%"
    return Event(
        "straggler", found.time, f"rank {found.rank} on {found.host}, {excess} slower: {found.detail}"
    )
