"""`launch logs`: what a run's ranks have printed, and with -f what they print, to the run's end."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.checks import check_least
from launcher.errors import UsageError
from launcher.follow.polling import Poller
from launcher.launch.slurm.queue import JobState
from launcher.runs.status import RunStatus, read_status
from launcher.runs.tail import Output, RunTail
from launcher.schema import LaunchConfig
from launcher.terminal import escape_text, print_text
from launcher.verbs.choose import choose_one
from launcher.verbs.standing import find_standing, stand
from launcher.wording import say

TICK = 0.25
"""Seconds between two looks at the logs."""
LOOK = 1.0
"""Seconds between two looks at the manifest."""
LONGEST_HOST = 80
"""Characters of a host's name."""
SETTLE = 3.0
"""Seconds that a network filesystem has to show the last lines of a job on other machines."""


def show_logs(config: LaunchConfig, names: Sequence[str]) -> int:
    """Print the output of a run's last attempt, or follow it; returns 0. Raises UsageError."""
    path = choose_one(config, names, "logs")
    check_least("rank", 0 if config.rank is None else config.rank, 0)
    check_least("logs.tail", config.logs.tail, 1)
    if config.follow:
        follow_output(path, RunTail(path, config.rank, config.logs.tail))
        return 0
    tail = RunTail(path, config.rank)
    check_rank(tail)
    if not write_lines(tail.read_lines(final=True), config.rank):
        (run,) = find_standing([path]).runs
        say(f"no output: {describe_run(run)}")
    return 0


def check_rank(tail: RunTail) -> None:
    """Raise UsageError for a rank that the run does not have."""
    if tail.rank is None or tail.find_attempts():
        return
    ranks = [log for logs in RunTail(tail.path).find_attempts().values() for log in logs]
    if ranks:
        known = sorted({int(log.stem.partition("-")[2]) for log in ranks})
        raise UsageError(
            f"rank={tail.rank} has printed nothing: the run's ranks are {known[0]} to {known[-1]}"
        )


def follow_output(path: Path, tail: RunTail) -> None:
    """Print what comes, over all attempts, until the run has ended; Ctrl-C ends it earlier."""
    watch = RunWatch(path)
    try:
        run = watch.look()
        while run.is_live or watch.is_settling():
            if write_lines(tail.read_lines(), tail.rank):
                watch.changed = time.monotonic()
            time.sleep(TICK)
            run = watch.look()
        write_lines(tail.read_lines(final=True), tail.rank)
        say(describe_run(run))
    finally:
        watch.close()


def write_lines(lines: Iterable[Output], rank: int | None) -> int:
    """Print lines, those of several ranks with their origin, and our remarks on stderr; returns how many.

    On a terminal, of what acts on it only colours are let through.
    """
    count = 0
    for line in lines:
        if line.remark:
            sys.stdout.flush()
            say(line.text)
            continue
        alone = rank is not None or line.rank is None
        origin = "" if alone else f"[{escape_text(line.host, LONGEST_HOST)}:{line.rank}] "
        print_text(f"{origin}{line.text}\n", colours=True)
        count += 1
    sys.stdout.flush()
    return count


def describe_run(run: RunStatus) -> str:
    """Say how a run stands: `tiny/20260801-120000 is queued, job 12: Resources`."""
    job = f", job {run.job_id}" if run.job_id else ""
    verb = "is" if run.is_live or run.state in ("lost", "unknown") else "has"
    return f"{run.run} {verb} {run.state}{job}" + (f": {run.reason}" if run.reason else "")


@dataclass(slots=True)
class RunWatch:
    """Looks after a run that is followed: its manifest, and what SLURM says, asked for in a thread."""

    path: Path
    run: RunStatus | None = None
    job: JobState | None = None
    answered: bool = False
    """SLURM has said something."""
    poller: Poller | None = None
    looked: float = 0.0
    """When the manifest was read, in monotonic seconds."""
    changed: float = field(default_factory=time.monotonic)
    """When something was last printed or happened."""
    lived: bool = False
    """The run had not ended at the first look."""
    told: tuple[str, ...] = ()

    def look(self) -> RunStatus:
        """Return how the run stands, and say so where it waits."""
        now = time.monotonic()
        if self.run is None or now - self.looked > LOOK:
            self.looked = now
            run = read_status(self.path)
            run = self.ask_slurm(run) if run.job_id and run.is_live else run
            if self.run is None or run.is_live != self.run.is_live:
                self.changed = now
            self.run, self.lived = run, self.lived or run.is_live
            self.tell_wait(run)
        return self.run

    def ask_slurm(self, run: RunStatus) -> RunStatus:
        """Return how the run stands by SLURM's newest answer, if there is one."""
        if self.poller is None:
            self.poller = Poller((str(run.job_id),))
        for answer in self.poller.take_answers():
            if answer.error:
                self.tell(f"{answer.error}; the logs are followed on")
            else:
                self.job, self.answered = answer.jobs.get(str(run.job_id)), True
        return stand(run, self.job) if self.answered else run

    def tell_wait(self, run: RunStatus) -> None:
        """Say that a run waits, and why, where that is new."""
        if run.state == "queued" and self.answered and run.reason:
            self.tell(describe_run(run))

    def tell(self, text: str) -> None:
        """Say something, but once."""
        if (text,) != self.told:
            self.told = (text,)
            say(text)

    def is_settling(self) -> bool:
        """Tell whether lines of a job that ended while it was followed may still come."""
        is_job = self.run is not None and self.run.job_id is not None
        return self.lived and is_job and time.monotonic() - self.changed < SETTLE

    def close(self) -> None:
        """Ask no more."""
        if self.poller:
            self.poller.close()
