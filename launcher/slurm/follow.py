"""Why a job is pending, in words, its position in the queue, and the thread that asks SLURM about jobs."""

import contextlib
import math
import os
import queue
import re
import select
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from launcher.errors import SchedulerError
from launcher.files import open_file
from launcher.launch.signals import FORWARDED, SignalQueue, catch_signals
from launcher.report.console import JobConsole, Source
from launcher.report.viewer import ViewOptions
from launcher.runs.manifest import CLOSED, read_job, read_manifest, take_dict
from launcher.runs.rank_logs import Follower
from launcher.runs.run_directory import RunDir, explain_missing_end
from launcher.slurm.commands import ENDED, JobState, ask_queue, run_slurm

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


def explain_reason(reason: str) -> str:
    """Return SLURM's reason, with an explanation if there is one: `Priority (jobs of … go first)`."""
    word = reason.partition(",")[0].strip()
    families = (text for start, text in LIMITS.items() if word.startswith(start))
    text = REASONS.get(word) or next(families, "")
    return f"{reason} ({text})" if text else reason


def describe_wait(job: JobState, position: tuple[int, int] | None, now: datetime) -> str:
    """Say why a pending job waits, its position and when it may start, as far as SLURM knows."""
    parts = [explain_reason(job.reason) or "the scheduler has not come to it yet"]
    if position:
        parts.append(f"position {position[0]} of {position[1]} in {job.partition}")
    with contextlib.suppress(ValueError):
        start = datetime.fromisoformat(job.start)
        wait = start - now
        if wait > timedelta():
            seconds = math.ceil(wait.total_seconds())
            hours, minutes = divmod(-(-seconds // 60), 60)
            left = (
                f"{hours} h {minutes} min" if hours else f"{minutes} min" if seconds >= 60 else f"{seconds} s"
            )
            how_long = f" (in {left})" if wait < SHOWN_WAIT else ""
            parts.append(f"expected start {start:%Y-%m-%d %H:%M}{how_long}")
    return ", ".join(parts)


def find_position(lines: Iterable[str], job_id: str) -> tuple[int, int] | None:
    """Find a pending job among lines of job and priority: its place, 1 is the first, and their number.

    An array's members that wait together count as one. Held jobs, whose priority is 0, stand in nobody's way.
    """
    rows = [line.split() for line in lines]
    pairs = [(row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdecimal()]
    queue = {name: priority for name, priority in pairs if priority}
    number = job_id.partition("_")[0]
    own = job_id if job_id in queue else next((n for n in queue if n.partition("_")[0] == number), None)
    if own is None:
        return None
    return 1 + sum(value > queue[own] for value in queue.values()), len(queue)


@dataclass(frozen=True, slots=True)
class Answer:
    """What SLURM said."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Those that it knows."""
    asked: frozenset[str] = frozenset()
    position: tuple[int, int] | None = None
    """See `find_position`: of the one job that is asked about, if that is why it waits."""
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
        jobs, position = ask_queue(job_ids), None
        waits = [job for job in jobs.values() if job.state == "PENDING"]
        if len(job_ids) == len(waits) == 1 and waits[0].reason in QUEUE_REASONS:
            where = f"--partition={waits[0].partition}"
            text = run_slurm(["squeue", "--noheader", "--states=PENDING", where, "--format=%i %Q"])
            position = find_position(text.splitlines(), waits[0].job_id)
    except SchedulerError as error:
        return Answer(asked=frozenset(job_ids), error=str(error))
    return Answer(jobs, frozenset(job_ids), position)


PATIENCE = 5.0
"""Seconds that a network filesystem has to show what was written, and SLURM to notice an end."""
SILENT = ("COMPLETING", "STAGE_OUT", "SIGNALING", "REQUEUED")
"""States that pass by themselves."""
QUIET = 5.0
"""Seconds without a new line after which a log counts as complete."""
FRESH = 2.0
"""Seconds for which a size that a network filesystem tells is believed."""
OWN_PREFIX = b"launch: "
"""How the lines of the batch script's process begin; the last line of a job is one."""
OWN_LINE = re.compile(rb"^(" + OWN_PREFIX + rb"[^\n]*\n)", re.MULTILINE)
OTHER_RANKS = re.compile(rb"^\[[^][\s]+:(?!0\] )\d+\] .*\n", re.MULTILINE)
"""Lines of other ranks than rank 0."""
RANKS = Source(0, "out", b"")
"""The log has the ranks' lines with their origin already."""
MOST_KEPT = 1 << 16
"""Bytes of a marked line; a longer one is none."""


@dataclass(slots=True)
class FollowedJob:
    """What is known of one job."""

    run_path: Path
    job_id: str
    state: JobState | None = None
    """SLURM's newest word; None before the first, and for a job that SLURM has forgotten."""
    position: tuple[int, int] | None = None
    forgotten: bool = False
    outcome: Mapping[str, object] = field(default_factory=dict)
    """The manifest's."""
    last_shown: tuple[object, ...] = ()
    """What the last line was about."""
    ran: bool = False
    ending: float | None = None
    """When there was first a sign of the end, in monotonic seconds."""
    status: int | None = None
    """Its exit code, once it has ended."""

    def update_state(self, answer: Answer) -> str:
        """Take what SLURM says, and return a line about what is new; empty if nothing is."""
        self.state = state = answer.jobs.get(self.job_id)
        self.position, self.forgotten = answer.position, state is None
        if state is None or state.state in ENDED or state.state in SILENT:
            return ""
        if self.is_final and state.state == "RUNNING":  # it has ended; SLURM is slower to tell
            return ""
        pending = state.state == "PENDING"
        key = (state.state, state.reason if pending else state.nodelist, state.restarts)
        if key == self.last_shown or (pending and not state.reason):
            return ""
        self.last_shown = key
        line = f"job {self.job_id} {self.describe_state(state)}"
        self.ran = self.ran or not pending
        return line

    def describe_state(self, state: JobState) -> str:
        """Say in which state it is, and what that means."""
        if state.state == "PENDING":
            wait = describe_wait(state, self.position, datetime.now())
            if not (self.ran or state.restarts):
                return f"waits: {wait}"
            cause = str(self.outcome.get("cause") or "") if self.outcome.get("state") == "requeued" else ""
            return f"is back in the queue{f' ({cause})' if cause else ''}: {wait}"
        where = f" on {state.nodelist}" if state.nodelist else ""
        again = (
            f", after {state.restarts} requeue{'s' if state.restarts > 1 else ''}" if state.restarts else ""
        )
        return f"is {state.state.lower()}{where}{again}"

    def update_outcome(self) -> bool:
        """Read how the run stands, and tell whether that is news."""
        before, manifest = self.outcome.get("state"), read_manifest(self.run_path)
        if read_job(manifest) == self.job_id:
            self.outcome = take_dict(manifest, "outcome") or self.outcome
        return self.outcome.get("state") != before

    @property
    def is_final(self) -> bool:
        """Whether the manifest tells the end."""
        return self.outcome.get("state") in CLOSED

    @property
    def is_over(self) -> bool:
        """Whether SLURM says that it has ended, or knows nothing of it any more."""
        return self.forgotten or (self.state is not None and self.state.state in ENDED)

    @property
    def has_run(self) -> bool:
        """Whether its last attempt may have begun: SLURM shows no nodes of a job that ended before it ran."""
        return self.state is None or bool(self.state.nodelist)

    def find_exit_code(self) -> str | None:
        """Find its exit code once it has ended; returns what there is to say of that, None before the end.

        The manifest's exit code counts, or SLURM's if the job ended without one or never began.
        """
        if not (self.is_final or self.is_over):
            self.ending = None
            return None
        now = time.monotonic()
        self.ending = self.ending or now
        late = now - self.ending > PATIENCE
        leaving = self.is_over or (self.state is not None and self.state.state == "COMPLETING")
        if self.is_final and (leaving or late):
            code = self.outcome.get("exit_code")  # it may be missing or damaged
            self.status = code if isinstance(code, int) else int(self.outcome["state"] != "succeeded")
            return ""
        if not self.is_over or not (late or not self.has_run):
            return None
        return self.use_slurm_state()

    def use_slurm_state(self) -> str:
        """Find the exit code by SLURM's word alone, and say what that is."""
        if self.state is None:
            self.status = 1
            return f"SLURM has forgotten job {self.job_id}, and {self.run_path} does not tell how it ended"
        self.status = self.state.exit_code or int(self.state.state != "COMPLETED")
        where = ""
        if not self.has_run:
            count = self.state.restarts or int(self.ran)
            attempts = f"{count} attempt{'' if count == 1 else 's'}"
            where = f" in the queue, after {attempts}" if count else " before it ran"
        reason = f" ({self.state.reason})" if self.state.reason else ""
        silence = explain_missing_end(RunDir(self.run_path))
        more = f"; {silence}" if silence else ""
        return f"job {self.job_id} ended{where}: {self.state.state}{reason}{more}"

    def describe_end(self) -> str:
        """Say how it ended, in a line: the last one of an array's member."""
        failure = self.outcome.get("first_failure")
        why = (
            f": rank {failure['rank']} on {failure['host']} {failure['reason']}"
            if isinstance(failure, dict)
            else ""
        )
        word = str(self.outcome.get("state")) if self.is_final else "ended"
        code = f" with exit code {self.status}" if self.status else ""
        return f"job {self.job_id} {word}{code}{why} ({self.run_path})"


@dataclass(slots=True)
class MarkedLines:
    """Gives launch's own lines whole, and everything else at once, with what is unfinished."""

    kept: bytes = b""
    """The beginning of a line that is marked, or may be."""
    begins: bool = True
    """The next byte begins a line."""

    def split(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """Give the pieces of some bytes in their order: whether it is a line of launch's, and the piece."""
        data, self.kept = self.kept + data, b""
        end = data.rfind(b"\n") + 1
        last = data[end:]
        may_be_own = last.startswith(OWN_PREFIX) or OWN_PREFIX.startswith(last)
        if last and may_be_own and (end or self.begins) and len(last) < MOST_KEPT:
            data, self.kept = data[:end], last
        first_end = 0 if self.begins else data.find(b"\n") + 1 or len(data)
        others, *pieces = OWN_LINE.split(data[first_end:])
        if data or self.kept:
            self.begins = not last or bool(self.kept)
        if data[:first_end] + others:
            yield False, data[:first_end] + others
        for number, piece in enumerate(pieces):
            if piece:
                yield number % 2 == 0, piece

    def finish(self) -> bytes:
        """Return what was kept of a line that has no end."""
        kept, self.kept = self.kept, b""
        return kept


@dataclass(slots=True)
class JobLog:
    """Shows what is added to the log: ranks' output on stdout, launch's on stderr, rank 0's progress."""

    run: RunDir
    job_id: str
    console: JobConsole
    follower: Follower = field(init=False)
    lines: MarkedLines = field(default_factory=MarkedLines)
    ends_with_launch_line: bool = False
    """The last line is launch's."""
    changed: float = field(default_factory=time.monotonic)
    """When something last came, in monotonic seconds."""
    opened: float = 0.0
    """When the file was last opened for its size."""

    def __post_init__(self) -> None:
        """Begin at the log's start: each job has its own."""
        self.follower = Follower()
        self.follower.watch(self.path)

    @property
    def path(self) -> Path:
        """The file, which every attempt appends to."""
        return self.run.path / "logs" / f"slurm-{self.job_id}.out"

    def read_new(self) -> bytes:
        """Return some of what is new."""
        now = time.monotonic()
        if (
            now - self.opened > FRESH
        ):  # NFS asks the server at an open, else it may believe its cache for 60 s
            self.opened = now
            with contextlib.suppress(OSError):
                os.close(open_file(self.path))
        data = self.follower.read_chunk(self.path)
        if data:
            self.changed = time.monotonic()
        return data

    def show(self, data: bytes) -> None:
        """Show some of the log."""
        for is_own, piece in self.lines.split(data):
            self.ends_with_launch_line = is_own
            if is_own:
                self.console.write_own_lines(piece)
            else:
                self.console.note_progress("out", OTHER_RANKS.sub(b"", piece))
                self.console.write_output(RANKS, piece)

    def show_rest(self) -> None:
        """Show a last line of launch's that has no end."""
        if rest := self.lines.finish():
            self.console.write_output(RANKS, rest)

    def is_complete(self, ended: float) -> bool:
        """Tell whether nothing more is to be expected of a job, and when its end was noticed.

        A network filesystem shows lines some seconds later than the manifest that was written before them.
        """
        quiet = time.monotonic() - max(ended, self.changed) > QUIET
        return quiet or (self.ends_with_launch_line and not self.lines.kept)


TICK, MANIFEST_TICK = 0.1, 0.5
"""Seconds between two looks at the log, and at the manifests."""
INTERRUPTED = 128 + signal.SIGINT


def follow_jobs(jobs: Sequence[tuple[Path, str]]) -> int:
    """Stay with jobs to their ends, and return the first exit code that is not 0.

    Of one job the output is shown, of several a line for each change. Ctrl-C asks whether to cancel them
    (then the exit code is 130) or to detach (0). If there is no terminal to ask on, for a second
    Ctrl-C and any other signal, it detaches with 128+n.
    """
    with catch_signals() as inbox:
        following = Following(inbox, [FollowedJob(path, job_id) for path, job_id in jobs])
        try:
            return following.run_loop()
        finally:
            following.close()


@dataclass(slots=True)
class Following:
    """Jobs that are followed, and what is shown of them."""

    inbox: SignalQueue
    jobs: list[FollowedJob]
    console: JobConsole = field(default_factory=lambda: JobConsole(ViewOptions("all")))
    poller: Poller = field(init=False)
    log: JobLog | None = None
    """Output of the job; None if there are several."""
    failures: int = 0
    """Questions in a row that SLURM has not answered."""
    cancelling: bool = False
    next_look: float = 0.0
    """Monotonic time of the next look at the manifests."""

    def __post_init__(self) -> None:
        """Begin to ask."""
        self.poller = Poller(tuple(job.job_id for job in self.jobs))
        if len(self.jobs) == 1:
            self.log = JobLog(RunDir(self.jobs[0].run_path), self.jobs[0].job_id, self.console)

    @property
    def open_jobs(self) -> list[FollowedJob]:
        """The jobs that have not ended."""
        return [job for job in self.jobs if job.status is None]

    def run_loop(self) -> int:
        """Show what happens until all jobs have ended or the user leaves; returns the exit code."""
        while True:
            for number in self.inbox.take():
                status = None if number in FORWARDED else self.handle_signal(number)
                if status is not None:
                    return status
            for answer in self.poller.take_answers():
                self.take_answer(answer)
            busy = self.look_at_files()
            if not busy and self.is_over():
                return INTERRUPTED if self.cancelling else next((j.status for j in self.jobs if j.status), 0)
            self.show_wait()
            select.select([self.inbox.wakeup], [], [], 0 if busy else TICK)

    def look_at_files(self) -> bool:
        """Read the manifests, and show what is new in the log; tells whether there was anything."""
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + MANIFEST_TICK
            news = [job.update_outcome() for job in self.open_jobs]
            if any(news):
                self.poller.ask_now()
        data = self.log.read_new() if self.log else b""
        if self.log and data:
            self.console.show_status("")
            self.log.show(data)
        self.console.tick()
        return bool(data)

    def take_answer(self, answer: Answer) -> None:
        """Show what is new in an answer of SLURM's; of answers that do not come, the second is told."""
        if answer.error:
            self.failures += 1
            if self.failures == 2:
                self.console.print_own_line(f"{answer.error}; the job is followed on, and SLURM asked again")
            return
        if self.failures > 1:
            self.console.print_own_line("SLURM answers again")
        self.failures = 0
        for job in self.open_jobs:
            if job.job_id in answer.asked and (text := job.update_state(answer)):
                self.console.print_own_line(text)

    def is_over(self) -> bool:
        """Tell of jobs that have ended, and whether none is left and all has been shown."""
        for job in self.open_jobs:
            text = job.find_exit_code()
            if text is None:
                continue
            self.poller.job_ids = tuple(left.job_id for left in self.open_jobs)
            if text or self.log is None:
                self.console.show_status("")
                self.console.print_own_line(text or job.describe_end())
        if self.open_jobs:
            return False
        if self.log is None or not self.jobs[0].has_run:
            return True
        if not self.log.is_complete(self.jobs[0].ending or 0):
            return False
        self.log.show_rest()
        return True

    def show_wait(self) -> None:
        """Keep the line about jobs that wait up to date; the bar of an attempt that has ended goes."""
        if self.log is None:
            counts_by_state = Counter(
                job.state.state.lower() if job.state else "unknown" for job in self.open_jobs
            )
            counts = ", ".join(f"{count} {word}" for word, count in sorted(counts_by_state.items()))
            self.console.show_status(f"{len(self.jobs)} jobs: {counts}" if counts else "")
            return
        job = self.jobs[0]
        if job.state and job.state.state == "PENDING":
            self.console.drop_bar()
            self.console.show_status(f"job {job.job_id} {job.describe_state(job.state)}")
        else:
            self.console.show_status("")

    def handle_signal(self, number: int) -> int | None:
        """Ask, or leave the jobs alone; returns the exit code, None if they are followed on."""
        self.close_lines()
        if number != signal.SIGINT or self.cancelling or not has_user():
            return self.detach(128 + number)
        answer = ask_cancel_or_detach(
            f"launch: cancel {self.list_job_names()}, or detach? [c/d] ", self.inbox
        )
        if answer != "c":
            return self.detach(0 if answer == "d" else INTERRUPTED)
        try:
            run_slurm(["scancel", *(job.job_id for job in self.open_jobs)])
        except SchedulerError as error:
            self.console.print_own_line(f"{error}: not cancelled")
            return None
        self.cancelling = True
        self.poller.ask_now()
        self.console.print_own_line("cancelled; waiting for the end (Ctrl-C detaches)")
        return None

    def detach(self, status: int) -> int:
        """Leave the jobs alone, and say how to come back."""
        path = shlex.quote(str(self.jobs[0].run_path))
        back = f"launch logs -f {path}" if self.log else "launch status"
        what = "is left alone" if self.cancelling else "goes on"
        self.console.print_own_line(f"detached: {self.list_job_names()} {what}; {back} comes back to it")
        return status

    def list_job_names(self) -> str:
        """`job 12`, `3 jobs`."""
        return f"job {self.jobs[0].job_id}" if self.log else f"{len(self.open_jobs)} jobs"

    def close_lines(self) -> None:
        """Take down what is drawn on the terminal."""
        self.console.show_status("")
        self.console.close()

    def close(self) -> None:
        """Stop asking, and leave the terminal clean."""
        self.poller.close()
        self.close_lines()


def has_user() -> bool:
    """Tell whether there is a user at a terminal: this is not a job that a shell runs in the background."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return False


def ask_cancel_or_detach(question: str, inbox: SignalQueue) -> str:
    """Ask until the answer is `c` or `d`; empty if a signal or the end of the input comes before it."""
    while True:
        sys.stderr.write(question)
        sys.stderr.flush()
        ready, _, _ = select.select([sys.stdin, inbox.wakeup], [], [])
        if inbox.wakeup in ready:
            inbox.take()
            sys.stderr.write("\n")
            return ""
        line = sys.stdin.readline()
        if not line:
            return ""
        if (answer := line.strip().lower()[:1]) in ("c", "d"):
            return answer
        sys.stderr.write("launch: c cancels, d detaches and lets it go on, Ctrl-C detaches too\n")
