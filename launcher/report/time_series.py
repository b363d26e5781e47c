"""What nodes reported over time, put into bins: a value for each rank, the spread over ranks, shares of time.

Everything here is pure: reports in, numbers out. Times are seconds since the epoch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import fmean, median

from launcher.watch.watch_model import NodeReport, RankState

MOST_BINS = 160
"""Bins of a chart: more than one for each six pixels of it are not told apart."""
FEW_HOSTS = 8
"""Nodes up to which each has to report in each bin."""
LARGEST = 1e15
"""Numbers above this are damage: no bytes, seconds or watts of a rank."""
LONGEST_GAP = 3.0
"""Intervals between two reports that count as time of the later one; what is longer is a gap."""
STARTING = ("starting", "joining", "compiling")
GONE = ("ended", "exited", "unwatched")
ACTIVITIES = ("compute", "waiting for others", "data", "saving", "evaluating", "starting", "hanging")
"""Where a rank's time goes, in the order in which charts and tables have it."""
Take = Callable[[RankState], float | None]
"""One quantity of a rank's state."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Equal parts of a span of time."""

    begin: float
    width: float
    count: int

    def find(self, time: float) -> int | None:
        """Return the bin of a time; None outside."""
        at = int((time - self.begin) // self.width) if time >= self.begin else -1
        return min(at, self.count - 1) if 0 <= at <= self.count else None

    def list_centers(self) -> list[float]:
        """Return the middle of each bin in seconds since the beginning."""
        return [(at + 0.5) * self.width for at in range(self.count)]


@dataclass(frozen=True, slots=True)
class Spread:
    """What the ranks had in each bin: the 5th percentile, the median and the 95th; None for an empty bin."""

    low: tuple[float | None, ...]
    middle: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RankTime:
    """Where the time of one rank went."""

    rank: int
    host: str
    seconds: tuple[float, ...]
    """For each of ACTIVITIES."""
    knows_waits: bool = True
    """Its waiting for others was measured; else that is in `compute`."""

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.seconds)

    def find_share(self, activity: str) -> float:
        """Return the share of time of an activity."""
        return self.seconds[ACTIVITIES.index(activity)] / self.total if self.total else 0.0


def choose_bins(samples: Sequence[NodeReport], begin: float, end: float) -> Bins:
    """Choose bins as fine as the reports are dense, MOST_BINS at most; there is one at least.

    Of many nodes, of which each is read for other times, they are as fine as all nodes' reports together.
    """
    span = max(end - begin, 1.0)
    plain = max(1, min(MOST_BINS, int(span / find_interval(samples))))
    counts = [plain]
    if len({sample.host for sample in samples}) > FEW_HOSTS:
        counts = [plain * factor for factor in range(16, 0, -1) if plain * factor <= MOST_BINS] or [plain]
    full = 0.9 * measure_fill(samples, Bins(begin, span / plain, plain))
    bins = (Bins(begin, span / count, count) for count in counts)
    return next((one for one in bins if measure_fill(samples, one) >= full), Bins(begin, span / plain, plain))


def measure_fill(samples: Sequence[NodeReport], bins: Bins) -> float:
    """Return the share of bins with a report."""
    return len({bins.find(sample.time) for sample in samples} - {None}) / bins.count


def find_interval(samples: Sequence[NodeReport]) -> float:
    """Return the usual seconds between two reports of a node: the median of all."""
    gaps = [
        later.time - earlier.time
        for found in group_by_host(samples).values()
        for earlier, later in pairwise(found)
        if later.time > earlier.time
    ]
    return max(median(gaps), 0.1) if gaps else 5.0


def group_by_host(samples: Iterable[NodeReport]) -> dict[str, list[NodeReport]]:
    """Return the reports of each node by time."""
    found: dict[str, list[NodeReport]] = {}
    for sample in samples:
        found.setdefault(sample.host, []).append(sample)
    for reports in found.values():
        reports.sort(key=lambda report: report.time)
    return found


def bin_values(samples: Iterable[NodeReport], bins: Bins, take: Take) -> dict[int, dict[int, float]]:
    """Return for each rank the mean of a quantity in each bin that it was reported in."""
    gathered: dict[int, dict[int, tuple[float, int]]] = {}
    for sample in samples:
        at = bins.find(sample.time)
        if at is None:
            continue
        for state in sample.ranks:
            value = take(state)
            if value is not None and is_sound(value):
                line = gathered.setdefault(state.rank, {})
                total, count = line.get(at, (0.0, 0))
                line[at] = total + value, count + 1
    return {
        rank: {at: total / count for at, (total, count) in gathered[rank].items()}
        for rank in sorted(gathered)
    }


def is_sound(value: float | None) -> bool:
    """Tell whether there is a number, and one that can be drawn."""
    return value is not None and isfinite(value) and 0 <= value < LARGEST


def fill_line(values: Mapping[int, float], count: int) -> tuple[float | None, ...]:
    """Return a value for each bin; None for those without."""
    return tuple(values.get(at) for at in range(count))


def find_rank_spread(values: Mapping[int, Mapping[int, float]], count: int) -> Spread:
    """Return the spread over ranks in each bin."""
    columns: list[list[float]] = [[] for _ in range(count)]
    for line in values.values():
        for at, value in line.items():
            columns[at].append(value)
    rows = [find_percentiles(sorted(column)) for column in columns]
    return Spread(*(tuple(row[at] for row in rows) for at in range(3)))


def find_percentiles(ordered: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the 5th percentile, the median and the 95th of ascending numbers, the nearest rank of each."""
    if not ordered:
        return None, None, None
    last = len(ordered) - 1
    low, middle, high = (ordered[round(share * last)] for share in (0.05, 0.5, 0.95))
    return low, middle, high


def share_time(
    samples: Sequence[NodeReport], hangs: Sequence[tuple[float, float]] = ()
) -> tuple[RankTime, ...]:
    """Return where each rank's time went, by rank.

    The time from one report of a node to the next is counted by what the later one says: all of it for the
    phase that the rank is in, and while it trains by its shares of waiting. `hangs` are spans of time.
    """
    longest = LONGEST_GAP * find_interval(samples)
    found: dict[int, list[float]] = {}
    hosts: dict[int, str] = {}
    blind: set[int] = set()
    for host, reports in group_by_host(samples).items():
        before = None
        for report in reports:
            past = report.interval if before is None else report.time - before
            seconds, before = min(max(past, 0.0), longest), report.time
            is_hang = any(begin <= report.time <= end for begin, end in hangs)
            for state in report.ranks:
                add_time(found.setdefault(state.rank, [0.0] * len(ACTIVITIES)), state, seconds, is_hang)
                hosts[state.rank] = host
                if state.phase in ("training", "loading") and state.wait_share is None:
                    blind.add(state.rank)
    return tuple(
        RankTime(rank, hosts[rank], tuple(found[rank]), rank not in blind)
        for rank in sorted(found)
        if sum(found[rank])
    )


def add_time(totals: list[float], state: RankState, seconds: float, is_hang: bool) -> None:
    """Add seconds to what a rank did in them."""
    if state.phase in GONE:
        return
    whole = "hanging" if is_hang else "starting" if state.phase in STARTING else state.phase
    if whole in ACTIVITIES:
        totals[ACTIVITIES.index(whole)] += seconds
        return
    waits = limit_share(state.wait_share)
    data = min(limit_share(1.0 if state.phase == "loading" else state.data_share), 1.0 - waits)
    parts = {"compute": 1.0 - waits - data, "waiting for others": waits, "data": data}
    for activity, share in parts.items():
        totals[ACTIVITIES.index(activity)] += share * seconds


def limit_share(value: float | None) -> float:
    """Return a share between 0 and 1; 0 for none."""
    return min(max(value, 0.0), 1.0) if value is not None and isfinite(value) else 0.0


def order_slowest(times: Sequence[RankTime]) -> list[RankTime]:
    """Sort ranks, the slowest first: the one that others wait for is the one that waits least itself.

    Where waits are not known, it is the one that has trained longest.
    """
    if all(time.knows_waits for time in times):
        return sorted(times, key=lambda time: (time.find_share("waiting for others"), time.rank))
    return sorted(times, key=lambda time: (-time.seconds[0] - time.seconds[2], time.rank))


def average_times(times: Sequence[RankTime]) -> tuple[float, ...]:
    """Return the mean seconds of several ranks for each of ACTIVITIES; there is one rank at least."""
    return tuple(fmean(time.seconds[at] for time in times) for at in range(len(ACTIVITIES)))
