"""SLURM's commands and notations: one parser for what each of squeue, sacct, sinfo and scontrol prints."""

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

from launcher.errors import SchedulerError, UsageError
from launcher.runs.manifest import read_time

logger = logging.getLogger(__name__)

FORMAT_VARIABLES = ("SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT")
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
SQUEUE = ("squeue", "--noheader", "--array", "--all", "--states=all")
SACCT = ("sacct", "--parsable2", "--noheader", "--allocations")
SINFO = ("sinfo", "--noheader", "--Node")
CONFIG_LINE = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
NODE_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S+)")
SHORT_TIMEOUT = 4.0
"""Seconds for one question: a job that is being ended has KillWait in all, 30 s by default."""
LONG_TIMEOUT = 20.0
"""Seconds for one question while nothing ends the job: slurmctld can be busy."""
RETRY, LONGEST_RETRY = 0.5, 5.0
"""Seconds between two tries to requeue: the first two, and at most."""
ANSWERED = 60.0
"""Seconds in which slurmctld answers other questions, after which any complaint of its is a refusal."""
REFUSAL = re.compile(
    "presently disabled|Invalid (job|user) id|permission denied|Only batch|not supported|already complet",
    re.IGNORECASE,
)
"""In scontrol's words if slurmctld will not requeue a job (src/common/slurm_errno.c)."""


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
    for job in ask_queue([job_id], environ, timeout).values():
        return job
    raise SchedulerError(f"squeue: nothing on job {job_id}")


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


def ask_config(environ: Mapping[str, str] | None = None, timeout: float = SHORT_TIMEOUT) -> dict[str, str]:
    """Return SLURM's configuration as `scontrol show config` prints it; raises SchedulerError."""
    return dict(CONFIG_LINE.findall(run_slurm(["scontrol", "show", "config"], environ, timeout=timeout)))


def ask_node_fields(
    hosts: Sequence[str], environ: Mapping[str, str], timeout: float = SHORT_TIMEOUT
) -> dict[str, dict[str, str]]:
    """Return what `scontrol show node` prints of each node, as far as it is a word; raises SchedulerError."""
    argv = ["scontrol", "--oneliner", "show", "node", ",".join(hosts)]
    lines = run_slurm(argv, environ, timeout=timeout).splitlines() if hosts else []
    nodes = [dict(reversed(NODE_FIELD.findall(line))) for line in lines]  # a reason at the end can hold any
    return {fields["NodeName"]: fields for fields in nodes if "NodeName" in fields}


def ask_node_states(
    hosts: Sequence[str], environ: Mapping[str, str], timeout: float = SHORT_TIMEOUT
) -> dict[str, str]:
    """Return the states of nodes as sinfo has them, `down*`; raises SchedulerError."""
    if not hosts:
        return {}
    argv = [*SINFO, "--all", f"--nodes={','.join(hosts)}", "--format=%N|%T"]
    return dict(split_rows(run_slurm(argv, environ, timeout=timeout), 2))


def is_down(state: str) -> bool:
    """Tell whether a node in this state is not there."""
    return state.startswith(tuple(STATES["down"])) or state.endswith("*")


def ask_last_end(job_id: str, environ: Mapping[str, str]) -> str:
    """Return the state in which accounting has the job's attempt before this one; empty if it has none."""
    argv = [*SACCT, "--duplicates", f"--jobs={job_id}", "--format=State,Start"]
    try:
        rows = split_rows(run_slurm(argv, environ, timeout=SHORT_TIMEOUT), 2)
    except SchedulerError:
        return ""
    ended = [state.split()[0] for state, _ in rows if state not in ("", "RUNNING", "PENDING")]
    return ended[-1] if ended else ""


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
    longest = LONG_TIMEOUT if timeout == math.inf else SHORT_TIMEOUT
    while True:
        try:
            run_slurm(["scontrol", "requeue", job_id], environ, timeout=longest)
            return
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

    def list_nodes(partition: str, *chosen: str) -> set[str]:
        return {*ask(*SINFO, f"--partition={partition}", "--format=%N", *chosen).split()}

    try:
        answer = ask(*SQUEUE, f"--jobs={job_id}", "--format=%x|%n|%P")
        excluded, required, partition = next(split_rows(answer, 3))
        named = list_nodes(partition, f"--nodes={required}") if required else set()
        before = list_nodes(partition, f"--nodes={excluded}") if excluded else set()
        users = before - {*lost}
        free = list_nodes(partition) - users
        able = [name for name in lost if name in free - named]
        chosen = able[: max(len(free) - min_nodes, 0)]
        if users | {*chosen} != before:
            ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(sorted(users | {*chosen}))}")
    except (SchedulerError, StopIteration) as error:
        return f"{', '.join(lost)} not excluded ({error})"
    kept = [name for name in lost if name not in chosen]
    why = f"the job asks for it, or partition {partition} would have too few nodes"
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
    names: list[str] = []
    for item in ITEM.finditer(text):
        found = PIECE.findall(item[0])
        pieces = [[*_expand_ranges(ranges)] if ranges else [plain] for ranges, plain in found]
        names += map("".join, itertools.product(*pieces))
    return tuple(names)


def _expand_ranges(text: str) -> Iterator[str]:
    """Give the numbers of `08-10,12,20-30:5`, with their zeros in front; raises ValueError."""
    for part in text.split(","):
        span, _, stride = part.partition(":")
        low, _, high = span.partition("-")
        for number in range(int(low), int(high or low) + 1, int(stride or 1)):
            yield str(number).zfill(len(low))


def fold_hosts(names: Iterable[str]) -> str:
    """Return names as SLURM writes them, `login,n[0-1,12]`: in the order of the numbers at their ends."""
    pairs = dict.fromkeys(map(_split_number, names))
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in pairs))}
    ordered = sorted(pairs, key=lambda pair: (places[pair[0]], len(pair[1]), pair[1]))
    return fold_in_order(map("".join, ordered))


def fold_in_order(names: Iterable[str]) -> str:
    """Return names in SLURM's form and in their order: `n[0,2-5],m1`; `expand_hosts` gives them back.

    Numbers that follow each other are ranges in brackets.
    """
    pieces: list[tuple[str, list[list[str]]]] = []  # a name, and the first and last numbers of its ranges
    for name, number in map(_split_number, names):
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


def _split_number(name: str) -> tuple[str, str]:
    """Return a name without the number at its end, and that number; empty if there is none."""
    found = NUMBERED.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")
