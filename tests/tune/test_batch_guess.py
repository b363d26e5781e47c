"""The first micro-batch of a search, by an estimate of memory."""

from dataclasses import replace

import pytest

from launcher.fit.training import (
    Device,
    Estimate,
    ModelDimensions,
    ParallelLayout,
    Range,
    Training,
    TrainingSettings,
)
from launcher.tune.batch_guess import guess_batch

MODEL = ModelDimensions("tiny", 256, 4, 128, 4, 2, 32, 384, 128)
REQUEST = Training(MODEL, ParallelLayout(), TrainingSettings(), Device("H100", 80 << 10), 1)


def estimate(request: Training) -> Estimate:
    """20 GiB, and one for each sequence; the range goes 10% to each side."""
    expected = (20 + request.settings.micro_batch) << 30
    total = Range(expected * 9 // 10, expected, expected * 11 // 10)
    return Estimate((), total, total, total)


@pytest.mark.parametrize(
    ("gib", "most", "batch"), [(80, 4096, 32), (90, 4096, 64), (80, 16, 16), (80, 24, 16), (10, 4096, 1)]
)
def test_the_first_size_is_the_largest_that_is_expected_to_fit(gib: int, most: int, batch: int) -> None:
    request = replace(REQUEST, device=Device("GPU", gib << 10))
    assert guess_batch(request, estimate, most) == batch


def test_without_a_device_s_memory_there_is_no_guess() -> None:
    assert guess_batch(replace(REQUEST, device=Device("GPU", 0)), estimate, 4096) is None
