"""Which ranks are slow step after step: statistics over the excess of ranks, without files or a clock."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, pstdev

from launcher.watch.own_time import StepExcess

BLOCK = 10
"""Steps that are taken together: their mean is less noisy, and more like other means, than single steps."""
SCALES = (4, 6, 8, 10)
"""Blocks, newest last, over which a rank must be slow: large excess is plain after few of them."""
MIN_BLOCKS = 6
"""Blocks that are known before anything is said: fewer do not show how a rank drifts."""
MOST_BLOCKS = 40
MIN_EXCESS = 0.05
"""Excess, as a share of the others' step, that is worth to be told."""
CERTAINTY = 4.5
"""Excess in standard errors."""
RELATED = 2
"""Blocks of which one counts for the error: ranks drift, so that neighbouring blocks are alike."""
ROBUST_Z = 5.0
"""Excess in standard deviations of the other ranks' excess, once there are MIN_OTHERS."""
MIN_OTHERS = 4
SPREAD = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median in that of a mean, for normal noise: sqrt(pi / 2)."""
TRIMMED = 1.4
"""Standard deviation of ten normal values in that of the eight that are left without both ends."""
NOISE_FLOOR = 0.002
"""Spread of blocks, as a share of the step, below which none is believed."""
RECOVERED = 0.5
"""An episode ends once the excess over the fewest blocks is below this share of MIN_EXCESS."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slow step after step."""

    rank: int
    excess: float
    """Of its own part of a step, as a share of the others' step."""
    seconds: float
    """The same for each step."""
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive steps taken together."""

    first_step: int
    last_step: int
    seconds: float
    """Of a step, in the mean."""
    excess: Mapping[int, float]
    """Seconds for each step in the mean, by rank."""
    error: float
    """Standard error of these within the block, in the median over ranks."""


class ExcessHistory:
    """The last steps of all ranks; says which of them begin and cease to be slow."""

    def __init__(self, min_excess: float = MIN_EXCESS) -> None:
        self.min_excess = min_excess
        self.waiting: list[StepExcess] = []
        self.blocks: list[Block] = []
        self.last_step = 0
        self.slow: dict[int, SlowRank] = {}

    def add(self, steps: Iterable[StepExcess]) -> tuple[SlowRank, ...]:
        """Add steps, if they are not known already; return the ranks that begin to be slow.

        Steps may be missing in between.
        """
        found: list[SlowRank] = []
        for step in sorted(steps, key=lambda one: one.step):
            if step.step <= self.last_step:
                continue
            self.last_step = step.step
            self.waiting.append(step)
            if len(self.waiting) == BLOCK:
                self.add_block(join_steps(self.waiting))
                self.waiting = []
                found += self.judge()
        return tuple(found)

    def add_block(self, block: Block) -> None:
        """Add a block."""
        self.blocks = [*self.blocks[1 - MOST_BLOCKS :], block]

    def judge(self) -> list[SlowRank]:
        """Return the ranks that are slow now and were not before; forget those that have recovered."""
        for rank in [rank for rank in self.slow if self.has_recovered(rank)]:
            del self.slow[rank]
        found: dict[int, SlowRank] = {}
        for scale in SCALES:
            if len(self.blocks) >= max(scale, MIN_BLOCKS):
                for slow in find_slow(self.blocks, scale, self.min_excess):
                    found.setdefault(slow.rank, slow)
        new = [slow for rank, slow in found.items() if rank not in self.slow]
        self.slow |= found
        return new

    def has_recovered(self, rank: int) -> bool:
        """Tell whether a slow rank is as quick as the others again."""
        recent = self.blocks[-SCALES[0] :]
        shares = [block.excess.get(rank, 0.0) / block.seconds for block in recent]
        return median(shares) < RECOVERED * self.min_excess


def join_steps(steps: Sequence[StepExcess]) -> Block:
    """Take the mean of steps; only ranks that are in all of them count.

    The largest and the smallest excess of each rank are left out: one long pause is no habit.
    """
    ranks = sorted(set.intersection(*(set(step.excess) for step in steps)))
    seconds = median(step.seconds for step in steps)
    values = {rank: sorted(step.excess[rank] for step in steps)[1:-1] for rank in ranks}
    excess = {rank: fmean(own) for rank, own in values.items()}
    error = median(pstdev(own, excess[rank]) for rank, own in values.items()) / sqrt(len(steps)) * TRIMMED
    return Block(steps[0].step, steps[-1].step, seconds, excess, error)


def find_slow(blocks: Sequence[Block], scale: int, min_excess: float) -> list[SlowRank]:
    """Return the ranks that are slow over all of the last blocks, `scale` of them, the slowest first.

    A rank is slow if the median of its blocks is at least `min_excess`, is certain by its spread within and
    between blocks, and stands out from the others by a robust z (their median and median absolute
    deviation).
    """
    recent, older = blocks[-scale:], blocks[:-scale]
    seconds = max(1e-9, median(block.seconds for block in recent))
    ranks = set.intersection(*(set(block.excess) for block in recent))
    if len(ranks) < 2:
        return []
    shares = {rank: [block.excess[rank] / seconds for block in recent] for rank in ranks}
    middles = {rank: median(own) for rank, own in shares.items()}
    usual = median(middles.values())
    across = SPREAD * median(abs(middle - usual) for middle in middles.values())
    within = median(block.error for block in recent) / seconds / sqrt(scale)
    between = measure_drift(recent, older, seconds) / sqrt(max(1, scale / RELATED))
    found = []
    for rank, middle in middles.items():
        excess = middle / (1 - middle) if middle < 1 else inf
        if excess < min_excess or min(shares[rank]) < 0:
            continue
        error = MEDIAN_ERROR * max(within, between, NOISE_FLOOR)
        stands_out = len(ranks) <= MIN_OTHERS or middle - usual >= ROBUST_Z * max(across, NOISE_FLOOR)
        if middle >= CERTAINTY * error and stands_out:
            found.append(SlowRank(rank, excess, middle * seconds, recent[0].first_step, recent[-1].last_step))
    return sorted(found, key=lambda slow: -slow.excess)


def measure_drift(recent: Sequence[Block], older: Sequence[Block], seconds: float) -> float:
    """Return by how much ranks wander from block to block, as a share of the step: a median over ranks."""
    spreads = []
    for rank in set.union(*(set(block.excess) for block in recent)):
        parts = ([block.excess[rank] for block in part if rank in block.excess] for part in (recent, older))
        spreads.append(max(measure_noise(own) if len(own) > 2 else 0.0 for own in parts))
    return median(spreads) / seconds


def measure_noise(values: Sequence[float]) -> float:
    """Return the standard deviation of values, by their median absolute deviation."""
    middle = median(values)
    return SPREAD * median(abs(value - middle) for value in values)
