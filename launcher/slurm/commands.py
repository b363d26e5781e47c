"""SLURM's commands, notations and variables: one parser for what each of its commands prints."""

import contextlib
import itertools
import logging
import math
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, SchedulerError, UsageError
from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_NODE_ORDER, LAUNCH_RENDEZVOUS, LAUNCH_SECRETS, name_host
from launcher.runs.manifest import read_time

logger = logging.getLogger(__name__)

FORMAT_VARIABLES = ("SQUEUE_", "SINFO_", "SLURM_TIME_FORMAT")
"""Beginnings of the variables by which people choose what these commands show, which is read here."""
FIXED_VARIABLES = {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}
"""Numbers and times look the same everywhere, and those of an array's members are shown in full."""
TIMEOUT = 60.0
"""Seconds that a command has; slurmctld itself gives up on a request after less (MessageTimeout)."""
STATES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("states.toml").read_text(encoding="utf-8"))
"""SLURM's words for states, and what they mean."""
ENDED, WAITING, RUNNING = (frozenset(STATES[name]) for name in ("ended", "waiting", "running"))
SQUEUE_FIELDS = (
    *("JobArrayID", "State", "Partition", "NumNodes", "NodeList", "StartTime", "RestartCnt", "exit_code"),
    *("EndTime", "PreemptTime", "TimeLimit", "Reason"),
)
"""What is asked, in squeue's names; a reason can hold anything, and comes last."""
SQUEUE = ("squeue", "--noheader", "--noconvert", "--array", "--all", "--states=all")
SINFO = ("sinfo", "--noheader", "--Node")
SINFO_FIELDS = ("NodeList", "StateLong", "NodeAddr", "Port")
SHORT_TIMEOUT = 4.0
"""Seconds for one question: a job that is being ended has KillWait in all, 30 s by default."""
LONG_TIMEOUT = 20.0
"""Seconds for one question while nothing ends the job: slurmctld can be busy."""
RETRY, LONGEST_RETRY = 0.5, 5.0
"""Seconds between two tries to requeue: the first two, and at most."""
MOST_ANSWERS = 15
"""Answers to other questions in a row, about a minute, after which any complaint is a refusal."""
REFUSAL = re.compile(
    "presently disabled|Invalid (job|user) id|permission denied|Only batch|not supported|already complet"
    "|there is no scontrol",
    re.IGNORECASE,
)
"""In scontrol's words if slurmctld will not requeue a job (src/common/slurm_errno.c), or in ours."""


def run_slurm(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, *, timeout: float = TIMEOUT
) -> str:
    """Run one of SLURM's commands and return what it prints; raises SchedulerError with its complaint.

    How it shows things is by its words alone, whatever the user's variables say.
    """
    given = os.environ if environ is None else environ
    kept = {name: value for name, value in given.items() if not name.startswith(FORMAT_VARIABLES)}
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
        raise SchedulerError(f"there is no {argv[0]} on PATH: load SLURM's module") from None
    except OSError as error:
        raise SchedulerError(f"{argv[0]} cannot be run ({error.strerror})") from None
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
    reason: str = ""
    """Why it waits, or ended; empty if SLURM gives none."""
    partition: str = ""
    nodes: int = 0
    nodelist: str = ""
    """In SLURM's form, `n[0-3]`; empty before the start."""
    start: str = ""
    """`YYYY-MM-DDTHH:MM:SS` in local time, the expected one of a pending job; empty if none is known."""
    restarts: int = 0
    """Requeues so far, one that is under way among them."""
    exit_code: int | None = None
    """As a shell gives it, 128+n for signal n; None before the end."""
    end_time: float | None = None
    """Time limit, in seconds since the epoch, infinite for none; the time of the end if SLURM is ending
    the job; None if SLURM does not tell."""
    preempted: bool = False
    """SLURM has set a time at which the job has to make room, or had to."""


def ask_queue(
    job_ids: Sequence[str], environ: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> dict[str, JobState]:
    """Ask slurmctld about jobs; for the number of an array, about all of its members.

    Jobs that it no longer knows are left out: it forgets one MinJobAge seconds after its end. Raises
    SchedulerError if it does not answer.
    """
    argv = [*SQUEUE, f"--jobs={','.join(job_ids)}", f"--Format={':|,'.join(SQUEUE_FIELDS)}:|"]
    try:
        text = run_slurm(argv, environ, timeout=timeout) if job_ids else ""
    except SchedulerError as error:
        # Of one job that it does not know it says so; in a list it passes over such.
        if "Invalid job id" in str(error):
            return {}
        raise
    found = {}
    for job_id, state, *row in split_rows(text, len(SQUEUE_FIELDS)):
        partition, nodes, nodelist, start, restarts, status, end, preempted, limit, reason = row
        code = int(status) if state in ENDED and status.isdecimal() else None
        if code is not None:
            code = 128 + (code & 127) if code & 127 else code >> 8 & 255
        found[job_id] = JobState(
            job_id,
            state,
            reason,
            partition,
            read_number(nodes.partition("-")[0]),  # a range before the start
            nodelist,
            start,
            read_number(restarts),
            code,
            end_time=math.inf if limit == "UNLIMITED" else read_time(end),
            preempted=read_time(preempted) is not None,
        )
    return found


def ask_job(job_id: str, environ: Mapping[str, str], timeout: float = SHORT_TIMEOUT) -> JobState:
    """Ask slurmctld how one job stands; raises SchedulerError."""
    if not (found := ask_queue([job_id], environ, timeout)):
        raise SchedulerError(f"squeue: nothing on job {job_id}")
    return next(iter(found.values()))


def split_rows(text: str, count: int) -> Iterator[list[str]]:
    """Give the rows of a table whose columns end in `|`; other lines are passed over."""
    for line in text.splitlines():
        row = [cell.strip() for cell in line.removesuffix("|").split("|", count - 1)]
        if len(row) == count:
            yield [("" if cell in STATES["none"] else cell) for cell in row]


def name_job(environ: Mapping[str, str]) -> str:
    """Return the job's id, `12_3` for an array's member: the bare number of one may be the whole array's."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def read_number(text: str) -> int:
    """Return a number of SLURM's; 0 for what is none."""
    return int(text) if text.isdecimal() else 0


def count_restarts(environ: Mapping[str, str]) -> int:
    """Return how often the job had been requeued when this start of it began."""
    return read_number(environ.get("SLURM_RESTART_COUNT", ""))


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as SLURM sees it."""

    state: str
    """As sinfo has it, `down*`."""
    address: str
    """Where its daemon listens."""
    port: int
    """Of that; 0 if it is not known."""

    @property
    def is_down(self) -> bool:
        """It is not there, or slurmctld does not reach it."""
        return self.state.startswith(tuple(STATES["down"])) or self.state.endswith("*")


def ask_nodes(
    hosts: Sequence[str], environ: Mapping[str, str], timeout: float = SHORT_TIMEOUT
) -> dict[str, NodeState]:
    """Ask slurmctld how nodes stand; those that it does not know are left out. Raises SchedulerError."""
    words = ("--all", "--noconvert", f"--nodes={','.join(hosts)}", f"--Format={':|,'.join(SINFO_FIELDS)}:|")
    text = run_slurm((*SINFO, *words), environ, timeout=timeout) if hosts else ""
    rows = {host: row for host, *row in split_rows(text, len(SINFO_FIELDS)) if host in hosts}
    return {host: NodeState(state, where, read_number(port)) for host, (state, where, port) in rows.items()}


def ask_down_nodes(
    hosts: Sequence[str], environ: Mapping[str, str], timeout: float = SHORT_TIMEOUT
) -> dict[str, str]:
    """Return those nodes that are not there, with their states; none if SLURM does not answer."""
    try:
        nodes = ask_nodes(hosts, environ, timeout)
    except SchedulerError:
        return {}
    return {host: nodes[host].state for host in hosts if host in nodes and nodes[host].is_down}


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
    end, answers, pause = time.monotonic() + timeout, 0, RETRY
    longest = LONG_TIMEOUT if timeout == math.inf else SHORT_TIMEOUT
    while True:
        try:
            run_slurm(["scontrol", "requeue", job_id], environ, timeout=longest)
            return
        except SchedulerError as error:
            if "pending execution" in str(error):
                return
            try:
                answers += 1
                if ask_job(job_id, environ).restarts > count_restarts(environ):
                    return
            except SchedulerError:
                answers = 0
            if REFUSAL.search(str(error)) or answers > MOST_ANSWERS or time.monotonic() > end:
                raise
            if pause == RETRY:
                logger.warning(f"the requeue is tried again until SLURM answers: {error}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY)


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
        return run_slurm(argv, environ, timeout=max(end - time.monotonic(), 0.0))

    try:
        row = next(split_rows(ask(*SQUEUE, f"--jobs={job_id}", "--format=%x|%n|%P"), 3))
        before, named = {*expand_hosts(row[0])}, {*expand_hosts(row[1])}
        users = before - {*lost}
        free = {*ask(*SINFO, f"--partition={row[2]}", "--format=%N").split()} - users
        able = [name for name in lost if name in free - named]
        chosen = able[: max(len(free) - min_nodes, 0)]
        if users | {*chosen} != before:
            ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(sorted(users | {*chosen}))}")
    except (SchedulerError, StopIteration, ValueError) as error:
        return f"{', '.join(lost)} not excluded ({error})"
    kept = [name for name in lost if name not in chosen]
    why = f"the job asks for it, or partition {row[2]} would have too few nodes"
    return f"{', '.join(kept)} not excluded: {why}" if kept else ""


# Notations

SIGNAL = re.compile(r"(?:B:)?(?:SIG)?(?P<signal>USR[12])(?:@(?P<seconds>\d+))?", re.IGNORECASE)
"""Signals that can mean `write a checkpoint`; the others stop a job, or mean another thing."""
GRACE = 60
"""Seconds before the limit if `--signal` names none (sbatch(1))."""
MOST_GRACE = 65535
"""The largest that `--signal` takes (sbatch(1))."""
ITEM = re.compile(r"(?:[^,\[\]]+|\[[^\]]*\])+")
"""One item of the outer list of nodes, `rack[1-2]n[08-10]`; commas within brackets belong to it."""
PIECE = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)
"""A name that ends in a number."""
NUMBERS = re.compile(r"([0-9]+)")


def parse_signal(text: str) -> tuple[signal.Signals, int]:
    """Read `cluster.signal`: the signal, and the seconds before the limit; raises UsageError."""
    match = SIGNAL.fullmatch(text)
    seconds = int(match["seconds"] or GRACE) if match else 0
    if not match or not 0 < seconds <= MOST_GRACE:
        raise UsageError(
            f"cluster.signal={text}: give USR1 or USR2 and the seconds before the time limit, at most"
            f" {MOST_GRACE}, as in cluster.signal=USR2@120"
        )
    return signal.Signals[f"SIG{match['signal'].upper()}"], seconds


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names of `rack[1-2]n[08-10],login`, in the list's order.

    Several brackets are all combined, the last running fastest. Raises ValueError for what is no such list.
    """

    def expand(ranges: str) -> Iterator[str]:
        for part in ranges.split(","):  # `08-10`, `12` or `20-30:5`, with zeros in front
            span, _, stride = part.partition(":")
            low, _, high = span.partition("-")
            for number in range(int(low), int(high or low) + 1, int(stride or 1)):
                yield str(number).zfill(len(low))

    names: list[str] = []
    for item in ITEM.finditer(text):
        pieces = [[*expand(ranges)] if ranges else [plain] for ranges, plain in PIECE.findall(item[0])]
        names += map("".join, itertools.product(*pieces))
    return tuple(names)


def make_natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return what sorts names by the numbers in them, then as text: n2, n02, n10, rack1n3."""
    parts = NUMBERS.split(name)
    numbered = tuple((1, int(part), "") if odd % 2 else (0, 0, part) for odd, part in enumerate(parts))
    return (*numbered, (2, 0, name))


def fold_hosts(names: Iterable[str]) -> str:
    """Return names as SLURM writes them, in their natural order: `login,n[0-1,12]`."""
    return fold_in_order(sorted({*names}, key=make_natural_key))


def fold_in_order(names: Iterable[str]) -> str:
    """Return names in SLURM's form and in their order: `n[0,2-5],m1`; `expand_hosts` gives them back.

    Numbers that follow each other are ranges in brackets.
    """
    pieces: list[tuple[str, list[list[str]]]] = []  # a name, and the first and last numbers of its ranges
    for whole in names:
        found = NUMBERED.fullmatch(whole)
        name, number = (found[1], found[2]) if found else (whole, "")
        if not number or not pieces or pieces[-1][0] != name or not pieces[-1][1]:
            pieces.append((name, []))
        spans = pieces[-1][1]
        if spans and number == str(int(spans[-1][1]) + 1).zfill(len(spans[-1][0])):
            spans[-1][1] = number
        elif number:
            spans.append([number, number])
    words = []
    for name, spans in pieces:
        text = ",".join(low if low == high else f"{low}-{high}" for low, high in spans)
        words.append(f"{name}[{text}]" if "-" in text or "," in text else name + text)
    return ",".join(words)


# Variables

WHERE_SLURM_IS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""They say where SLURM is, and who asks it, and stay in every environment."""
STEP_OPTION = re.compile("SLURM_(?!JOB_|ARRAY_|SUBMIT_)|(SBATCH|SALLOC|SRUN|PMI[X2]?)_")
"""Beginnings of the variables that srun takes for options, or an MPI library for its own process manager.

They are from outside: of the shell that submitted, of a job script's own request, of an mpirun. An `srun`
that finds `SLURM_CPUS_PER_TASK` beside other words refuses from 23.11 on, and before it ignores them.
SLURM_JOB_* and the like tell of the job, and programs read them; srun takes none of these for an option.
"""
KEPT_BY_STEPS = re.compile("SLURM_(CLUSTER_NAME|WORKING_CLUSTER|NNODES|JOBID|RESTART_COUNT)")
"""Exceptions beside WHERE_SLURM_IS: they say which job this is."""
TASK_VARIABLES = (LAUNCH_SECRETS, LAUNCH_RENDEZVOUS, LAUNCH_ATTEMPT, LAUNCH_NODE_ORDER)
"""Variables from the batch script's process to the tasks; no rank gets them."""


def clean_for_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which srun does what its words say and nothing else."""
    return {
        name: value
        for name, value in environ.items()
        if not STEP_OPTION.match(name) or name in WHERE_SLURM_IS or KEPT_BY_STEPS.fullmatch(name)
    }


def drop_task_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a task's environment without the variables that are for the task alone."""
    return {name: value for name, value in environ.items() if name not in TASK_VARIABLES}


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """One task's place in the step."""

    host: str
    node_rank: int
    """Its number in the order of the nodes' ranks; without an order, in SLURM's own."""
    nodes: int
    """Of the step."""
    attempt: int
    endpoint: str
    step: str
    """`JOB.STEP`."""


def read_task_identity(environ: Mapping[str, str]) -> TaskIdentity:
    """Read the variables; a task that is started by hand is the only one of its job."""
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    host, hosts = name_host(environ), expand_hosts(environ.get(LAUNCH_NODE_ORDER, ""))
    return TaskIdentity(
        host,
        hosts.index(host) if host in hosts else int(environ.get("SLURM_NODEID", "0")),
        int(environ.get("SLURM_STEP_NUM_NODES", "1")),
        int(environ.get(LAUNCH_ATTEMPT, "0")),
        environ.get(LAUNCH_RENDEZVOUS, "localhost:0"),
        f"{job}.{step}",
    )


def list_job_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the job's nodes in SLURM's order; raises MachineError if the variables name none."""
    text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    with contextlib.suppress(ValueError):
        if hosts := expand_hosts(text):
            return hosts
    raise MachineError(f"SLURM_JOB_NODELIST={text!r} is no list of nodes: is this a SLURM job?")


def count_gpus(environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs the job has on each node, as SLURM counts them; None if it does not tell."""
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return int(text) if text.isascii() and text.isdecimal() else None
