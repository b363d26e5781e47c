"""The search for the number of workers, over made-up programs, and what bounds the searches."""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from launcher.config.settings import Settings
from launcher.inprocess.launch_inprocess.measurements import WARMUP, choose_block, find_error, is_enough
from launcher.plan.model import DataloaderConfig, Limits, Plan, Request
from launcher.plan.planner import plan
from launcher.tune.trials import Trial
from launcher.tune.workers import WorkersSearch, bound_rate, find_max_workers, price_all
from tests.plan.lab_machines import convert, load

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
    price = price_all(most, STEPS)
    search = WorkersSearch(most, thrift=price / 2)
    while (count := search.next()) is not None:
        search.trials.append(measure(rng, curve, count, noise))
    chosen = search.conclude().value
    assert chosen is not None
    best = max(curve(count)[0] for count in range(most + 1))
    cost = sum(trial.steps for trial in search.trials) / price
    return Search(curve(chosen)[0] / best, cost, tuple(trial.value for trial in search.trials))


PROGRAMS = 250


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("most", [4, 8, 16, 28, 64])
def test_the_choice_is_near_the_best_for_half_the_steps(most: int, noise: float) -> None:
    done = [simulate(seed, most, noise) for seed in range(PROGRAMS)]
    far = [search for search in done if search.quality < 0.95]
    assert len(far) <= 0.04 * PROGRAMS, far
    assert min(search.quality for search in done) > 0.9
    dear = [search for search in done if search.cost > 0.5]
    assert len(dear) <= (0 if noise <= 0.05 else 0.15) * PROGRAMS, dear
    assert statistics.median(search.cost for search in done) <= 0.3
    assert all(len(set(search.tried)) == len(search.tried) for search in done)


def test_bounds_are_those_of_a_concave_throughput() -> None:
    trials = [Trial(0, 1, 0.5), Trial(2, 3, 0.5)]
    assert bound_rate(trials[:1], 4) == 2  # nothing to wait for
    assert bound_rate([Trial(0, 1, 0.9)], 1) == pytest.approx(1.15 / 0.9)  # a worker loads as fast
    assert bound_rate(trials[1:], 3) == pytest.approx(3 * 1.02 * 3 / 2)  # each worker as much again


BOOK = Trial(0, 1 / 0.7, 0.5 / 0.7, 15)
"""100 samples of 5 ms, 0.2 s of computing: 3 workers (ml-engineering book)."""
PEAK = [Trial(0, 1, 0.8), Trial(2, 2, 0.6), Trial(4, 4, 0.5), Trial(8, 4, 0.5)]
DEAR = [Trial(0, 1, 0.9, 15), Trial(4, 4, 0.2, 20), Trial(8, 5, 0.0, 30)]


@pytest.mark.parametrize(
    ("trials", "most", "thrift", "following"),
    [
        ([], 8, math.inf, [0]),
        ([Trial(0, 10, 0.0, 15)], 8, math.inf, [None]),
        ([Trial(0, 10, 0.01, 15)], 8, math.inf, [None]),
        ([Trial(0, 10, 0.5, 15)], 8, math.inf, [1, 2, 3, 4]),
        ([BOOK], 8, math.inf, [3]),
        ([BOOK, Trial(3, 5, 0.0, 20)], 8, math.inf, [None]),
        ([Trial(0, 1, 0.9), Trial(4, reason="no room")], 3, math.inf, [1, 2, 3]),
        ([Trial(0, reason="x")], 3, math.inf, [None]),
        # As fast with 8 as with 4: up to 6 may be faster than both.
        (PEAK, 8, math.inf, [5, 6, 7]),
        # Without steps left, fewer workers are not looked for.
        (DEAR, 8, 100, [5, 6, 7]),
        (DEAR, 8, 90, [None]),
        # Something else has slowed computing in the first trial; one worker is waited for.
        ([Trial(0, 13.1, 0.48, 51), Trial(1, 29.9, 0.97, 51)], 3, math.inf, [2, 3]),
    ],
)
def test_what_is_tried_next(
    trials: list[Trial], most: int, thrift: float, following: list[int | None]
) -> None:
    assert WorkersSearch(most, thrift=thrift, trials=trials).next() in following


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([BOOK, Trial(3, 5, 0.0, 20)], 3),
        ([Trial(8, 10.0), Trial(4, 9.9), Trial(2, 9.0)], 4),
        ([Trial(0, 1, 0.9), Trial(4, reason="no room")], 0),
        ([Trial(0, reason="x")], None),
    ],
)
def test_the_fewest_that_are_as_fast_are_best(trials: list[Trial], best: int | None) -> None:
    assert WorkersSearch(8, trials=trials).conclude().value == best


def test_even_steps_are_enough_soon_and_uneven_ones_late() -> None:
    even, uneven = [0.1] * 60, [0.1, 0.1, 0.1, 0.4, 0.1] * 12
    assert find_enough(even, 1) == 12
    assert find_enough(uneven, 1) == 48
    assert find_enough(even, 16) == 48
    assert find_enough(uneven, 4, seconds=1) == 8
    assert [choose_block(workers) for workers in (0, 1, 2, 3, 4, 5, 16)] == [4, 4, 4, 6, 4, 5, 16]


def find_enough(times: list[float], workers: int, seconds: float = 99) -> int:
    block = choose_block(workers)
    return next(count for count in range(1, 61) if is_enough(times[:count], block, 48, seconds))


def test_bursts_of_workers_are_no_noise() -> None:
    """Four workers that deliver together: a long step, three short ones, again and again."""
    bursts = [0.37, 0.01, 0.01, 0.01] * 12
    assert is_enough(bursts[:12], choose_block(4), 48, 99)
    assert find_error(bursts[:12]) > 0.3
    assert not is_enough(bursts[:13], choose_block(4), 48, 99)


def plan_eight(limits: Limits) -> Plan:
    """Eight ranks on a machine with 16 cores for each of them."""
    machine = replace(convert(load("dgx-a100")), limits=limits)
    return plan(machine, Request(nproc_per_node=8))


@pytest.mark.parametrize(
    ("limits", "most", "why"),
    [
        (Limits(), 32, "2 for each"),
        (Limits(cpus=24), 6, "2 for each"),
        (Limits(cpus=8), 4, "at least 4"),
        (Limits(memory_kib=256 << 20), 16, "256 GiB of memory"),
        (Limits(shm_kib=8 << 20), 5, "8 GiB of /dev/shm"),
        (Limits(files=1024), 8, "1024 open files"),
        (Limits(files=64), 1, "64 open files"),
    ],
)
def test_cores_memory_and_descriptors_bound_a_search(limits: Limits, most: int, why: str) -> None:
    config = Settings(dataloader=DataloaderConfig(worker_gib=0.9, worker_shm_mib=102.4))
    found, reason = find_max_workers(config, plan_eight(limits))
    assert found == most
    assert why in reason
