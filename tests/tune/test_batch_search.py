"""The search for a micro-batch, over made-up programs."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from launcher.tune.batch import BatchSearch
from launcher.tune.trials import FAILED, TOO_LARGE, MeasureError, Trial

GIB = 1 << 20
BOUNDS = BatchSearch("--b", start=8, max_batch=4096, memory_kib=64 * GIB, seconds=60, timeout=900)


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


def search(measure: Measure, bounds: BatchSearch = BOUNDS) -> tuple[list[int], dict[str, Any]]:
    """The sizes that are tried, and what is found."""
    tried = replace(bounds, trials=[])
    while (batch := tried.next()) is not None:
        assert 1 <= batch <= bounds.max_batch and batch not in [trial.value for trial in tried.trials]
        tried.trials.append(measure(batch))
        assert len(tried.trials) <= 18
    return [trial.value for trial in tried.trials], dict(tried.conclude().facts)


def fail_above_24(batch: int) -> Trial:
    fits = 24 % batch == 0
    return Curve().measure(batch) if fits else Trial(batch, verdict=FAILED, reason="24 must divide")


def without_rate(batch: int) -> Trial:
    return replace(Curve(gpu_kib=7 * GIB).measure(batch), rate=0.0, step_seconds=0.0)


UNLIMITED = replace(BOUNDS, memory_kib=0)


@pytest.mark.parametrize(
    ("measure", "bounds", "tried", "found"),
    [
        # 1 GiB, and an eighth for each sequence: 56 fit into 8 GiB, of which 48 is the largest tried.
        (Curve(gpu_kib=8 * GIB).measure, BOUNDS, [8, 16, 32, 64], (48, 48, 48, 48)),
        (Curve(gpu_kib=7 * GIB).measure, BOUNDS, [], (48, 32, 48, 32)),
        (Curve(gpu_kib=int(7.4 * GIB)).measure, BOUNDS, [], (48, 48, 48, 48)),
        (Curve(gpu_kib=9 * GIB).measure, BOUNDS, [], (64, 48, 64, 48)),
        # An unknown limit leaves what another size has shown.
        (Curve(limit_kib=7 * GIB).measure, BOUNDS, [], (48, 32, 48, 32)),
        # Most of 20 GiB is the model: half a size tells how memory grows.
        (Curve(19 * GIB).measure, replace(BOUNDS, memory_kib=24 * GIB), [8, 4, 16], (32, 24, 32, 24)),
        # Too large a beginning is halved until it fits.
        (
            Curve(gpu_kib=GIB + GIB // 2).measure,
            replace(BOUNDS, start=64),
            [64, 32, 16, 8, 4, 6],
            (4, 3, 4, 3),
        ),
        # The fastest may be smaller than the largest.
        (Curve(gpu_kib=40 * GIB, fixed=0.001, knee=16).measure, BOUNDS, [], (256, 256, 16, 16)),
        (Curve(fixed=0, gpu_kib=4 * GIB).measure, BOUNDS, [], (24, 16, 8, 8)),
        (without_rate, BOUNDS, [], (48, 32, None, 32)),
        (fail_above_24, BOUNDS, [8, 16, 12], (12, 12, 12, 12)),
    ],
)
def test_the_choice(
    measure: Measure, bounds: BatchSearch, tried: list[int], found: tuple[int | None, ...]
) -> None:
    """The largest size, the largest with a margin, the fastest, and what is to be used."""
    sizes, choice = search(measure, bounds)
    assert sizes[: len(tried)] == tried
    names = ("largest", "largest_with_margin", "fastest", "batch")
    assert tuple(choice[name] for name in names) == found


@pytest.mark.parametrize(
    ("measure", "bounds", "is_limit", "why"),
    [
        (Curve(gpu_kib=8 * GIB).measure, BOUNDS, True, "64 does not fit: out of memory"),
        (fail_above_24, BOUNDS, False, "16 fails, not for memory: 24 must divide"),
        (Curve(fixed=0.2, each=0.2).measure, BOUNDS, False, "no more throughput, and steps of about"),
        (Curve(fixed=1).measure, replace(UNLIMITED, timeout=12), False, "tune.timeout=12 s"),
        *(
            (Curve().measure, replace(UNLIMITED, max_batch=most), False, f"tune.max_batch={most}")
            for most in (1, 2, 8, 13, 100, 4096)
        ),
        *(
            (Curve().measure, replace(BOUNDS, memory_kib=gib * GIB), False, "it would take about")
            for gib in (3, 5, 9, 20, 33)
        ),
    ],
)
def test_what_ends_a_search(measure: Measure, bounds: BatchSearch, is_limit: bool, why: str) -> None:
    sizes, choice = search(measure, bounds)
    assert choice["largest_is_limit"] is is_limit and why in choice["limit"]
    most = max(map(measure, sizes), key=lambda trial: trial.memory_kib)
    assert most.memory_kib <= (bounds.memory_kib or most.memory_kib)
    assert max(measure(size).step_seconds for size in sizes) < bounds.timeout / 11
    possible = min(((bounds.memory_kib or 1 << 40) - GIB) // (GIB // 8), bounds.max_batch)
    if why.startswith(("tune.max", "it would")):
        assert possible / 1.5 < choice["largest"] <= possible


def test_nothing_fits() -> None:
    tried, choice = search(Curve(gpu_kib=GIB).measure)
    assert tried == [8, 4, 2, 1] and not any(found for key, found in choice.items() if key != "option")


def test_any_program_is_searched_in_few_runs() -> None:
    """The largest is within a third of what is possible, the fastest within 5% of what was tried."""
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
        tried, choice = search(curve.measure, bounds)
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
    with pytest.raises(MeasureError, match=re.escape("batches of 4 with --b 8 and with 16")):
        replace(BOUNDS, trials=[Trial(8, loader_batch=4), Trial(16, loader_batch=4)]).next()
