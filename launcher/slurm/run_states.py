"""How runs stand, by their directories and by what SLURM says of their jobs, and jobs that are followed."""

import contextlib
import logging
import math
import os
import re
import select
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from launcher.errors import SchedulerError, UsageError
from launcher.files import open_file
from launcher.launch.signals import FORWARDED, SignalQueue, catch_signals
from launcher.runs.manifest import CLOSED, OPEN, check_process, read_own_manifest
from launcher.runs.rank_logs import Follower, find_logs
from launcher.runs.run_directory import FULL, RunDir, is_full
from launcher.runs.run_status import RunStatus, mark_lost, read_status
from launcher.slurm.commands import ENDED, STATES, WAITING, JobState, ask_queue, name_job, run_slurm
from launcher.text import quote_word

if TYPE_CHECKING:
    from launcher.report.console import JobConsole

logger = logging.getLogger(__name__)

STATE_SECONDS = 0.5
"""Seconds between two looks at the manifests of runs that are followed."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 20.0
"""Seconds between two questions to SLURM after a change, and when nothing has changed for long."""


def find_run_states(
    paths: Sequence[Path], *, own: bool = False
) -> tuple[list[RunStatus], SchedulerError | None]:
    """Find out how some runs stand; SLURM is asked about those that have not ended by their manifests.

    If SLURM cannot be asked, the runs are as their manifests have them, and the error says why.
    With `own`, what another user may have written is not heard: see `read_status`.
    """
    runs = [read_status(path, own=own) for path in paths]
    job_ids = [run.job_id for run in runs if run.job_id and (run.is_live or run.state == "unknown")]
    try:
        jobs = ask_queue(job_ids) if job_ids else {}
    except SchedulerError as error:
        return runs, error
    return [update_run(run, jobs.get(run.job_id or "")) for run in runs], None


def update_run(run: RunStatus, job: JobState | None) -> RunStatus:
    """Return how a run stands; a manifest that was completed meanwhile is read again."""
    judged = resolve_run(run, job)
    is_over = run.is_live and not judged.is_live
    return resolve_run(read_status(Path(run.path)), job) if is_over else judged


def resolve_run(run: RunStatus, job: JobState | None) -> RunStatus:
    """Return how a run stands: SLURM's answer counts if the manifest has no outcome."""
    if not run.is_live and (run.state != "unknown" or not run.job_id):
        return run
    if not run.job_id:
        return mark_lost(run, "it was never submitted") if run.state == "queued" else run
    if job is None:
        why = f"SLURM no longer knows job {run.job_id}, and how it ended was not written down"
        if run.state == "queued" and not run.attempts:
            why = f"SLURM no longer knows job {run.job_id}, which never began: it was cancelled in the queue"
            if find_logs(Path(run.path), "slurm-"):
                why = (
                    f"job {run.job_id} ended before it came to the program (cluster.setup?): see launch logs"
                )
        return mark_lost(run, why) if run.is_live else run
    run = replace(
        run,
        slurm_state=job.state,
        partition=job.partition,
        nodes=job.nodes or run.nodes,
        nodelist=job.nodelist,
        restarts=max(run.restarts, job.restarts),
    )
    if job.state in WAITING:
        return replace(run, state="queued", reason=job.reason, expected_start=job.start)
    if job.state not in ENDED:
        # While its nodes are cleared, the manifest tells whether it is to begin again.
        state = run.state if job.state == "COMPLETING" else "running"
        return replace(run, state=state, reason="" if job.state == "RUNNING" else job.state.lower())
    state, text = STATES["endings"].get(job.state, ("failed", job.state))
    code = f"exit code {job.exit_code}" if text == job.state and job.exit_code else ""
    full = FULL if is_full(RunDir(Path(run.path))) else ""
    parts = (text, "" if job.reason == "NonZeroExitCode" else job.reason, code, full)
    reason = "; ".join(filter(None, parts))
    return replace(run, state=state, reason=reason, exit_code=job.exit_code, seconds=None)


def describe_run_state(run: RunStatus) -> str:
    """Say how a run stands: `tiny/20260801-120000 is queued, job 12: Resources`."""
    job = f", job {run.job_id}" if run.job_id else ""
    verb = "is" if run.is_live or run.state in ("lost", "unknown") else "has"
    return f"{run.run} {verb} {run.state}{job}" + (f": {run.reason}" if run.reason else "")


def explain_reason(reason: str) -> str:
    """Return SLURM's reason, with an explanation if there is one: `Priority (jobs of … go first)`."""
    word, known = reason.partition(",")[0].strip(), STATES["reasons"]
    text = known.get(word) or next((known[name] for name in known if word.startswith(name)), "")
    return f"{reason} ({text})" if text else reason


@dataclass(slots=True)
class RunWatch:
    """How runs that are followed stand, by their manifests and by SLURM, which is asked in threads."""

    paths: Sequence[Path]
    say: Callable[[str], None] = logger.info
    """Says that SLURM does not answer."""
    runs: list[RunStatus] = field(default_factory=list)
    updated: float = 0.0
    """When the manifests were read, in monotonic seconds."""
    answer: Mapping[str, JobState | None] = field(default_factory=dict)
    """What SLURM has said of each job that it was asked about."""
    replies: SimpleQueue[dict[str, JobState | None] | SchedulerError] = field(default_factory=SimpleQueue)
    """What threads have brought."""
    due: float = 0.0
    """When SLURM is to be asked next, in monotonic seconds; infinite while it is asked."""
    pause: float = 0.0
    """Seconds between two questions."""
    errors: int = 0
    """Since its last answer; the second one is told."""

    def update(self) -> list[RunStatus]:
        """Return how the runs stand."""
        now = time.monotonic()
        if self.runs and now - self.updated < STATE_SECONDS:
            return self.runs
        ended = {run.path: run for run in self.runs if run.state in CLOSED and not run.slurm_state}
        found = [ended.get(str(path.absolute())) or read_status(path) for path in self.paths]
        if not self.replies.empty():
            reply = self.replies.get()
            if isinstance(reply, SchedulerError):
                self.errors += 1
                if self.errors == 2:
                    self.say(f"{reply}; SLURM is asked again, and the run directory tells meanwhile")
            else:
                self.pause = FIRST_PAUSE if reply != self.answer else min(1.5 * self.pause, LONGEST_PAUSE)
                self.answer, self.errors = reply, 0
            self.due = now + (self.pause or FIRST_PAUSE)
        job_ids = tuple(run.job_id for run in found if run.job_id and run.is_live)
        if job_ids and now >= self.due:
            self.due = math.inf
            threading.Thread(target=self._ask, args=(job_ids,), daemon=True).start()
        self.updated, answer = now, self.answer
        self.runs = [
            update_run(run, answer[job_id]) if (job_id := run.job_id or "") in answer else run
            for run in found
        ]
        return self.runs

    def _ask(self, job_ids: Sequence[str]) -> None:
        """Ask once: a thread's body."""
        try:
            jobs = ask_queue(job_ids)
            self.replies.put({job_id: jobs.get(job_id) for job_id in job_ids})
        except SchedulerError as error:
            self.replies.put(error)


def refuse_run_in_use(path: Path, *, submits: bool) -> None:
    """Raise UsageError for a run directory whose run has not ended: two would write the same checkpoints.

    If SLURM cannot be asked, that is SchedulerError for a job to be submitted, and else a warning.
    """
    try:
        found = read_own_manifest(path)
    except PermissionError:  # what opens the directory refuses it, and says why
        return
    if found.last.outcome.state not in OPEN:
        return
    process, job_id, holder = found.process, found.job_id, ""
    if process and check_process(process):
        holder = f"process {process.pid}, which is running"
    elif job_id and job_id != name_job(os.environ):  # runs in an allocation are judged by their processes
        try:
            job = ask_queue([job_id]).get(job_id)
        except SchedulerError as error:
            if submits:
                raise
            logger.warning(f"whether run_dir={path} is still in use is not known: {error}")
            return
        holder = f"job {job_id}, which is {job.state}" if job and job.state not in ENDED else ""
    if holder:
        target = job_id if holder.startswith("job") else quote_word(str(path.absolute()))
        raise UsageError(f"run_dir={path} belongs to {holder}: wait for its end, or `launch cancel {target}`")


# Following submitted jobs

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
MOST_KEPT = 1 << 16
"""Bytes of a line that are waited for its end with."""
PASSING = (None, *STATES["passing"])
"""SLURM's states that pass by themselves; None before its first answer."""


@dataclass(slots=True)
class JobLog:
    """Shows what is added to the log: ranks' output on stdout, launch's on stderr, rank 0's progress."""

    path: Path
    """The file, which every attempt appends to."""
    console: "JobConsole"
    follower: Follower = field(default_factory=Follower)
    kept: bytes = b""
    """The beginning of a line."""
    is_whole: bool = False
    """The last line is that of a job's end."""
    opened: float = 0.0
    """When the file was last opened for its size."""

    def show_new(self, *, final: bool = False) -> bool:
        """Show whole lines of what is new, and tell whether there was any; at the end an unfinished one."""
        from launcher.report.console import Source  # there is a console

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
            ranks = Source(0, "out", b"")  # the log has their lines with their origin already
            pieces = [*OWN_LINES.split(data), b""]  # every second one is launch's
            for others, own in zip(pieces[::2], pieces[1::2], strict=True):
                if others:
                    self.console.note_progress("out", OTHER_RANKS.sub(b"", others))
                    self.console.write_output(ranks, others)
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
    from launcher.report.console import JobConsole  # whoever starts or submits a job does without
    from launcher.report.viewer import ViewOptions

    console = JobConsole(ViewOptions("all"))
    watch = RunWatch([path for path, _ in jobs], console.print_own_line)
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
    console: "JobConsole"
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
        return 128 + signal.SIGINT if self.cancelling else next((code for code in codes if code), 0)

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
