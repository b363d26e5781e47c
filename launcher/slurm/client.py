"""SLURM's commands, run with their complaints as errors, and what squeue and sacct know of jobs."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.errors import SchedulerError
from launcher.slurm.notation import expand_ranges

FORMAT_VARIABLES = ("SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT")
"""Beginnings of the variables by which people choose what these commands show, which is read here."""
FIXED_VARIABLES = {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}
"""Numbers and times look the same everywhere, and those of an array's members are shown in full."""
TIMEOUT = 60.0
"""Seconds that a command has; slurmctld itself gives up on a request after less (MessageTimeout)."""
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States from which a job does not come back (squeue(1), "JOB STATE CODES")."""
SQUEUE_FIELDS = (
    "JobArrayID,State,Partition,NumNodes,NodeList",
    "StartTime,SubmitTime,RestartCnt,exit_code,Reason",
)
SACCT_FIELDS = ("JobID,State,Partition,NNodes,NodeList", "Start,ExitCode,Reason")
"""What is asked, in these commands' names; a reason can hold anything, and comes last.

sacct's `Restarts` came with 23.11.
"""
MAX_JOBS = 1000
"""Jobs of one question: an argument can have 128 KiB."""
NO_VALUES = ("", "N/A", "None", "Unknown", "None assigned", "(null)", "NONE")
"""How SLURM writes that there is no such thing."""


class MissingCommandError(SchedulerError):
    """SLURM's commands are not there: nobody will ever answer."""


def run_slurm(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, *, timeout: float = TIMEOUT
) -> str:
    """Run one of SLURM's commands and return what it prints; raises SchedulerError with its complaint.

    How it shows things is by its words alone, whatever the user's variables say.
    """
    environ_given = os.environ if environ is None else environ
    kept = {name: value for name, value in environ_given.items() if not name.startswith(FORMAT_VARIABLES)}
    try:
        done = subprocess.run(
            argv,
            env={**kept, **FIXED_VARIABLES},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise MissingCommandError(f"there is no {argv[0]} on PATH: load SLURM's module") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"{argv[0]} did not answer in {timeout:.0f} s: is slurmctld up (`scontrol ping`)?"
        ) from None
    if done.returncode:
        complaint = " ".join((done.stderr or done.stdout).split())
        complaint = complaint or f"ended with {done.returncode}, and printed nothing"
        raise SchedulerError(f"{argv[0]}: {complaint}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class JobState:
    """A job, or one member of a job array, as SLURM sees it."""

    job_id: str
    """`12`, `12_3` for an array's member."""
    state: str
    """SLURM's long word: PENDING, RUNNING, COMPLETED, …"""
    reason: str
    """Why it waits, or ended; empty if SLURM gives none."""
    partition: str
    nodes: int
    nodelist: str
    """In SLURM's form, `n[0-3]`; empty before the start."""
    start: str
    """`YYYY-MM-DDTHH:MM:SS` in local time, the expected one of a pending job; empty if none is known."""
    restarts: int | None
    """How often it went back into the queue; None if only accounting remembers the job."""
    exit_code: int | None
    """As a shell gives it, 128+n for signal n; None before the end."""
    submitted: str = ""
    """When it came into the queue, as `start`; of a requeued job, when it came back."""


def ask_queue(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Ask SLURM about jobs; for the number of an array, about all of its members.

    Jobs that it no longer knows are left out. Raises SchedulerError if slurmctld does not answer.
    """
    wanted = list(dict.fromkeys(job_ids))
    found: dict[str, JobState] = {}
    for at in range(0, len(wanted), MAX_JOBS):
        found |= ask_controller(wanted[at : at + MAX_JOBS])
    known = {*found, *(job_id.partition("_")[0] for job_id in found)}
    forgotten = [job_id for job_id in wanted if job_id not in known]
    for at in range(0, len(forgotten), MAX_JOBS):
        # If accounting is off or down, sacct fails, and nothing more is known.
        with contextlib.suppress(SchedulerError):
            found |= ask_accounting(forgotten[at : at + MAX_JOBS])
    return found


def ask_controller(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Ask slurmctld, which forgets a job MinJobAge seconds after its end; raises SchedulerError."""
    fields = ",".join(SQUEUE_FIELDS).split(",")
    argv = ["squeue", "--noheader", "--array", "--all", "--states=all", f"--jobs={','.join(job_ids)}"]
    try:
        text = run_slurm([*argv, "--Format=" + ",".join(f"{name}:|" for name in fields)])
    except SchedulerError as error:
        # Of one job that it does not know it says so; in a list it passes over such.
        if "Invalid job id" in str(error):
            return {}
        raise
    found = [read_squeue(row) for row in split_rows(text, len(fields))]
    return {job.job_id: job for job in found}


def ask_accounting(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Ask slurmdbd about jobs that the controller has forgotten; raises SchedulerError."""
    # Members that never began have one row together, which is not shown for the number of one of them.
    numbers = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    argv = ["sacct", "--parsable2", "--noheader", "--allocations", f"--jobs={','.join(numbers)}"]
    fields = ",".join(SACCT_FIELDS).split(",")
    text = run_slurm([*argv, f"--format={','.join(fields)}"])
    rows = [read_sacct(row) for row in split_rows(text, len(fields))]
    # A member that ran has a row of its own, and is still counted in that of those that never did.
    rows.sort(key=lambda job: "[" not in job.job_id)
    found = [replace(job, job_id=member) for job in rows for member in list_members(job.job_id)]
    # What is no final state here was never told to slurmdbd: the controller would know such a job.
    wanted = [job for job in found if job.state in ENDED]
    return {j.job_id: j for j in wanted if j.job_id in job_ids or j.job_id.partition("_")[0] in job_ids}


def list_members(job_id: str) -> Iterator[str]:
    """Give the members of a row of sacct's, `12_[3-5,9%2]`; another job's number is given as it is."""
    array, bracket, members = job_id.partition("[")
    if not bracket:
        yield job_id
    for part in members.rstrip("]").partition("%")[0].split(",") if bracket else ():
        with contextlib.suppress(ValueError):  # `...`, if the list is too long
            yield from (f"{array}{number}" for number in expand_ranges(part))


def split_rows(text: str, count: int) -> Iterator[list[str]]:
    """Give the rows of a table whose columns end in `|`; other lines are passed over."""
    for line in text.splitlines():
        row = [cell.strip() for cell in line.removesuffix("|").split("|", count - 1)]
        if len(row) == count:
            yield [("" if cell in NO_VALUES else cell) for cell in row]


def read_squeue(row: Sequence[str]) -> JobState:
    """Read a row of squeue's, whose exit code has waitpid's form."""
    job_id, state, partition, nodes, nodelist, start, submitted, restarts, status, reason = row
    ended = state in ENDED and status.isdecimal()
    return JobState(
        job_id=job_id,
        state=state,
        reason=reason,
        partition=partition,
        nodes=parse_node_count(nodes),
        nodelist=nodelist,
        start=start,
        restarts=int(restarts) if restarts.isdecimal() else None,
        exit_code=shell_code(int(status) >> 8 & 255, int(status) & 127) if ended else None,
        submitted=submitted,
    )


def read_sacct(row: Sequence[str]) -> JobState:
    """Read a row of sacct's: the exit code is `CODE:SIGNAL`, and the state may name who cancelled the job."""
    job_id, state, partition, nodes, nodelist, start, status, reason = row
    code, _, number = status.partition(":")
    known = code.isdecimal() and number.isdecimal()
    return JobState(
        job_id=job_id,
        state=state.split()[0] if state else "",
        reason=reason,
        partition=partition,
        nodes=parse_node_count(nodes),
        nodelist=nodelist,
        start=start,
        restarts=None,
        exit_code=shell_code(int(code), int(number)) if known else None,
    )


def shell_code(code: int, number: int) -> int:
    """Return an exit code as a shell gives it, from a program's own and the signal that ended it."""
    return 128 + number if number else code


def parse_node_count(text: str) -> int:
    """Read a number of nodes, which may be a range (`2-4`) before the start: the least."""
    digits = text.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
