"""Writes lines to the tasks of a step, by srun's stdin, and lets nobody wait for a reader."""

import threading
from collections.abc import Iterable
from queue import SimpleQueue

from launcher.launch.signal_channel import write_line_to_tasks

CLOSE_TIMEOUT = 5.0
"""Seconds for what is still to be written when srun has ended."""


class TaskWriter:
    """Keeps lines whole and in their order, whichever thread sends them.

    srun reads no further while the daemon of a node takes nothing from it: whoever wrote to it directly would
    wait too.
    """

    def __init__(self, descriptor: int) -> None:
        """Write to a descriptor, which is closed by others."""
        self.descriptor = descriptor
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        self.thread = threading.Thread(target=self.write_lines, daemon=True)
        self.thread.start()

    def send(self, lines: Iterable[str]) -> None:
        """Write lines as soon as possible; nothing happens if the tasks are gone."""
        for line in lines:
            self.lines.put(line)

    def write_lines(self) -> None:
        """Write what is sent until the end: the thread's body."""
        while (line := self.lines.get()) is not None:
            write_line_to_tasks(self.descriptor, line)

    def close(self) -> bool:
        """Write what is left; False if nobody reads it, and the thread still waits."""
        self.lines.put(None)
        self.thread.join(CLOSE_TIMEOUT)
        return not self.thread.is_alive()
