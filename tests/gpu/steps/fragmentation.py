"""GPU memory with and without expandable segments: the largest batch that fits, and what lies fallow."""

from collections.abc import Iterable, Mapping

import torch

from tests.benchmarks.fragmentation import ALLOCATORS, Fill, fill
from tests.gpu.context import NEEDED, Context, together

CAP, OUTSIDE = 4.0, 0.7
"""GiB of GPU memory for each process at most, and what it takes outside torch's allocator."""
STEPS = 40
FIRST = (2, 4, 8, 16, 32)
"""Batches that are tried first; as many more between the largest that fits and the smallest that does not."""
LARGEST = 256
Tried = Mapping[tuple[str, int], Fill]
"""What came of it, by allocator and batch."""


def run(context: Context) -> None:
    """On a GPU, find the largest batch of each allocator, and compare both at the smaller of these."""
    if context.cpu:
        for name in ALLOCATORS:
            filled = fill(context.folder, name, 1, "--device=cpu", "--steps=1")
            context.record.check(f"the program trains under allocator={name}", filled.fits)
        context.record.leave_out("the GPU's memory under each allocator", NEEDED)
        return
    cap = choose_cap()
    first = try_batches(context, cap, FIRST)
    tried = {**first, **try_batches(context, cap, list_between(first))}
    largest = {name: find_largest(tried, name) for name in ALLOCATORS}
    for name in ALLOCATORS:
        context.record.check(
            f"a batch fits under allocator={name}", largest[name] > 0, f"within {cap:.1f} GiB"
        )
        common = tried.get((name, min(largest.values())))
        if common:
            record_fill(context, name, largest, common)


def choose_cap() -> float:
    """GiB for each process, so that all of a round fit on the GPU together."""
    free, _ = torch.cuda.mem_get_info()
    return min(CAP, 0.95 * free / 2**30 / (len(FIRST) * len(ALLOCATORS)) - OUTSIDE)


def try_batches(context: Context, cap: float, batches: Iterable[int]) -> Tried:
    """Fill the GPU's memory with each batch under each allocator, all at the same time."""
    pairs = [(allocator, batch) for allocator in ALLOCATORS for batch in batches]
    filled = together(lambda pair: try_batch(context, cap, *pair), pairs, max(1, len(pairs)))
    return {pair: one for pair, one in zip(pairs, filled, strict=True) if one}


def try_batch(context: Context, cap: float, allocator: str, batch: int) -> Fill | None:
    """Fill the GPU's memory once; None where that fails otherwise than for lack of memory."""
    folder = context.folder / f"{allocator}-{batch}"
    folder.mkdir()
    with context.record.part(f"allocator={allocator}, batches of {batch}"):
        return fill(folder, allocator, batch, f"--cap-gib={cap}", f"--steps={STEPS}")
    return None


def list_between(tried: Tried) -> list[int]:
    """Batches between those of which it is known, under both allocators, whether they fit."""
    good = min(find_largest(tried, name) for name in ALLOCATORS)
    fitting = {batch for (_, batch), filled in tried.items() if filled.fits}
    bad = min((batch for _, batch in tried if batch > max(fitting, default=0)), default=LARGEST)
    stride = max(1, -(-(bad - good - 1) // len(FIRST)))
    return [batch for batch in range(good + stride, bad, stride) if batch not in FIRST]


def find_largest(tried: Tried, allocator: str) -> int:
    """The largest batch that fits; 0 where none does."""
    return max(
        (batch for (name, batch), filled in tried.items() if name == allocator and filled.fits), default=0
    )


def record_fill(context: Context, name: str, largest: Mapping[str, int], filled: Fill) -> None:
    """Record an allocator's figures at the batch that fits under both."""
    context.record.row(
        f"{STEPS} steps, sequences of 64 to 1,024",
        allocator=name,
        largest_batch_that_fits=largest[name],
        batch=min(largest.values()),
        reserved_MiB=filled.reserved_mib,
        allocated_MiB=filled.allocated_mib,
        unused=f"{1 - filled.allocated_mib / max(1.0, filled.reserved_mib):.0%}",
    )
    used = 0 < filled.allocated_mib <= filled.reserved_mib
    context.record.check(f"allocator={name} holds what tensors take", used, str(filled))
