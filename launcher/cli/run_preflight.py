"""Checks this machine before a run starts here, as the nodes of a SLURM job are checked."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.settings import Settings
from launcher.doctor.model import PreflightReport
from launcher.errors import MachineError
from launcher.launch.job import Job
from launcher.launch.signals import STOPPING, catch_signals, name_signal
from launcher.preflight.checks import (
    CheckedNodes,
    describe_report,
    make_request,
    run_checks,
    write_preflight_report,
)
from launcher.protocol import name_host
from launcher.report.findings import list_preflight_lines
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)


def check_before_run(job: Job, run: RunDir, manifest: dict[str, Any]) -> int:
    """Check this machine, tell what was found, and return 0 if the run is to start.

    Raises MachineError if it is not, for `preflight.on_failure`; returns 128+n for a signal that stopped it.
    A node of a job that is started by hand reports alone: the others would wait for it.
    """
    try:
        checked, stop = check_this_machine(job.config, job.environ, run.path, job.program)
    except Exception as error:  # a mistake of the checks' own ends no run
        checked, stop = CheckedNodes(None, f"{type(error).__name__}: {error}: report it"), 0
    report, problem = checked.report, checked.problem
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
) -> tuple[CheckedNodes, int]:
    """Return what was found, or why nothing was, and the signal that ended the checks, else 0.

    `words` are the program and its arguments.
    """
    hosts, directory = (name_host(environ),), Path.cwd()
    request = make_request(
        config, hosts, directory=directory, run_path=run_path, words=words, environ=environ
    )
    signals: list[int] = []
    with catch_signals() as inbox:

        def is_stopped() -> bool:
            signals.extend(number for number in inbox.take() if number in STOPPING)
            return bool(signals)

        try:
            answers = run_checks(
                request.command, request, environ, wakeup=inbox.wakeup, is_stopped=is_stopped
            )
        except OSError as error:
            return CheckedNodes(None, f"no process can be made ({error.strerror})"), 0
        except Exception as error:  # what a signal has asked for holds all the same
            checked = CheckedNodes(None, f"{type(error).__name__}: {error}: report it")
        else:
            if answers.ended and not answers.final:
                checked = CheckedNodes(None, answers.last_error)
            else:
                checked = CheckedNodes(answers.make_report(answers.missing, {}))
        is_stopped()
    return checked, signals[0] if signals else 0
