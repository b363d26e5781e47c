"""The searches for a number of workers and for a micro-batch, over made-up programs, and what bounds them."""

import math
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.inprocess.launch_inprocess.measurements import WARMUP, choose_block, find_error, is_enough
from launcher.plan.model import DataloaderConfig, Limits, Plan, Request
from launcher.plan.planner import plan
from launcher.tune.search import BatchSearch, WorkersSearch, find_max_workers
from launcher.tune.trials import Trial
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
    price = sum(
        STEPS + 3 + 2 * count for count in range(most + 1)
    )  # two batches are prefetched for each worker
    search = WorkersSearch(most, STEPS)
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


BOOK = Trial(0, 1 / 0.7, 0.5 / 0.7, 15)
"""100 samples of 5 ms, 0.2 s of computing: 3 workers (ml-engineering book)."""
PEAK = [Trial(0, 1, 0.8), Trial(2, 2, 0.6), Trial(4, 4, 0.5), Trial(8, 4, 0.5)]
DEAR = [Trial(0, 1, 0.9, 15), Trial(4, 4, 0.2, 20), Trial(8, 5, 0.0, 30)]


def test_what_is_tried_next_and_chosen() -> None:
    cases: list[tuple[list[Trial], int, int, list[int | None]]] = [
        ([], 8, 999, [0]),
        ([Trial(0, 10, 0.0, 15)], 8, 999, [None]),
        ([Trial(0, 10, 0.01, 15)], 8, 999, [None]),
        ([Trial(0, 10, 0.5, 15)], 8, 999, [1, 2, 3, 4]),
        ([BOOK], 8, 999, [3]),
        ([BOOK, Trial(3, 5, 0.0, 20)], 8, 999, [None]),
        ([Trial(0, 1, 0.9), Trial(4, reason="no room")], 3, 999, [1, 2, 3]),
        ([Trial(0, reason="x")], 3, 999, [None]),
        # As fast with 8 as with 4: up to 6 may be faster than both.
        (PEAK, 8, 999, [5, 6, 7]),
        # With another trial these have taken 95 steps, and half of all are 99, or 94.5.
        (DEAR, 8, 11, [5, 6, 7]),
        (DEAR, 8, 10, [None]),
        # Something else has slowed computing in the first trial; one worker is waited for.
        ([Trial(0, 13.1, 0.48, 51), Trial(1, 29.9, 0.97, 51)], 3, 999, [2, 3]),
    ]
    for trials, most, steps, following in cases:
        assert WorkersSearch(most, steps, trials=trials).next() in following, trials
    for trials, best in [
        ([BOOK, Trial(3, 5, 0.0, 20)], 3),
        ([Trial(8, 10.0), Trial(4, 9.9), Trial(2, 9.0)], 4),
        ([Trial(0, 1, 0.9), Trial(4, reason="no room")], 0),
        ([Trial(0, reason="x")], None),
    ]:
        assert WorkersSearch(8, STEPS, trials=trials).conclude().value == best, trials


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


def test_cores_memory_and_descriptors_bound_a_search() -> None:
    config = Settings(dataloader=DataloaderConfig(worker_gib=0.9, worker_shm_mib=102.4))
    for limits, most, why in [
        (Limits(), 32, "2 for each"),
        (Limits(cpus=24), 6, "2 for each"),
        (Limits(cpus=8), 4, "at least 4"),
        (Limits(memory_kib=256 << 20), 16, "256 GiB of memory"),
        (Limits(shm_kib=8 << 20), 5, "8 GiB of /dev/shm"),
        (Limits(files=1024), 8, "1024 open files"),
        (Limits(files=64), 1, "64 open files"),
    ]:
        found, reason = find_max_workers(config, plan_eight(limits))
        assert found == most and why in reason, limits


# A micro-batch


GIB = 1 << 20
BOUNDS = BatchSearch("--b", start=8, max_batch=4096, memory_kib=64 * GIB, seconds=60, timeout=900)


@dataclass(frozen=True, slots=True)
class Memory:
    """A program: memory is a line, seconds of a step another one, and throughput falls above a knee."""

    base_kib: int = GIB
    each_kib: int = GIB // 8
    fixed: float = 0.05
    each: float = 0.001
    knee: int = 1 << 30
    gpu_kib: int = 0
    """Memory of its GPU; 0 for a program that runs on CPUs."""
    limit_kib: int = 1 << 40
    """What nobody knows of: an address space, say."""

    def measure(self, batch: int) -> Trial:
        use = self.base_kib + batch * self.each_kib
        if use > min(self.gpu_kib or self.limit_kib, self.limit_kib):
            return Trial(batch, verdict="does_not_fit", reason="out of memory")
        step = (self.fixed + batch * self.each) * max(1.0, batch / self.knee) ** 0.5
        trial = Trial(batch, rate=batch / step, step_seconds=step, steps=15, memory_kib=use)
        if not self.gpu_kib:
            return trial
        return replace(trial, gpu_kib=use, gpu_total_kib=self.gpu_kib, memory_kib=GIB)


Measure = Callable[[int], Trial]


def search_batch(measure: Measure, bounds: BatchSearch = BOUNDS) -> tuple[list[int], dict[str, Any]]:
    """The sizes that are tried, and what is found."""
    tried = replace(bounds, trials=[])
    while (batch := tried.next()) is not None:
        assert 1 <= batch <= bounds.max_batch and batch not in [trial.value for trial in tried.trials]
        tried.trials.append(measure(batch))
        assert len(tried.trials) <= 18
    return [trial.value for trial in tried.trials], dict(tried.conclude().facts)


def fail_above_24(batch: int) -> Trial:
    fits = 24 % batch == 0
    return Memory().measure(batch) if fits else Trial(batch, verdict="failed", reason="24 must divide")


def without_rate(batch: int) -> Trial:
    return replace(Memory(gpu_kib=7 * GIB).measure(batch), rate=0.0, step_seconds=0.0)


UNLIMITED = replace(BOUNDS, memory_kib=0)


@pytest.mark.parametrize(
    ("measure", "bounds", "tried", "found"),
    [
        # 1 GiB, and an eighth for each sequence: 56 fit into 8 GiB, of which 48 is the largest tried.
        (Memory(gpu_kib=8 * GIB).measure, BOUNDS, [8, 16, 32, 64], (48, 48, 48, 48)),
        (Memory(gpu_kib=7 * GIB).measure, BOUNDS, [], (48, 32, 48, 32)),
        (Memory(gpu_kib=int(7.4 * GIB)).measure, BOUNDS, [], (48, 48, 48, 48)),
        (Memory(gpu_kib=9 * GIB).measure, BOUNDS, [], (64, 48, 64, 48)),
        # An unknown limit leaves what another size has shown.
        (Memory(limit_kib=7 * GIB).measure, BOUNDS, [], (48, 32, 48, 32)),
        # Most of 20 GiB is the model: half a size tells how memory grows.
        (Memory(19 * GIB).measure, replace(BOUNDS, memory_kib=24 * GIB), [8, 4, 16], (32, 24, 32, 24)),
        # Too large a beginning is halved until it fits.
        (
            Memory(gpu_kib=GIB + GIB // 2).measure,
            replace(BOUNDS, start=64),
            [64, 32, 16, 8, 4, 6],
            (4, 3, 4, 3),
        ),
        # The fastest may be smaller than the largest.
        (Memory(gpu_kib=40 * GIB, fixed=0.001, knee=16).measure, BOUNDS, [], (256, 256, 16, 16)),
        (Memory(fixed=0, gpu_kib=4 * GIB).measure, BOUNDS, [], (24, 16, 8, 8)),
        (without_rate, BOUNDS, [], (48, 32, None, 32)),
        (fail_above_24, BOUNDS, [8, 16, 12], (12, 12, 12, 12)),
    ],
)
def test_the_choice(
    measure: Measure, bounds: BatchSearch, tried: list[int], found: tuple[int | None, ...]
) -> None:
    """The largest size, the largest with a margin, the fastest, and what is to be used."""
    sizes, choice = search_batch(measure, bounds)
    assert sizes[: len(tried)] == tried
    names = ("largest", "largest_with_margin", "fastest", "batch")
    assert tuple(choice[name] for name in names) == found


@pytest.mark.parametrize(
    ("measure", "bounds", "is_limit", "why"),
    [
        (Memory(gpu_kib=8 * GIB).measure, BOUNDS, True, "64 does not fit: out of memory"),
        (fail_above_24, BOUNDS, False, "16 fails, not for memory: 24 must divide"),
        (Memory(fixed=0.2, each=0.2).measure, BOUNDS, False, "no more throughput, and steps of about"),
        (Memory(fixed=1).measure, replace(UNLIMITED, timeout=12), False, "tune.timeout=12 s"),
        *(
            (Memory().measure, replace(UNLIMITED, max_batch=most), False, f"tune.max_batch={most}")
            for most in (1, 2, 8, 13, 100, 4096)
        ),
        *(
            (Memory().measure, replace(BOUNDS, memory_kib=gib * GIB), False, "it would take about")
            for gib in (3, 5, 9, 20, 33)
        ),
    ],
)
def test_what_ends_a_search(measure: Measure, bounds: BatchSearch, is_limit: bool, why: str) -> None:
    sizes, choice = search_batch(measure, bounds)
    assert choice["largest_is_limit"] is is_limit and why in choice["limit"]
    most = max(map(measure, sizes), key=lambda trial: trial.memory_kib)
    assert most.memory_kib <= (bounds.memory_kib or most.memory_kib)
    assert max(measure(size).step_seconds for size in sizes) < bounds.timeout / 11
    possible = min(((bounds.memory_kib or 1 << 40) - GIB) // (GIB // 8), bounds.max_batch)
    if why.startswith(("tune.max", "it would")):
        assert possible / 1.5 < choice["largest"] <= possible


def test_nothing_fits() -> None:
    tried, choice = search_batch(Memory(gpu_kib=GIB).measure)
    assert tried == [8, 4, 2, 1] and not any(found for key, found in choice.items() if key != "option")


def test_any_program_is_searched_in_few_runs() -> None:
    """The largest is within a third of what is possible, the fastest within 5% of what was tried."""
    rng = random.Random(14)
    for _ in range(500):
        curve = Memory(
            base_kib=int(rng.uniform(0.1, 12) * GIB),
            each_kib=int(rng.uniform(0.001, 2) * GIB),
            fixed=rng.uniform(0, 0.5),
            each=10 ** rng.uniform(-5, -2),
            knee=1 << rng.randrange(20),
            gpu_kib=rng.choice([0, 16, 40, 80]) * GIB,
        )
        bounds = replace(BOUNDS, start=rng.choice([1, 4, 8, 8, 8, 24]), timeout=1e9, seconds=1e9)
        tried, choice = search_batch(curve.measure, bounds)
        if choice["largest"] is None:
            assert curve.base_kib + curve.each_kib > (curve.gpu_kib or 64 * GIB)
            continue
        possible = ((curve.gpu_kib or bounds.memory_kib) - curve.base_kib) / curve.each_kib
        largest = choice["largest"]
        assert min(possible, 4096) / 1.51 <= largest <= possible or largest == 1, (curve, tried)
        best = max(curve.measure(size).rate for size in tried)
        assert curve.measure(choice["fastest"]).rate >= 0.95 * best, (curve, tried)


def test_an_option_without_effect_is_told() -> None:
    for first, other in ((0, 0), (4, 8)):
        replace(BOUNDS, trials=[Trial(8, loader_batch=first), Trial(16, loader_batch=other)]).next()
    with pytest.raises(UsageError, match=re.escape("batches of 4 with --b 8 and with 16")):
        replace(BOUNDS, trials=[Trial(8, loader_batch=4), Trial(16, loader_batch=4)]).next()
