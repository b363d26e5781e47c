"""The judging node's comparison of ranks, in a thread: that takes a second with 1,000 of them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from launcher.watch.stragglers import StragglerFinder, explain_straggler
from launcher.watch.watch_model import NodeReport

AFTER_DEFECT = 600.0
"""Seconds until the next comparison after one that failed."""
COMPARISONS = 50
"""The ranks are compared no sooner than so many times what that took the last time: 2% of a core at most."""


@dataclass(slots=True)
class StragglerSearch:
    """Looks for stragglers, and tells of them."""

    send: Callable[[dict[str, object]], None]
    """Tells the supervisor something."""
    finder: StragglerFinder = field(default_factory=StragglerFinder)
    thread: threading.Thread | None = None
    next_time: float = 0.0
    """Monotonic."""

    def start(self, reports: Sequence[NodeReport], now: float) -> None:
        """Compare the ranks of these reports, if it is time; `now` is monotonic."""
        if now < self.next_time or (self.thread and self.thread.is_alive()):
            return
        self.thread = threading.Thread(target=self.compare, args=(reports,), name="stragglers", daemon=True)
        self.thread.start()

    def compare(self, reports: Sequence[NodeReport]) -> None:
        """Compare them: the thread's body."""
        begin = time.thread_time()
        self.next_time = time.monotonic() + AFTER_DEFECT
        for found in self.finder.update(reports):
            lines = [explain_straggler(found)]
            self.send({"event": "straggler", "lines": lines, "straggler": asdict(found)})
        self.next_time = time.monotonic() + COMPARISONS * (time.thread_time() - begin)
