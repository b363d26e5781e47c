"""`launch doctor`: gathers the facts, has them judged, and prints the findings."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from launcher.cli.plan import plan_node
from launcher.cli.verbs import VerbCall
from launcher.codec import dump
from launcher.config.run_path import EMPTY_PATH
from launcher.config.settings import Settings
from launcher.config.start import guess_kind
from launcher.doctor.machine import BindingTrial, Case, judge_machine
from launcher.doctor.model import Facts, PreflightReport, Wanted, choose_exit_code, found
from launcher.errors import MachineError, UsageError
from launcher.launch.job import SHIM
from launcher.plan.model import Plan, RankPlan, plan_to_json
from launcher.preflight.checks import SECONDS, judge_stored
from launcher.probe.health import read_health
from launcher.probe.node import read_node_facts
from launcher.protocol import LAUNCH_PLAN, LAUNCH_QUIET, LAUNCH_RECORD_DIR, PREFIX, name_plan_file
from launcher.report.console import make_console
from launcher.report.findings import print_findings, summarise_preflight
from launcher.runs.run_records import RunRecords, compare_rank, find_last_run, read_run

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the JSON form of findings."""
PATIENCE = 30
"""Seconds that a trial of the shim may take."""


def show_checkup(call: VerbCall) -> int:
    """Print the findings; return 1 if one is an error or a warning, else 0."""
    # A file may choose preflight for jobs: here the command line has to ask for it.
    if {"preflight", "preflight.kind"} & {*call.given} and call.config.preflight.kind in SECONDS:
        return show_nodes(call)
    findings = judge_machine(gather_case(call))
    if is_here(call.config) and find_spec("matplotlib") is None:
        findings = (*findings, found("report.no_charts", "note"))
    if call.config.format == "json":
        print_json(findings=[finding.to_json() for finding in findings])
    else:
        print_findings(make_console(stderr=False), findings)
    return choose_exit_code(findings)


def show_nodes(call: VerbCall) -> int:
    """Print what preflight finds now, or what a run's answers say; returns as `show_checkup`."""
    report = check_nodes(call)
    if call.config.format == "json":
        account = {"kind": report.kind, "seconds": round(report.seconds, 2), "sick": report.sick}
        account |= {"silent": report.silent, "nodes": report.nodes}
        listed = [{"host": one.host, **one.to_json()} for one in report.findings]
        print_json(preflight=account, findings=listed)
    else:
        findings = list(report.findings)
        troubled = {one.host for one in report.findings}
        findings += [
            found("checks.passed", "ok", node.host) for node in report.nodes if node.host not in troubled
        ]
        print_findings(make_console(stderr=False), findings, by_node=True)
        logger.info(summarise_preflight(report))
    return choose_exit_code(report.findings)


def print_json(**values: object) -> None:
    """Print an answer for programs."""
    sys.stdout.write(dump({"schema": SCHEMA, **values}, indent=1))


def check_nodes(call: VerbCall) -> PreflightReport:
    """Check the nodes of the allocation that this is in, or this machine, or judge a run's answers again.

    Raises MachineError, and UsageError for a run whose nodes were not checked.
    """
    config, environ, stop = call.config, call.environ, 0
    if config.run_dir is not None:
        gpus = config.cluster.gpus_per_node
        wanted = Wanted(
            gpus if isinstance(gpus, int) else None,
            config.preflight.min_free_gib * (1 << 20),
            config.preflight.tolerance,
        )
        report = judge_stored(Path(config.run_dir), wanted)
        if report is None:
            raise UsageError(
                f"run_dir={config.run_dir} holds no preflight/*/report.json: name a run with one"
            )
        return report
    if guess_kind("auto", environ)[0] == "allocation":
        from launcher.slurm.first_node import choose_nodes
        from launcher.slurm.preflight import check_allocation

        hosts = choose_nodes(environ, sys.maxsize)
        logger.info(f"checking {len(hosts)} nodes of SLURM job {environ['SLURM_JOB_ID']}")
        checked = check_allocation(config, environ, hosts)
    else:
        from launcher.cli.run_preflight import check_this_machine

        checked, stop = check_this_machine(config, environ, find_existing(Path(config.runs_dir)))
    if stop:
        raise SystemExit(128 + stop)
    if checked.report is None:
        raise MachineError(f"the nodes could not be checked: {checked.problem}")
    return checked.report


def find_existing(path: Path) -> Path:
    """Return a folder, or the one above it that exists: `runs_dir` is made by the first run."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def is_here(config: Settings) -> bool:
    """Tell whether the machine that is planned for is this one."""
    return config.machine.snapshot is None and os.path.realpath(config.machine.root) == "/"


def gather_case(call: VerbCall) -> Case:
    """Gather all that is judged of a machine; raises UsageError, and MachineError as a plan does."""
    # A placement that falls short is a finding here.
    config = replace(call.config, binding=replace(call.config.binding, strict=False))
    plan, here = plan_node(config, call.environ), is_here(config)
    if config.machine.snapshot is None:
        paths = [
            (str(find_existing(Path(config.runs_dir))), "run directory"),
            (os.path.realpath("."), "working directory"),
            (tempfile.gettempdir(), "temporary directory"),
            *((path, "data") for path in config.preflight.paths),
        ]
        gpus = frozenset(rank.gpu.pci for rank in plan.ranks if rank.gpu)
        facts = read_node_facts(config.machine.root, paths if here else (), gpus=gpus or None)
        facts = replace(facts, health=read_health(config.machine.root, plan.machine))
    else:
        facts = Facts("", 0, 0.0, shm_kib=plan.machine.limits.shm_kib)
    run, reason = find_run(config, here)
    return Case(
        plan=plan,
        facts=facts,
        trial=try_plan(plan) if here else BindingTrial(reason="another machine's plan"),
        num_workers=config.dataloader.num_workers,
        binding=config.binding.policy,
        environ=call.environ if here else None,
        run=run,
        run_reason=reason,
        wanted=Wanted(min_free_kib=config.preflight.min_free_gib * (1 << 20)),
    )


def find_run(config: Settings, here: bool) -> tuple[RunRecords | None, str]:
    """Return the run to compare, or why there is none; raises UsageError if the named one is no run."""
    if config.run_dir is None:
        if not here:
            return None, "it is about this machine; run_dir=DIR compares a run"
        last = find_last_run(Path(config.runs_dir))
        return (read_run(last), "") if last else (None, f"no run below runs_dir={config.runs_dir} yet")
    if not config.run_dir:
        raise UsageError(EMPTY_PATH.format("run_dir"))
    path = Path(config.run_dir)
    try:
        planned = any(entry.match(name_plan_file("*")) for entry in path.iterdir())
    except PermissionError as error:
        raise UsageError(f"run_dir={path} cannot be read ({error.strerror}): ask its owner") from None
    except OSError:
        planned = False
    if not planned:
        raise UsageError(f"run_dir={path} holds no plan-HOST.json: name a run's directory")
    return read_run(path), ""


def try_plan(plan: Plan) -> BindingTrial:
    """Let the shim apply the plan to short-lived processes: a rank for each memory policy that differs."""
    ranks = list({rank.memory: rank for rank in reversed(plan.ranks)}.values())
    refused: dict[str, None] = {}
    otherwise: dict[str, None] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="launch-doctor-") as folder:
            Path(folder, "plan.json").write_text(json.dumps(plan_to_json(plan)), encoding="utf-8")
            for rank in ranks:
                problems, is_memory = try_rank(rank, folder)
                (refused if is_memory else otherwise).update(dict.fromkeys(problems))
    except (OSError, subprocess.SubprocessError) as error:
        return BindingTrial(reason=f"the shim cannot be tried here ({error})")
    return BindingTrial(len(ranks), tuple(otherwise), tuple(refused))


def try_rank(rank: RankPlan, folder: str) -> tuple[Sequence[str], bool]:
    """Start one rank's shim before a program that does nothing; raises OSError or SubprocessError.

    Returns what was not as planned, and whether that is its memory policy.
    """
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(PREFIX)},
        LAUNCH_PLAN: f"{folder}/plan.json",
        LAUNCH_RECORD_DIR: folder,
        LAUNCH_QUIET: "1",
        "RANK": str(rank.local_rank),
        "LOCAL_RANK": str(rank.local_rank),
    }
    command = [sys.executable, "-I", "-S", str(SHIM), sys.executable, "-I", "-S", "-c", "pass"]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=PATIENCE, check=False)
    records = [one for host in read_run(Path(folder)).hosts for one in host.records]
    own = next((record for record in records if record.local_rank == rank.local_rank), None)
    if own is None or done.returncode:
        count = "no record" if own is None else "a record"
        return (f"local rank {rank.local_rank}: the shim ended with {done.returncode} and {count}",), False
    problems = own.problems or tuple(compare_rank(rank, own))
    return problems, rank.memory.policy != "default" and own.memory != rank.memory


HELP = """\
usage: launch doctor [KEY=VALUE ...]

Checks what slows or breaks training jobs on this machine, and compares what the
last run's ranks had with their plan. Each finding says why it matters, and the
fix. Nothing is changed. The exit code is 1 if a finding is an error (x) or a
warning (!), and 0 if there are notes (i) and unmade checks (?) at most.

  format=table|json    json: {"schema": 1, "findings":
                       [{level, subject, what, why, fix, rule, values}]}
  run_dir=DIR          compare this run, not the last one below runs_dir
  preflight=light|deep make the checks before a job, now, on all nodes of the
                       SLURM job that this is in, else here; findings by node;
                       with run_dir=DIR judge what that run's nodes answered

  launch doctor
  launch doctor format=json
"""
