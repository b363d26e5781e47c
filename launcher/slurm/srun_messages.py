"""What srun prints on stderr of a step and its tasks."""

import re
from collections.abc import Iterable

from launcher.slurm.notation import expand_hosts

SLURM_PREFIXES = ("srun: ", "slurmstepd")
"""Beginnings of the lines that are srun's own, or of the daemon behind a task."""
TASK_END = re.compile(r"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
"""How tasks ended; `_task_finish` in SLURM's src/srun/libsrun/launch.c. One line can tell of several."""
NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<hosts>\S+)")
"""A node that slurmctld has given up; src/api/step_launch.c."""
EXITED = re.compile(r"Exited with exit code (\d+)")
CANCELLED = " CANCELLED AT "
"""In slurmstepd's message on a step that was ended from outside, or by srun."""
ENDED = "Terminated"
"""The word on tasks that srun itself has ended because another one failed."""
CPU_BIND_COMPLAINT = "cluster configuration lacks support for cpu binding"
"""srun's answer to --cpu-bind=none, even with --quiet, if no TaskPlugin can bind."""
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


def has_begun(lines: Iterable[str]) -> bool:
    """Tell whether any line is about a step that has begun."""
    return any(map(STEP_BEGUN.search, lines))


def is_temporary(text: str) -> bool:
    """Tell whether srun says why it did not start a step, and that another try may do so."""
    return bool(TEMPORARY.search(text))


def drop_prefix(line: str) -> str:
    """Return a line without srun's prefixes."""
    return line.removeprefix("srun: ").removeprefix("error: ")


def is_task_end(line: str) -> bool:
    """Tell whether a line says that tasks ended badly."""
    return TASK_END.match(line) is not None


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
    return is_cancelled(line) and any(map(is_task_end, before))
