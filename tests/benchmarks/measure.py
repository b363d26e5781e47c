"""Paired timing: A and B in turn, so that a machine whose speed drifts slows both."""

import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one thing, in milliseconds."""

    name: str
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def list_cells(self, base: "Sample | None" = None) -> list[str]:
        cells = [self.name, *(f"{time:.1f}" for time in (min(self.times), self.median, max(self.times)))]
        if base is self:
            cells += ["", ""]
        elif base is not None:
            extra = statistics.median(a - b for a, b in zip(self.times, base.times, strict=True))
            cells += [f"{extra:+.1f}", f"{self.median / base.median:.2f}"]
        return cells


def print_head(title: str, *names: str) -> None:
    """Print the head of a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|", flush=True)


def print_row(*cells: object) -> None:
    """Print a row of it."""
    print(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |", flush=True)


def measure_in_turn(things: Mapping[str, Callable[[], float]], rounds: int) -> list[Sample]:
    """Call each in turn for `rounds` rounds after one that does not count; each returns milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in things}
    for number in range(rounds + 1):
        for name, thing in things.items():
            taken = thing()
            if number:
                times[name].append(taken)
    return [Sample(name, tuple(values)) for name, values in times.items()]


def time_call(thing: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    thing()
    return 1e3 * (time.perf_counter() - start)


def time_process(command: Sequence[str], environ: Mapping[str, str] | None = None) -> float:
    """Milliseconds of a whole process, its output thrown away; raises CalledProcessError where it fails."""
    sink = subprocess.DEVNULL
    return time_call(lambda: subprocess.run(command, env=environ, check=True, stdout=sink, stderr=sink))


def measure_children() -> float:
    """CPU seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def print_table(title: str, samples: Sequence[Sample], *, compare: bool = True) -> None:
    """Print times; `compare` adds differences and ratios to the first row, pair by pair."""
    print_head(title, "ms", "min", "median", "max", *(("more than the first", "ratio") if compare else ()))
    for sample in samples:
        print_row(*sample.list_cells(samples[0] if compare else None))


def print_goals(samples: Sequence[Sample], goals: Mapping[str, float | None]) -> None:
    """Print the share of the first row's time, in the median round, of each row that has a goal."""
    for sample in samples:
        goal = goals.get(sample.name)
        if goal is None:
            continue
        pairs = zip(sample.times, samples[0].times, strict=True)
        share = statistics.median(one / base for one, base in pairs)
        word = "reached" if share <= goal else "missed"
        print(f"\n{sample.name}: {share:.2f} of {samples[0].name}; the goal of at most {goal} is {word}")
