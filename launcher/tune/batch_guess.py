"""The micro-batch with which a search begins, by the estimate of a known model's memory."""

from collections.abc import Callable
from dataclasses import replace

from launcher.fit.training import Estimate, Training
from launcher.tune.batch_search import MARGIN


def guess_batch(request: Training, estimate: Callable[[Training], Estimate], max_batch: int) -> int | None:
    """Return the largest power of two up to `max_batch` that is expected to fit with a margin.

    None if the memory of the device is unknown; 1 if nothing is expected to fit, since estimates can be off.
    """
    capacity = request.device.memory_mib << 20
    if not capacity:
        return None
    size = 1
    while 2 * size <= max_batch:
        settings = replace(request.settings, micro_batch=2 * size)
        if estimate(replace(request, settings=settings)).total.expected > (1 - MARGIN) * capacity:
            break
        size *= 2
    return size
