"""Asks SLURM about jobs again and again, in a thread, and seldom enough for a busy controller."""

import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.errors import SchedulerError
from launcher.slurm.pending_reason import Place, ask_place
from launcher.slurm.queue import JobState, ask_queue

HURRY, FIRST, LONGEST = 0.5, 2.0, 20.0
"""Seconds between two questions: at a known change, after any, and when nothing has changed for long."""
GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Answer:
    """What SLURM said."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Those that it knows."""
    asked: frozenset[str] = frozenset()
    place: Place | None = None
    """Of the one job that is asked about."""
    error: str = ""
    """Why there is no answer."""


@dataclass(slots=True)
class Poller:
    """Asks about jobs until it is closed; the answers wait in a queue."""

    job_ids: tuple[str, ...]
    """What is asked about; may be replaced at any time."""
    answers: "queue.SimpleQueue[Answer]" = field(default_factory=queue.SimpleQueue)
    wake: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)
    closing: bool = False

    def __post_init__(self) -> None:
        """Begin to ask."""
        self.thread = threading.Thread(target=self.run_polls, daemon=True)
        self.thread.start()

    def run_polls(self) -> None:
        """Ask, wait, and ask again: the thread's body."""
        pause, known = FIRST, Answer()
        while not self.closing:
            answer = ask_jobs(self.job_ids)
            self.answers.put(answer)
            pause = min(pause * GROWTH, FIRST if answer.jobs != known.jobs else LONGEST)
            known = answer
            if self.wake.wait(pause):
                self.wake.clear()
                pause = HURRY

    def ask_now(self) -> None:
        """Ask without waiting, since something is known to have changed."""
        self.wake.set()

    def take_answers(self) -> Iterable[Answer]:
        """Give what has been said since the last call."""
        while not self.answers.empty():
            yield self.answers.get()

    def close(self) -> None:
        """Ask no more."""
        self.closing = True
        self.wake.set()


def ask_jobs(job_ids: tuple[str, ...]) -> Answer:
    """Ask once; of one job that is pending its place in the queue as well."""
    try:
        jobs = ask_queue(job_ids)
        waits = [job for job in jobs.values() if job.state == "PENDING"]
        place = ask_place(waits[0]) if len(job_ids) == len(waits) == 1 else None
    except SchedulerError as error:
        return Answer(asked=frozenset(job_ids), error=str(error))
    return Answer(jobs, frozenset(job_ids), place)
