"""What a sweeper optimizes: the last loss that a run has printed, or numbers that its program has written."""

from pathlib import Path

from launcher.files import read_file
from launcher.runs.attempt_progress import find_logs, list_attempts, read_last
from launcher.runs.run_directory import RunDir

FILE = "objective.txt"
"""File in the run directory that holds a run's objective: a number, or one for each of several directions."""
LOSS, FROM_FILE = KINDS = ("loss", "file")
"""Where an objective comes from: the values of `objective`."""
MOST = 1 << 16
"""Bytes of the file at most."""


class ObjectiveError(ValueError):
    """A run has no objective: why, and what to do."""


def read_objective(path: Path, kind: str) -> float | list[float]:
    """Return the objective of a run that has ended; a list if there are several.

    `kind` is one of KINDS. Raises ObjectiveError.
    """
    return read_loss(path) if kind == LOSS else read_numbers(path / FILE)


def read_loss(path: Path) -> float:
    """Return the loss of the last step that rank 0 has printed one for; raises ObjectiveError."""
    run = RunDir(path)
    for attempt in sorted(list_attempts(path), reverse=True):
        logs = find_logs(run, attempt)
        found = [
            next((step for step in read_last(log) if "loss" in dict(step.metrics)), None) for log in logs
        ]
        steps = [step for step in found if step]
        if steps:
            last = max(steps, key=lambda step: step.step)
            return float(dict(last.metrics)["loss"].replace(",", "").removesuffix("%"))
    if (path / FILE).exists():
        raise ObjectiveError(
            f"rank 0 has printed no loss, and there is {path / FILE}: set objective={FROM_FILE}"
        )
    raise ObjectiveError(
        f"rank 0 has printed no line with a step and a loss, as `step 10 loss 2.3`: print one, or write the"
        f" number to {FILE} in the run directory and set objective={FROM_FILE}"
    )


def read_numbers(path: Path) -> float | list[float]:
    """Return the number in a file, or all of several between spaces or line ends; raises ObjectiveError."""
    try:
        numbers = [float(word) for word in read_file(path, MOST).decode().split()]
    except OSError as error:
        raise ObjectiveError(
            f"{path} cannot be read ({error.strerror}): the program is to write it"
        ) from None
    except ValueError:
        raise ObjectiveError(f"{path} holds what is no number: write numbers alone") from None
    if not numbers:
        raise ObjectiveError(f"{path} is empty: write a number")
    return numbers if len(numbers) > 1 else numbers[0]
