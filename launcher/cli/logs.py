"""`launch logs`: what a run's ranks have printed, and with -f what they print, to the run's end."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.runs import choose_one
from launcher.cli.verbs import Call
from launcher.errors import UsageError
from launcher.report.viewer import open_stream
from launcher.runs.rank_logs import Output, RunOutputReader
from launcher.runs.run_status import RunStatus, read_status
from launcher.slurm.commands import JobState
from launcher.slurm.run_states import find_run_states, update_run
from launcher.text import escape_text, print_text

if TYPE_CHECKING:
    from launcher.slurm.follow import Poller

logger = logging.getLogger(__name__)

STATE_SECONDS = 1.0
"""Seconds between two looks at the manifest."""
NETWORK_SECONDS = 3.0
"""Seconds that a network filesystem has to show the last lines of a job on other machines."""
LOG_SECONDS = 0.25
"""Seconds between two looks at the logs."""
LONGEST_HOST = 80
"""Characters of a host's name."""


def show_logs(call: Call) -> int:
    """Print the output of a run's last attempt, or follow it; returns 0. Raises UsageError."""
    config = call.config
    path = choose_one(config, call.names, "logs")
    writer = OutputWriter(config.rank)
    if config.follow:
        _follow_output(path, RunOutputReader(path, config.rank, config.logs.tail), writer)
        return 0
    tail = RunOutputReader(path, config.rank)
    if tail.rank is not None and not tail.find_attempts():
        logs = [log for logs in RunOutputReader(path).find_attempts().values() for log in logs]
        if known := sorted({int(log.stem.partition("-")[2]) for log in logs}):
            raise UsageError(
                f"rank={tail.rank} has printed nothing: the run's ranks are {known[0]} to {known[-1]}"
            )
    if not writer.write(tail.read_lines(final=True)):
        (run,) = find_run_states([path]).runs
        logger.info(f"no output: {describe_run_state(run)}")
    return 0


def _follow_output(path: Path, tail: RunOutputReader, writer: "OutputWriter") -> None:
    """Print what comes, over all attempts, until the run has ended; Ctrl-C ends it earlier."""
    with closing(RunWatch(path)) as watch:
        run = watch.update()
        while run.is_live or watch.may_still_print():
            if writer.write(tail.read_lines()):
                watch.changed = time.monotonic()
            time.sleep(LOG_SECONDS)
            run = watch.update()
        writer.write(tail.read_lines(final=True))
        if open_stream("stdout").is_same_file(open_stream("stderr")):
            writer.end_line()
        logger.info(describe_run_state(run))


@dataclass(slots=True)
class OutputWriter:
    """Prints lines on stdout, those of several ranks with their origin, and our remarks on stderr.

    On a terminal a line is text, of a bar its last state, and of what acts on the terminal only colours are
    let through; elsewhere it is its bytes.
    """

    rank: int | None
    """The one rank that is shown; None is all of them."""
    unfinished: Output | None = None
    """What was printed last, if it does not end with a newline."""

    def write(self, lines: Iterable[Output]) -> int:
        """Print lines; returns how many."""
        count, is_terminal = 0, sys.stdout.isatty()
        for line in lines:
            if line.remark:
                self.end_line()
                logger.info(line.text)
                continue
            if not is_terminal:
                self.copy_line(line)
            elif not line.raw.endswith(b"\r"):  # that is a former state of a bar
                print_text(f"{self.format_origin(line)}{line.text}\n", colours=True)
            count += 1
        sys.stdout.flush()
        return count

    def end_line(self) -> None:
        """End an unfinished line, and have all that was printed shown."""
        if self.unfinished:
            sys.stdout.buffer.write(b"\n")
            self.unfinished = None
        sys.stdout.flush()

    def copy_line(self, line: Output) -> None:
        """Print a line as it is; a newline of ours ends an unfinished one that another source's follows."""
        before, origin = b"", os.fsencode(self.format_origin(line))
        if last := self.unfinished:
            is_same = (last.rank, last.stream, last.host) == (line.rank, line.stream, line.host)
            before, origin = (b"", b"") if is_same else (b"\n", origin)
        sys.stdout.buffer.write(before + origin + line.raw)
        self.unfinished = None if line.raw.endswith(b"\n") else line

    def format_origin(self, line: Output) -> str:
        """Return what stands before a line."""
        if self.rank is not None or line.rank is None:
            return ""
        return f"[{escape_text(line.host, LONGEST_HOST)}:{line.rank}] "


def describe_run_state(run: RunStatus) -> str:
    """Say how a run stands: `tiny/20260801-120000 is queued, job 12: Resources`."""
    job = f", job {run.job_id}" if run.job_id else ""
    verb = "is" if run.is_live or run.state in ("lost", "unknown") else "has"
    return f"{run.run} {verb} {run.state}{job}" + (f": {run.reason}" if run.reason else "")


@dataclass(slots=True)
class RunWatch:
    """The state of a run that is followed, from its manifest and from SLURM, which a thread asks."""

    path: Path
    say: Callable[[str], None] = logger.info
    """Says what is new of a run that waits, and that SLURM does not answer."""
    error_note: str = "the logs are followed on"
    """What goes on if SLURM does not answer."""
    run: RunStatus | None = None
    job: JobState | None = None
    answered: bool = False
    """SLURM has said something."""
    poller: "Poller | None" = None
    updated: float = 0.0
    """When the manifest was read, in monotonic seconds."""
    changed: float = field(default_factory=time.monotonic)
    """When something was last printed or happened."""
    lived: bool = False
    """The run had not ended at the first update."""
    reported: str = ""

    def update(self) -> RunStatus:
        """Return the run's state, by SLURM's newest answer if there is one, and report if it waits."""
        now = time.monotonic()
        if self.run is not None and now - self.updated <= STATE_SECONDS:
            return self.run
        self.updated, run = now, read_status(self.path)
        if run.job_id and run.is_live:
            if self.poller is None:
                from launcher.slurm.follow import Poller

                self.poller = Poller((run.job_id,))
            for answer in self.poller.take_answers():
                if answer.error:
                    self.report_once(f"{answer.error}; {self.error_note}")
                else:
                    self.job, self.answered = answer.jobs.get(run.job_id), True
            run = update_run(run, self.job) if self.answered else run
        if self.run is None or run.is_live != self.run.is_live:
            self.changed = now
        self.run, self.lived = run, self.lived or run.is_live
        if run.state == "queued" and self.answered and run.reason:
            self.report_once(describe_run_state(run))
        return run

    def report_once(self, text: str) -> None:
        """Say something, but once."""
        if text != self.reported:
            self.reported = text
            self.say(text)

    def may_still_print(self) -> bool:
        """Tell whether lines of a job that ended while it was followed may still come."""
        is_job = self.run is not None and self.run.job_id is not None
        return self.lived and is_job and time.monotonic() - self.changed < NETWORK_SECONDS

    def close(self) -> None:
        """Ask no more."""
        if self.poller:
            self.poller.close()
