"""Step time with many ranks, from what the collector took in each step of a few."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RANKS = (8, 64, 512, 4096, 16_384)
REPEATS = 4
"""Simulated runs for each number of ranks, each as long as what was measured."""
BAR = 40
"""Characters of the longest bar."""

Series = Sequence[NDArray[np.float64]]
"""Milliseconds that the collector took in each step, a series for each rank that was measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a policy."""

    series: Series
    """All of one length, a multiple of `period`, and in step with one another."""
    period: int
    """1 where each rank collects when it comes to it; else all collect every so many steps, at the same."""


def simulate_stalls(measured: Measured, ranks: int, seed: int = 0) -> NDArray[np.float64]:
    """Milliseconds that each step of a job waits for the slowest of its ranks' collectors.

    A rank lives through one of the measured series from any of its steps on. Ranks that collect in step
    start from steps that are whole periods apart: only what they find there differs.
    """
    random = np.random.default_rng(seed)
    length = len(measured.series[0])
    slowest = np.zeros((REPEATS, length))
    for run in slowest:
        chosen = random.integers(len(measured.series), size=ranks)
        shifts = measured.period * random.integers(length // measured.period, size=ranks)
        for which, shift in zip(chosen, shifts, strict=True):
            np.maximum(run, np.roll(measured.series[which], shift), out=run)
    return slowest.ravel()


def print_at_scale(policies: Mapping[str, Measured], base: float) -> None:
    """Print the mean step of each policy in milliseconds; `base` is a step in which no rank collects."""
    print(
        f"\nThe same step with more ranks: mean ms, of which {base:.1f} without any collection (simulated)\n"
    )
    print(f"| ranks | {' | '.join(f'{ranks:,}' for ranks in RANKS)} |\n|---|{'---|' * len(RANKS)}")
    means = {
        name: [base + float(simulate_stalls(measured, ranks).mean()) for ranks in RANKS]
        for name, measured in policies.items()
    }
    for name, row in means.items():
        print(f"| {name} | {' | '.join(f'{mean:.1f}' for mean in row)} |")
    print(f"\nWith {RANKS[-1]:,} ranks (`.` is the step itself, `#` waiting for a rank that collects):\n")
    longest = max(row[-1] for row in means.values())
    for name, row in means.items():
        print(f"    {name:<28} {draw_bar(base, row[-1], longest)} {row[-1]:.0f} ms")
    print(
        "\nAssumed: an all_reduce each step, in which all wait for the slowest, and which takes no"
        " longer with more ranks; each simulated rank collects as one of the measured ranks did, from a step"
        " of its own on; nothing but the collector delays a rank; no collection takes longer than the longest"
        " measured."
    )


def draw_bar(base: float, mean: float, longest: float) -> str:
    """A bar as long as the mean step, a part of the longest."""
    plain, whole = (round(BAR * part / longest) for part in (base, mean))
    return "." * plain + "#" * (whole - plain)
