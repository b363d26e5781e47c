"""Stays with submitted jobs to their ends: how they stand, the output of one, and what Ctrl-C does."""

import contextlib
import os
import re
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
from launcher.files import open_file
from launcher.launch.signals import FORWARDED, SignalQueue, catch_signals
from launcher.report.console import JobConsole, Source
from launcher.report.viewer import ViewOptions
from launcher.runs.manifest import CLOSED
from launcher.runs.rank_logs import Follower
from launcher.runs.run_status import RunStatus
from launcher.slurm.commands import STATES, run_slurm
from launcher.slurm.run_states import RunWatch, describe_run_state, explain_reason

TICK = 0.1
"""Seconds between two looks at the log."""
PATIENCE = 5.0
"""Seconds without anything new after which a job that has ended is over: a network filesystem is slow to show
what was written."""
FRESH = 2.0
"""Seconds for which a size that a network filesystem tells is believed."""
OWN_LINES = re.compile(rb"((?:(?:^|(?<=\r))launch: .*\n)+)", re.MULTILINE)
"""Lines of the batch script's process."""
LAST_LINE = re.compile(
    rb"^launch: (run directory |(error: )?attempt \d+ does not begin|.*was not told of the end).*\n\Z",
    re.MULTILINE,
)
"""The last line of a job; its manifest may be closed while its ranks still end."""
OTHER_RANKS = re.compile(rb"^\[[^][\s]+:(?!0\] )\d+\] .*\n", re.MULTILINE)
"""Lines of other ranks than rank 0."""
RANKS = Source(0, "out", b"")
"""The log has the ranks' lines with their origin already."""
MOST_KEPT = 1 << 16
"""Bytes of a line that are waited for its end with."""
PASSING = (None, *STATES["passing"])
"""SLURM's states that pass by themselves; None before its first answer."""
INTERRUPTED = 128 + signal.SIGINT


@dataclass(slots=True)
class JobLog:
    """Shows what is added to the log: ranks' output on stdout, launch's on stderr, rank 0's progress."""

    path: Path
    """The file, which every attempt appends to."""
    console: JobConsole
    follower: Follower = field(default_factory=Follower)
    kept: bytes = b""
    """The beginning of a line."""
    is_whole: bool = False
    """The last line is that of a job's end."""
    opened: float = 0.0
    """When the file was last opened for its size."""

    def show_new(self, *, final: bool = False) -> bool:
        """Show whole lines of what is new, and tell whether there was any; at the end an unfinished one."""
        now = time.monotonic()
        if now - self.opened > FRESH:
            # NFS asks the server at an open, else it may believe its cache for 60 s.
            self.opened = now
            with contextlib.suppress(OSError):
                os.close(open_file(self.path))
        self.follower.watch(self.path)
        new = self.follower.read_chunk(self.path)
        data = self.kept + new
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if final or len(data) - end > MOST_KEPT:
            end = len(data)
        data, self.kept = data[:end], data[end:]
        if data:
            self.console.show_status("")
            pieces = [*OWN_LINES.split(data), b""]  # every second one is launch's
            for others, own in zip(pieces[::2], pieces[1::2], strict=True):
                if others:
                    self.console.note_progress("out", OTHER_RANKS.sub(b"", others))
                    self.console.write_output(RANKS, others)
                if own:
                    self.console.write_own_lines(own)
            self.is_whole = not pieces[-2] and LAST_LINE.search(pieces[-3]) is not None
        return bool(new)


def follow_jobs(jobs: Sequence[tuple[Path, str]]) -> int:
    """Stay with jobs, given as run directory and number, and return the first exit code that is not 0.

    Of one job the output is shown, of several a line for each change. Ctrl-C asks whether to cancel them
    (then the exit code is 130) or to detach (0). If there is no terminal to ask on, for a second
    Ctrl-C and any other signal, it detaches with 128+n.
    """
    console = JobConsole(ViewOptions("all"))
    watch = RunWatch([path for path, _ in jobs], console.print_own_line, "the job is followed on")
    log = None
    if len(jobs) == 1:
        path, job_id = jobs[0]
        log = JobLog(path / "logs" / f"slurm-{job_id}.out", console)
    with catch_signals() as inbox:
        try:
            return Following(jobs, inbox, console, watch, log).run_loop()
        finally:
            console.show_status("")
            console.close()


@dataclass(slots=True)
class Following:
    """Jobs that are followed, and what is shown of them."""

    jobs: Sequence[tuple[Path, str]]
    inbox: SignalQueue
    console: JobConsole
    watch: RunWatch
    log: JobLog | None
    """Output of the job; None if there are several."""
    told: dict[str, str] = field(default_factory=dict)
    """What was last said of each run."""
    cancelling: bool = False

    def run_loop(self) -> int:
        """Show what happens until all jobs have ended or the user leaves; returns the exit code."""
        changed = time.monotonic()
        while True:
            for number in self.inbox.take():
                status = None if number in FORWARDED else self.handle_signal(number)
                if status is not None:
                    return status
            runs, is_busy = self.watch.update(), bool(self.log and self.log.show_new())
            self.console.tick()
            if self.tell_changes(runs) or is_busy:
                changed = time.monotonic()
            elif not any(run.is_live for run in runs):
                is_told = all(run.state in CLOSED and not run.slurm_state for run in runs)
                is_complete = is_told and (not self.log or (self.log.is_whole and not self.log.kept))
                if is_complete or time.monotonic() - changed > PATIENCE:
                    break
            self.show_wait(runs)
            select.select([self.inbox.wakeup], [], [], 0 if is_busy else TICK)
        if self.log:
            self.log.show_new(final=True)
            if not is_told:
                self.say(f"{describe_run_state(runs[0])} ({runs[0].path})")
        codes = [run.exit_code or int(run.state != "succeeded") for run in runs]
        return INTERRUPTED if self.cancelling else next((code for code in codes if code), 0)

    def tell_changes(self, runs: Sequence[RunStatus]) -> bool:
        """Say of each job whether it waits or runs, if that is new; returns whether anything is."""
        is_new = False
        for run in runs:
            is_passing = run.slurm_state in PASSING or (run.state == "queued" and not run.reason)
            key = f"{run.state} {run.nodelist if run.state == 'running' else run.reason} {run.restarts}"
            if self.told.get(run.path) == key or (run.is_live and is_passing):
                continue
            is_new, self.told[run.path] = True, key
            if run.is_live:
                self.say(describe_job(run))
            elif not self.log:
                self.say(f"{describe_run_state(run)} ({run.path})")
        return is_new

    def say(self, text: str) -> None:
        """Print a line of our own, above all that is drawn."""
        self.console.show_status("")
        self.console.print_own_line(text)

    def show_wait(self, runs: Sequence[RunStatus]) -> None:
        """Keep the line about jobs that wait up to date; the bar of an attempt that has ended goes."""
        if self.log is None:
            states = Counter(run.state for run in runs if run.is_live)
            counts = ", ".join(f"{count} {word}" for word, count in sorted(states.items()))
            self.console.show_status(f"{len(runs)} jobs: {counts}" if counts else "")
        elif runs[0].slurm_state == "PENDING":
            self.console.drop_bar()
            self.console.show_status(describe_job(runs[0]))
        else:
            self.console.show_status("")

    def handle_signal(self, number: int) -> int | None:
        """Ask, or leave the jobs alone; returns the exit code, None if they are followed on."""
        self.console.show_status("")
        self.console.close()
        status, answer = 128 + number, b""
        live = [run for run in self.watch.runs if run.is_live]
        names = f"job {self.jobs[0][1]}" if self.log else f"{len(live)} jobs"
        if number == signal.SIGINT and not self.cancelling and has_user():
            sys.stderr.write(f"launch: cancel {names}, or detach? [c/d] ")
            sys.stderr.flush()
            ready, _, _ = select.select([sys.stdin, self.inbox.wakeup], [], [])
            if self.inbox.wakeup in ready:
                sys.stderr.write("\n")
            elif answer := os.read(sys.stdin.fileno(), 80):
                status = 0
        if answer.strip().lower().startswith(b"c"):
            try:
                run_slurm(["scancel", *(run.job_id or "" for run in live)])
            except SchedulerError as error:
                self.say(f"{error}: not cancelled")
                return None
            self.cancelling = True
            self.watch.due = 0.0
            self.say("cancelled; waiting for the end (Ctrl-C detaches)")
            return None
        back = f"launch logs -f {shlex.quote(str(self.jobs[0][0]))}" if self.log else "launch status"
        what = "is left alone" if self.cancelling else "goes on"
        self.say(f"detached: {names} {what}; {back} comes back to it")
        return status


def describe_job(run: RunStatus) -> str:
    """Say where a job runs, or why it waits."""
    if run.state != "queued":
        where = f" on {run.nodelist}" if run.nodelist else ""
        again = f", after {run.restarts} requeue{'s' if run.restarts > 1 else ''}" if run.restarts else ""
        return f"job {run.job_id} is {run.reason or run.state}{where}{again}"
    why = explain_reason(run.reason)
    why += f", expected start {run.expected_start}" if run.expected_start else ""
    if not (run.restarts or run.attempts):
        return f"job {run.job_id} waits: {why}"
    cause = run.attempts[-1].cause if run.attempts else ""
    return f"job {run.job_id} is back in the queue{f' ({cause})' if cause else ''}: {why}"


def has_user() -> bool:
    """Tell whether there is a user at a terminal: this is not a job that a shell runs in the background."""
    try:
        streams = (sys.stdin, sys.stderr)
        return all(one and one.isatty() for one in streams) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
