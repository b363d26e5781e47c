"""Why a job is pending, in words, its position in the queue, and the thread that asks SLURM about jobs."""

import math
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from launcher.errors import SchedulerError
from launcher.slurm.client import JobState, ask_queue, run_slurm

REASONS = {
    "Priority": "jobs of higher priority go first",
    "Resources": "the next in line, until enough nodes are free",
    "BeginTime": "its earliest start is still to come",
    "Dependency": "jobs that it depends on have not ended",
    "DependencyNeverSatisfied": "a job that it depends on ended otherwise: it never starts, cancel it",
    "JobArrayTaskLimit": "as many members of the array run as cluster.array_parallelism allows",
    "JobHeldUser": "held: `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobLaunchFailure": "its start failed",
    "Licenses": "a license that it asks for is in use",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "the partition is closed",
    "PartitionInactive": "the partition is closed",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to one job",
    "PartitionTimeLimit": "cluster.time is above the partition's limit",
    "Prolog": "the nodes are being prepared",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "BadConstraints": "no node fits cluster.constraint",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such QOS, or not for this account",
    "AccountNotAllowed": "the partition is not open to this account",
    "QOSNotAllowed": "the partition or the account is not open to this QOS",
}
"""SLURM's reasons (squeue(1), "JOB REASON CODES") that people meet most, and what they say."""
LIMITS = {
    "AssocGrp": "the account's jobs together have come to a limit",
    "AssocMax": "it is above what the account allows to one job or user",
    "QOSGrp": "the QOS's jobs together have come to a limit",
    "QOSMin": "it is below the QOS's least size",
    "QOSMax": "it is above what the QOS allows to one job, user or account",
    "Max": "it is above a limit of the account",
}
"""The same for families of reasons, by how they begin."""
QUEUE_REASONS = ("Priority", "Resources")
"""The reasons for which others before it matter."""
SHOWN_WAIT = timedelta(hours=48)
"""Up to here it is said how long something takes, beside when it is."""
HURRIED_PAUSE, FIRST_PAUSE, LONGEST_PAUSE = 0.5, 2.0, 20.0
"""Seconds between two questions: at a known change, after any, and when nothing has changed for long."""
GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A pending job among those of its partition."""

    position: int
    """1 is the first."""
    length: int
    """Pending jobs; an array's members that wait together count as one."""


def explain_reason(reason: str) -> str:
    """Return SLURM's reason, with an explanation if there is one: `Priority (jobs of … go first)`."""
    word = reason.partition(",")[0].strip()
    families = (text for start, text in LIMITS.items() if word.startswith(start))
    text = REASONS.get(word) or next(families, "")
    return f"{reason} ({text})" if text else reason


def describe_wait(job: JobState, position: QueuePosition | None, now: datetime) -> str:
    """Say why a pending job waits, its position and when it may start, as far as SLURM knows."""
    parts = [explain_reason(job.reason) or "the scheduler has not come to it yet"]
    if position:
        parts.append(f"position {position.position} of {position.length} in {job.partition}")
    if start := describe_expected_start(job.start, now):
        parts.append(f"expected start {start}")
    return ", ".join(parts)


def describe_expected_start(text: str, now: datetime) -> str:
    """Say when a job is expected to start; nothing if that is unknown or has passed."""
    try:
        start = datetime.fromisoformat(text)
    except ValueError:
        return ""
    wait = start - now
    if wait <= timedelta():
        return ""
    seconds = math.ceil(wait.total_seconds())
    hours, minutes = divmod(-(-seconds // 60), 60)
    how_long = f"{hours} h {minutes} min" if hours else f"{minutes} min" if seconds >= 60 else f"{seconds} s"
    return f"{start:%Y-%m-%d %H:%M}" + (f" (in {how_long})" if wait < SHOWN_WAIT else "")


def ask_position(job: JobState) -> QueuePosition | None:
    """Find a job's place in its partition's queue; None if that is not why it waits.

    Raises SchedulerError.
    """
    if job.reason not in QUEUE_REASONS:
        return None
    argv = ["squeue", "--noheader", "--states=PENDING", f"--partition={job.partition}", "--format=%i %Q"]
    return find_position(run_slurm(argv).splitlines(), job.job_id)


def find_position(lines: Iterable[str], job_id: str) -> QueuePosition | None:
    """Find a job among lines of job and priority; held jobs, whose priority is 0, stand in nobody's way."""
    rows = [line.split() for line in lines]
    pairs = [(row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdecimal()]
    queue = {name: priority for name, priority in pairs if priority}
    number = job_id.partition("_")[0]
    own = job_id if job_id in queue else next((n for n in queue if n.partition("_")[0] == number), None)
    if own is None:
        return None
    return QueuePosition(1 + sum(value > queue[own] for value in queue.values()), len(queue))


@dataclass(frozen=True, slots=True)
class Answer:
    """What SLURM said."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Those that it knows."""
    asked: frozenset[str] = frozenset()
    position: QueuePosition | None = None
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
        pause, known = FIRST_PAUSE, Answer()
        while not self.closing:
            answer = ask_jobs(self.job_ids)
            self.answers.put(answer)
            pause = min(pause * GROWTH, FIRST_PAUSE if answer.jobs != known.jobs else LONGEST_PAUSE)
            known = answer
            if self.wake.wait(pause):
                self.wake.clear()
                pause = HURRIED_PAUSE

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
        position = ask_position(waits[0]) if len(job_ids) == len(waits) == 1 else None
    except SchedulerError as error:
        return Answer(asked=frozenset(job_ids), error=str(error))
    return Answer(jobs, frozenset(job_ids), position)
