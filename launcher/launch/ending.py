"""The end of a job on this node: which rank failed first and why, exit code, manifest, and the last words."""

import contextlib
import logging
import os
import re
import resource
import signal
import time
from dataclasses import dataclass, replace

from launcher.codec import load
from launcher.config.settings import SLURM_KINDS, NotifyConfig
from launcher.errors import EXIT_HANG, EXIT_MACHINE
from launcher.files import LARGEST, read_file
from launcher.launch.job import Job
from launcher.launch.processes import Death, RankProcess
from launcher.launch.signals import name_signal
from launcher.protocol import name_applied_file
from launcher.runs.manifest import Outcome
from launcher.runs.rank_logs import read_tail
from launcher.runs.records import Applied, RankFailure, compare_applied, read_error
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

REPORT = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s+"
    r"exitcode\s*: (?P<exitcode>-?\d+) \(pid: (?P<pid>\d+)\)"
)
"""One entry of the table in torchelastic's ChildFailedError."""
CLOSING = re.compile(r"Sending process (\d+) closing signal")
"""What the agent says of a rank that it ends itself (torch/distributed/elastic/multiprocessing/api.py)."""
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGTERM: "from outside",
    signal.SIGKILL: "probably out of memory: see `dmesg`, and the job's memory limit",
    signal.SIGXCPU: "its CPU time is used up: `ulimit -t`, limits.conf",
    signal.SIGBUS: "a bus error: often /dev/shm is full",
    signal.SIGSEGV: "a crash in native code: PYTHONFAULTHANDLER=1 shows where",
    signal.SIGABRT: "aborted: often a CUDA assertion, or a collective that ran into its timeout",
}
EXIT_HINTS = {
    os.EX_TEMPFAIL: "EX_TEMPFAIL: it asks for another start",
    126: "the program cannot be executed",
    127: "the program was not found",
}
SHIM_LINES = ("launch-rank: rank ", "launch-rank: warning: ")
"""Beginnings of the shim's lines in a rank's log, which are not the program's last words."""
FIRST_UNNAMED = 32
"""The C library keeps some of the real-time signals for itself, and has no names for them (signal(7))."""
NOTICE_PATIENCE = 5.0
"""Seconds that a job's end may be late because of a message to notify.url."""


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How the ranks of this node, and the agent that started them, ended; and what there is to say of it."""

    agent_code: int
    """As subprocess gives it: -n for signal n."""
    deaths: tuple[Death, ...]
    """The ranks' ends in the order in which the kernel saw them, over all attempts."""
    signal: int | None
    """The first stopping signal that `launch` was sent."""
    signal_time: float
    """When it came, in seconds since the epoch; infinite if none did."""
    leftovers: tuple[str, ...]
    """Processes that outlived the agent and were ended."""
    hang: str = ""
    """The hang, in words, for which ranks were ended from here."""
    agent_log: tuple[str, ...] = ()
    """What the agent has said since its start."""
    memory: str = ""
    """What the kernel has killed for memory on this node, in words; empty if it has killed nothing."""

    failure: Death | None = None
    """The first rank of this node that failed; None if none did, or a stop was asked for."""
    status: int = 0
    """Exit code of `launch`."""

    @property
    def state(self) -> str:
        """`succeeded`, `failed`, or `stopped` by a signal to `launch` before any failure."""
        if self.status == 0:
            return "succeeded"
        return "stopped" if self.signal and not (self.failure or self.hang) else "failed"

    @property
    def last_deaths(self) -> list[Death]:
        """The ends of the last start's ranks, in their order.

        When nodes join or leave, torchrun starts the ranks again within an attempt: only the newest count.
        """
        last = max((death.process.attempt for death in self.deaths), default=0)
        newest = {death.process.local_rank: death for death in self.deaths if death.process.attempt == last}
        return [death for death in self.deaths if newest.get(death.process.local_rank) is death]

    @property
    def clean(self) -> list[Death]:
        """Those of the last start's ranks that ended with 0."""
        return [death for death in self.last_deaths if death.exitcode == 0]

    def describe_agent(self) -> str:
        """Say how an agent ended that failed by itself, with its last words."""
        code = self.agent_code
        said = [line.strip() for line in self.agent_log if any(map(str.isalpha, line))]
        how = name_signal(-code) if code < 0 else f"code {code}: {said[-1] if said else 'it printed nothing'}"
        memory = f", {self.memory}" if self.memory else ""
        return f"the agent ended with {how}{memory}"


def judge_end(end: NodeEnd, ranks: int = 0) -> NodeEnd:
    """Add the first failure and the exit code: the program's own, 128+n for a signal, 3 for the agent's.

    If the number of this node's ranks is given, it is a success if all of them ended with 0, even if a signal
    had asked them to end. What was stopped for a hang has that code, whatever the ranks made of it.
    """
    code = end.agent_code
    if end.hang and (code != 0 or end.signal):
        return replace(end, status=EXIT_HANG)
    if code == 0 or (ranks and len(end.clean) == ranks):
        return end
    if failure := find_failure(end):
        return replace(end, failure=failure, status=failure.status)
    if end.signal:
        return replace(end, status=128 + end.signal)
    return replace(end, status=128 - code if code < 0 else EXIT_MACHINE)


def find_failure(end: NodeEnd) -> Death | None:
    """Return the first end of a rank of the last attempt that was a failure; None if no rank failed.

    The kernel's order of deaths decides, since the agent polls and sees several at once. If the agent
    reaped a process before its exit code was read, the code is taken from the agent's report. What comes
    after a signal to `launch` is no failure, nor what the agent itself has ended, or its end by SIGKILL.
    """
    text = "" if end.signal or end.agent_code < 0 else "\n".join(end.agent_log)
    reported = {int(found["pid"]): found for found in REPORT.finditer(text)}
    closed = {int(pid) for pid in CLOSING.findall(text)}
    for death in end.last_deaths:
        pid, exitcode = death.process.pid, death.exitcode
        if exitcode is None and pid in reported:
            exitcode = int(reported[pid]["exitcode"])
        is_closed = exitcode == -signal.SIGTERM and (pid in closed or end.agent_code < 0)
        if exitcode and not is_closed and death.time < end.signal_time:
            return Death(death.process, death.time, exitcode)
    last = max((death.process.attempt for death in end.deaths), default=0)
    for pid, found in reported.items():
        process = RankProcess(int(found["rank"]), int(found["local_rank"]), last, pid)
        return Death(process, time.time(), int(found["exitcode"]))
    return None


def describe_oom_kills(job: Job, killed: int) -> str:
    """Say that the kernel has killed this many processes for memory here; nothing if it has killed none."""
    limit = job.plan.machine.limits.memory_kib
    processes = "a process" if killed == 1 else f"{killed} processes"
    where = f"at the limit of the job's cgroup, {limit >> 10} MiB" if limit else "of the job"
    fix = ": ask for more with cluster.mem" if limit and job.cluster.kind in SLURM_KINDS else ""
    return f"out of memory: the kernel killed {processes} {where}{fix}" if killed > 0 else ""


def describe_failure(job: Job, run: RunDir, end: NodeEnd) -> RankFailure | None:
    """Return the first failure with its reason and last lines; None if no rank failed."""
    if (death := end.failure) is None or death.exitcode is None:
        return None
    rank, attempt = death.process.rank, death.process.attempt
    # The last words of stderr; those of stdout if it is empty.
    log, lines, count = run.rank_log(rank, attempt, "err"), list[str](), job.config.logs.tail
    for path in (log, run.rank_log(rank, attempt, "out")):
        found = [line for line in read_tail(path, count + 5) if not line.startswith(SHIM_LINES)]
        if any(line.strip() for line in found):
            log, lines = path, found[-count:]
            break
    error = read_error(run, rank, attempt)
    reason = describe_exit(death.exitcode, end.memory) + (f": {error}" if error else "")
    local_rank = death.process.local_rank
    return RankFailure(rank, local_rank, death.time, death.exitcode, reason, str(log), tuple(lines), attempt)


def describe_exit(exitcode: int, cause: str = "") -> str:
    """Say in words how a process ended; `cause` is why, if that is known."""
    number = -exitcode if exitcode < 0 else exitcode - 128
    name = signal.Signals(number).name if 0 < number < FIRST_UNNAMED else ""
    hint, seconds = SIGNAL_HINTS.get(number, ""), resource.getrlimit(resource.RLIMIT_CPU)[1]
    if number == signal.SIGKILL and seconds != resource.RLIM_INFINITY:
        hint = f"after {seconds} s of CPU time (`ulimit -t`), or out of memory: see `dmesg`"
    hint = cause or hint
    if exitcode < 0:
        words = f"was killed by {name} (signal {number})" if name else f"was killed by signal {number}"
        return f"{words}, {hint}" if hint else words
    # above 128 as a shell gives it, which the program may have passed on
    passed_on = ", ".join(filter(None, (name and f"128+{number}, as of a child killed by {name}", hint)))
    meaning = cause or EXIT_HINTS.get(exitcode, passed_on)
    return f"exited with code {exitcode}" + (f" ({meaning})" if meaning else "")


def check_success(job: Job, run: RunDir, end: NodeEnd) -> list[str]:
    """Say what was not as planned in a job that succeeded."""
    records = []
    for rank in {death.process.rank for death in end.deaths}:
        with contextlib.suppress(OSError, ValueError):
            records.append(load(Applied, read_file(run.path / name_applied_file(rank), LARGEST, own=True)))
    planned = job.plan.ranks if end.deaths else ()  # a spare node has none
    lines = compare_applied(planned, [record for record in records if record.host == job.host])
    lines += [f"{name} outlived the program, and was ended" for name in end.leftovers]
    return [*lines, end.memory] if end.memory else lines


def post_end(
    config: NotifyConfig, run: RunDir, host: str, outcome: Outcome, *, job_id: str | None = None
) -> None:
    """Tell notify.url of the manifest's outcome, from one node of the job; a failure is a warning."""
    if config.url is None or run.node_rank > 0:
        return
    try:
        from launcher.watch.model import NotifySettings
        from launcher.watch.notify import Notifier

        event, sentence = describe_outcome(outcome)
        settings = NotifySettings(url=config.url, format=config.format, events=tuple(config.events))
        name = f"{run.path.parent.name}/{run.path.name}"
        job = {"run": name, "job_id": job_id, "host": host, "run_dir": str(run.path)}
        notifier = Notifier(settings, logger.warning, job)
        notifier.tell(event, sentence, state=outcome.state, exit_code=outcome.exit_code)
        notifier.close(NOTICE_PATIENCE)
    except Exception as error:  # the program's exit code counts, whatever becomes of the message
        logger.warning(f"notify.url was not told of the end ({type(error).__name__})")


def describe_outcome(outcome: Outcome) -> tuple[str, str]:
    """Return the event, `fail` or `end`, and why it ended so: who failed first, and the manifest's reason.

    An attempt that failed and is requeued is a `fail` too, but not one that was preempted, or that ran into
    its time limit.
    """
    state, first = outcome.state, outcome.first_failure
    goes_on = state == "requeued" and outcome.cause in ("preempted", "timeout", "requeued")
    parts = [state]
    if first:
        parts.append(f"rank {first.rank} on {first.host} {first.reason}")
    if outcome.reason:
        parts.append(outcome.reason)
    return "fail" if state in ("failed", "requeued") and not goes_on else "end", "; ".join(parts)
