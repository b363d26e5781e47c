"""The search for a micro-batch, over made-up programs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from launcher.tune.batch_search import BatchBounds, BatchSearch
from launcher.tune.trials import FAILED, TOO_LARGE, Trial

GIB = 1 << 20
BOUNDS = BatchBounds(start=8, max_batch=4096, memory_kib=64 * GIB, seconds=60, timeout=900)


@dataclass(frozen=True, slots=True)
class Curve:
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
            return Trial(batch, verdict=TOO_LARGE, reason="out of memory")
        step = (self.fixed + batch * self.each) * max(1.0, batch / self.knee) ** 0.5
        trial = Trial(batch, rate=batch / step, step_seconds=step, steps=15, memory_kib=use)
        if not self.gpu_kib:
            return trial
        return replace(trial, gpu_kib=use, gpu_total_kib=self.gpu_kib, memory_kib=GIB)


Measure = Callable[[int], Trial]


def search(measure: Measure, bounds: BatchBounds = BOUNDS) -> list[Trial]:
    trials: list[Trial] = []
    while (batch := BatchSearch(trials, bounds).next()) is not None:
        assert 1 <= batch <= bounds.max_batch and batch not in [trial.value for trial in trials]
        trials.append(measure(batch))
        assert len(trials) < 20
    return trials


def list_sizes(trials: list[Trial]) -> list[int]:
    return [trial.value for trial in trials]


def test_a_gpu_is_filled_by_doubling_and_then_the_middle() -> None:
    """1 GiB, and an eighth for each sequence: 56 fit into 8 GiB, of which 48 is the largest tried."""
    trials = search(Curve(gpu_kib=8 * GIB).measure)
    assert list_sizes(trials)[:4] == [8, 16, 32, 64]
    choice = BatchSearch(trials, BOUNDS).conclude()
    assert choice is not None
    assert (choice.largest, choice.largest_safe, choice.fastest, choice.batch) == (48, 48, 48, 48)
    assert choice.is_bounded and choice.why == "64 does not fit: out of memory"
    assert len(trials) == 5


@pytest.mark.parametrize(("gib", "largest", "safe"), [(7.0, 48, 32), (7.4, 48, 48), (9.0, 64, 48)])
def test_a_margin_is_left(gib: float, largest: int, safe: int) -> None:
    choice = BatchSearch(search(Curve(gpu_kib=int(gib * GIB)).measure), BOUNDS).conclude()
    assert choice is not None
    assert (choice.largest, choice.largest_safe, choice.batch) == (largest, safe, safe)


def test_an_unknown_limit_leaves_what_another_size_has_shown() -> None:
    choice = BatchSearch(search(Curve(limit_kib=7 * GIB).measure), BOUNDS).conclude()
    assert choice is not None
    assert (choice.largest, choice.largest_safe) == (48, 32)


def test_the_machine_s_memory_is_never_exceeded() -> None:
    curve = Curve()
    for gib in (3, 5, 9, 20, 33):
        bounds = replace(BOUNDS, memory_kib=gib * GIB)
        trials = search(curve.measure, bounds)
        assert max(trial.memory_kib for trial in trials) <= bounds.memory_kib
        choice = BatchSearch(trials, bounds).conclude()
        assert choice is not None and not choice.is_bounded
        assert "was not tried: it would take about" in choice.why
        possible = (bounds.memory_kib - curve.base_kib) / curve.each_kib
        assert possible / 1.5 < choice.largest <= possible


def test_half_a_size_tells_how_memory_grows() -> None:
    """Most of 20 GiB is the model: by one trial, twice the size would take 40."""
    curve = Curve(base_kib=19 * GIB, each_kib=GIB // 8)
    trials = search(curve.measure, replace(BOUNDS, memory_kib=24 * GIB))
    assert list_sizes(trials)[:3] == [8, 4, 16]
    assert max(list_sizes(trials)) == 32
    assert BatchSearch(trials[:1], BOUNDS).predict_memory(16) == 40 * GIB
    assert BatchSearch(trials[:2], BOUNDS).predict_memory(16) == 21 * GIB


def test_too_large_a_beginning_is_halved_until_it_fits() -> None:
    curve = Curve(gpu_kib=GIB + GIB // 2)
    assert list_sizes(search(curve.measure, replace(BOUNDS, start=64)))[:6] == [64, 32, 16, 8, 4, 6]
    nothing = search(Curve(gpu_kib=GIB).measure)
    assert list_sizes(nothing) == [8, 4, 2, 1]
    assert BatchSearch(nothing, BOUNDS).conclude() is None


def test_the_fastest_may_be_smaller_than_the_largest() -> None:
    trials = search(Curve(gpu_kib=40 * GIB, fixed=0.001, knee=16).measure)
    choice = BatchSearch(trials, BOUNDS).conclude()
    assert choice is not None
    assert choice.largest == 256 and choice.fastest == choice.batch == 16


def test_a_size_between_two_is_tried_alone() -> None:
    """12 are faster than 8 and 16; 18 are more than the largest that fits."""
    trials = [Trial(16, rate=90), Trial(8, rate=80), Trial(12, rate=100)]
    assert BatchSearch([*trials, Trial(24, verdict=TOO_LARGE)], replace(BOUNDS, memory_kib=0)).next() is None
    assert BatchSearch([*trials, Trial(32, rate=50), Trial(64, verdict=TOO_LARGE)], BOUNDS).next() == 48


def test_smaller_sizes_are_tried_as_long_as_they_are_as_fast() -> None:
    """No step has a fixed cost: every size is as fast."""
    trials = search(Curve(fixed=0, gpu_kib=4 * GIB).measure)
    assert min(list_sizes(trials)) == 1
    choice = BatchSearch(trials, BOUNDS).conclude()
    assert choice is not None and choice.batch == 1


def test_slow_steps_without_a_gain_end_the_search() -> None:
    trials = search(Curve(fixed=0.2, each=0.2).measure)
    choice = BatchSearch(trials, BOUNDS).conclude()
    assert choice is not None and not choice.is_bounded
    assert max(trial.step_seconds for trial in trials) < 900 / 11
    assert "was not tried: " in choice.why and "steps of about" in choice.why


def test_a_run_that_takes_too_long_is_not_begun() -> None:
    bounds = replace(BOUNDS, timeout=12, memory_kib=0)
    trials = search(Curve(fixed=1).measure, bounds)
    assert max(trial.step_seconds for trial in trials) < 12 / 11 and len(trials) > 2
    assert "tune.timeout=12 s" in BatchSearch(trials, bounds).refuse(1024)


def test_a_size_that_fails_for_another_reason_is_no_limit_of_memory() -> None:
    def measure(batch: int) -> Trial:
        fits = 24 % batch == 0
        return Curve().measure(batch) if fits else Trial(batch, verdict=FAILED, reason="24 must divide")

    choice = BatchSearch(search(measure), BOUNDS).conclude()
    assert choice is not None
    assert (choice.largest, choice.is_bounded) == (12, False)
    assert choice.why == "16 fails, not for memory: 24 must divide"


@pytest.mark.parametrize(("most", "largest"), [(1, 1), (2, 2), (8, 8), (13, 12), (100, 96), (4096, 4096)])
def test_the_largest_to_try_is_kept_to(most: int, largest: int) -> None:
    bounds = replace(BOUNDS, max_batch=most, memory_kib=0)
    choice = BatchSearch(search(Curve().measure, bounds), bounds).conclude()
    assert choice is not None
    assert (choice.largest, choice.why) == (largest, f"tune.max_batch={most}")


def test_without_throughput_the_largest_with_a_margin_is_chosen() -> None:
    def measure(batch: int) -> Trial:
        return replace(Curve(gpu_kib=7 * GIB).measure(batch), rate=0.0, step_seconds=0.0)

    choice = BatchSearch(search(measure), BOUNDS).conclude()
    assert choice is not None
    assert (choice.fastest, choice.batch) == (None, 32)


def test_any_program_is_searched_in_few_runs() -> None:
    """The largest is within a third of what is possible, the fastest within 5% of the best on the way."""
    rng = random.Random(14)
    for _ in range(500):
        curve = Curve(
            base_kib=int(rng.uniform(0.1, 12) * GIB),
            each_kib=int(rng.uniform(0.001, 2) * GIB),
            fixed=rng.uniform(0, 0.5),
            each=10 ** rng.uniform(-5, -2),
            knee=1 << rng.randrange(20),
            gpu_kib=rng.choice([0, 16, 40, 80]) * GIB,
        )
        bounds = replace(BOUNDS, start=rng.choice([1, 4, 8, 8, 8, 24]), timeout=1e9, seconds=1e9)
        trials = search(curve.measure, bounds)
        choice = BatchSearch(trials, bounds).conclude()
        if choice is None:
            assert curve.base_kib + curve.each_kib > (curve.gpu_kib or 64 * GIB)
            continue
        possible = ((curve.gpu_kib or bounds.memory_kib) - curve.base_kib) / curve.each_kib
        assert min(possible, 4096) / 1.51 <= choice.largest <= possible or choice.largest == 1, (
            curve,
            trials,
        )
        rates = [curve.measure(1 << power).rate for power in range(13) if 1 << power <= choice.largest]
        assert choice.fastest is not None
        assert curve.measure(choice.fastest).rate >= 0.95 * max(rates), (curve, list_sizes(trials))
        assert len(trials) <= 18
