"""The step that checks a job's nodes before its ranks start: one task on each, all at once.

Nothing here holds a job up for longer than the checks' limit, and nothing of ours that fails keeps it from
starting: then a warning says that its nodes were not checked.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.agent.endpoint import read_client_ports
from launcher.config.settings import Settings
from launcher.doctor.node_facts import PreflightReport
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED, STOPPING
from launcher.preflight.answer_files import write_preflight_report
from launcher.preflight.answer_reader import START_MARGIN, AnswerReader
from launcher.preflight.needed_paths import list_needed_paths
from launcher.preflight.preflight_report import describe_report, explain_missing_answer, make_report
from launcher.preflight.preflight_request import SECONDS, NeededPath, PreflightRequest
from launcher.preflight.rank_interpreter import find_rank_python
from launcher.report.runs import list_preflight_lines
from launcher.slurm.attempt import Attempt, try_write_manifest
from launcher.slurm.attempt_end import StepReport
from launcher.slurm.job_control import count_restarts
from launcher.slurm.notation import expand_hosts
from launcher.slurm.preflight_action import NodeChoice, choose_hosts
from launcher.slurm.rendezvous import pick_port
from launcher.slurm.slurm_environ import clean_for_step, drop_task_variables
from launcher.slurm.srun_command import Step, give_cpus, render_step
from launcher.slurm.srun_messages import (
    drop_prefix,
    has_begun,
    is_cpu_bind_complaint,
    is_slurm_line,
    parse_node_failure,
    parse_task_ends,
)
from launcher.slurm.step_monitor import StepMonitor

logger = logging.getLogger(__name__)

FIXED_OPTIONS: Mapping[str, object] = {
    "input": "none",
    "output": None,
    "error": None,
    "label": None,
    "kill-on-bad-exit": 0,
    "no-kill": True,
}
"""Options of srun with which a node's answer reaches us whatever happens to the others."""
PORT_TRIAL = 50
"""Number of the port's candidate at which nodes meet for work in pairs: none of the rendezvous' own."""


@dataclass(frozen=True, slots=True)
class CheckedNodes:
    """What became of the step."""

    report: PreflightReport | None
    """None if nothing was found out."""
    problem: str = ""
    """Why nothing was."""


def run_preflight(attempt: Attempt, monitor: StepMonitor, kind: str) -> StepReport | None:
    """Check an attempt's nodes, tell what was found, and choose those that it goes on with.

    Returns the attempt's end if its ranks are not to start.
    """
    candidates = list_candidates(attempt)
    try:
        checked = check_nodes(attempt, monitor, candidates, kind)
    except OSError as error:
        checked = CheckedNodes(None, f"srun cannot be run ({error.strerror})")
    if stop := report_early_stop(monitor):
        return stop
    if checked.report is None:
        logger.warning(f"preflight: the nodes were not checked: {checked.problem}")
        record_preflight(attempt, {"kind": kind, "problem": checked.problem})
        return None
    return act_on_report(attempt, monitor, checked.report, candidates)


def report_early_stop(monitor: StepMonitor) -> StepReport | None:
    """Return the end of an attempt that a signal has stopped before its ranks' step; None if none has."""
    monitor.take_early_signals()
    if stops := [number for number, _ in monitor.signals if number in STOPPING]:
        return StepReport(128 + stops[0], (), (), tuple(monitor.signals), monitor.checkpointed)
    return None


def list_candidates(attempt: Attempt) -> tuple[str, ...]:
    """Return the nodes to check: those that the job is to run on, and spare ones if they could be used.

    A node beyond `nodes` and `cluster.spares` can be used only by `preflight.on_failure=exclude`.
    """
    if attempt.request.config.preflight.on_failure != "exclude":
        return attempt.step_hosts
    text = attempt.environ.get("SLURM_JOB_NODELIST") or attempt.environ.get("SLURM_NODELIST", "")
    others = (host for host in expand_hosts(text) if host not in attempt.step_hosts)
    return (*attempt.step_hosts, *others)


def act_on_report(
    attempt: Attempt, monitor: StepMonitor, report: PreflightReport, candidates: Sequence[str]
) -> StepReport | None:
    """Tell what was found, write it down, and do what `preflight.on_failure` says."""
    request = attempt.request
    for line in list_preflight_lines(report):
        logger.info(f"preflight: {line}")
    choice = choose_hosts(
        candidates,
        report.sick,
        on_failure=request.config.preflight.on_failure,
        nodes=(request.min_nodes, request.max_nodes),
        owned=attempt.requeues,
        reserved=len(attempt.spares),
    )
    if choice.text:
        logger.info(f"preflight: {choice.text}")
    try:
        write_preflight_report(attempt.run.path, attempt.run.first_attempt, report)
    except OSError as error:
        logger.warning(f"preflight: its report could not be written ({error})")
    left_out = [host for host in attempt.step_hosts if host in report.sick and host not in choice.hosts]
    account = describe_report(report)
    use_hosts(attempt, choice.hosts or attempt.hosts, candidates, report.sick)
    record_preflight(attempt, {**account, "action": choice.action, "left_out": left_out})
    return None if choice.hosts else report_sickness(monitor, choice, report)


def use_hosts(
    attempt: Attempt, hosts: tuple[str, ...], candidates: Sequence[str], sick: Collection[str]
) -> None:
    """Have the attempt go on with these nodes, and with what is left of the healthy ones as its spares."""
    left = (host for host in candidates if host not in hosts and host not in sick)
    attempt.hosts = hosts
    attempt.spares = tuple(left)[: attempt.request.config.cluster.spares]
    attempt.manifest["hosts"] = list(attempt.hosts)


def record_preflight(attempt: Attempt, account: Mapping[str, object]) -> None:
    """Have the manifest tell of the checks while the job runs, too."""
    attempt.manifest["preflight"] = dict(account)
    try_write_manifest(attempt.run, attempt.manifest)


def report_sickness(monitor: StepMonitor, choice: NodeChoice, report: PreflightReport) -> StepReport:
    """Return the end of an attempt whose ranks do not start for the sake of sick nodes."""
    errors = {one.host: one.finding for one in reversed(report.findings) if one.finding.level == "error"}
    words = [f"{host}: {errors[host].what}" for host in report.sick if host in errors]
    sick = report.sick if choice.action == "requeue" else ()
    return StepReport(
        0,
        (),
        (),
        tuple(monitor.signals),
        monitor.checkpointed,
        sickness=tuple(words) or (choice.text,),
        sick=sick,
    )


def check_nodes(
    attempt: Attempt, monitor: StepMonitor, candidates: tuple[str, ...], kind: str
) -> CheckedNodes:
    """Run the step to its end, or to its limit; raises OSError if there is no srun."""
    began, config, run = time.monotonic(), attempt.request.config, attempt.run
    paths = list_needed_paths(config, run.path, Path(attempt.request.directory))
    request = describe_checks(config, attempt.environ, candidates, kind, paths)
    words = attempt.request.words or config.program.get("command") or ()
    environ = {**attempt.environ, **config.env}
    request = replace(request, python=find_rank_python(words, environ, attempt.request.directory))
    process = start_checks(config, request, attempt.environ)
    reader = AnswerReader(process, request, monitor.inbox.wakeup)
    try:
        while reader.collect(began + START_MARGIN + request.seconds):
            if monitor.take_early_signals():
                return CheckedNodes(None, "a signal came")
    finally:
        reader.end()
    return judge_check_step(attempt.environ, reader, time.monotonic() - began)


def check_spare_nodes(attempt: Attempt) -> CheckedNodes:
    """Check the spare nodes alone while the others work, if nothing has checked them before the start."""
    began, config = time.monotonic(), attempt.request.config
    paths = list_needed_paths(config, attempt.run.path, Path(attempt.request.directory))
    request = describe_checks(config, attempt.environ, attempt.spares, "light", paths)
    try:
        reader = AnswerReader(start_checks(config, request, attempt.environ), request)
    except OSError as error:
        return CheckedNodes(None, f"srun cannot be run ({error.strerror})")
    try:
        while reader.collect(began + START_MARGIN + request.seconds):
            pass
    finally:
        reader.end()
    return judge_check_step(attempt.environ, reader, time.monotonic() - began)


def check_allocation(
    config: Settings, environ: Mapping[str, str], hosts: tuple[str, ...]
) -> tuple[PreflightReport | None, str]:
    """Check the nodes of an allocation without a run; returns why there is no report, too."""
    began, kind = time.monotonic(), config.preflight.kind
    paths = list_needed_paths(config, None, Path.cwd())
    request = describe_checks(config, environ, hosts, kind, paths)
    try:
        reader = AnswerReader(start_checks(config, request, environ), request)
    except OSError as error:
        return None, f"srun cannot be run ({error.strerror})"
    try:
        reader.collect(began + START_MARGIN + request.seconds)
    finally:
        reader.end()
    checked = judge_check_step(environ, reader, time.monotonic() - began)
    return checked.report, checked.problem


def describe_checks(
    config: Settings,
    environ: Mapping[str, str],
    hosts: tuple[str, ...],
    kind: str,
    paths: tuple[NeededPath, ...],
) -> PreflightRequest:
    """Return what the nodes are asked."""
    job, restarts = int(environ.get("SLURM_JOB_ID", "0")), count_restarts(environ)
    port = pick_port(job, restarts, PORT_TRIAL, read_client_ports())
    return PreflightRequest(
        kind,
        hosts,
        SECONDS[kind],
        time.time(),
        paths,
        config.preflight.min_free_gib,
        config.preflight.tolerance,
        f"{hosts[0]}:{port}",
        find_rank_python(("-m",), {**environ, **config.env}, str(Path.cwd())),
    )


def start_checks(
    config: Settings, request: PreflightRequest, environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a task on each node, outside of any container; raises OSError if there is no srun."""
    parent = os.getpid()
    return subprocess.Popen(
        render_step(describe_check_step(config, request, environ)),
        env={**drop_task_variables(clean_for_step(environ)), **config.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - no other thread forks here
    )


def describe_check_step(config: Settings, request: PreflightRequest, environ: Mapping[str, str]) -> Step:
    """Return the step; its tasks begin in `/`, since any other folder may be stuck."""
    own = {name.replace("_", "-"): value for name, value in give_cpus(config.cluster.srun, environ).items()}
    return Step(
        nodes=len(request.hosts),
        nodelist=request.hosts,
        elastic=True,
        directory="/",
        command=(sys.executable, "-P", "-m", "launcher.preflight", request.to_json()),
        options={**own, **FIXED_OPTIONS},
    )


def judge_check_step(environ: Mapping[str, str], reader: AnswerReader, seconds: float) -> CheckedNodes:
    """Tell nodes that hold the checks up from those whose checks failed for a reason of their own."""
    hosts = reader.request.hosts
    lines = [line for line in reader.errors if not is_cpu_bind_complaint(line)]
    missing = [host for host in hosts if host not in reader.final]
    if reader.ended and not reader.facts and not has_begun(lines):
        words = "; ".join(map(drop_prefix, lines[-3:])) or f"srun ended with {reader.process.returncode}"
        return CheckedNodes(None, words)
    lost = {host for line in lines if (names := parse_node_failure(line)) for host in expand_hosts(names)}
    silent = [host for host in missing if host in lost or not reader.ended]
    ends = parse_task_ends(lines)
    problems = {
        host: f"its program ended: {ends.get(host, 'it printed no answer')}"
        for host in missing
        if host not in silent
    }
    if len(problems) == len(hosts):
        return CheckedNodes(None, explain_missing_answer(line for line in lines if not is_slurm_line(line)))
    gpus = count_node_gpus(environ)
    return CheckedNodes(
        make_report(reader.request, reader.facts, silent, problems, gpus=gpus, seconds=seconds)
    )


def count_node_gpus(environ: Mapping[str, str]) -> int | None:
    """Return the GPUs that SLURM has given the job on each node; None if it does not tell."""
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return int(text) if text.isascii() and text.isdecimal() else None
