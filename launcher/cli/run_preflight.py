"""Checks this machine before a run starts here, as the nodes of a SLURM job are checked."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.settings import Settings
from launcher.doctor.node_facts import PreflightReport
from launcher.errors import MachineError
from launcher.launch.job import Job
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED, STOPPING, catch_signals, name_signal
from launcher.preflight.answer_files import write_preflight_report
from launcher.preflight.answer_reader import START_MARGIN, AnswerReader
from launcher.preflight.needed_paths import list_needed_paths
from launcher.preflight.preflight_report import describe_report, explain_missing_answer, make_report
from launcher.preflight.preflight_request import SECONDS, PreflightRequest
from launcher.preflight.rank_interpreter import find_rank_python
from launcher.protocol import name_host
from launcher.report.runs import list_preflight_lines
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)


def check_before_run(job: Job, run: RunDir, manifest: dict[str, Any]) -> int:
    """Check this machine, tell what was found, and return 0 if the run is to start.

    Raises MachineError if it is not, for `preflight.on_failure`; returns 128+n for a signal that stopped it.
    A node of a job that is started by hand reports alone: the others would wait for it.
    """
    try:
        report, problem, stop = check_this_machine(job.config, job.environ, run.path, job.program)
    except Exception as error:  # a mistake of the checks' own ends no run
        report, problem, stop = None, f"{type(error).__name__}: {error}: report it", 0
    if stop:
        finish(run, manifest, {"state": "stopped", "exit_code": 128 + stop, "signal": name_signal(stop)})
        return 128 + stop
    if report is None:
        logger.warning(f"preflight: this machine was not checked: {problem}")
        record_check(run, manifest, None, {"kind": job.config.preflight.kind, "problem": problem})
        return 0
    for line in list_preflight_lines(report):
        logger.info(f"preflight: {line}")
    on_failure = job.config.preflight.on_failure
    stops = bool(report.sick) and on_failure != "report" and job.cluster.kind != "manual"
    if report.sick and not stops and on_failure != "report":
        logger.info("preflight: this node starts all the same: the job's others wait for it")
    account = {**describe_report(report), "action": "stop" if stops else "start", "left_out": []}
    record_check(run, manifest, report, account)
    if stops:
        reason = f"preflight found this machine sick (preflight.on_failure={on_failure})"
        finish(run, manifest, {"state": "failed", "cause": "sick_node", "exit_code": 3, "reason": reason})
        raise MachineError(f"{reason}: see above for the fixes, or set preflight.on_failure=report")
    return 0


def record_check(
    run: RunDir, manifest: dict[str, Any], report: PreflightReport | None, account: Mapping[str, object]
) -> None:
    """Write down what was found; if that cannot be, say so and go on."""
    manifest["preflight"] = dict(account)
    try:
        if report:
            write_preflight_report(run.path, run.first_attempt, report)
        write_manifest(run, manifest)
    except OSError as error:
        logger.warning(f"preflight: its report could not be written ({error})")


def finish(run: RunDir, manifest: dict[str, Any], outcome: Mapping[str, object]) -> None:
    """Complete the manifest of a run whose ranks did not start."""
    manifest |= {"ended": stamp_time(), "outcome": dict(outcome)}
    try:
        write_manifest(run, manifest)
    except OSError as error:
        logger.warning(f"the manifest could not be written ({error})")


def check_this_machine(
    config: Settings, environ: Mapping[str, str], run_path: Path, words: Sequence[str] = ("-m",)
) -> tuple[PreflightReport | None, str, int]:
    """Return what was found, or why nothing was, and the signal that ended the checks, else 0.

    `words` are the program and its arguments.
    """
    kind, began = config.preflight.kind, time.monotonic()
    request = PreflightRequest(
        kind,
        (name_host(environ),),
        SECONDS[kind],
        time.time(),
        list_needed_paths(config, run_path, Path.cwd()),
        config.preflight.min_free_gib,
        config.preflight.tolerance,
        python=find_rank_python(words, environ, str(Path.cwd())),
    )
    with catch_signals() as inbox:
        try:
            reader = AnswerReader(start_check(request, environ), request, inbox.wakeup)
        except OSError as error:
            return None, f"no process can be made ({error.strerror})", 0
        stop, problem = 0, ""
        try:
            while not stop and reader.collect(began + START_MARGIN + request.seconds):
                stop = next((number for number in inbox.take() if number in STOPPING), 0)
        except Exception as error:  # what a signal has asked for holds all the same
            problem = f"{type(error).__name__}: {error}: report it"
        finally:
            reader.end()
        stop = stop or next((number for number in inbox.take() if number in STOPPING), 0)
    if stop or problem:
        return None, problem, stop
    if reader.ended and not reader.final:
        return None, explain_missing_answer(reader.errors), 0
    silent = [host for host in request.hosts if host not in reader.final]
    seconds = time.monotonic() - began
    return make_report(request, reader.facts, silent, {}, gpus=None, seconds=seconds), "", 0


def start_check(request: PreflightRequest, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the node's program, in `/`, since any other folder may be stuck; raises OSError."""
    parent = os.getpid()
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "launcher.preflight", request.to_json()),
        cwd="/",
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is for this process alone
        preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - no other thread forks here
    )
