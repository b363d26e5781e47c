"""Made-up programs: throughput by the number of workers, and what measuring them gives."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from launcher.inprocess.launch_inprocess.measurements import WARMUP, choose_block, is_enough
from launcher.tune.search import choose_best, choose_next, price_all
from launcher.tune.trials import Trial

STEPS = 48
KINDS = ("sleeping", "computing", "mixed", "soft")
LOADS = (0.005, 0.05, 0.3, 1, 2, 3, 5, 8, 12)
"""Seconds of loading for each second of computing."""

Curve = Callable[[int], tuple[float, float]]
"""Steps per second and share of waiting by the number of workers."""


def make_curve(rng: random.Random, cores: int) -> Curve:
    """A program whose loading sleeps, or needs cores that the training needs too, or saturates softly."""
    compute = rng.uniform(0.02, 0.5)
    load = compute * rng.choice(LOADS) * rng.uniform(0.8, 1.2)
    kind, crowd = rng.choice(KINDS), rng.uniform(0, 0.05)
    busy_share = {"computing": 1.0, "mixed": rng.uniform(0.2, 0.9)}.get(kind, 0.0)

    def curve(workers: int) -> tuple[float, float]:
        if workers == 0:
            return 1 / (compute + load), load / (compute + load)
        busy = 1 + workers * busy_share
        slow = max(1, busy / cores)
        step = compute * (1 + crowd * max(0, busy - cores)) if busy_share else compute
        loaded = workers / (1 - busy_share + busy_share * slow) / load
        rate = (step**4 + loaded**-4) ** -0.25 if kind == "soft" else min(1 / step, loaded)
        return rate, max(0.0, 1 - rate * step)

    return curve


def measure(rng: random.Random, curve: Curve, workers: int, noise: float) -> Trial:
    """A trial as the meter ends it, each step off by `noise` and the whole of it by half a percent."""
    rate, wait = curve(workers)
    warm = WARMUP if workers == 0 or wait > 0.1 else max(WARMUP, 2 * workers + 1)
    drift, times = rng.gauss(1, 0.005), [0.0][:0]
    while not is_enough(times, choose_block(workers), STEPS, math.inf):
        times.append(drift / rate * max(0.1, rng.gauss(1, noise)))
    seen = min(1.0, max(0.0, 1 - (1 - wait) * rng.gauss(1, 0.02))) if wait > 0.002 else wait
    return Trial(workers, len(times) / sum(times), seen, len(times) + warm)


@dataclass(frozen=True, slots=True)
class Search:
    """How a search went."""

    quality: float
    """The choice's true throughput over the best there is."""
    cost: float
    """Its steps over those of trying every number."""
    tried: tuple[int, ...]


def simulate(seed: int, most: int, noise: float) -> Search:
    rng = random.Random(seed)
    curve = make_curve(rng, max(2, most // 2))
    trials: list[Trial] = []
    price = price_all(most, STEPS)
    while (count := choose_next(trials, most, price / 2)) is not None:
        trials.append(measure(rng, curve, count, noise))
    chosen = choose_best(trials)
    assert chosen is not None
    best = max(curve(count)[0] for count in range(most + 1))
    return Search(
        curve(chosen.value)[0] / best,
        sum(trial.steps for trial in trials) / price,
        tuple(trial.value for trial in trials),
    )
