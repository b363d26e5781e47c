"""What watching says of a run, for `launch status`."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from launcher.runs.run_status import RunStatus
from launcher.watch.node_reports import read_job_state
from launcher.watch.watch_model import Hang, JobState


def add_watch(status: RunStatus) -> RunStatus:
    """Add what the node that judges has written last; a hang that goes on is the reason that is shown."""
    state = read_job_state(Path(status.path))
    if state is None:
        return status
    running = status.state == "running" and state.state != "ended"
    hang = state.hangs[-1] if state.hangs else None
    reason = status.reason
    if running and hang and hang.recovered is None and not reason:
        reason = name_hang(hang)
    return replace(status, reason=reason, watch=summarize_watch(state, running=running))


def summarize_watch(state: JobState, *, running: bool) -> dict[str, object]:
    """Return the JSON form; `step_age` are seconds until now, and `verdict` is the last hang's."""
    age = state.step_age
    if running and age is not None:
        age += max(0.0, time.time() - state.time)
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
