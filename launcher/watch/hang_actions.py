"""What follows a hang on a node, and when: pure values in, pure values out.

A restart costs minutes, and a verdict on ranks that work can be wrong: only ranks that do nothing at all are
ended at once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.watch.progress_limit import RankProgress
from launcher.watch.rank_activity import is_working
from launcher.watch.watch_model import Hang, NodeEvidence, Verdict

CAUTION, CAUTION_LIMITS = 60.0, 2.0
"""Seconds, and times the limit, for which a hang must go on after its verdict before ranks that work end."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the supervisor is to do because of a hang."""

    action: str
    """`restart` or `stop`."""
    ranks: tuple[int, ...]
    """Those on this node that hold the others up; none if they are elsewhere, and have ended."""
    pids: tuple[int, ...]
    """Of all ranks on this node: if others run by now, the order has come too late."""
    sentence: str


@dataclass(slots=True)
class HangActions:
    """What was done here about hangs."""

    acted: int = 0
    """Number of the last hang that is dealt with."""
    seen: dict[int, float] = field(default_factory=dict)
    """Monotonic time at which each hang was first heard of, by number."""

    def list_orders(
        self, hangs: Iterable[Hang], progress: Sequence[RankProgress], pids: Mapping[int, int], now: float
    ) -> Iterator[Order]:
        """Give what is to be done now; `progress` and `pids` are of this node's ranks, `now` is monotonic."""
        for hang in hangs:
            if hang.number <= self.acted:
                continue
            waited = now - self.seen.setdefault(hang.number, now)
            culprits = tuple(rank for rank in pids if rank in hang.verdict.ranks)
            if is_settled(hang, pids):
                self.acted = hang.number
            elif waited >= hang.delay and not has_moved(progress, culprits, hang.delay):
                self.acted = hang.number
                if culprits or hang.action == "stop" or hang.verdict.kind == "exited":
                    yield Order(hang.action, culprits, tuple(pids.values()), hang.verdict.sentence)


def is_settled(hang: Hang, pids: Mapping[int, int]) -> bool:
    """Tell whether nothing is to be done about a hang, or no more: other processes are those ranks now."""
    restarted = any(pids.get(rank, pid) != pid for rank, pid in hang.pids)
    return hang.action == "report" or hang.recovered is not None or restarted


def has_moved(progress: Sequence[RankProgress], ranks: Collection[int], seconds: float) -> bool:
    """Tell whether one of some ranks has made progress within the last seconds."""
    return any(one.rank in ranks and one.idle is not None and one.idle < seconds for one in progress)


def choose_action(on_hang: str, verdict: Verdict) -> str:
    """Return what follows a verdict: of ranks that are not heard of, nobody knows whether they work."""
    return "report" if verdict.kind == "silent" else on_hang


def choose_delay(verdict: Verdict, evidence: Sequence[NodeEvidence], limit: float) -> float:
    """Return the seconds for which a hang must go on before ranks are ended for it.

    It is 0 if those that hold the others up used no CPU, moved no bytes and stood at one place.
    """
    ranks = {rank.rank: rank for node in evidence for rank in node.ranks}
    culprits = [ranks.get(rank) for rank in verdict.ranks]
    if all(rank is not None and not is_working(rank) for rank in culprits):
        return 0.0
    return max(CAUTION, CAUTION_LIMITS * limit)
