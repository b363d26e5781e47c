"""`launch logs`: what a run's ranks have printed, and with -f what they print, to the run's end."""

import logging
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.choose_runs import choose_one
from launcher.cli.run_watch import RunWatch, describe_run_state
from launcher.cli.verbs import VerbCall
from launcher.errors import UsageError
from launcher.report.viewer import open_stream
from launcher.runs.rank_logs import Output, RunOutputReader
from launcher.slurm.run_states import find_run_states
from launcher.text import escape_text, print_text

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.25
"""Seconds between two looks at the logs."""
LONGEST_HOST = 80
"""Characters of a host's name."""


def show_logs(call: VerbCall) -> int:
    """Print the output of a run's last attempt, or follow it; returns 0. Raises UsageError."""
    config, names = call.config, call.names
    path = choose_one(config, names, "logs")
    if config.follow:
        follow_output(path, RunOutputReader(path, config.rank, config.logs.tail))
        return 0
    tail = RunOutputReader(path, config.rank)
    check_rank_printed(tail)
    if not OutputWriter(config.rank).write(tail.read_lines(final=True)):
        (run,) = find_run_states([path]).runs
        logger.info(f"no output: {describe_run_state(run)}")
    return 0


def check_rank_printed(tail: RunOutputReader) -> None:
    """Raise UsageError for a rank that the run does not have."""
    if tail.rank is None or tail.find_attempts():
        return
    ranks = [log for logs in RunOutputReader(tail.path).find_attempts().values() for log in logs]
    if ranks:
        known = sorted({int(log.stem.partition("-")[2]) for log in ranks})
        raise UsageError(
            f"rank={tail.rank} has printed nothing: the run's ranks are {known[0]} to {known[-1]}"
        )


def follow_output(path: Path, tail: RunOutputReader) -> None:
    """Print what comes, over all attempts, until the run has ended; Ctrl-C ends it earlier."""
    watch, writer = RunWatch(path), OutputWriter(tail.rank)
    try:
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
    finally:
        watch.close()


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
            self.print_line(line) if is_terminal else self.copy_line(line)
            count += 1
        sys.stdout.flush()
        return count

    def end_line(self) -> None:
        """End an unfinished line, and have all that was printed shown."""
        if self.unfinished:
            sys.stdout.buffer.write(b"\n")
            self.unfinished = None
        sys.stdout.flush()

    def print_line(self, line: Output) -> None:
        """Print a line for people; not the former states of a bar."""
        if not line.raw.endswith(b"\r"):
            print_text(f"{self.format_origin(line)}{line.text}\n", colours=True)

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


HELP = """\
usage: launch logs [-f] [rank=K] [RUN] [KEY=VALUE ...]

Prints what the ranks of a run's last attempt have printed, each line with its
host and rank; if no rank has printed anything, the job's own log. RUN is the
newest run, or NAME/ID, an ID, a NAME (its newest run), a run directory, or a
job (12, or 12_3 of an array).

  -f                   go on to the run's end, over all attempts; it begins
                       with the last lines of each rank
  logs.tail=N          how many of those (20)
  rank=K               this rank alone, without host and rank before each line
  runs_dir=DIR         where the runs are (runs)

  launch logs
  launch logs rank=1
  launch logs -f train logs.tail=100
"""
