"""Which runs there are, what a text means of them, and how one stands, as far as its directory tells."""

import difflib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from launcher.errors import UsageError
from launcher.files import LARGEST, is_planted, open_directory, read_file
from launcher.runs.manifest import (
    CLOSED,
    JOB,
    FirstFailure,
    Outcome,
    ProcessId,
    Run,
    check_process,
    read_manifest,
    read_own_manifest,
    read_time,
)
from launcher.runs.progress import find_last_line, find_newest, find_printed_step, read_mtime
from launcher.runs.rank_logs import list_attempts
from launcher.runs.run_directory import FULL, RunDir, is_full
from launcher.text import describe_time

STAMP = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")
"""A run's ID as `launch` chooses it."""
MOST_NEAR = 200
"""Runs whose names are compared with one that is not found."""


def list_runs(runs_dir: Path) -> Iterator[Path]:
    """Give the run directories, the newest first; whether one has a manifest is looked up as it is given."""
    folders = [run for name in _list_within(runs_dir) for run in _list_within(name)]
    return (path for path in sorted(folders, key=_read_age, reverse=True) if _is_run(path))


def _list_within(folder: Path) -> list[Path]:
    """Return the folders in a folder, another user's symbolic links left out; none if it cannot be read."""
    try:
        with open_directory(folder) as at, os.scandir(at) as entries:
            found = [entry for entry in entries if entry.is_dir()]
            links = [e.name for e in found if e.is_symlink() and is_planted(e.stat(follow_symlinks=False))]
            return [folder / entry.name for entry in found if entry.name not in links]
    except (OSError, ValueError):
        return []


def _read_age(path: Path) -> tuple[str, int, str]:
    """Return what orders runs by their start: the ID tells it, else the folder's time of change."""
    if span := STAMP.fullmatch(path.name):
        return span[1], int(span[2] or 1), path.parent.name
    changed = datetime.fromtimestamp(read_mtime(path) or 0.0).astimezone()
    return changed.strftime("%Y%m%d-%H%M%S"), 0, path.name


def _is_run(path: Path) -> bool:
    """Tell whether a folder is a run's."""
    try:
        return (path / "manifest.json").is_file()
    except (OSError, ValueError):  # too long to be a path, or with a NUL in it
        return False


def name_run(path: Path) -> str:
    """Return a run's name as the verbs take it, `NAME/ID`."""
    return f"{path.parent.name}/{path.name}"


def choose_runs(runs_dir: Path, texts: Sequence[str]) -> list[Path]:
    """Return the runs that some texts mean, each once; raises UsageError with the near names."""
    return list(dict.fromkeys(path for text in texts for path in _find_runs(runs_dir, text)))


def _find_runs(runs_dir: Path, text: str) -> Sequence[Path]:
    """Return the runs that a text means: several only for the number of a job array, its newest members.

    It is a path, `NAME/ID`, an ID, the NAME of runs (the newest), or a job's number (`12`, `12_3`).
    """
    for path in (runs_dir / text, Path(text)):
        if "/" in text.rstrip("/") and _is_run(path):
            return [path.absolute()]
    is_number = JOB.fullmatch(text) is not None
    jobs = _find_jobs(runs_dir, text) if is_number else ()
    named = _find_named(runs_dir, text)
    if jobs and named:
        raise UsageError(
            f"{text} is the job of {name_run(jobs[0])}, and means {name_run(named)} too: write NAME/ID"
        )
    if jobs or named:
        return [named] if named else jobs
    if _is_run(Path(text)):
        return [Path(text).absolute()]
    newest = list(islice(list_runs(runs_dir), MOST_NEAR))
    if not newest:
        raise UsageError(
            f"there is no run {text!r}: none is below runs_dir={runs_dir}; name another with runs_dir=DIR"
        )
    known = [form for path in newest for form in (path.parent.name, path.name, name_run(path))]
    near = difflib.get_close_matches(text, dict.fromkeys(known), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the newest is {name_run(newest[0])}"
    what = "job" if is_number else "run"
    raise UsageError(f"there is no {what} {text!r} below runs_dir={runs_dir}: {hint}")


def _find_named(runs_dir: Path, text: str) -> Path | None:
    """Return the run with this ID, or the newest of this name; raises UsageError for an ID of several."""
    if not text or "/" in text or text in (".", ".."):
        return None
    same = sorted(name / text for name in _list_within(runs_dir) if _is_run(name / text))
    if len(same) > 1:
        shown = ", ".join(name_run(path) for path in same[:8])
        raise UsageError(f"{text} is the ID of {len(same)} runs: write one of {shown}")
    own = sorted(_list_within(runs_dir / text), key=_read_age, reverse=True)
    return next(iter(same), next((path.absolute() for path in own if _is_run(path)), None))


def _find_jobs(runs_dir: Path, number: str) -> Sequence[Path]:
    """Return the newest run of a job, or of each member of a job array, in the order of their numbers."""
    mark, found = f'"{number}'.encode(), dict[int, Path]()
    for path in list_runs(runs_dir):
        with suppress(OSError):
            # Parsing thousands of manifests would take seconds.
            if mark in read_file(path / "manifest.json", LARGEST):
                job, _, member = (read_manifest(path).job_id or "").partition("_")
                if number in (job, f"{job}_{member}"):
                    if not member or "_" in number:
                        return [path.absolute()]
                    found.setdefault(int(member), path.absolute())
    return [found[member] for member in sorted(found)]


LONG_SILENCE = 1800.0
"""Seconds without anything written after which a run that cannot be seen from here may be over."""
LIVE = ("queued", "running")
"""States of a run that is still to end."""
STATES = {
    "submitted": "queued",
    "requeued": "queued",
    "running": "running",
    **dict(zip(CLOSED, CLOSED, strict=True)),
}
"""The manifest's states, and those that are shown."""


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One start of a run that is over, or the one that the run is at."""

    started: str
    ended: str
    state: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run."""

    run: str
    """`NAME/ID`."""
    path: str
    state: str
    """`queued`, `running`, `succeeded`, `failed`, `stopped`; `lost` if it ended and nobody wrote how;
    `unknown` if the manifest cannot be read."""
    reason: str = ""
    """Why it waits or ended; in SLURM's words for a job that waits."""
    job_id: str | None = None
    slurm_state: str | None = None
    """The state as SLURM names it; None if SLURM was not asked, or no longer knows the job."""
    partition: str = ""
    nodes: int = 0
    nodelist: str = ""
    step: int | None = None
    total: int | None = None
    last_line: str = ""
    restarts: int = 0
    """Starts that nobody asked for: SLURM's requeues, and restarts of the ranks."""
    started: str = ""
    """ISO 8601, of the last attempt; of the submission if none has begun."""
    ended: str = ""
    expected_start: str = ""
    """When SLURM thinks that a job that waits will begin, in local time; empty if it does not say."""
    seconds: float | None = None
    """How long the last attempt has run, or a job that waits has waited; None if that is not known."""
    exit_code: int | None = None
    first_failure: FirstFailure | None = None
    command: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    """Nodes that wait to take the place of one that is lost."""
    replacements: tuple[Mapping[str, object], ...] = ()
    """Of the last attempt: the `lost` node, the `spare` in its place, the `time`, and the `evidence`."""
    attempts: tuple[AttemptStatus, ...] = ()
    """Oldest first."""
    process: ProcessId | None = None
    """What the run hangs on if it is no SLURM job."""
    preflight: Mapping[str, object] | None = None
    """What the checks before its start found: `kind`, `seconds`, `sick`, `findings` and more."""
    watch: Mapping[str, object] | None = None
    """What watching says: `state`, `step`, `step_age`, `verdict` and more; None if nothing is known."""

    @property
    def is_live(self) -> bool:
        """Whether it is still to end, as far as is known."""
        return self.state in LIVE


def read_status(path: Path, *, own: bool = False) -> RunStatus:
    """Read a run's manifest; nothing raises, and what is damaged is left out.

    With `own`, which is for what acts upon it, one that another user may have written is `unknown`. Whether
    the process of a run that says that it is running is there is looked at.
    """
    run, doubt = Run(), "its manifest.json cannot be read"
    try:
        run = read_own_manifest(path) if own else read_manifest(path)
    except PermissionError as error:
        doubt = f"{error.filename}: {error.strerror}"
    last, outcome, job_id = run.last, run.last.outcome, run.job_id
    state = STATES.get(outcome.state, "unknown")
    begin, end = read_time(last.started), time.time() if state in LIVE else read_time(last.ended)
    if state == "queued":
        begin = read_time(last.ended) or begin  # of the attempt before, if there was one
    before = [attempt.outcome.state for attempt in run.attempts[:-1]]
    resumes = sum(word in CLOSED or (word == "running" and not job_id) for word in before)  # by run_dir=
    status = RunStatus(
        run=name_run(path),
        path=str(path.absolute()),
        state=state,
        reason=doubt if state == "unknown" else explain_outcome(outcome),
        job_id=job_id,
        nodes=len(last.hosts),
        nodelist=",".join(last.hosts),
        restarts=max(0, max(list_attempts(path), default=0) - resumes),
        started=last.started,
        ended=last.ended or "",
        seconds=None if begin is None or end is None else max(0.0, end - begin),
        exit_code=outcome.exit_code,
        first_failure=outcome.first_failure,
        command=tuple(last.command),
        spares=tuple(last.spares),
        replacements=tuple(last.replacements),
        attempts=list_attempt_states(run),
        process=run.process,
        preflight=last.preflight,
    )
    if state != "running" or not status.process or (is_alive := check_process(status.process)):
        return status
    host, pid = status.process.host, status.process.pid
    if is_alive is False:
        full = f"; {FULL}" if is_full(RunDir(path)) else ""
        return mark_lost(status, f"process {pid} on {host} is gone, and left no word{full}")
    # On another host it may have died, which is said if nothing has been written for long.
    written = [find_newest(folder) or 0 for folder in (path / "logs", path / "watch")]
    silence = time.time() - max(written)
    if not any(written) or silence < LONG_SILENCE:
        return replace(status, reason="")
    reason = (
        f"nothing was written for {describe_time(silence)}: whether it goes on can be seen on {host} alone"
    )
    return replace(status, reason=reason)


def mark_lost(status: RunStatus, reason: str) -> RunStatus:
    """Return the status of a run that ended without a word; nobody knows when."""
    return replace(status, state="lost", reason=reason, seconds=None)


def explain_outcome(outcome: Outcome) -> str:
    """Say why a run ended: who failed first, the cause, or the signal."""
    failure, cause, reason = outcome.first_failure, outcome.cause, outcome.reason or ""
    is_crash = failure is not None and cause in (None, "crash")
    words = list(outcome.events) if is_crash else []
    words += [reason or cause] if cause and not is_crash else []
    if failure:
        who = f"rank {failure.rank} on {failure.host}"
        if not any(f"{who} " in word for word in words):
            words.append(f"{who} {failure.reason}")
    if not words and outcome.signal:
        words.append(f"by {outcome.signal}")
    return "; ".join(words or [reason])


def list_attempt_states(run: Run) -> tuple[AttemptStatus, ...]:
    """Return a run's starts; a submission that never ran is none."""
    return tuple(
        AttemptStatus(
            one.started,
            one.ended or "",
            one.outcome.state,
            one.outcome.cause or "",
            explain_outcome(one.outcome),
        )
        for one in run.attempts
        if one.outcome.state not in ("", "submitted")
    )


def add_progress(status: RunStatus) -> RunStatus:
    """Add what rank 0 has printed last: its step, and its last line."""
    path = Path(status.path)
    step, last = find_printed_step(path), find_last_line(path)
    number, total = (step.step, step.total) if step else (None, None)
    return replace(status, step=number, total=total, last_line=last)
