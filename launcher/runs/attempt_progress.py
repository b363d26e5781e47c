"""How far a run and its attempts have come: what rank 0 printed, its steps and last line, and checkpoints."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from glob import iglob
from pathlib import Path

from launcher.runs.progress import MOST_STEPS, Progress, merge_steps, parse_progress
from launcher.runs.rank_logs import decode_line, read_from, read_tail
from launcher.runs.run_directory import RunDir, list_logs
from launcher.text import strip_sequences

LINES = 20000
"""Last lines of a log that are searched for a step."""
MOST = 10000
"""Entries of the folder of checkpoints that are looked at."""
PASSED_OVER = ("launch-rank: ", "launch-agent: ", "launch: run directory ")
"""How lines begin that tell nothing: those on a rank's start and end, and the last one of a job's own log."""
TAIL = 400
"""Last lines of a log that are searched for a step."""


@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """What is to be seen of an attempt's progress."""

    steps: tuple[Progress, ...]
    """The first and the last step that rank 0 printed; none if it printed none."""
    newest: float | None
    """When the newest checkpoint was written, by the filesystem's clock; None if there is none."""

    @property
    def step(self) -> int | None:
        """The last step."""
        return self.steps[-1].step if self.steps else None

    @property
    def finished(self) -> bool | None:
        """Whether the last step is the last of all; None if the program does not tell."""
        last = self.steps[-1] if self.steps else None
        return None if last is None or last.total is None else last.step >= last.total


def measure_attempt(run: RunDir, patterns: Sequence[str] = ()) -> AttemptProgress:
    """Read what the attempt has left, torchrun's restarts included; nothing raises.

    Absolute `patterns`, as glob has them, find checkpoints that are not in the run directory.
    """
    numbers = sorted(number for number in list_attempts(run.path) if number >= run.first_attempt)
    logs = [path for number in numbers for path in find_logs(run, number)]
    first = next((step for path in logs for step in read_first(path)), None)
    last = next((step for path in reversed(logs) if (step := read_newest(path))), None)
    steps = (first or last, last) if last else ()
    newest = [find_newest(run.path / "checkpoints"), find_newest_elsewhere(run, patterns)]
    times = [time for time in newest if time is not None]
    return AttemptProgress(tuple(step for step in steps if step), max(times, default=None))


def find_logs(run: RunDir, attempt: int) -> Iterable[Path]:
    """Give rank 0's logs; some programs report on stderr."""
    return (run.rank_log(0, attempt, ending) for ending in ("err", "out"))


def find_last_step(run: RunDir, rank: int, attempt: int) -> Progress | None:
    """Return the last step that a rank printed in an attempt; None if it printed none."""
    logs = (run.rank_log(rank, attempt, ending) for ending in ("out", "err"))
    return next((step for path in logs for step in read_last(path)), None)


def read_first(path: Path) -> Iterable[Progress]:
    """Give the steps in the first part of a log."""
    lines = read_from(path, 0)[0].split(b"\n")
    return (step for raw in lines if (step := parse_progress(decode_line(raw))))


def read_last(path: Path) -> Iterable[Progress]:
    """Give the steps in the last part of a log, the last one first."""
    lines = reversed(read_tail(path, LINES))
    return (step for line in lines if (step := parse_progress(line)))


def read_newest(path: Path) -> Progress | None:
    """Return the last step of a log, with the newest value of each metric; None if there is none."""
    newest = None
    for step in itertools.islice(read_last(path), MOST_STEPS):
        newest = merge_steps(step, newest) if newest else step
    return newest


def find_newest_elsewhere(run: RunDir, patterns: Sequence[str]) -> float | None:
    """Return when the newest checkpoint was written that a pattern finds, a folder's files included.

    What is not newer than the run's configuration is an earlier run's.
    """
    try:
        begun = (run.path / "config.yaml").stat().st_mtime
    except OSError:
        begun = 0.0
    found = (
        time
        for pattern in patterns
        for name in itertools.islice(iglob(pattern, recursive=True), MOST)  # noqa: PTH207 - it is absolute
        for time in (read_mtime(Path(name)), find_newest(Path(name)))
        if time is not None and time > begun
    )
    return max(found, default=None)


def read_mtime(path: Path) -> float | None:
    """Return when a file was last written; None if that is not to be had."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def find_newest(folder: Path) -> float | None:
    """Return when something in a folder was last written, or in the folders in it."""
    try:
        entries = list(itertools.islice(folder.iterdir(), MOST))
        below = [
            path for entry in entries if entry.is_dir() for path in itertools.islice(entry.iterdir(), MOST)
        ]
        return max((path.stat().st_mtime for path in (*entries, *below)), default=None)
    except OSError:
        return None


def find_latest(path: Path) -> tuple[Progress | None, str]:
    """Return a run's newest step and its last line; None and empty if there are none."""
    attempts = sorted(list_attempts(path), reverse=True)
    # Until the newest attempt has come to a step, that of the one before it counts.
    step = next((found for attempt in attempts if (found := find_step(path, attempt))), None)
    last = next((line for attempt in attempts[:1] if (line := find_last_line(path, attempt))), "")
    return step, last or find_own_line(path)


def list_attempts(path: Path) -> list[int]:
    """Return the numbers of a run's attempts that have a folder for logs."""
    return [int(name) for name in list_logs(path) if name.isdecimal()]


def find_step(path: Path, attempt: int) -> Progress | None:
    """Return the newest step among the last lines of rank 0."""
    logs = (path / "logs" / str(attempt) / f"rank-0.{ending}" for ending in ("out", "err"))
    steps = [step for log in logs for line in read_tail(log, TAIL) if (step := parse_progress(line))]
    return max(steps, key=lambda step: step.step, default=None)


def find_last_line(path: Path, attempt: int) -> str:
    """Return the last line that rank 0's program printed, on the stream that it wrote to last."""
    logs = [path / "logs" / str(attempt) / f"rank-0.{ending}" for ending in ("out", "err")]
    return find_last_text([log for log in logs if log.exists()])


def find_own_line(path: Path) -> str:
    """Return the last line of the job's log, or else of the agents', if no rank has printed any."""
    return find_last_text(find_job_logs(path)) or find_last_text(find_agent_logs(path))


def find_job_logs(path: Path) -> list[Path]:
    """Return the logs of a run's jobs."""
    names = sorted(list_logs(path))
    return [path / "logs" / name for name in names if name.startswith("slurm-") and name.endswith(".out")]


def find_agent_logs(path: Path) -> list[Path]:
    """Return the logs of torchrun's agents."""
    names = sorted(list_logs(path))
    return [path / "logs" / name for name in names if name.startswith("agent-") and name.endswith(".log")]


def find_last_text(logs: Sequence[Path]) -> str:
    """Return the last line with something in it, of the log that was written to last."""
    for log in sorted(logs, key=read_change, reverse=True):
        for line in reversed(read_tail(log, TAIL)):
            text = strip_sequences(line).strip()
            if text and not text.startswith(PASSED_OVER):
                return text
    return ""


def read_change(path: Path) -> float:
    """Return when a file was written to; 0 if it is gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
