"""What srun prints on stderr of a step and its tasks, line by line and as a report."""

import contextlib
import re
import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from launcher.slurm.notation import expand_hosts, expand_ranges

SLURM_PREFIXES = ("srun: ", "slurmstepd")
"""Beginnings of the lines that are srun's own, or of the daemon behind a task."""
TASK_END = re.compile(r"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
"""How tasks ended; `_task_finish` in SLURM's src/srun/libsrun/launch.c. One line can tell of several."""
NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<hosts>\S+)")
"""A node that slurmctld has given up; src/api/step_launch.c."""
EXITED = re.compile(r"Exited with exit code (\d+)")
OUT_OF_MEMORY = "Out Of Memory"
CORE = " (core dumped)"
CANCELLED = " CANCELLED AT "
"""In slurmstepd's message on a step that was ended from outside, or by srun."""
ENDED = "Terminated"
"""The word on tasks that srun itself has ended because another one failed."""
CPU_BIND_COMPLAINT = "cluster configuration lacks support for cpu binding"
"""srun's answer to --cpu-bind=none, even with --quiet, if no TaskPlugin can bind."""
COMPLETED = re.compile(r"srun: (?:\S+: )*\S+: tasks? (?P<tasks>[\d,-]+): Completed$")
"""Tasks that ended with 0, of which `srun --verbose` alone tells."""
SRUN = "srun"
"""Stands for srun itself among the nodes that got a signal from outside."""
TERMINATED = "srun: forcing job termination"
"""What it says of SIGTERM, SIGHUP or SIGQUIT, after which it has the tasks killed; srun_job.c."""
USEFUL_LINE = re.compile(
    r"srun: (?:error|fatal|warning|unrecognized|ambiguous|invalid|option)\b", re.IGNORECASE
)
"""What srun says without `--verbose`, getopt's complaints included."""
STEP_BEGUN = re.compile(r"\btasks? \d|Node failure|slurmstepd|Job step aborted|io error")
"""In its messages on a step that has begun."""
TEMPORARY = re.compile(r"contact|imed out|Connection refused|temporar|busy|Zero Bytes")
"""In its messages if slurmctld is away, or the nodes are not ready for another step."""
KEPT_LINES = 40
"""Lines of srun's, and of tasks that have no logs yet, that are kept for the report."""


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How tasks ended, by one line of srun's."""

    tasks: tuple[int, ...]
    """Their ranks."""
    exitcode: int
    """As subprocess gives it: -n for signal n."""
    memory: bool = False
    """SLURM says that they came to the job's memory limit."""


def is_slurm_line(line: str) -> bool:
    """Tell whether a line is SLURM's, rather than a task's."""
    return line.startswith(SLURM_PREFIXES)


def is_cpu_bind_complaint(line: str) -> bool:
    """Tell whether a line of srun's stderr is of no use to anybody."""
    return CPU_BIND_COMPLAINT in line


def was_srun_terminated(line: str) -> bool:
    """Tell whether srun says that a signal to itself ends the step."""
    return line.startswith(TERMINATED)


def is_verbose(line: str) -> bool:
    """Tell whether srun prints a line only for want of `--quiet`, or because of `--verbose`."""
    return line.startswith("srun: ") and not USEFUL_LINE.match(line)


def parse_completed(line: str) -> tuple[int, ...]:
    """Return the tasks that a line of srun's says ended with 0; none for any other line."""
    found = COMPLETED.match(line)
    try:
        return tuple(map(int, expand_ranges(found["tasks"]))) if found else ()
    except ValueError:
        return ()


def has_begun(lines: Iterable[str]) -> bool:
    """Tell whether any line is about a step that has begun."""
    return any(map(STEP_BEGUN.search, lines))


def is_temporary(text: str) -> bool:
    """Tell whether srun says why it did not start a step, and that another try may do so."""
    return bool(TEMPORARY.search(text))


def drop_prefix(line: str) -> str:
    """Return a line without srun's prefixes."""
    return line.removeprefix("srun: ").removeprefix("error: ")


def parse_task_end(line: str) -> TaskEnd | None:
    """Read how tasks ended out of a line of srun's stderr; None if it tells something else."""
    found = TASK_END.match(line)
    if not found:
        return None
    how = found["how"].strip().removesuffix(CORE)
    exited = EXITED.fullmatch(how)
    try:
        tasks = tuple(map(int, expand_ranges(found["tasks"])))
        if how == OUT_OF_MEMORY:
            return TaskEnd(tasks, -signal.SIGKILL, memory=True)
        return TaskEnd(tasks, int(exited[1]) if exited else -number_signal(how))
    except ValueError:
        return None


def number_signal(words: str) -> int:
    """Return the signal that strsignal(3) has these words for; raises ValueError.

    srun does not set a locale, and this interpreter asks the same library.
    """
    for number in signal.valid_signals():
        if signal.strsignal(number) == words:
            return int(number)
    raise ValueError(words)


def parse_task_ends(lines: Iterable[str]) -> dict[str, str]:
    """Return for each host how its task ended, in srun's words; the last line counts."""
    found = [match for line in lines if (match := TASK_END.match(line))]
    return {host: match["how"].strip() for match in found for host in expand_hosts(match["hosts"])}


def parse_node_failure(line: str) -> str:
    """Return the list of nodes that a line of srun's stderr says are lost; empty for any other line."""
    found = NODE_FAILURE.match(line)
    return found["hosts"] if found else ""


def is_cancelled(line: str) -> bool:
    """Tell whether a line says that the step was ended from outside, or by srun."""
    return CANCELLED in line


def is_in_node_records(line: str, before: Iterable[str]) -> bool:
    """Tell whether the nodes' records say more than a line does, if there is a task of ours on each.

    A task that was killed left no record. That srun ends the others adds nothing to the first end.
    """
    if found := TASK_END.match(line):
        how = found["how"].strip()
        return how == ENDED or bool(EXITED.fullmatch(how))
    return is_cancelled(line) and any(map(TASK_END.match, before))


@dataclass(slots=True)
class SrunReport:
    """What srun printed of a step's tasks."""

    ends: list[tuple[float, TaskEnd]] = field(default_factory=list)
    """With the time of the line, in seconds since the epoch; not of those that ended with 0."""
    clean: dict[int, float] = field(default_factory=dict)
    """When tasks ended with 0, by their ranks."""
    lost: set[str] = field(default_factory=set)
    """Hosts."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """All of its lines that are of use."""
    cancelled: bool = False
    cancelled_first: bool = False
    """Before any task had ended."""
    stop: tuple[int, float] | None = None
    """The first stopping signal that the ranks were sent, and when, in seconds since the epoch."""

    def note_line(self, line: str) -> bool:
        """Take a line of srun's stderr; false if there is nothing in it for people."""
        if is_cpu_bind_complaint(line) or is_verbose(line):
            self.clean |= dict.fromkeys(parse_completed(line), time.time())
            return False
        self.lines.append(line)
        if end := parse_task_end(line):
            self.ends.append((time.time(), end))
            return False
        if hosts := parse_node_failure(line):
            with contextlib.suppress(ValueError):
                self.lost.update(expand_hosts(hosts))
        cancelled = is_cancelled(line)
        self.cancelled = self.cancelled or cancelled
        self.cancelled_first = self.cancelled_first or (cancelled and not self.ends)
        # That srun ends the others adds nothing to the first end.
        return not (cancelled and self.ends)
