"""What the supervisor makes of the watcher's messages: what to log, to record and to do."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from launcher.launch.processes import Death, RankProcess
from launcher.launch.watcher_process import WatcherProcess
from launcher.text import escape_text

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MOST_HANGS = 100
"""Hangs, and stragglers, that the manifest tells of."""
MOST_LINES = 20
"""Lines of one message that are shown."""


@dataclass(frozen=True, slots=True)
class HangOrder:
    """What is to be done because of a hang."""

    action: str
    """`restart` or `stop`."""
    ranks: tuple[int, ...]
    """Ranks to kill for a restart; none for all of this node."""
    sentence: str
    pids: tuple[int, ...] = ()
    """Of all ranks on this node that it is about."""

    def is_late(self, running: Iterable[RankProcess]) -> bool:
        """Tell whether ranks were started anew since: others run than it knows of."""
        return any(process.pid not in self.pids for process in running)


@dataclass(slots=True)
class Watching:
    """A job that is watched."""

    watcher: WatcherProcess
    hangs: list[dict[str, object]] = field(default_factory=list)
    """Those that this node has told of, as `watch.model.Hang`."""

    stragglers: list[dict[str, object]] = field(default_factory=list)
    """Those that this node has told of, as `watch.model.Straggler`."""

    failed: bool = False
    """A call of ours has raised what nobody has foreseen: the job goes on without."""

    @property
    def pids(self) -> Collection[int]:
        """PIDs of processes of our own."""
        return self.watcher.pids

    def add_ranks(self, ranks: Iterable[RankProcess]) -> None:
        """Have ranks watched that have started."""
        self.guard(lambda: self.watcher.add_ranks(ranks))

    def attend(self, deaths: Sequence[Death]) -> list[HangOrder]:
        """Take the watcher's messages; return what is to be done. `deaths` are all of them so far."""
        return self.guard(lambda: self.take(self.watcher.attend(deaths))) or []

    def close(self) -> None:
        """End the watcher, and say what it had to say last."""
        self.failed = False
        self.guard(lambda: self.take(self.watcher.close()))

    def guard(self, call: Callable[[], Result]) -> Result | None:
        """Call what must not touch the job; after the first failure nothing more is called but the end."""
        if self.failed:
            return None
        try:
            return call()
        except Exception as error:
            self.failed = True
            logger.warning(f"the ranks are no longer watched, and run on: {error!r}")
            return None

    def take(self, messages: Iterable[dict[str, object]]) -> list[HangOrder]:
        """Log messages, keep the hangs among them, and return the orders."""
        orders = []
        for message in messages:
            level = logging.WARNING if message["event"] == "warning" else logging.INFO
            for line in select_texts(message.get("lines"))[:MOST_LINES]:
                logger.log(level, escape_text(line))
            if message["event"] in ("hang", "recovered"):
                self.keep_hang(message.get("hang"))
            elif message["event"] == "straggler":
                self.keep_straggler(message.get("straggler"))
            elif message["event"] == "act":
                orders.append(decode_order(message))
        return orders

    def keep_straggler(self, straggler: object) -> None:
        """Keep a straggler for the manifest."""
        if isinstance(straggler, dict):
            self.stragglers = [*self.stragglers, straggler][-MOST_HANGS:]

    def keep_hang(self, hang: object) -> None:
        """Keep a hang, or what has become of one, for the manifest."""
        if not isinstance(hang, dict):
            return
        self.hangs = [one for one in self.hangs if one.get("number") != hang.get("number")]
        self.hangs = [*self.hangs, hang][-MOST_HANGS:]


def decode_order(message: dict[str, object]) -> HangOrder:
    """Return what a message asks for."""
    sentence = escape_text(str(message.get("sentence") or ""))
    ranks, pids = take_numbers(message.get("ranks")), take_numbers(message.get("pids"))
    return HangOrder(str(message.get("action")), ranks, sentence, pids)


def take_numbers(value: object) -> tuple[int, ...]:
    """Return the whole numbers of a list."""
    return tuple(item for item in value if type(item) is int) if isinstance(value, list) else ()


def select_texts(value: object) -> list[str]:
    """Return the texts of a list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
