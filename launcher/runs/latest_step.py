"""What a run's rank 0 has come to: its newest step, and the last line that it printed."""

from collections.abc import Sequence
from pathlib import Path

from launcher.runs.progress import Progress, parse_progress
from launcher.runs.rank_logs import read_tail
from launcher.runs.run_directory import list_logs
from launcher.text import strip_sequences

PASSED_OVER = ("launch-rank: ", "launch-agent: ", "launch: run directory ")
"""How lines begin that tell nothing: those on a rank's start and end, and the last one of a job's own log."""
TAIL = 400
"""Last lines of a log that are searched for a step."""


def find_latest(path: Path) -> tuple[Progress | None, str]:
    """Return a run's newest step and its last line; None and empty where there are none."""
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
    """Return the last line of the job's own log, or else of the agents', where no rank has printed any."""
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
    """Return when a file was written to; 0 where it is gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
