"""What watching says of a run, for `launch status`."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from launcher.runs.run_status import RunStatus
from launcher.watch.model import Hang, JobState
from launcher.watch.run_files import ReportCache

SILENT = 30.0
"""Seconds since the last word of the node that judges, after which there will hardly be another."""


def add_watch(status: RunStatus) -> RunStatus:
    """Add what the node that judges has written last; a hang that goes on is the reason that is shown."""
    stored = ReportCache(Path(status.path)).read_job()
    if stored is None:
        return status
    state = stored.value
    running = status.state == "running" and state.state != "ended"
    hang = state.hangs[-1] if state.hangs else None
    reason = status.reason
    if running and hang and hang.recovered is None and not reason:
        reason = name_hang(hang)
    silence = time.monotonic() - stored.seen
    return replace(status, reason=reason, watch=summarize_watch(state, silence, running=running))


def summarize_watch(state: JobState, silence: float, *, running: bool) -> dict[str, object]:
    """Return the JSON form; `verdict` is the last hang's.

    `step_age` is what was written last: steps may have been made since, unless nothing is written any more.
    """
    age = state.step_age
    if age is not None and running and silence > SILENT:
        age += silence
    hang = state.hangs[-1] if state.hangs else None
    return {
        "state": state.state if running else "ended",
        "time": state.time,
        "step": state.step,
        "step_age": None if age is None else round(age, 3),
        "step_seconds": state.p50,
        "verdict": asdict(hang.verdict) if hang else None,
        "hang": None if hang is None else {"number": hang.number, "recovered": hang.recovered},
        "hangs": len(state.hangs),
        "restarts": state.restarts,
        "stragglers": len({one.rank for one in state.stragglers}),
        "silent": list(state.silent),
    }


def name_hang(hang: Hang) -> str:
    """Say what holds a run up."""
    where = f"after step {hang.step}" if hang.step else "before the first step"
    return f"hang {hang.number} {where}: {hang.verdict.sentence}"
