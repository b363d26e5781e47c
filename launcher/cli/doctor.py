"""`launch doctor`: gathers the facts, has them judged, and prints the findings."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.cli.main import Call
from launcher.codec import dump
from launcher.config.settings import Settings, refuse
from launcher.config.start import guess_kind, plan_node
from launcher.doctor.machine import Case, judge_machine
from launcher.doctor.model import Facts, Finding, PreflightReport, Wanted, choose_exit_code, found, or_ok
from launcher.errors import EXIT_MACHINE, MachineError, UsageError
from launcher.launch.job import SHIM, Job
from launcher.launch.signals import STOPPING, catch_signals, name_signal
from launcher.plan.model import Plan, plan_to_json
from launcher.preflight import (
    SECONDS,
    describe_report,
    judge_stored,
    make_request,
    run_checks,
    write_preflight_report,
)
from launcher.probe.node import read_health, read_node_facts
from launcher.protocol import LAUNCH_PLAN, LAUNCH_QUIET, LAUNCH_RECORD_DIR, PREFIX, name_host, name_plan_file
from launcher.report.findings import list_preflight_lines, print_findings, summarise_preflight
from launcher.report.tables import make_console
from launcher.runs.manifest import Outcome, Run, stamp_time, write_manifest
from launcher.runs.records import RunRecords, compare_rank, find_last_run, read_run
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the JSON form of findings."""
PATIENCE = 30
"""Seconds that a trial of the shim may take."""


def show_checkup(call: Call) -> int:
    """Print the findings; return 1 if one is an error or a warning, else 0."""
    config, report = call.config, None
    answer: dict[str, Any] = {"schema": SCHEMA}
    # A file may choose preflight for jobs: here the command line has to ask for it.
    if {"preflight", "preflight.kind"} & call.given and config.preflight.kind in SECONDS:
        report = _check_nodes(call)
        findings = report.findings
        account = {"kind": report.kind, "seconds": round(report.seconds, 2), "sick": report.sick}
        answer["preflight"] = {**account, "silent": report.silent, "nodes": report.nodes}
        answer["findings"] = [{"host": one.host, **one.to_json()} for one in findings]
    else:
        findings = judge_machine(_gather_case(call))
        if _is_here(config) and find_spec("matplotlib") is None:
            findings = (*findings, found("report.no_charts", "note"))
        answer["findings"] = [finding.to_json() for finding in findings]
    if config.format == "json":
        sys.stdout.write(dump(answer, indent=1))
        return choose_exit_code(findings)
    hosts = [node.host for node in report.nodes] if report else []
    troubled = {one.host for one in findings}
    passed = [found("checks.passed", "ok", host) for host in hosts if host not in troubled]
    print_findings(make_console(stderr=False), [*findings, *passed], by_node=report is not None)
    if report:
        logger.info(summarise_preflight(report))
    return choose_exit_code(findings)


def _check_nodes(call: Call) -> PreflightReport:
    """Check the nodes of the allocation that this is in, or this machine, or judge a run's answers again.

    Raises MachineError, and UsageError for a run whose nodes were not checked.
    """
    config, environ = call.config, call.environ
    if config.run_dir is not None:
        gpus, preflight = config.cluster.gpus_per_node, config.preflight
        free_kib = preflight.min_free_gib * (1 << 20)
        wanted = Wanted(gpus if isinstance(gpus, int) else None, free_kib, preflight.tolerance)
        if stored := judge_stored(Path(config.run_dir), wanted):
            return stored
        raise UsageError(f"run_dir={config.run_dir} holds no preflight/*/report.json: name a run with one")
    if guess_kind("auto", environ)[0] == "allocation":
        from launcher.slurm.commands import list_job_hosts
        from launcher.slurm.first_node import check_allocation

        hosts = list_job_hosts(environ)
        logger.info(f"checking {len(hosts)} nodes of SLURM job {environ['SLURM_JOB_ID']}")
        report = check_allocation(config, environ, hosts, directory=Path.cwd())
    else:
        report = _check_this_machine(config, environ, _find_existing(Path(config.runs_dir)))
    if isinstance(report, str):
        raise MachineError(f"the nodes could not be checked: {report}")
    return report


def _find_existing(path: Path) -> Path:
    """Return a folder, or the one above it that exists: `runs_dir` is made by the first run."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _is_here(config: Settings) -> bool:
    """Tell whether the machine that is planned for is this one."""
    return config.machine.snapshot is None and os.path.realpath(config.machine.root) == "/"


def _gather_case(call: Call) -> Case:
    """Gather all that is judged of a machine; raises UsageError, and MachineError as a plan does."""
    # A placement that falls short is a finding here.
    config = replace(call.config, binding=replace(call.config.binding, strict=False))
    plan, here = plan_node(config, call.environ), _is_here(config)
    if config.machine.snapshot is None:
        paths = [
            (str(_find_existing(Path(config.runs_dir))), "run directory"),
            (os.path.realpath("."), "working directory"),
            (tempfile.gettempdir(), "temporary directory"),
            *((path, "data") for path in config.preflight.paths),
        ]
        gpus = ",".join(dict.fromkeys(rank.gpu.uuid for rank in plan.ranks if rank.gpu and rank.gpu.uuid))
        facts = read_node_facts(config.machine.root, paths if here else (), gpus=gpus or None)
        facts = replace(facts, health=read_health(config.machine.root, plan.machine))
    else:
        facts = Facts("", 0, 0.0, shm_kib=plan.machine.limits.shm_kib)
    run, reason = _find_run(config, here)
    untried = [found("unchecked.binding", "unknown", reason="not in these files")]
    return Case(
        plan=plan,
        facts=facts,
        trial=_try_plan(plan) if here else untried,
        num_workers=config.dataloader.num_workers,
        binding=config.binding.policy,
        environ=call.environ if here else None,
        run=run,
        run_reason=reason,
        wanted=Wanted(min_free_kib=config.preflight.min_free_gib * (1 << 20)),
    )


def _find_run(config: Settings, here: bool) -> tuple[RunRecords | None, str]:
    """Return the run to compare, or why there is none; raises UsageError if the named one is no run."""
    if config.run_dir is None and not here:
        return None, "it is about this machine; run_dir=DIR compares a run"
    if config.run_dir is None:
        last = find_last_run(Path(config.runs_dir))
        return (read_run(last), "") if last else (None, f"no run below runs_dir={config.runs_dir} yet")
    path = Path(config.run_dir)
    if not config.run_dir or not any(path.glob(name_plan_file("*"))):
        raise refuse("no_plans", run_dir=config.run_dir)
    return read_run(path), ""


def _try_plan(plan: Plan) -> Sequence[Finding]:
    """Let the shim apply the plan to programs that do nothing: a rank for each memory policy that differs."""
    ranks = {rank.memory: rank for rank in reversed(plan.ranks)}.values()
    refused: dict[str, None] = {}
    otherwise: dict[str, None] = {}
    python = [sys.executable, "-I", "-S"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    try:
        with tempfile.TemporaryDirectory(prefix="launch-doctor-") as folder:
            Path(folder, "plan.json").write_text(json.dumps(plan_to_json(plan)), encoding="utf-8")
            places = {LAUNCH_PLAN: f"{folder}/plan.json", LAUNCH_RECORD_DIR: folder, LAUNCH_QUIET: "1"}
            for rank in ranks:
                number = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank.local_rank))
                command = [*python, str(SHIM), *python, "-c", "pass"]
                environ = {**inherited, **places, **number}
                done = subprocess.run(
                    command, env=environ, capture_output=True, timeout=PATIENCE, check=False
                )
                records = [one for host in read_run(Path(folder)).hosts for one in host.records]
                own = next((record for record in records if record.local_rank == rank.local_rank), None)
                if own is None or done.returncode:
                    otherwise[f"the shim of local rank {rank.local_rank} ended with {done.returncode}"] = None
                    continue
                is_memory = rank.memory.policy != "default" and own.memory != rank.memory
                problems = own.problems or compare_rank(rank, own)
                (refused if is_memory else otherwise).update(dict.fromkeys(problems))
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"the shim cannot be tried here ({error})"
        return [found("unchecked.binding", "unknown", reason=reason)]
    told = [found("placement.memory_refused", "warning", problem=one) for one in refused]
    told += [found("placement.otherwise", "warning", problem=one) for one in otherwise]
    return or_ok(told, "placement.tried", tried=len(ranks))


# Before a run on this machine


def check_before_run(job: Job, run: RunDir, manifest: Run) -> int:
    """Check this machine, tell what was found, and return 0 if the run is to start.

    Raises MachineError if it is not, for `preflight.on_failure`; returns 128+n for a signal that stopped it.
    A node of a job that is started by hand reports alone: the others would wait for it.
    """
    settings, status, stops = job.config.preflight, 0, False
    try:
        report = _check_this_machine(job.config, job.environ, run.path, job.program)
    except SystemExit as stop:
        status, report = int(stop.code or 0), "stopped"
        manifest.last.outcome = Outcome("stopped", exit_code=status, signal=name_signal(status - 128))
    reason = f"preflight found this machine sick (preflight.on_failure={settings.on_failure})"
    if isinstance(report, PreflightReport):
        lines = list_preflight_lines(report)
        for line in lines:
            logger.info(f"preflight: {line}")
        stops = bool(report.sick) and settings.on_failure != "report"
        if stops and job.cluster.kind == "manual":
            stops = False
            logger.info("preflight: this node starts all the same: the job's others wait for it")
        action = "stop" if stops else "start"
        told = {"action": action, "left_out": [], "lines": lines}
        manifest.last.preflight = {**describe_report(report), **told}
    elif not status:
        logger.warning(f"preflight: this machine was not checked: {report}")
        manifest.last.preflight = {"kind": settings.kind, "problem": report}
    if stops:
        manifest.last.outcome = Outcome("failed", "sick_node", EXIT_MACHINE, reason=reason)
    if stops or status:
        manifest.last.ended = stamp_time()
    try:
        if isinstance(report, PreflightReport):
            write_preflight_report(run.path, run.first_attempt, report)
        write_manifest(run, manifest)
    except OSError as error:
        logger.warning(f"preflight: what was found could not be written ({error})")
    if stops:
        raise MachineError(f"{reason}: see above for the fixes, or set preflight.on_failure=report")
    return status


def _check_this_machine(
    config: Settings, environ: Mapping[str, str], run_path: Path, words: Sequence[str] = ("-m",)
) -> PreflightReport | str:
    """Return what was found, or why nothing was; raises SystemExit(128+n) after a signal.

    `words` are the program and its arguments. A mistake of the checks' own is told as a problem, and what a
    signal has asked for holds all the same.
    """
    signals: list[int] = []
    with catch_signals() as inbox:

        def is_stopped() -> bool:
            signals.extend(number for number in inbox.take() if number in STOPPING)
            return bool(signals)

        try:
            request = make_request(
                config,
                (name_host(environ),),
                directory=Path.cwd(),
                run_path=run_path,
                words=words,
                environ=environ,
            )
            answers = run_checks(
                request.command, request, environ, wakeup=inbox.wakeup, is_stopped=is_stopped
            )
            report = answers.judge(tuple(answers.errors))
        except Exception as error:
            report = f"{type(error).__name__}: {error}"
        if is_stopped():
            raise SystemExit(128 + signals[0])
    return report
