"""What follows a hang on a node: pure values in, pure values out."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from launcher.watch.watch_model import Hang, Verdict


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

    def list_orders(self, hangs: Iterable[Hang], pids: Mapping[int, int]) -> Iterator[Order]:
        """Give what is to be done now; `pids` are of this node's ranks."""
        for hang in hangs:
            if hang.number <= self.acted:
                continue
            self.acted = hang.number
            culprits = tuple(rank for rank in pids if rank in hang.verdict.ranks)
            acts = culprits or hang.action == "stop" or hang.verdict.kind == "exited"
            if acts and not is_settled(hang, pids):
                yield Order(hang.action, culprits, tuple(pids.values()), hang.verdict.sentence)


def is_settled(hang: Hang, pids: Mapping[int, int]) -> bool:
    """Tell whether nothing is to be done about a hang, or no more: other processes are those ranks now."""
    restarted = any(pids.get(rank, pid) != pid for rank, pid in hang.pids)
    return hang.action == "report" or hang.recovered is not None or restarted


def choose_action(on_hang: str, verdict: Verdict) -> str:
    """Return what follows a verdict: of ranks that are not heard of, nobody knows whether they work."""
    return "report" if verdict.kind == "silent" else on_hang
