"""`launch` within a SLURM job, in salloc's shell or a job script: a step over its nodes, on this terminal."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.launch.job import Draft, plan_job
from launcher.launch.local_run import prepare_run
from launcher.protocol import LAUNCH_SECRETS, name_host
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt import Attempt
from launcher.slurm.first_node import choose_nodes, run_attempt
from launcher.slurm.job_request import JobRequest, make_job_request, write_request
from launcher.slurm.node_step import describe_node_step
from launcher.slurm.srun_command import render_step
from launcher.text import join_words, print_text

logger = logging.getLogger(__name__)


def run_allocation(draft: Draft, argv: Sequence[str]) -> int:
    """Run a job over the nodes of the SLURM job that this is; returns the exit code, raises LaunchError."""
    hosts = choose_nodes(os.environ, draft.cluster.max_nodes)
    if draft.config.dry_run:
        return preview_allocation(draft, argv, hosts)
    run, _ = prepare_run(draft, argv, hosts)
    request = describe_request(draft, argv, run.path)
    secrets = write_request(request, run.path)
    carried = {LAUNCH_SECRETS: json.dumps({str(run.path): secrets})} if secrets else {}
    return run_attempt(request, run, {**os.environ, **carried}, requeues=False)


def describe_request(draft: Draft, argv: Sequence[str], run_path: Path) -> JobRequest:
    """Return what the nodes are told."""
    request = make_job_request(draft, argv, run_path)
    cluster = replace(request.config.cluster, kind=draft.cluster.kind)
    return replace(request, config=replace(request.config, cluster=cluster))


def preview_allocation(draft: Draft, argv: Sequence[str], hosts: Sequence[str]) -> int:
    """Show srun's command, and the plan where this is one of the nodes: `dry_run=true`."""
    from launcher.report.console import make_console
    from launcher.report.placement_table import print_placement

    if name_host(os.environ) in hosts:
        print_placement(make_console(), plan_job(draft).plan, explain=draft.config.explain)
    else:
        logger.info(f"{', '.join(hosts)} plan for themselves: this machine is none of them")
    run_path = Path("RUN_DIR")
    request = describe_request(draft, argv, run_path)
    attempt = Attempt(request, RunDir(run_path), os.environ, tuple(hosts), {}, requeues=False)
    sys.stderr.flush()
    print_text(join_words(render_step(describe_node_step(attempt))) + "\n")
    return 0
