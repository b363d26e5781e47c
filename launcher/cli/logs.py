"""`launch logs`: what a run's ranks have printed, and with -f what they print, to the run's end."""

import logging
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.runs import choose_one
from launcher.cli.verbs import Call
from launcher.errors import UsageError
from launcher.report.viewer import open_stream
from launcher.runs.rank_logs import Output, RunOutputReader
from launcher.slurm.run_states import RunWatch, describe_run_state, find_run_states
from launcher.text import escape_text, print_text

logger = logging.getLogger(__name__)

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
    said, changed, lived = "", time.monotonic(), False
    watch = RunWatch([path])
    while True:
        (run,) = watch.update()
        lived = lived or run.is_live
        if writer.write(tail.read_lines()) or run.is_live:
            changed = time.monotonic()
        # Lines of a job on other machines that ended while it was followed may still come.
        elif time.monotonic() - changed >= (NETWORK_SECONDS if lived and run.job_id else 0):
            break
        text = describe_run_state(run)
        if run.state == "queued" and run.slurm_state and run.reason and text != said:
            logger.info(text)
            said = text
        time.sleep(LOG_SECONDS)
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
