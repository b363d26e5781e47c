"""The two searches: which value to try next, and which is best, by the trials so far.

A micro-batch is doubled until it does not fit, then the middle of the last two is tried. Memory grows with
the size along a line, so that two trials tell what a third one needs; what the machine may not have is not
tried.

Steps per second rise with the number of DataLoader workers until something else is the limit, in proportion
at most, and each further worker brings no more than the one before it: throughput is concave. So what has
been measured bounds what has not been, and a number that cannot be better is not tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.plan.model import Plan
from launcher.plan.resources import limit_workers
from launcher.text import count_things, describe_time, format_size
from launcher.tune.trials import FITS, TOO_LARGE, VERDICTS, Conclusion, MeasureError, Trial, read_measurements

if TYPE_CHECKING:
    from launcher.config.settings import Settings

GAIN = 1.02
"""Gain in throughput below which nothing is worth a further trial, nor to be told from noise."""
NEAR = 0.985
"""Share of the best throughput from which a smaller value is as good."""


def _find_fastest(trials: Sequence[Trial]) -> int | None:
    """Return the smallest value whose throughput is the best's within noise; None if none was measured."""
    best = max((trial.rate for trial in trials), default=0.0)
    return min((trial.value for trial in trials if trial.rate and trial.rate >= NEAR * best), default=None)


# The micro-batch

FIRST_BATCH = 8
"""Size of the first trial if nothing else is known."""
MARGIN = 0.05
"""Share of the memory to spare, since fragmentation grows in a long run."""
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
        if STEPS * step > self.seconds and largest.rate <= GAIN * max(halves, default=0.0):
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


# DataLoader workers

DEAR_GAIN = 1.04
"""The same as GAIN, once a further trial would exceed half of what trying all numbers takes."""
ERROR = 0.02
"""What a measured throughput may be off."""
LOADING = 0.15
"""How much faster a worker may load than the rank's own process does, which trains beside it."""
FIRST = 4
"""Workers of the first trial with any at most: without workers, a GPU's work is hidden behind the loading."""
WARMUP = 3
"""Steps that are not measured, with any number of workers."""
MOST_WAIT = 0.99
"""Share of waiting at most: without any computing there would be no limit to hope for."""
WORKERS_PER_CORE = 2
"""Workers for each core: those that read from a disk or a network wait more than they compute."""
MIN_WORKERS, MAX_WORKERS = 4, 64


@dataclass(slots=True)
class WorkersSearch:
    """Tries the most telling number of DataLoader workers until it is clear which one is best."""

    max_workers: int
    steps: int
    """Measured steps of a trial at most."""
    why: str = ""
    """Why there are no more workers."""
    trials: list[Trial] = field(default_factory=list)
    subject: str = "dataloader"
    title: str = "workers"
    option: str = ""
    """Nothing of the program's: variables tell it the number."""

    @property
    def bounds(self) -> str:
        """What is tried at most."""
        return f"0 workers each, then up to {self.max_workers} ({self.why})"

    def argument(self, value: int) -> str:
        """Return a value as people read it."""
        return count_things(value, "worker")

    def next(self) -> int | None:
        """Return the number of workers that tells most; None if it is clear which is best."""
        trials, measured = self.trials, self._list_measured()
        if not measured:
            return None if trials else 0
        most = min([self.max_workers, *(trial.value - 1 for trial in trials if trial.verdict != FITS)])
        tried = {trial.value for trial in trials}
        best = max(trial.rate for trial in measured)
        # Steps of trying all numbers; before the measured ones, each worker has two batches prefetched.
        price = sum(self.steps + WARMUP + 2 * count for count in range(self.max_workers + 1))
        is_dear = sum(trial.steps for trial in trials) + trials[-1].steps > price / 2
        bounds = {count: _bound_rate(measured, count) for count in range(1, most + 1) if count not in tried}
        worth = best * (DEAR_GAIN if is_dear else GAIN)
        open_counts = [count for count, bound in bounds.items() if bound > worth]
        highest = measured[-1].value
        if above := [count for count in open_counts if count > highest]:
            # The fewest workers that may reach what any may, at most twice as many as were tried.
            hoped = NEAR * max(bounds[count] for count in above)
            aim = next(count for count in above if bounds[count] >= hoped)
            lowest, limit = highest + highest // 4, max(FIRST, 2 * highest)
            within = [count for count in above if lowest <= count <= limit]
            return min((count for count in within if count >= aim), default=max(within, default=above[0]))
        if open_counts:
            return max(open_counts, key=lambda count: bounds[count])
        if is_dear:
            return None
        # A lower number that may do as well, unless it is hardly lower.
        fewest = _find_fastest(measured) or 0
        below = max((trial.value for trial in measured if trial.value < fewest), default=fewest)
        fewer = [count for count, bound in bounds.items() if below < count < fewest and bound >= NEAR * best]
        if not fewer or fewest - below <= max(1, fewest // 8):
            return None
        return fewer[0] if below == 0 else fewer[(len(fewer) - 1) // 2]

    def _list_measured(self) -> list[Trial]:
        return sorted((trial for trial in self.trials if trial.rate), key=lambda trial: trial.value)

    def measure(self, folder: Path, value: int, ranks: int) -> Trial:
        """Return what a number of workers has measured; raises MeasureError if that says nothing.

        UsageError if the number is not the launcher's to choose.
        """
        measured = read_measurements(folder, value, ranks)
        loader, trial = measured.loader, measured.trial
        if loader is None:
            raise MeasureError(
                "the program reads from no torch.utils.data.DataLoader: there is nothing to tune"
            )
        if loader.workers != value:
            which = "the DataLoader of an IterableDataset has" if loader.iterable else "the program sets"
            why = ", and gets no other, as its dataset may not shard by worker" if loader.iterable else ""
            raise UsageError(
                f"{which} num_workers={loader.workers} itself{why}: leave num_workers out of DataLoader(...),"
                " or let it take LAUNCH_NUM_WORKERS or `{num_workers}` among the program's arguments"
            )
        if not trial.rate:
            raise MeasureError(f"{trial.reason} to measure: let it run for {2 * value + 20} at least")
        return replace(trial, memory_kib=sum(record.memory_kib for record in measured.records))

    def conclude(self) -> Conclusion:
        """Choose the fewest workers whose throughput is the best's within noise."""
        chosen = _find_fastest(self.trials)
        facts = {"max_workers": self.max_workers, "num_workers": chosen}
        if chosen is None:
            why = "".join(f": {trial.reason}" for trial in self.trials)
            return Conclusion(None, facts, [f"nothing could be measured{why}"], {})
        return Conclusion(chosen, facts, [f"fastest with {self.argument(chosen)}"], {chosen: "chosen"})


def _bound_rate(measured: Sequence[Trial], count: int) -> float:
    """Return what steps per second a number of workers can have at most, by the trials with fewer.

    By the last of them, there is nothing to wait for any more: computing is no faster beside more workers; if
    it has been, something else slowed the earlier trial. By each, as much again from each worker; and by the
    line through two next to each other, as steep as noise allows.
    """
    fewer = [trial for trial in measured if trial.value < count]
    bounds = [trial.rate / (1 - min(trial.wait, MOST_WAIT)) for trial in fewer[-1:]]
    for trial in fewer:
        if trial.value:
            bounds.append(trial.rate * (1 + ERROR) * count / trial.value)
        elif trial.wait:
            bounds.append(count * (1 + LOADING) * trial.rate / trial.wait)
    for low, high in pairwise(trial for trial in fewer if trial.value):
        rise = high.rate * (1 + ERROR) - low.rate * (1 - ERROR)
        bounds.append(high.rate * (1 + ERROR) + rise / (high.value - low.value) * (count - high.value))
    return min(bounds)


def find_max_workers(config: "Settings", plan: Plan) -> tuple[int, str]:
    """Return the most workers of a rank that a search is to try, with why."""
    asked = config.tune.max_workers
    if isinstance(asked, int):
        return asked, f"tune.max_workers={asked}"
    ranks, machine = len(plan.ranks), plan.machine
    # The cores of the rank that has fewest, shared ones and a quota on CPU time counted in part.
    core_of = {cpu.id: cpu.core for cpu in machine.cpus}
    sets = [{core_of[cpu] for cpu in rank.worker_cpus if cpu in core_of} for rank in plan.ranks]
    quota = [] if machine.limits.cpus is None else [machine.limits.cpus / ranks]
    cores = min(len(set().union(*sets)) / ranks, *map(len, sets), *quota)
    highest = min(MAX_WORKERS, max(MIN_WORKERS, int(WORKERS_PER_CORE * cores)))
    bounds = limit_workers(config.dataloader, machine, ranks)
    tight = min(bounds, key=lambda bound: bound.max_workers, default=None)
    if tight is not None and tight.max_workers < highest:
        return max(1, tight.max_workers), tight.what
    return highest, f"{WORKERS_PER_CORE} for each of a rank's cores, and at least {MIN_WORKERS}"
