"""Shows what the ranks of all nodes print, from their logs, where no process of ours is on the nodes."""

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.runs.rank_logs import Follower
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.report.console import JobConsole

TICK = 0.04
"""Seconds between two looks at the logs, while there is nothing new."""
TICK_FILE = 0.0005
"""Seconds more for each file that is looked at, which on a network filesystem is a question to its server."""
PATIENCE = 10.0
"""Seconds that a terminal or pipe has, at the end, to take what is still to be shown."""


@dataclass(slots=True)
class RankView:
    """Shows lines in a thread: a stalled reader must not hold up the job."""

    run: RunDir
    hosts: tuple[str, ...]
    """The nodes of the step, by SLURM_NODEID."""
    ranks: int
    """On each node."""
    mode: str
    """`logs.console`."""
    texts: "queue.SimpleQueue[tuple[bool, str]]" = field(default_factory=queue.SimpleQueue)
    """Lines that wait, and whether they are our own."""
    ending: threading.Event = field(default_factory=threading.Event)
    console: "JobConsole | None" = None
    thread: threading.Thread = field(init=False)

    def start(self) -> None:
        """Begin to show."""
        self.thread = threading.Thread(target=self.run_view, daemon=True)
        self.thread.start()

    def say(self, text: str) -> None:
        """Show one of our own lines."""
        self.texts.put((True, text))

    def show_text(self, line: str) -> None:
        """Show a line of srun's."""
        self.texts.put((False, line))

    def name_host(self, rank: int) -> str:
        """Return the node that a rank is on."""
        node = rank // self.ranks
        return self.hosts[node] if node < len(self.hosts) else "?"

    def run_view(self) -> None:
        """Show the job to its end: the thread's body. If that fails, the job goes on without."""
        try:
            self.show_ranks()
        except Exception as error:
            logger.warning(f"the display failed ({error!r}): see {self.run.path}")

    def show_ranks(self) -> None:
        """Show what is new until there is no more; the console's import is hidden by the program's own."""
        follower = Follower(self.run, is_new=True)
        count = len(self.hosts) * self.ranks
        for rank in range(count if self.mode == "all" else 1):
            follower.watch_rank(rank, self.run.first_attempt)
        from launcher.report.console import JobConsole, make_console

        logs, origin = str(self.run.path / "logs"), self.name_host if count > 1 else None
        self.console = console = JobConsole(self.mode, make_console(), logs, origin)
        tick = TICK + TICK_FILE * len(follower.offsets)
        while not self.ending.is_set():
            if not self.show_new(follower, console):
                self.ending.wait(tick)
        while self.show_new(follower, console):
            pass
        console.close()
        console.begin_line()

    def show_new(self, follower: Follower, console: "JobConsole") -> bool:
        """Show some of what the ranks have printed, and the lines that wait; False where there is nothing."""
        busy = console.show_turn(follower, final=self.ending.is_set())
        while not self.texts.empty():
            own, text = self.texts.get()
            console.print_message(text) if own else console.write_own_lines(console.encode(f"{text}\n"))
        console.tick()
        return busy

    def close(self) -> bool:
        """Have everything shown; False where the reader of our output takes none."""
        self.ending.set()
        taken = -1
        while self.thread.is_alive() and taken != self.count_taken():
            taken = self.count_taken()
            self.thread.join(PATIENCE)
        return not self.thread.is_alive()

    def count_taken(self) -> int:
        """Return the bytes that the readers of our output have taken."""
        return self.console.out.taken + self.console.err.taken if self.console else 0
