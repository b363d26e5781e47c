"""`launch doctor preflight=light`: the checks of a job's nodes, now: here, or on all of an allocation."""

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from launcher.cli.run_preflight import check_this_machine
from launcher.cli.verbs import VerbCall
from launcher.config.settings import Settings
from launcher.config.start import guess_kind
from launcher.doctor.checkup import choose_exit_code
from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import PreflightReport
from launcher.errors import MachineError

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the JSON form."""


def show_node_checks(call: VerbCall) -> int:
    """Print what preflight finds; returns 1 if a finding is an error or a warning, else 0."""
    report = check_all_nodes(call.config, call.environ)
    if call.config.format == "json":
        account = {"kind": report.kind, "seconds": round(report.seconds, 2), "sick": list(report.sick)}
        account |= {"silent": list(report.silent), "nodes": [asdict(node) for node in report.nodes]}
        found = [{"host": one.host, **asdict(one.finding)} for one in report.findings]
        shown = {"schema": SCHEMA, "preflight": account, "findings": found}
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    else:
        print_by_node(report)
    return choose_exit_code(tuple(one.finding for one in report.findings))


def check_all_nodes(config: Settings, environ: Mapping[str, str]) -> PreflightReport:
    """Check the nodes of the allocation that this is in, or this machine; raises MachineError."""
    if guess_kind("auto", environ)[0] == "allocation":
        from launcher.slurm.first_node import choose_nodes
        from launcher.slurm.preflight_step import check_allocation

        hosts = choose_nodes(environ, sys.maxsize)
        logger.info(f"checking {len(hosts)} nodes of SLURM job {environ['SLURM_JOB_ID']}")
        report, problem, stop = *check_allocation(config, environ, hosts), 0
    else:
        report, problem, stop = check_this_machine(
            config, environ, find_checked_folder(Path(config.runs_dir))
        )
    if stop:
        raise SystemExit(128 + stop)
    if report is None:
        raise MachineError(f"the nodes could not be checked: {problem}")
    return report


def find_checked_folder(path: Path) -> Path:
    """Return a folder, or the one above it that exists: `runs_dir` is made by the first run."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def print_by_node(report: PreflightReport) -> None:
    """Print the findings with the node as their subject, and a last line."""
    from launcher.report.console import make_console
    from launcher.report.runs import print_findings, summarise_preflight

    findings = [name_node(one.host or "all nodes", one.finding) for one in report.findings]
    clear = [node.host for node in report.nodes if node.host not in {one.host for one in report.findings}]
    findings += [Finding("ok", host, "all well") for host in clear]
    print_findings(make_console(stderr=False), findings)
    logger.info(summarise_preflight(report))


def name_node(host: str, finding: Finding) -> Finding:
    """Return a finding with the node as its subject."""
    return replace(finding, subject=host, what=f"{finding.subject}: {finding.what}")
