"""`launch tune batch`: the largest micro-batch that fits and the fastest one, by the program's own option."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.tune import Conclusion, Strategy
from launcher.cli.tune_trial import FinishedTrial, specify_trial
from launcher.config.settings import Settings
from launcher.config.training import make_fit_request
from launcher.errors import UsageError
from launcher.fit.memory import estimate_memory
from launcher.fit.training import ModelDimensions
from launcher.launch.job import Job, JobSpec
from launcher.plan.model import Plan
from launcher.probe.limits import find_usable_memory
from launcher.protocol import LAUNCH_METER
from launcher.report.fit import describe_batch_size, print_batches, tabulate_batches
from launcher.runs.rank_logs import read_tail
from launcher.runs.secrets import mask_words
from launcher.text import format_size, join_words
from launcher.tune.batch_search import FIRST_BATCH, MARGIN, BatchBounds, BatchSearch
from launcher.tune.trials import (
    FAILED,
    FITS,
    TOO_LARGE,
    MeasureError,
    Trial,
    check_effect,
    find_memory_error,
    measure_batch,
)

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.compose import Composed

_STREAMS = ("err", "out")
LOG_LINES = 20_000
"""Last lines of each rank's logs that are searched for an allocation that has failed."""
KNOWN = (
    "--micro-batch-size",
    "--micro_batch_size",
    "--per-device-train-batch-size",
    "--per_device_train_batch_size",
    "--train-batch-size",
    "--train_batch_size",
    "--batch-size",
    "--batch_size",
    "batch_size=",
)
"""Options that are recognized among a program's arguments, if tune.option names none."""
PREFIX = "program."
"""Of keys of the configured program."""
OF_A_SEARCH = ("save", "format", "new_run_dir")
"""Settings beside `tune` that a search alone has."""


class BatchStrategy(Strategy):
    """Doubles the size until it does not fit, then looks between; see `BatchSearch`."""

    subject, group = "batch", "program"
    variables = (LAUNCH_METER,)
    describe, tabulate = staticmethod(describe_batch_size), staticmethod(tabulate_batches)

    def __init__(self, composed: "Composed", spec: JobSpec, argv: Sequence[str]) -> None:
        super().__init__(composed, spec, argv)
        self.option = find_batch_option(spec)
        if self.target is not None and spec.program is not None:
            raise UsageError(
                f"save={self.target}: a file can hold the choice for a program of the group `program` alone,"
                " leave it out: the command to use is printed"
            )
        self.bounds = BatchBounds(0, 0, 0, 0, 0)

    def set_bounds(self, job: Job) -> tuple[str, str]:
        """Begin with the size that the command line sets, else with one that is expected to fill a GPU.

        Else with the configured program's, else with FIRST_BATCH.
        """
        spec, option, tune = self.spec, self.option, job.config.tune
        asked = option.start if spec.program is not None or option.name in spec.given else None
        if asked is not None and asked > tune.max_batch:
            raise UsageError(
                f"{option.render(asked)} is above tune.max_batch={tune.max_batch}: give a larger one"
            )
        expected = None
        if not asked:
            expected = expect_batch(
                job.config, job.plan, spec.fit_model, is_bundled=spec.is_bundled, environ=job.environ
            )
        start = min(asked or expected or option.start or FIRST_BATCH, tune.max_batch)
        memory_kib = find_usable_memory(job.plan.machine)
        self.bounds = BatchBounds(start, tune.max_batch, memory_kib, tune.seconds, tune.timeout)
        most = f"{tune.max_batch}"
        most += f", within {format_size(memory_kib)} of memory" if memory_kib else ""
        first = option.render(start)
        return (
            f"{first} first, at most {most}",
            f"{first}, then twice as much until it does not fit, up to {most}",
        )

    def next(self) -> int | None:
        check_effect(self.trials, self.option.name)
        return self._search.next()

    @property
    def _search(self) -> BatchSearch:
        return BatchSearch(self.trials, self.bounds)

    def argument(self, value: int) -> str:
        return self.option.render(value)

    def specify(self, value: int, run_path: Path) -> JobSpec:
        spec, name = self.spec, self.option.name
        if spec.program is None:  # trials are resolved from the configuration
            self.composed.tree.program[name.removeprefix(PREFIX)] = value
        else:
            spec = replace(spec, program=set_argument(spec.program, name, value))
        return specify_trial(self.composed, spec, run_path / f"batch-{value}")

    def judge(self, finished: FinishedTrial, value: int) -> Trial:
        """Tell whether a size fits, and how fast it is.

        A program that catches the error of an allocation, and goes on or ends in peace, does not fit either.
        """
        finished.check_signal()
        run = finished.monitor.run
        logs = [
            run.rank_log(rank, run.first_attempt, end) for rank in range(finished.ranks) for end in _STREAMS
        ]
        reason = find_memory_error(line for log in logs for line in read_tail(log, LOG_LINES))
        if not reason and finished.starved:
            reason = "the machine's memory ran out, so it was ended"
        elif not reason and finished.oom_kills > 0:
            reason = "the kernel killed a process for memory"
        if reason:
            return Trial(value, verdict=TOO_LARGE, reason=reason)
        finished.check()
        return measure_batch(finished.read_records(), value, finished.ranks)

    def excuse(self, error: MeasureError, value: int) -> Trial | None:
        """Once a size has fitted, a failure for another reason than memory is put down to the size."""
        if all(trial.verdict != FITS for trial in self.trials):
            return None
        lines = [line.strip().removeprefix("| ").strip() for line in str(error).splitlines()]
        return Trial(value, verdict=FAILED, reason=next((line for line in reversed(lines) if line), ""))

    def conclude(self) -> Conclusion:
        choice = self._search.conclude()
        rows = [
            {
                "batch": trial.value,
                "verdict": trial.verdict,
                "sequences_per_second": round(trial.rate, 4) or None,
                "standard_error": round(trial.error, 4) if trial.rate else None,
                "step_seconds": round(trial.step_seconds, 6) or None,
                "steps": trial.steps,
                "unit": trial.unit,
                "memory_kib": trial.memory_kib or None,
                "gpu_kib": trial.gpu_kib or None,
                "gpu_total_kib": trial.gpu_total_kib or None,
                "reason": trial.reason or None,
            }
            for trial in sorted(self.trials, key=lambda trial: trial.value)
        ]
        facts = {
            "option": self.option.name,
            **asdict(choice),
            "argument": self.argument(choice.batch) if choice.batch else None,
            "trials": rows,
        }
        if choice.batch is None:
            last = self.trials[-1] if self.trials else Trial(self.bounds.start)
            why = (
                f"{self.argument(last.value)} does not fit ({last.reason}), nor does any larger one: use"
                " a smaller model or shorter sequences, activation checkpointing, or more sharding"
            )
            return Conclusion(None, facts, [why], {})
        safe = choice.largest_with_margin or "none is known to have 5% to spare"
        fast = choice.fastest or "not measured"
        sizes = f"with 5% of the memory to spare: {safe}; fastest: {fast}; use {choice.batch}"
        base = self.spec.choices.get("program", "train")
        return Conclusion(
            choice.batch,
            facts,
            lines=[
                f"largest micro-batch that fits: {choice.largest} ({choice.limit})",
                f"{sizes}: `{self._render_command(choice.batch)}`",
            ],
            settings={
                "defaults": f"[{json.dumps(base)}, _self_]",
                self.option.name.removeprefix(PREFIX): choice.batch,
            },
        )

    def show(self, console: "Console") -> None:
        print_batches(console, self.trials, self._search.conclude())

    def _render_command(self, batch: int) -> str:
        """Return the command that uses a size, with the settings of this one that later runs need too."""
        words = dropwhile(lambda word: word in ("tune", "batch"), self.argv)
        settings = []
        for word in takewhile(lambda word: "=" in word and not word.startswith("-"), words):
            key = word.partition("=")[0].lstrip("+~")
            if key not in (*OF_A_SEARCH, self.option.name) and not key.startswith("tune."):
                settings.append(word)
        if self.spec.program is None:
            return f"launch {join_words([*mask_words(settings), self.argument(batch)])}"
        program = mask_words(set_argument(self.spec.program, self.option.name, batch))
        return f"launch {join_words([*mask_words(settings), '--', *program])}"


def expect_batch(
    config: Settings,
    plan: Plan,
    model: ModelDimensions | None,
    *,
    is_bundled: bool,
    environ: Mapping[str, str],
) -> int | None:
    """Return the largest power of two that is expected to fit a rank's GPU with a margin.

    None without a GPU or a known model: on CPUs the memory is no measure of what is fast, and a step that
    fills it can take minutes. 1 if nothing is expected to fit, since estimates can be off.
    """
    if config.fit.check == "off" or not all(rank.gpu for rank in plan.ranks):
        return None
    try:
        request = make_fit_request(config, plan, model, nodes=1, is_bundled=is_bundled, environ=environ)
        if request is None or not request.device.memory_mib:
            return None
        size, limit = 1, (1 - MARGIN) * (request.device.memory_mib << 20)
        while 2 * size <= config.tune.max_batch:
            settings = replace(request.settings, micro_batch=2 * size)
            if estimate_memory(replace(request, settings=settings)).total.expected > limit:
                break
            size *= 2
        return size
    except UsageError:  # settings of `fit` that make no training are no reason not to measure
        return None


@dataclass(frozen=True, slots=True)
class BatchOption:
    """Where a size is put: an option of the program's, or a key of the configured program's."""

    name: str
    """`--batch-size`, `train.batch_size=`, or the key `program.batch_size`."""
    separator: str
    """What stands between name and size."""
    start: int | None
    """The size that is given now; None if there is none."""

    def render(self, batch: int) -> str:
        """Return the argument as it is typed."""
        return f"{self.name}{self.separator}{batch}"


def find_batch_option(spec: JobSpec) -> BatchOption:
    """Return the option that tune.option names, or that is known; raises UsageError."""
    name = spec.config.tune.option
    if spec.program is None:
        name = name or f"{PREFIX}batch_size"
        key, values = name.removeprefix(PREFIX), spec.config.program
        if not name.startswith(PREFIX) or key not in values:
            program = f"program={spec.choices.get('program', '')}"
            raise UsageError(
                f"tune.option={name}: {program} has no such key, name one that its file has, as in"
                f" tune.option={PREFIX}batch_size"
            )
        return BatchOption(name, "=", _parse_size(str(values[key])))
    if name is not None and name.startswith(PREFIX) and not name.endswith("="):
        raise UsageError(f"tune.option={name} is a key of the configured program: name the program's option")
    if name is None:
        name = next((option for option in KNOWN if read_argument(spec.program, option) is not None), None)
    if name is None:
        raise UsageError(
            "which option of the program sets its micro-batch? Name it: tune.option=--batch-size, or"
            " tune.option=train.batch_size= for a program of Hydra's"
        )
    start = _parse_size(read_argument(spec.program, name))
    return BatchOption(name, "" if name.endswith("=") else " ", start)


def _parse_size(text: str | None) -> int | None:
    """Return a size of at least 1; None for anything else."""
    number = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0
    return number or None


def read_argument(program: Sequence[str], name: str) -> str | None:
    """Return the last value of an option among a program's arguments; None if it is not there."""
    values = [program[at].removeprefix(before) for at, before in _find_values(program, name)]
    return values[-1] if values else None


def set_argument(program: Sequence[str], name: str, batch: int) -> tuple[str, ...]:
    """Return a program's arguments with an option set: where it stands, each time, or else at the end."""
    words, places = list(program), list(_find_values(program, name))
    for at, before in places:
        words[at] = f"{before}{batch}"
    if not places:
        words += [f"{name}{batch}"] if name.endswith("=") else [name, str(batch)]
    return tuple(words)


def _find_values(program: Sequence[str], name: str) -> Iterator[tuple[int, str]]:
    """Give the number of each word that holds an option's value, and what stands before it there."""
    joined, at = name if name.endswith("=") else f"{name}=", 0
    while at < len(program):
        if program[at].startswith(joined):
            yield at, joined
        elif program[at] == name and at + 1 < len(program):
            at += 1
            yield at, ""
        at += 1
