"""A thread that does one thing after the other, for what may be slow or stuck; nothing waits for it."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker(Generic[T]):
    """Does work on items in their order; of too many, those that come last are dropped.

    The interpreter's end does not wait for it. The first failure is warned of, and later ones are silent.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[T], object],
        most: int,
        warn: Callable[[OSError], object] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """`work` is called with each item, `finish` in the end; both raise OSError. `most` may wait."""
        self._work = work
        self._finish = finish
        self._warn = warn
        self._items: queue.Queue[tuple[T] | None] = queue.Queue(most)
        self.closing = threading.Event()
        """Somebody waits for the end."""
        self.busy_since: float | None = None
        """Monotonic time at which it began what it does now."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: T) -> bool:
        """Leave an item to the thread; return False if it had to be dropped."""
        try:
            self._items.put_nowait((item,))
        except queue.Full:
            return False
        return True

    def wait_idle(self, seconds: float) -> bool:
        """Wait until all is done, at most so long; tell whether it is."""
        with self._items.all_tasks_done:
            return self._items.all_tasks_done.wait_for(lambda: not self._items.unfinished_tasks, seconds)

    def close(self, timeout: float) -> None:
        """Have the rest done, and wait for that for so many seconds at most."""
        self.closing.set()
        end = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._items.put(None, timeout=timeout)
            self.thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while entry := self._items.get():
            self.busy_since = time.monotonic()
            try:
                self._work(entry[0])
            except OSError as error:
                if self._warn:
                    self._warn(error)
                    self._warn = None
            self.busy_since = None
            self._items.task_done()
        if self._finish:
            with contextlib.suppress(OSError):
                self._finish()
