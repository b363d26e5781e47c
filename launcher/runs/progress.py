"""How far a run has come: what rank 0 prints, checkpoints, its objective, and ranks that ended early."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from glob import iglob
from itertools import islice
from pathlib import Path

from launcher.files import read_file
from launcher.runs.rank_logs import decode_line, find_logs, list_attempts, read_from, read_tail
from launcher.runs.run_directory import RunDir
from launcher.text import name_some, strip_sequences

STEP = re.compile(r"\bstep[ :=]+(\d{1,15})\b(?:\s*/\s*(\d{1,15})\b)?", re.IGNORECASE)
METRIC = re.compile(
    r"\b(loss|lr|tokens/s|tflops|mfu)[ :=]+(-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]?\d+)?%?|nan\b|-?inf\b)",
    re.IGNORECASE,
)
WORD = b"step"
MOST_LINES, MOST_STEPS = 64, 16
"""Lines with the word that are read of a chunk from either end, and steps that are taken of it."""
MOST_BYTES = 4096
"""Bytes at the end of a line that are read."""
LINES, TAIL = 20000, 400
"""Last lines of a log that are searched for a step, after an attempt and while one runs."""
MOST_ENTRIES = 10000
"""Entries of the folder of checkpoints that are looked at."""
PASSED_OVER = ("launch-rank: ", "launch-agent: ", "launch: run directory ")
"""How lines begin that tell nothing: those on a rank's start and end, and the last one of a job's own log."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One logging step."""

    step: int
    total: int | None
    """Steps of the whole run, if the program prints them."""
    metrics: tuple[tuple[str, str], ...]
    """Name and value as printed: loss, lr, tokens/s, tflops, mfu."""


def parse_progress(text: str) -> Progress | None:
    """Read a line such as `step 10/200 loss 5.54 tokens/s 12345 tflops 0.01`; None for any other line."""
    step = STEP.search(text)
    if not step:
        return None
    metrics = tuple((name.lower(), value) for name, value in METRIC.findall(text))
    return Progress(int(step[1]), int(step[2]) if step[2] else None, metrics) if metrics else None


def find_steps(lines: Iterable[bytes]) -> Iterator[Progress]:
    """Give the steps of some lines; of many lines with the word, some are read."""
    candidates = (line[-MOST_BYTES:] for line in lines if WORD in line.lower())
    for line in islice(candidates, MOST_LINES):
        if step := parse_progress(line.decode(errors="replace")):
            yield step


def merge_steps(earlier: Progress, step: Progress) -> Progress:
    """Return a step that keeps the metrics of an earlier one which it does not tell itself."""
    return replace(step, metrics=tuple({**dict(earlier.metrics), **dict(step.metrics)}.items()))


@dataclass(slots=True)
class ProgressReader:
    """Reads a program's progress from chunks of its output: the first step ever and the newest, not all."""

    steps: list[Progress] = field(default_factory=list)
    """The first logging step and the last, with the newest value of each metric."""
    partial: dict[str, bytes] = field(default_factory=dict)
    """By stream, the end of a line that is not finished yet."""

    def add(self, stream: str, data: bytes) -> bool:
        """Take a chunk of a stream, and tell whether there was a step in it."""
        data = self.partial.pop(stream, b"") + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self.partial[stream] = data[max(end, len(data) - MOST_BYTES) :]
        if WORD not in data.lower():
            return False
        lines = data[:end].replace(b"\r", b"\n").split(b"\n")
        found = [*islice(find_steps(reversed(lines)), MOST_STEPS)][::-1]
        first = None if self.steps else next(find_steps(lines), None)
        if first and first not in found:
            found.insert(0, first)
        for step in found:
            self.steps[1:] = [merge_steps(self.steps[-1], step) if self.steps else step]
        return bool(found)

    def finish(self) -> bool:
        """Take the lines that have no end, and tell whether there was a step in them."""
        found = [self.add(stream, b"\n") for stream in tuple(self.partial)]
        return any(found)


def describe_progress(steps: Sequence[Progress]) -> str:
    """Return what rank 0 reported, first to last: `loss 5.55 to 2.41 over 200 steps, 12345 tokens/s …`."""
    if not steps:
        return ""
    first, last = dict(steps[0].metrics), dict(steps[-1].metrics)
    parts = []
    if "loss" in first and "loss" in last:
        begin, end = steps[0].step, steps[-1].step
        count = end if begin else end + 1  # a program may count from 0
        parts.append(
            f"loss {last['loss']} at step {end}"
            if begin == end
            else f"loss {first['loss']} to {last['loss']} over {count} steps"
        )
    best = {name: value for step in steps for name, value in step.metrics}
    forms = {"tokens/s": "{} tokens/s", "tflops": "{} TFLOPS", "mfu": "MFU {}"}
    parts += [form.format(best[name]) for name, form in forms.items() if name in best]
    return ", ".join(parts)


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
    """Read what the attempt has left, restarts included; nothing raises.

    Absolute `patterns`, as glob has them, find checkpoints that are not in the run directory: those that are
    not newer than the run's configuration are an earlier run's.
    """
    numbers = sorted(number for number in list_attempts(run.path) if number >= run.first_attempt)
    logs = [path for number in numbers for path in list_own_logs(run, number)]
    begins = (raw for path in logs for raw in read_from(path, 0)[0].split(b"\n"))
    # What stderr tells may be of an evaluation.
    last = find_last_step(run, numbers, endings=("out",)) or find_last_step(run, numbers)
    first = next((step for raw in begins if (step := parse_progress(decode_line(raw)))), last)
    begun = read_mtime(run.path / "config.yaml") or 0.0
    found = (Path(name) for each in patterns for name in islice(iglob(each, recursive=True), MOST_ENTRIES))  # noqa: PTH207 - it is absolute
    elsewhere = [time for path in found for time in (read_mtime(path), find_newest(path)) if time]
    times = [time for time in elsewhere if time > begun]
    times += filter(None, [find_newest(run.path / "checkpoints")])
    return AttemptProgress((first, last) if first and last else (), max(times, default=None))


def list_own_logs(
    run: RunDir, attempt: int, rank: int = 0, endings: Sequence[str] = ("err", "out")
) -> list[Path]:
    """Return a rank's logs; some programs report on stderr."""
    return [run.rank_log(rank, attempt, ending) for ending in endings]


def find_last_step(
    run: RunDir,
    attempts: Iterable[int],
    rank: int = 0,
    count: int = LINES,
    metric: str = "",
    endings: Sequence[str] = ("err", "out"),
) -> Progress | None:
    """Return the newest step that a rank printed in the newest attempt that has one, by its last lines.

    It has the newest value of each metric; with `metric`, a step without that one is none.
    """
    for attempt in sorted(attempts, reverse=True):
        found = []
        for path in list_own_logs(run, attempt, rank, endings):
            steps = filter(None, map(parse_progress, reversed(read_tail(path, count))))
            known = (step for step in steps if not metric or metric in dict(step.metrics))
            newest = [*islice(known, MOST_STEPS)]
            found += [reduce(merge_steps, reversed(newest))] if newest else []
        if found:
            return max(found, key=lambda step: step.step)
    return None


def find_printed_step(path: Path) -> Progress | None:
    """Return a run's newest step; until the newest attempt has come to one, that of the one before it."""
    return find_last_step(RunDir(path), list_attempts(path), count=TAIL)


def read_mtime(path: Path) -> float | None:
    """Return when a file was last written; None if that is not to be had."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def find_newest(folder: Path) -> float | None:
    """Return when something in a folder was last written, or in the folders in it."""
    try:
        entries = [*islice(folder.iterdir(), MOST_ENTRIES)]
        for entry in [*entries]:
            entries += islice(entry.iterdir(), MOST_ENTRIES) if entry.is_dir() else ()
        return max((path.stat().st_mtime for path in entries), default=None)
    except OSError:
        return None


def find_last_line(path: Path) -> str:
    """Return a run's last line, of the log that was written to last; empty if there is none."""
    attempt = max(list_attempts(path), default=None)
    own = [] if attempt is None else list_own_logs(RunDir(path), attempt)
    # If rank 0 has not printed any: the job's log, or else the agents'.
    for logs in (own, find_logs(path, "slurm-"), find_logs(path, "agent-")):
        for log in sorted(logs, key=lambda log: read_mtime(log) or 0, reverse=True):
            for line in reversed(read_tail(log, TAIL)):
                text = strip_sequences(line).strip()
                if text and not text.startswith(PASSED_OVER):
                    return text
    return ""


FILE = "objective.txt"
"""File in the run directory that holds a run's objective: a number, or one for each of several directions."""
LOSS, FROM_FILE = KINDS = ("loss", "file")
"""Where an objective comes from: the values of `objective`."""
MOST_BYTES_OF_FILE = 1 << 16
"""Bytes of the file at most."""


class ObjectiveError(ValueError):
    """A run has no objective: why, and what to do."""


def read_objective(path: Path, kind: str) -> float | list[float]:
    """Return the objective of a run that has ended; a list if its file has several.

    `kind` is one of KINDS: the loss of the last step that rank 0 has printed one for, or the numbers in the
    file. Raises ObjectiveError.
    """
    file = path / FILE
    if kind == LOSS:
        if last := find_last_step(RunDir(path), list_attempts(path), metric="loss"):
            return float(dict(last.metrics)["loss"].replace(",", "").removesuffix("%"))
        raise ObjectiveError(
            f"rank 0 has printed no loss, and there is {file}: set objective={FROM_FILE}"
            if file.exists()
            else "rank 0 has printed no line with a step and a loss, as `step 10 loss 2.3`: print one, or"
            f" write the number to {FILE} in the run directory and set objective={FROM_FILE}"
        )
    try:
        numbers = [float(word) for word in read_file(file, MOST_BYTES_OF_FILE).decode().split()]
    except OSError as error:
        raise ObjectiveError(
            f"{file} cannot be read ({error.strerror}): the program is to write it"
        ) from None
    except ValueError:
        raise ObjectiveError(f"{file} holds what is no number: write numbers alone") from None
    if not numbers:
        raise ObjectiveError(f"{file} is empty: write a number")
    return numbers if len(numbers) > 1 else numbers[0]


LONG_BEFORE = 30.0
"""Seconds before a stop: a rank that ended with 0 later than that may have ended as all others would have."""
MOST_NAMED = 4
"""Ranks and nodes that are named in a sentence."""


@dataclass(frozen=True, slots=True)
class CleanEnd:
    """A rank that has ended with 0."""

    rank: int
    host: str
    time: float
    """Seconds since the epoch."""
    attempt: int
    """Whose folder has its logs."""


def explain_early_exits(run: RunDir, ends: Iterable[CleanEnd], before: float, world: int) -> str:
    """Say `rank 3 on n1 ended with 0 at step 40 while 7 ranks went on`, of ranks that ended before a time.

    Empty if none did. `before` are seconds since the epoch; `world` is the number of ranks, 0 if it is not
    known. Ranks that have printed their last step have ended as they should.
    """
    early = sorted((end for end in ends if end.time < before), key=lambda end: end.rank)
    if not early or len(early) == world:
        return ""
    first = min(early, key=lambda end: end.time)
    step, came = find_last_step(run, [first.attempt], first.rank), ""
    if step and step.total is not None and step.step >= step.total:
        return ""
    if step is None and (reached := find_last_step(run, [first.attempt])):
        came = f" (rank 0 came to step {reached.step})"
    who = f"rank{'' if len(early) == 1 else 's'} {name_some([str(end.rank) for end in early], MOST_NAMED)}"
    where = name_some([*dict.fromkeys(end.host for end in early)], MOST_NAMED)
    left = max(world - len(early), 0)
    others = {0: "others", 1: "1 rank"}.get(left, f"{left} ranks")
    at = f" at step {step.step}" if step else ""
    return f"{who} on {where} ended with 0{at} while {others} went on{came}"
