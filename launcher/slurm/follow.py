"""`follow=true`: stays with submitted jobs through the queue and every attempt, to their exit code."""

import os
import select
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import SchedulerError
from launcher.launch.signals import FORWARDED, SignalQueue, catch_signals
from launcher.report.console import JobConsole, StatusLine, make_console
from launcher.runs.run_directory import RunDir
from launcher.slurm.client import run_slurm
from launcher.slurm.followed_job import FollowedJob, JobLog
from launcher.slurm.pending_jobs import Answer, Poller

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
    console: JobConsole = field(default_factory=lambda: JobConsole("all", make_console()))
    poller: Poller = field(init=False)
    line: StatusLine = field(init=False)
    log: JobLog | None = None
    """Output of the job; None if there are several."""
    failures: int = 0
    """Questions in a row that SLURM has not answered."""
    cancelling: bool = False
    next_look: float = 0.0
    """Monotonic time of the next look at the manifests."""

    def __post_init__(self) -> None:
        """Begin to ask."""
        self.line = StatusLine(self.console)
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
            self.line.close()
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
                self.line.close()
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
            self.line.show(f"{len(self.jobs)} jobs: {counts}" if counts else "")
            return
        job = self.jobs[0]
        if job.state and job.state.state == "PENDING":
            self.console.drop_bar()
            self.line.show(f"job {job.job_id} {job.describe_state(job.state)}")
        else:
            self.line.close()

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
        self.line.close()
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
