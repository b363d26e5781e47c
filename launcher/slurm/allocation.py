"""`launch` within a SLURM job, in salloc's shell or a job script: a step over its nodes, on this terminal."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.launch.job import JobSpec
from launcher.launch.local_run import prepare_run
from launcher.protocol import LAUNCH_SECRETS, name_host
from launcher.runs.manifest import read_job, read_manifest
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt import Attempt
from launcher.slurm.commands import name_job
from launcher.slurm.first_node import (
    choose_nodes,
    order_job_nodes,
    report_node_order,
    run_attempt,
    run_batch_script,
)
from launcher.slurm.job_request import JobRequest, make_job_request, write_job_request
from launcher.slurm.node_job import plan_here
from launcher.slurm.node_step import describe_node_step
from launcher.slurm.srun import render_step
from launcher.slurm.submission import stage_run
from launcher.text import join_words, print_text

logger = logging.getLogger(__name__)


def run_allocation(spec: JobSpec, argv: Sequence[str]) -> int:
    """Run a job over the nodes of the SLURM job that this is; returns the exit code, raises LaunchError."""
    hosts = choose_nodes(os.environ, spec.cluster.max_nodes)
    if spec.config.dry_run:
        return preview_allocation(spec, argv, hosts)
    if spec.config.cluster.requeue.allocation:
        return run_own_job(spec, argv)
    if spec.fit_model and name_host(os.environ) in hosts:  # else its first node judges
        from launcher.slurm.submission_fit import judge_plan

        nodes = min(spec.cluster.min_nodes, len(hosts))
        spec = judge_plan(spec, plan_here(spec.config, spec.environ), nodes)
    run, _ = prepare_run(spec, argv, hosts)
    request = describe_request(spec, argv)
    secrets = write_job_request(request, run.path)
    carried = {LAUNCH_SECRETS: json.dumps({str(run.path): secrets})} if secrets else {}
    return run_attempt(request, run, {**os.environ, **carried}, requeues=False)


def run_own_job(spec: JobSpec, argv: Sequence[str]) -> int:
    """Run one attempt of the job whose batch script this process is, as one of a submitted job.

    The first attempt does what a submission would have done before.
    """
    cluster = replace(spec.config.cluster, kind="slurm")
    spec, job_id = replace(spec, config=replace(spec.config, cluster=cluster)), name_job(os.environ)
    if read_job(read_manifest(spec.run_path)) == job_id:
        secrets: Mapping[str, object] = write_job_request(make_job_request(spec, argv), spec.run_path)
    else:
        with contextlib.ExitStack() as undo:
            staged = stage_run(spec, argv, describe_sources(Path.cwd()), undo)
            staged.write_job_id(job_id)
            undo.pop_all()
        secrets = staged.secrets
    if secrets:
        os.environ[LAUNCH_SECRETS] = json.dumps({str(spec.run_path): secrets})
    return run_batch_script(spec.run_path)


def describe_request(spec: JobSpec, argv: Sequence[str]) -> JobRequest:
    """Return the request that the nodes read: they are in an allocation, however the job was asked for."""
    cluster = replace(spec.config.cluster, kind=spec.cluster.kind)
    return make_job_request(replace(spec, config=replace(spec.config, cluster=cluster)), argv)


def preview_allocation(spec: JobSpec, argv: Sequence[str], hosts: Sequence[str]) -> int:
    """Show srun's command, and the plan if this is one of the nodes, for `dry_run=true`."""
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement

    if name_host(os.environ) in hosts:
        print_placement(make_console(), plan_here(spec.config, spec.environ), explain=spec.config.explain)
    else:
        logger.info(f"{', '.join(hosts)} plan for themselves: this machine is none of them")
    request = describe_request(spec, argv)
    order = order_job_nodes(os.environ, request)
    ordered, spares = order.hosts[: request.max_nodes], order.hosts[request.max_nodes :]
    run = RunDir(spec.run_path)
    attempt = Attempt(request, run, os.environ, ordered, {}, requeues=False, spares=spares)
    report_node_order(order)
    sys.stderr.flush()
    print_text(join_words(render_step(describe_node_step(attempt))) + "\n")
    return 0
