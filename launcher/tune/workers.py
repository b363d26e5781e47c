"""The search for a number of DataLoader workers: which one to try next, and which is best.

Steps per second rise with the workers until something else is the limit, in proportion at most, and each
further worker brings no more than the one before it: throughput is concave. So what has been measured bounds
what has not been, and a number that cannot be better is not tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.plan.model import Plan
from launcher.plan.resources import limit_workers
from launcher.text import count_things
from launcher.tune.trials import FITS, Conclusion, MeasureError, Trial, read_measurements

if TYPE_CHECKING:
    from launcher.config.settings import Settings

GAIN = 1.02
"""Anything below is not worth a further trial, nor to be told from noise."""
DEAR_GAIN = 1.04
"""The same, once a further trial would exceed half of what trying all numbers takes."""
NEAR = 0.985
"""Share of the best throughput from which fewer workers are as good."""
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
        fewest = next(trial.value for trial in measured if trial.rate >= NEAR * best)
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
        measured = self._list_measured()
        best = max((trial.rate for trial in measured), default=0.0)
        chosen = next((trial.value for trial in measured if trial.rate >= NEAR * best), None)
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
