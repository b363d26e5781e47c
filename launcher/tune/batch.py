"""The search for a micro-batch: which size to try next, the largest that fits, and the fastest.

The size is doubled until it does not fit, then the middle of the last two is tried. Memory grows with the
size along a line, so that two trials tell what a third one needs; what the machine may not have is not tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.text import describe_time, format_size
from launcher.tune.trials import FITS, TOO_LARGE, VERDICTS, Conclusion, MeasureError, Trial, read_measurements

FIRST_BATCH = 8
"""Size of the first trial if nothing else is known."""
MARGIN = 0.05
"""Share of the memory to spare, since fragmentation grows in a long run."""
WORTH = 1.02
"""Gain in throughput below which long steps are not tried for it."""
AS_FAST = 0.985
"""Share of the best throughput from which a smaller size is as good."""
STEPS, ALL_STEPS = 8, 11
"""Steps of which a trial's measured part has to consist at least, and those with the ones before."""


@dataclass(slots=True)
class BatchSearch:
    """Doubles the micro-batch until it does not fit, then looks between."""

    option: str
    """The program's option; one that ends in `=` is joined to its value."""
    start: int
    max_batch: int
    memory_kib: int
    """Memory of the machine that the ranks may use; 0 if unknown."""
    seconds: float
    """Seconds of measuring for each size."""
    timeout: float
    """Seconds that a run may take."""
    trials: list[Trial] = field(default_factory=list)
    subject: str = "batch"
    title: str = "batch"

    @property
    def bounds(self) -> str:
        """What is tried at most."""
        memory = f", within {format_size(self.memory_kib)} of memory" if self.memory_kib else ""
        first = self.argument(self.start)
        return f"{first}, then twice as much until it does not fit, up to {self.max_batch}{memory}"

    def argument(self, value: int) -> str:
        """Return a size as it is typed."""
        return f"{self.option}{'' if self.option.endswith('=') else ' '}{value}"

    def next(self) -> int | None:
        """Return the size to try next; None if all is known that a few runs can tell.

        If only one size is known, and its memory forbids a larger one, half of it tells how memory grows.
        Three quarters of the largest are tried if that has no memory to spare. Raises MeasureError if the
        option has no effect.
        """
        by_loader: dict[int, Trial] = {}
        for trial in self.trials:
            other = by_loader.setdefault(trial.loader_batch, trial)
            if trial.loader_batch and other.value != trial.value:
                raise MeasureError(
                    f"the DataLoader gives batches of {trial.loader_batch} with {self.option} {other.value}"
                    f" and with {trial.value}: name the option of the micro-batch, tune.option=…"
                )
        fitting, tried = self._list_fitting(), {trial.value for trial in self.trials}
        if not tried:
            return min(self.start, self.max_batch)
        if not fitting:
            return min(tried) // 2 or None
        largest = fitting[-1].value
        limit = min((size for size in tried if size > largest), default=self.max_batch + 1)
        for size in _list_larger(largest):
            if size < limit and not self._refuse(size, fitting):
                return size
        is_lone = len(fitting) == 1 and largest > 1 and largest // 2 not in tried
        if is_lone and 0 < self.memory_kib < _extend(fitting, 2 * largest):
            return largest // 2
        near = any(2 * largest <= 3 * size for size in tried if size < largest)
        return None if largest % 4 or near or self._has_margin(fitting[-1]) else largest - largest // 4

    def measure(self, folder: Path, value: int, ranks: int) -> Trial:
        """Return what a size that fits has measured; raises MeasureError if that says nothing.

        A program that came to its end after a few steps fits, and has no throughput.
        """
        measured = read_measurements(folder, value, ranks)
        trial, loader = measured.trial, measured.loader
        if trial.steps < 2:
            raise MeasureError(f"{trial.reason}: it has too little data to be tried")
        slowest = max(measured.records, key=lambda record: record.step_seconds)
        # A loader of single items may give whole batches as such: its size of 1 says nothing.
        size = loader.batch_size if loader else None
        loader_batch = size if size is not None and size > 1 else 0
        per_step = slowest.batches / len(slowest.times) if slowest.times else 0.0
        rate = trial.rate * ranks * (loader_batch or value) * (per_step or 1.0)
        return replace(trial, rate=rate, unit="sequences", loader_batch=loader_batch)

    def conclude(self) -> Conclusion:
        """Choose the fastest of the sizes that fit with memory to spare, else of all that fit."""
        fitting = self._list_fitting()
        safe = [trial for trial in fitting if self._has_margin(trial)]
        largest = fitting[-1].value if fitting else None
        largest_safe = safe[-1].value if safe else None
        fastest = _find_fastest(fitting)
        batch = _find_fastest(safe or fitting) or largest_safe or largest
        limit = self._name_limit(fitting) if fitting else None
        facts = {
            "option": self.option,
            "batch": batch,
            "largest": largest,
            "largest_with_margin": largest_safe,
            "fastest": fastest,
            "largest_is_limit": bool(fitting) and any(trial.verdict == TOO_LARGE for trial in self.trials),
            "limit": limit,
            "argument": None if batch is None else self.argument(batch),
        }
        if batch is None:
            last = self.trials[-1] if self.trials else Trial(self.start)
            why = (
                f"{self.argument(last.value)} does not fit ({last.reason}), nor does any larger one: use"
                " a smaller model or shorter sequences, activation checkpointing, or more sharding"
            )
            return Conclusion(None, facts, [why], {})
        lines = [
            f"largest micro-batch that fits: {largest} ({limit})",
            f"with 5% of the memory to spare: {largest_safe or 'none is known to have 5% to spare'};"
            f" fastest: {fastest or 'not measured'}; use {batch}",
        ]
        names = {"largest": largest, "largest with 5% to spare": largest_safe, "fastest": fastest}
        remarks = {
            trial.value: ", ".join(name for name, found in names.items() if found == trial.value)
            for trial in self.trials
        }
        return Conclusion(batch, facts, lines, remarks)

    def _name_limit(self, fitting: Sequence[Trial]) -> str:
        """Say why no size is larger."""
        largest = fitting[-1].value
        larger = (trial for trial in self.trials if trial.value > largest)
        if above := min(larger, key=lambda trial: trial.value, default=None):
            return f"{above.value} {VERDICTS[above.verdict]}: {above.reason}"
        size = min((size for size in _list_larger(largest) if size <= self.max_batch), default=None)
        if size is None:
            return f"tune.max_batch={self.max_batch}"
        why = self._refuse(size, fitting)
        return f"{size} was not tried: {why}" if why else "the search was ended"

    def _list_fitting(self) -> list[Trial]:
        return sorted((one for one in self.trials if one.verdict == FITS), key=lambda one: one.value)

    def _refuse(self, batch: int, fitting: Sequence[Trial]) -> str:
        """Say why a larger size than any that fits is not to be tried; empty if it may be."""
        need = _extend(fitting, batch)
        if 0 < self.memory_kib < need:
            most = format_size(self.memory_kib)
            return f"it would take about {format_size(need)} of the {most} that it may use here"
        largest = fitting[-1]
        step = largest.step_seconds * batch / largest.value
        if ALL_STEPS * step > self.timeout:
            return f"its run would take more than tune.timeout={self.timeout:g} s"
        halves = [trial.rate for trial in fitting if 2 * trial.value <= largest.value]
        if STEPS * step > self.seconds and largest.rate <= WORTH * max(halves, default=0.0):
            return f"no more throughput, and steps of about {describe_time(step)}"
        return ""

    def _has_margin(self, trial: Trial) -> bool:
        """Tell whether a size that fits would still fit if it took MARGIN more memory.

        It would if another one that fits took as much. Else the device's memory counts, unless a size that
        should have fitted there did not: then another limit holds, which nobody knows.
        """
        fitting = self._list_fitting()
        needed = (1 + MARGIN) * trial.use_kib
        if any(other.use_kib >= needed for other in fitting):
            return trial.use_kib > 0
        capacity = trial.gpu_total_kib or self.memory_kib
        failed = min((other.value for other in self.trials if other.verdict == TOO_LARGE), default=None)
        is_known = failed is None or _extend(fitting, failed, on_gpu=True) >= (1 - MARGIN) * capacity
        return is_known and 0 < needed <= capacity


def _list_larger(batch: int) -> list[int]:
    """Return what may come after a size that fits: twice as much, the middle, after a middle its double."""
    return [2 * batch, *(batch + batch // part for part in (2, 3) if batch % part == 0)]


def _extend(fitting: Sequence[Trial], batch: int, *, on_gpu: bool = False) -> int:
    """Return the KiB that a size takes, by the line through the two largest that fit; 0 if unknown.

    It is the machine's memory, or with `on_gpu` that of the GPU if there is one.
    A single trial is taken for proportional, which is the most that it can be.
    """
    uses = [(trial.value, trial.use_kib if on_gpu else trial.memory_kib) for trial in fitting]
    points = [(size, kib) for size, kib in uses if kib]
    if not points:
        return 0
    x, y = points[-1]
    if len(points) == 1:
        return max(y, y * batch // x)
    x_before, y_before = points[-2]
    return y + max(0, y - y_before) * (batch - x) // (x - x_before)


def _find_fastest(trials: Sequence[Trial]) -> int | None:
    """Return the smallest size whose throughput is the best's within noise; None if none was measured."""
    best = max((trial.rate for trial in trials), default=0.0)
    good = (trial.value for trial in trials if trial.rate and trial.rate >= AS_FAST * best)
    return min(good, default=None)
