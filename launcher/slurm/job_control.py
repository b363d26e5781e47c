"""What a job's batch script asks SLURM about its own job and nodes, and the requeue."""

import contextlib
import logging
import math
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from launcher.errors import SchedulerError
from launcher.slurm.client import MissingCommandError, run_slurm, split_rows

logger = logging.getLogger(__name__)

RUNNING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
"""States of a job that SLURM has not begun to end."""
SHORT_TIMEOUT = 4.0
"""Seconds for one question: a job that is being ended has KillWait in all, 30 s by default."""
LONG_TIMEOUT = 20.0
"""Seconds for one question while nothing ends the job: slurmctld can be busy."""
RETRY, LONGEST_RETRY = 0.5, 5.0
"""Seconds between two tries to requeue: the first two, and at most."""
ANSWERED = 60.0
"""Seconds in which slurmctld answers other questions, after which any complaint of its is a refusal."""
DOWN = ("down", "fail", "error", "unknown", "reboot", "power")
"""Beginnings of sinfo's states of a node that is not there; one that does not respond ends in `*`."""
REFUSAL = re.compile(
    "presently disabled|Invalid (job|user) id|permission denied|Only batch|not supported|already complet",
    re.IGNORECASE,
)
"""In scontrol's words if slurmctld will not requeue a job (src/common/slurm_errno.c)."""
BOOT = re.compile(r"^NodeName=(\S+).*\bBootTime=(\S+)", re.MULTILINE)
KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
FIELDS = "State,RestartCnt,EndTime,PreemptTime,TimeLimit,Reason"
"""squeue's columns; the reason can hold anything, and comes last."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What SLURM says of the job itself, asked at the attempt's end."""

    state: str
    reason: str
    restarts: int
    """Requeues so far, one that is under way among them."""
    end_time: float | None
    """Time limit, in seconds since the epoch, infinite for none; the time of the end if SLURM is ending
    the job; None if SLURM does not tell."""
    preempted: bool
    """SLURM has set a time at which the job has to make room, or had to."""


def name_job(environ: Mapping[str, str]) -> str:
    """Return the job's id, `12_3` for an array's member: the bare number of one may be the whole array's."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def ask_job(job_id: str, environ: Mapping[str, str], timeout: float = SHORT_TIMEOUT) -> JobStatus:
    """Ask how the job stands; raises SchedulerError."""
    columns = ",".join(f"{name}:|" for name in FIELDS.split(","))
    argv = [
        "squeue",
        "--noheader",
        "--array",
        "--all",
        "--states=all",
        f"--jobs={job_id}",
        f"--Format={columns}",
    ]
    text = run_slurm(argv, environ, timeout=timeout)
    for state, restarts, end, preempted, limit, reason in split_rows(text, len(FIELDS.split(","))):
        count = int(restarts) if restarts.isdecimal() else 0
        until = math.inf if limit == "UNLIMITED" else parse_slurm_time(end)
        return JobStatus(state, reason, count, until, parse_slurm_time(preempted) is not None)
    raise SchedulerError(f"squeue: nothing on job {job_id}")


def parse_slurm_time(text: str) -> float | None:
    """Read SLURM's local time, in seconds since the epoch; None for `N/A` and such."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def ask_kill_wait(environ: Mapping[str, str]) -> int | None:
    """Ask for the seconds from SLURM's SIGTERM to its SIGKILL; None if it does not tell."""
    try:
        text = run_slurm(["scontrol", "show", "config"], environ, timeout=SHORT_TIMEOUT)
    except SchedulerError:
        return None
    found = KILL_WAIT.search(text)
    return int(found[1]) if found else None


def ask_nodes(
    hosts: Sequence[str], environ: Mapping[str, str], timeout: float = SHORT_TIMEOUT
) -> dict[str, str]:
    """Return the states of nodes as sinfo has them, `down*`; raises SchedulerError."""
    if not hosts:
        return {}
    argv = ["sinfo", "--noheader", "--Node", "--all", f"--nodes={','.join(hosts)}", "--format=%N|%T"]
    text = run_slurm(argv, environ, timeout=timeout)
    return dict(split_rows(text, 2))


def ask_boots(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, float]:
    """Return when nodes were booted, in seconds since the epoch; raises SchedulerError."""
    argv = ["scontrol", "--oneliner", "show", "node", ",".join(hosts)]
    text = run_slurm(argv, environ, timeout=SHORT_TIMEOUT) if hosts else ""
    times = [(found[1], parse_slurm_time(found[2])) for found in BOOT.finditer(text)]
    return {name: when for name, when in times if when is not None}


def is_down(state: str) -> bool:
    """Tell whether a node in this state is not there."""
    return state.startswith(DOWN) or state.endswith("*")


def ask_last_end(job_id: str, environ: Mapping[str, str]) -> str:
    """Return the state in which accounting has the job's attempt before this one; empty if it has none."""
    argv = ["sacct", "--duplicates", "--parsable2", "--noheader", "--allocations", f"--jobs={job_id}"]
    with contextlib.suppress(SchedulerError):
        text = run_slurm([*argv, "--format=State,Start"], environ, timeout=SHORT_TIMEOUT)
        ended = [
            state.split()[0] for state, _ in split_rows(text, 2) if state not in ("", "RUNNING", "PENDING")
        ]
        return ended[-1] if ended else ""
    return ""


@contextlib.contextmanager
def ignore_stops() -> Iterator[None]:
    """Ignore SIGTERM in a block: a requeue ends the batch step, whose commands would die of it half-way.

    An ignored signal stays ignored over exec.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@ignore_stops()
def requeue_job(job_id: str, environ: Mapping[str, str], timeout: float = math.inf) -> None:
    """Put the job back into the queue; tries for `timeout` seconds, until slurmctld answers.

    Raises SchedulerError for a refusal. That slurmctld is away can have any words ("Unexpected message
    received"), so only known ones refuse, and what it still says when it has answered questions for a while.
    If somebody else has requeued the job meanwhile, or the answer to a request was lost, that counts.
    """
    end, answered, pause = time.monotonic() + timeout, math.inf, RETRY
    while True:
        try:
            run_slurm(
                ["scontrol", "requeue", job_id],
                environ,
                timeout=LONG_TIMEOUT if end == math.inf else SHORT_TIMEOUT,
            )
        except MissingCommandError:
            raise
        except SchedulerError as error:
            if "pending execution" in str(error):
                return
            try:
                if ask_job(job_id, environ).restarts > count_restarts(environ):
                    return
                answered = min(answered, time.monotonic())
            except SchedulerError:
                answered = math.inf
            if REFUSAL.search(str(error)) or time.monotonic() > min(end, answered + ANSWERED):
                raise
            if pause == RETRY:
                logger.warning(f"the requeue is tried again until SLURM answers: {error}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY)
        else:
            return


def count_restarts(environ: Mapping[str, str]) -> int:
    """Return how often the job had been requeued when this start of it began."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


@ignore_stops()
def exclude_nodes(
    job_id: str,
    lost: Sequence[str],
    min_nodes: int,
    environ: Mapping[str, str],
    patience: float = 2 * SHORT_TIMEOUT,
) -> str:
    """Exclude lost nodes, the newest loss first, from a job that is in the queue; returns which could not be.

    SLURM has `patience` seconds in all, since signals wait meanwhile, and KillWait may run.

    What the user excluded stays so. A node that the user named with --nodelist is not excluded, nor are
    more than leave the partition `min_nodes` nodes: SLURM would never start the job.
    """
    end = time.monotonic() + patience

    def ask(*argv: str) -> str:
        left = min(SHORT_TIMEOUT, end - time.monotonic())
        if left <= 0:
            raise SchedulerError(f"SLURM took {patience:.0f} s to answer")
        return run_slurm(argv, environ, timeout=left)

    def list_nodes(expression: str, partition: str) -> set[str]:
        """Return the nodes of a partition, or those in `expression` if there is one."""
        chosen = (f"--nodes={expression}",) if expression else ()
        return {
            *ask("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N", *chosen).split()
        }

    argv = ("squeue", "--noheader", "--array", "--all", "--states=all", f"--jobs={job_id}")
    try:
        excluded, required, partition = next(split_rows(ask(*argv, "--format=%x|%n|%P"), 3))
        required_nodes = list_nodes(required, partition) if required else set()
        before = list_nodes(excluded, partition) if excluded else set()
        users = before - {*lost}
        chosen = choose_excluded_nodes(lost, list_nodes("", partition) - users, required_nodes, min_nodes)
        if users | {*chosen} != before:
            names = ",".join(sorted(users | {*chosen}))
            ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}")
    except (SchedulerError, StopIteration) as error:
        return f"{', '.join(lost)} not excluded ({error})"
    kept = [name for name in lost if name not in chosen]
    why = f"the job asks for it, or partition {partition} would have too few nodes"
    return f"{', '.join(kept)} not excluded: {why}" if kept else ""


def choose_excluded_nodes(
    lost: Sequence[str], nodes: set[str], required_nodes: set[str], min_nodes: int
) -> list[str]:
    """Return the lost nodes that can be spared, first ones first, so that `min_nodes` nodes remain."""
    able = [name for name in lost if name in nodes and name not in required_nodes]
    return able[: max(len(nodes) - min_nodes, 0)]
