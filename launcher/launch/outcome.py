"""The end of a job: exit code, manifest, and the last words to the user."""

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from launcher.config.settings import SLURM_KINDS
from launcher.errors import EXIT_HANG, EXIT_MACHINE
from launcher.launch.end_notice import post_end
from launcher.launch.failure import (
    describe_exit,
    explain_lines,
    find_failure,
    list_clean_exits,
    select_last_start,
)
from launcher.launch.job import Job
from launcher.launch.monitor import RankMonitor
from launcher.launch.processes import Death, RankProcess
from launcher.launch.signals import name_signal
from launcher.launch.supervisor import AgentExit
from launcher.launch.torchrun_agent import ENDED
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.node_records import RankFailure, read_error
from launcher.runs.progress import LONG_BEFORE, CleanEnd, EarlyEnd, describe_progress, find_early_exits
from launcher.runs.rank_logs import read_tail
from launcher.runs.run_directory import RunDir, release_space
from launcher.runs.run_records import compare_applied
from launcher.text import describe_first_failed_rank, describe_time

logger = logging.getLogger(__name__)

SHIM_LINES = ("launch-rank: rank ", "launch-rank: warning: ")
"""Beginnings of the shim's lines in a rank's log, which are not the program's last words."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended, and what there is to say of it."""

    agent_exit: AgentExit
    failure: Death | None
    """The first rank of this node that failed; None if none did, or a stop was asked for."""
    status: int
    """Exit code of `launch`."""
    agent_log: tuple[str, ...]
    memory: str = ""
    """What the kernel has killed for memory on this node, in words; empty if it has killed nothing."""

    requested: bool = False
    """The first rank that failed had one of the exit codes that ask for another start."""
    asking: bool = False
    """The same, or a rank had one of them that was stopped."""
    early: bool = False
    """Ranks had ended with 0 before the first failure."""
    events: tuple[str, ...] = ()
    """What came before the first failure, in words."""

    @property
    def state(self) -> str:
        """`succeeded`, `failed`, or `stopped`: by a signal to `launch` before any failure, or as asked."""
        if self.status == 0:
            return "succeeded"
        if self.agent_exit.hang:
            return "failed"
        return "stopped" if self.requested or (self.agent_exit.signal and not self.failure) else "failed"


def report_outcome(
    monitor: RankMonitor, agent_exit: AgentExit, agent_log: Sequence[str], seconds: float
) -> int:
    """Write how the job ended, say it, and return the exit code; the agent's log is that of this start."""
    trouble = release_space(monitor.run)
    outcome = judge_outcome(agent_exit, tuple(agent_log))
    outcome = add_oom_kills(outcome, monitor.job, monitor.count_new_oom_kills())
    outcome = add_context(monitor, outcome, trouble)
    written = complete_manifest(monitor, outcome)
    log_outcome(monitor, outcome, seconds)
    post_end(monitor.job.config.notify, monitor.run, monitor.job.host, written)
    return outcome.status


def add_context(monitor: RankMonitor, outcome: JobOutcome, trouble: str) -> JobOutcome:
    """Add what came before the first failure, and what that failure means to this job."""
    failure, deaths = outcome.failure, outcome.agent_exit.deaths
    codes = monitor.job.config.cluster.requeue.exit_codes
    requested = bool(failure and failure.status in codes)
    early = None if requested or outcome.status == 0 else collect_early_exits(monitor, outcome)
    asking = requested or any(death.exitcode in codes for death in select_last_start(deaths))
    events = tuple(filter(None, (trouble, early.describe() if early else "")))
    return replace(outcome, requested=requested, asking=asking, early=bool(early), events=events)


def collect_early_exits(monitor: RankMonitor, outcome: JobOutcome) -> EarlyEnd | None:
    """Return the ranks that ended with 0 before the first failure, or long before all were stopped."""
    host, deaths, failure = monitor.job.host, outcome.agent_exit.deaths, outcome.failure
    before = outcome.agent_exit.signal_time - LONG_BEFORE
    if failure:
        before = failure.time
    ends = [CleanEnd(d.process.rank, host, d.time, d.process.attempt) for d in list_clean_exits(deaths)]
    return find_early_exits(monitor.run, ends, before, len(monitor.job.plan.ranks))


def add_oom_kills(outcome: JobOutcome, job: Job, killed: int) -> JobOutcome:
    """Add that the kernel has killed this many processes for memory here since the agent's start."""
    if killed <= 0:
        return outcome
    limit = job.plan.machine.limits.memory_kib
    processes = "a process" if killed == 1 else f"{killed} processes"
    where = f"at the limit of the job's cgroup, {limit >> 10} MiB" if limit else "of the job"
    fix = ": ask for more with cluster.mem" if limit and job.cluster.kind in SLURM_KINDS else ""
    memory = f"out of memory: the kernel killed {processes} {where}{fix}"
    return replace(outcome, memory=memory)


def judge_outcome(agent_exit: AgentExit, log: tuple[str, ...], ranks: int = 0) -> JobOutcome:
    """Find the first failure and the exit code: the program's own, 128+n for a signal, 3 for the agent's.

    If the number of this node's ranks is given, it is a success if all of them ended with 0, even if a
    signal had asked them to end. What was stopped for a hang has that code, whatever the ranks made of it.
    """
    code = agent_exit.agent_exitcode
    if agent_exit.hang and (code != 0 or agent_exit.signal):
        return JobOutcome(agent_exit, None, EXIT_HANG, log)
    if code == 0 or (ranks and len(list_clean_exits(agent_exit.deaths)) == ranks):
        return JobOutcome(agent_exit, None, 0, log)
    # What comes after a signal to `launch`, or by SIGTERM after the agent was killed, is no failure.
    # Nor is what the ranks were started anew for.
    last = max((death.process.attempt for death in agent_exit.deaths), default=0)
    counted = [d for d in agent_exit.deaths if d.time < agent_exit.signal_time and d.process.attempt == last]
    counted = [d for d in counted if code > 0 or d.exitcode != -signal.SIGTERM]
    failure = find_failure(counted, "" if agent_exit.signal or code < 0 else "\n".join(log))
    if failure:
        return JobOutcome(agent_exit, failure, failure.status, log)
    if agent_exit.signal:
        return JobOutcome(agent_exit, None, 128 + agent_exit.signal, log)
    return JobOutcome(agent_exit, None, 128 - code if code < 0 else EXIT_MACHINE, log)


def complete_manifest(monitor: RankMonitor, outcome: JobOutcome) -> dict[str, object]:
    """Complete the manifest, and return its outcome."""
    number = outcome.agent_exit.signal
    deaths, failure = outcome.agent_exit.deaths, describe_failure(monitor, outcome)
    manifest = monitor.manifest if monitor.manifest is not None else {}
    manifest["ended"] = stamp_time()
    hang = outcome.agent_exit.hang
    written: dict[str, object] = {
        "state": outcome.state,
        **({"cause": "hang", "reason": hang} if hang else {}),
        "exit_code": outcome.status,
        "signal": name_signal(number) if number else None,
        "events": list(outcome.events),
        "first_failure": failure_to_json(failure, monitor.job.host) if failure else None,
        "attempts": 1 + max((d.process.attempt for d in deaths), default=monitor.run.first_attempt),
    }
    manifest["outcome"] = written
    try:
        write_manifest(monitor.run, manifest)
    except OSError as error:
        logger.warning(f"the manifest could not be written ({error})")
    return written


def describe_failure(monitor: RankMonitor, outcome: JobOutcome) -> RankFailure | None:
    """Return the first failure with its reason and last lines; None if no rank failed."""
    if (death := outcome.failure) is None or death.exitcode is None:
        return None
    log, lines = tail_rank(monitor.run, death.process, monitor.job.config.logs.tail)
    error = read_error(monitor.run, death.process.rank, death.process.attempt)
    if any(line.startswith("bdb.BdbQuit") for line in lines[-1:]) and monitor.job.world_size > 1:
        error = "breakpoint() needs a terminal, which only a single rank has: nproc_per_node=1"
    return RankFailure(
        death.process.rank,
        death.process.local_rank,
        death.time,
        death.exitcode,
        describe_exit(death.exitcode, outcome.memory or explain_lines(lines))
        + (f": {error}" if error else ""),
        log,
        tuple(lines),
        death.process.attempt,
    )


def failure_to_json(failure: RankFailure, host: str) -> dict[str, object]:
    """Return a failure as the manifest has it."""
    return {
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "host": host,
        "attempt": failure.attempt,
        "exit_code": failure.status,
        "reason": failure.reason,
        "last_lines": list(failure.lines),
    }


def log_outcome(monitor: RankMonitor, outcome: JobOutcome, seconds: float) -> None:
    """Say how it went: the first failure or what was not as planned, the result, the run directory."""
    result = describe_progress(monitor.viewer.finish(patient=outcome.agent_exit.signal is None))
    explain = partial(explain_failure, output_shown=monitor.job.config.logs.console != "none")
    tell: Mapping[str, Callable[[RankMonitor, JobOutcome], list[str]]]
    tell = {"failed": explain, "succeeded": check_success, "stopped": explain_stop}
    for line in tell[outcome.state](monitor, outcome):
        logger.log(logging.WARNING if outcome.state == "succeeded" else logging.INFO, line)
    logger.info(f"{outcome.state} after {describe_time(seconds)}" + (f": {result}" if result else ""))
    logger.info(f"run directory {monitor.run.path}")


def check_success(monitor: RankMonitor, outcome: JobOutcome) -> list[str]:
    """Say what was not as planned in a job that succeeded."""
    planned = monitor.job.plan.ranks if monitor.ranks else ()  # a spare node has none
    lines = [*outcome.events, *compare_applied(planned, monitor.read_applied())]
    lines += [f"{name} outlived the program, and was ended" for name in outcome.agent_exit.leftovers]
    return [*lines, outcome.memory] if outcome.memory else lines


def explain_stop(monitor: RankMonitor, outcome: JobOutcome) -> list[str]:
    """Say who asks for another start, and how to go on."""
    lines, failure = list(outcome.events), outcome.failure
    if failure:
        who = f"rank {failure.process.rank} on {monitor.job.host}"
        lines.append(f"{who} ended with {failure.status}, and asks for another start")
    if outcome.asking:
        lines.append(f"the same command with run_dir={monitor.run.path} goes on")
    return lines


def explain_failure(monitor: RankMonitor, outcome: JobOutcome, *, output_shown: bool) -> list[str]:
    """Say who failed first and show the end of its log; or what the agent said, if no rank failed.

    With `output_shown` the console has shown what the ranks printed, and a single rank's is not repeated.
    """
    failure, host = describe_failure(monitor, outcome), monitor.job.host
    if outcome.agent_exit.hang:
        return [*outcome.events, f"ended for a hang: {outcome.agent_exit.hang}"]
    if failure is None:
        path = monitor.run.agent_log(host)
        said = f"no rank failed, but {outcome.agent_exit.label}'s agent {describe_agent_exit(outcome)}"
        return [*outcome.events, said, f"its log is {path}"]
    if monitor.job.world_size == 1 and output_shown and failure.lines:
        return [*outcome.events, f"rank 0 on {host} {failure.reason}"]
    where = f"rank {failure.rank} on {host} (local rank {failure.local_rank})"
    what = "failed after that" if outcome.early else "failed first"
    return [
        *outcome.events,
        *describe_first_failed_rank(where, failure.reason, failure.log, failure.lines, what),
    ]


def describe_agent_exit(outcome: JobOutcome) -> str:
    """Say how an agent ended that failed by itself, with its last words."""
    code = outcome.agent_exit.agent_exitcode
    log = (line.strip() for line in outcome.agent_log if not line.startswith(ENDED))
    said = [line for line in log if any(map(str.isalpha, line))]
    how = name_signal(-code) if code < 0 else f"code {code}: {said[-1] if said else 'it printed nothing'}"
    return f"ended with {how}" + (f", {outcome.memory}" if outcome.memory else "")


def tail_rank(run: RunDir, process: RankProcess, count: int) -> tuple[str, list[str]]:
    """Return the log with the first failed rank's last words, and these; stdout if stderr is empty."""
    for stream in ("err", "out"):
        path = run.rank_log(process.rank, process.attempt, stream)
        lines = [line for line in read_tail(path, count + 5) if not line.startswith(SHIM_LINES)]
        if any(line.strip() for line in lines):
            return str(path), lines[-count:]
    return str(run.rank_log(process.rank, process.attempt, "err")), []
