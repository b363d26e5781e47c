"""`launch doctor`: gathers the facts, has them judged, and prints the findings."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from launcher.cli.plan import plan_node
from launcher.cli.verbs import VerbCall
from launcher.config.run_path import EMPTY_PATH
from launcher.config.settings import Settings
from launcher.doctor.checkup import choose_exit_code, run_checks
from launcher.doctor.facts import Health
from launcher.doctor.finding import BindingTrial, Case, Finding
from launcher.doctor.node_facts import NodeFacts
from launcher.errors import UsageError
from launcher.launch.job import SHIM
from launcher.plan.json_form import plan_to_json
from launcher.plan.model import Plan, RankPlan
from launcher.preflight.preflight_request import SECONDS
from launcher.probe.node_facts_reader import FactSources, read_node_facts
from launcher.probe.system_facts import read_health
from launcher.protocol import LAUNCH_PLAN, LAUNCH_QUIET, LAUNCH_RECORD_DIR, PREFIX, name_plan_file
from launcher.report.console import make_console
from launcher.report.runs import print_findings
from launcher.runs.applied_records import compare_rank
from launcher.runs.run_records import RunRecords, find_last_run, read_run

SCHEMA = 1
"""Version of the JSON form of findings."""
PATIENCE = 30
"""Seconds that a trial of the shim may take."""


def show_checkup(call: VerbCall) -> int:
    """Print the findings; return 1 if one is an error or a warning, else 0."""
    config, environ = call.config, call.environ
    if asks_preflight(call):
        from launcher.cli.doctor_nodes import show_node_checks

        return show_node_checks(call)
    # A placement that falls short is a finding here.
    config = replace(config, binding=replace(config.binding, strict=False))
    plan = plan_node(config, environ)
    known = config.machine.snapshot is None
    here = known and os.path.realpath(config.machine.root) == "/"
    run, reason = find_run(config, here)
    case = Case(
        plan=plan,
        health=read_health(config.machine.root, plan.machine) if known else Health(),
        trial=try_plan(plan) if here else BindingTrial(reason="another machine's plan"),
        num_workers=config.dataloader.num_workers,
        environ=environ if here else None,
        run=run,
        run_reason=reason,
        node=read_this_node(config, plan, here) if known else None,
        min_free_kib=config.preflight.min_free_gib * (1 << 20),
    )
    findings = run_checks(case)
    if here and find_spec("matplotlib") is None:
        what, why = "matplotlib is not installed", "`launch report` writes its page without charts"
        findings = (*findings, Finding("note", "report", what, why, "pip install 'launch-ranks[report]'"))
    if config.format == "json":
        listed = [asdict(finding) for finding in findings]
        sys.stdout.write(json.dumps({"schema": SCHEMA, "findings": listed}, indent=1) + "\n")
    else:
        print_findings(make_console(stderr=False), findings)
    return choose_exit_code(findings)


def asks_preflight(call: VerbCall) -> bool:
    """Tell whether the command line asks for the checks before a job; a file may choose them for jobs."""
    return bool({"preflight", "preflight.kind"} & {*call.given}) and call.config.preflight.kind in SECONDS


def read_this_node(config: Settings, plan: Plan, here: bool) -> NodeFacts:
    """Read what preflight would look at before a job."""
    runs = Path(config.runs_dir).absolute()
    while not runs.exists() and runs != runs.parent:
        runs = runs.parent  # It is made by the first run.
    paths = [
        (str(runs), "run directory"),
        (os.path.realpath("."), "working directory"),
        (tempfile.gettempdir(), "temporary directory"),
        *((path, "data") for path in config.preflight.paths),
    ]
    gpus = frozenset(rank.gpu.pci for rank in plan.ranks if rank.gpu)
    return read_node_facts(config.machine.root, paths if here else (), sources=FactSources(gpus=gpus or None))


def find_run(config: Settings, here: bool) -> tuple[RunRecords | None, str]:
    """Return the run to compare, or why there is none; raises UsageError if the named one is no run."""
    if config.run_dir is not None:
        if not config.run_dir:
            raise UsageError(EMPTY_PATH.format("run_dir"))
        path = Path(config.run_dir)
        check_run(path)
        return read_run(path), ""
    if not here:
        return None, "it is about this machine; run_dir=DIR compares a run"
    found = find_last_run(Path(config.runs_dir))
    return (read_run(found), "") if found else (None, f"no run below runs_dir={config.runs_dir} yet")


def check_run(path: Path) -> None:
    """Raise UsageError for what is no run directory, or is somebody else's."""
    try:
        planned = any(entry.match(name_plan_file("*")) for entry in path.iterdir())
    except PermissionError as error:
        raise UsageError(f"run_dir={path} cannot be read ({error.strerror}): ask its owner") from None
    except OSError:
        planned = False
    if not planned:
        raise UsageError(f"run_dir={path} holds no plan-HOST.json: name a run's directory")


def try_plan(plan: Plan) -> BindingTrial:
    """Let the shim apply the plan to short-lived processes: a rank for each memory policy that differs."""
    ranks = list({rank.memory: rank for rank in reversed(plan.ranks)}.values())
    try:
        with tempfile.TemporaryDirectory(prefix="launch-doctor-") as folder:
            Path(folder, "plan.json").write_text(json.dumps(plan_to_json(plan)), encoding="utf-8")
            problems = [problem for rank in ranks for problem in try_rank(rank, folder)]
    except (OSError, subprocess.SubprocessError) as error:
        return BindingTrial(reason=f"the shim cannot be tried here ({error})")
    return BindingTrial(len(ranks), tuple(dict.fromkeys(problems)))


def try_rank(rank: RankPlan, folder: str) -> Iterator[str]:
    """Start one rank's shim before a program that does nothing; raises OSError or SubprocessError."""
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
    own = [record for record in records if record.local_rank == rank.local_rank]
    for record in own:
        yield from record.problems or compare_rank(rank, record)
    if not own or done.returncode:
        yield f"local rank {rank.local_rank}: the shim ended with {done.returncode}, {len(own)} records"


HELP = """\
usage: launch doctor [KEY=VALUE ...]

Checks what slows or breaks training jobs on this machine, and compares what the
last run's ranks had with their plan. Each finding says why it matters, and the
fix. Nothing is changed. The exit code is 1 if a finding is an error (x) or a
warning (!), and 0 if there are notes (i) and unmade checks (?) at most.

  format=table|json    json: {"schema": 1,
                       "findings": [{level, subject, what, why, fix}]}
  run_dir=DIR          compare this run, not the last one below runs_dir
  preflight=light|deep make the checks before a job, now, on all nodes of the
                       SLURM job that this is in, else here; findings by node

  launch doctor
  launch doctor format=json
"""
