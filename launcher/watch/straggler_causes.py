"""Why a rank is slow, as far as reports show: what it has more of than the other ranks. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from launcher.watch.watch_model import GpuSample, RankState

EXPLAINED = 0.5
"""Share of the excess that a cause accounts for if it is named before others."""
PARTLY = 0.25
"""The largest cause is named if it accounts for this share of the excess."""
FAULT_SECONDS = 5e-4
"""What a major page fault is taken to cost: 0.1 ms from flash, several from disks and networks."""
PRESSURE = 0.05
"""Share of the time that tasks of the node wait for memory (PSI), from which on it is named."""
CLOCK = 0.97
"""A GPU's clock in that of the others, below which it is low."""
OWN_CODE = "program"
"""The cause, if no other is found."""
COMPUTES = 0.85
"""Cores that a rank uses at least, if it computes all the time."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank in one report, and its node's memory pressure."""

    state: RankState
    memory_pressure: float | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of Straggler, how much of the time it accounts for, and the figures."""

    name: str
    share: float
    detail: str


def find_cause(rank: Sequence[RankFacts], others: Sequence[Sequence[RankFacts]], excess: float) -> Cause:
    """Compare a slow rank's reports with those of the other ranks over the same time.

    `excess` is the share of the time by which it holds the others up.
    """
    finders = (find_data_wait, find_throttling, find_run_delay, find_faults, find_low_clock)
    found = [cause for find in finders if rank and (cause := find(rank, others)) is not None]
    for cause in found:
        if cause.share >= EXPLAINED * excess:
            return cause
    best = max(found, key=lambda cause: cause.share, default=None)
    if best is not None and best.share >= PARTLY * excess:
        return best
    return find_narrow_link(rank, others) or describe_own_code(rank)


def compare_values(
    rank: Sequence[RankFacts],
    others: Sequence[Sequence[RankFacts]],
    get: Callable[[RankFacts], float | None],
) -> tuple[float, float] | None:
    """Return a value of the rank, in the mean of its reports, and the median of the others'."""
    own = take_mean(rank, get)
    theirs = [mean for other in others if (mean := take_mean(other, get)) is not None]
    return None if own is None else (own, median(theirs) if theirs else 0.0)


def take_mean(facts: Sequence[RankFacts], get: Callable[[RankFacts], float | None]) -> float | None:
    """Return the mean of the values that are known."""
    values = [value for one in facts if (value := get(one)) is not None]
    return fmean(values) if values else None


def find_data_wait(rank: Sequence[RankFacts], others: Sequence[Sequence[RankFacts]]) -> Cause | None:
    """It waits for its DataLoader."""
    values = compare_values(rank, others, lambda one: one.state.data_share)
    if values is None:
        return None
    own, usual = values
    return Cause(
        "data", own - usual, f"it waits for data for {own:.0%} of the time, the others for {usual:.0%}"
    )


def find_throttling(rank: Sequence[RankFacts], others: Sequence[Sequence[RankFacts]]) -> Cause | None:
    """A CPU quota of its own cgroup holds it back."""
    values = compare_values(rank, others, lambda one: one.state.throttled)
    if values is None:
        return None
    own, usual = values
    return Cause(
        "cpu_quota", own - usual, f"the CPU quota of its cgroup holds it back for {own:.0%} of the time"
    )


def find_run_delay(rank: Sequence[RankFacts], others: Sequence[Sequence[RankFacts]]) -> Cause | None:
    """It is ready to run and waits for a core."""
    values = compare_values(rank, others, lambda one: one.state.thread_delay)
    if values is None:
        return None
    own, usual = values
    return Cause("run_delay", own - usual, describe_neighbours(rank, own))


def describe_neighbours(rank: Sequence[RankFacts], delay: float) -> str:
    """Say who runs on the cores of a rank."""
    found = {(one.name, one.pid): one for facts in rank for one in facts.state.neighbours}
    busiest = sorted(found.values(), key=lambda one: -one.share)[:2]
    if not busiest:
        return f"it waits for a core for {delay:.0%} of the time"
    texts = [
        f"{one.name} (PID {one.pid}) runs on its cores for {one.share:.0%} of the time" for one in busiest
    ]
    return f"{' and '.join(texts)}; it waits for a core for {delay:.0%}"


def find_faults(rank: Sequence[RankFacts], others: Sequence[Sequence[RankFacts]]) -> Cause | None:
    """Its memory is read back from disk; with memory pressure on its node, that is the reason."""
    values = compare_values(rank, others, lambda one: one.state.major_faults)
    pressure = take_mean(rank, lambda one: one.memory_pressure) or 0.0
    usual_pressure = [take_mean(other, lambda one: one.memory_pressure) or 0.0 for other in others]
    faults = max(0.0, values[0] - values[1]) if values else 0.0
    share = min(1.0, FAULT_SECONDS * faults)
    more = pressure - median(usual_pressure) if usual_pressure else 0.0
    detail = f"{faults:.0f} major page faults a second more than the others"
    if pressure >= PRESSURE and max(share, more) > 0:
        text = f"tasks on its node wait for memory for {pressure:.0%} of the time"
        return Cause("memory_pressure", max(share, more), f"{text}, {detail}" if faults >= 1 else text)
    return Cause("page_faults", share, detail) if values else None


def find_low_clock(rank: Sequence[RankFacts], others: Sequence[Sequence[RankFacts]]) -> Cause | None:
    """The clock of its GPU is lower than that of the others."""
    values = compare_values(rank, others, lambda one: one.state.gpu.sm_clock if one.state.gpu else None)
    if values is None or values[1] <= 0 or values[0] >= CLOCK * values[1]:
        return None
    own, usual = values
    samples = [one.state.gpu for one in rank if one.state.gpu]
    reasons = tuple(dict.fromkeys(reason for gpu in samples for reason in gpu.event_reasons))
    why = f" ({', '.join(reasons)})" if reasons else ""
    return Cause(
        "gpu_clock", 1 - own / usual, f"its GPU runs at {own:.0f} MHz, the others at {usual:.0f}{why}"
    )


def find_narrow_link(rank: Sequence[RankFacts], others: Sequence[Sequence[RankFacts]]) -> Cause | None:
    """The PCIe link of its GPU is narrower than it can be, and those of most others are not."""
    own = next((one.state.gpu for one in reversed(rank) if one.state.gpu), None)
    theirs = [facts[-1].state.gpu for facts in others if facts]
    if own is None or not is_narrow(own) or sum(map(is_narrow, theirs)) * 2 > len(theirs):
        return None
    return Cause("pcie", 0.0, f"its GPU's PCIe link has {own.pcie_width} lanes of {own.max_pcie_width}")


def is_narrow(gpu: GpuSample | None) -> bool:
    """Tell whether a GPU's link has fewer lanes than it can have."""
    return bool(gpu and gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width)


def describe_own_code(rank: Sequence[RankFacts]) -> Cause:
    """It is the rank's own code: say whether that computes or waits for something."""
    cpu = take_mean(rank, lambda one: one.state.cpu)
    if cpu is None:
        return Cause(OWN_CODE, 0.0, "its own code, for none of the reasons that are looked for")
    does = "computes" if cpu >= COMPUTES else "sleeps, or waits for something but data and other ranks"
    return Cause(OWN_CODE, 0.0, f"its own code: it {does}, with {cpu:.2f} cores in use")
