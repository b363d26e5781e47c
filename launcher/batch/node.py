"""One node's part of a SLURM job: its plan, torchrun's agent, and its record."""

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.attend import Viewer
from launcher.batch.companion import Companion
from launcher.batch.place import Place, read_place
from launcher.batch.request import JobRequest, read_request
from launcher.conclude import judge_outcome
from launcher.errors import MachineError
from launcher.job import Job, build_environ, plan_configured, render_agent
from launcher.launch.cluster import Cluster
from launcher.launch.control import open_control
from launcher.launch.slurm.environ import drop_ours
from launcher.launch.slurm.rendezvous import PORT_TAKEN
from launcher.launch.supervise import Supervisor
from launcher.launch.torchrun import check_port_free, parse_endpoint
from launcher.plan.codec import plan_to_json
from launcher.runs.logs import Follower, measure_file, read_tail
from launcher.runs.nodes import NodeRecord, write_node
from launcher.runs.rundir import RunDir, write_json

AGENT_LINES = 2000
"""Last lines of the agent's log that are searched for its report."""
HOLD = 5.0
"""Seconds after which the plan is shown in any case, while torch is imported or the nodes wait for each other."""
RESTARTS = 3
"""Of an elastic job, where nobody says: the loss of a node takes one at every node that remains."""


def run_node(run_path: Path, environ: Mapping[str, str], started: float) -> int:
    """Run this node's part to its end, and return its exit code; raises LaunchError or OSError."""
    place = read_place(environ)
    request = read_request(run_path, environ)
    enter_directory(request.directory, place.host)
    job = plan_part(request, place, environ)
    run = RunDir(run_path, place.attempt)
    try:
        check_port(job)
    except MachineError as error:
        return refuse_port(run, place, str(error), started)
    try:
        write_json(run.plan_path(place.host), plan_to_json(job.plan))
    except OSError as error:
        raise MachineError(
            f"{error.filename} cannot be written ({error.strerror}): is there room, and is it shared?"
        ) from None
    return run_agent(job, run, place, started)


def run_agent(job: Job, run: RunDir, place: Place, started: float) -> int:
    """Run torchrun's agent and its ranks to their end; raises OSError where it cannot be started."""
    command = render_agent(job, f"{run.id}-{place.step}-{place.attempt}")
    log = run.agent_log(place.host)
    log_begin = measure_file(log)
    viewer = Viewer(job, run, (), Follower(run, is_new=True), shows_job=place.node_rank == 0, hold=HOLD)
    companion = Companion(job, run, place, viewer, started)
    grace = job.config.torchrun.shutdown_timeout
    supervisor = Supervisor(companion, len(job.plan.ranks), grace, control=open_control(0))
    signal.signal(signal.SIGTERM, lambda *_: None)  # from here on the supervisor's, and nothing after it
    outcome = supervisor.run(command, build_environ(job, run), log)
    ending = judge_outcome(outcome, tuple(read_tail(log, AGENT_LINES, log_begin)))
    state = companion.write_end(ending)
    # To srun, the first task that fails is the end of all: others may still have time to stop.
    status = 0 if state == "stopped" and supervisor.commanded else ending.status
    if not companion.close():
        os._exit(status)  # a thread is stuck in a write, and the interpreter's end would wait for it
    return status


def enter_directory(directory: str, host: str) -> None:
    """Go to where the job was submitted; raises MachineError where this node has no such place."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise MachineError(
            f"{host} cannot enter {directory} ({error.strerror}): submit from a folder that all nodes share"
        ) from None


def plan_part(request: JobRequest, place: Place, environ: Mapping[str, str]) -> Job:
    """Plan this node; raises UsageError or MachineError."""
    config, own = request.config, drop_ours(environ)
    merged = {**own, **config.env}
    torchrun = config.torchrun
    if torchrun.local_addr is None and can_resolve(place.host):
        # By this name the others find rank 0; torchrun's own idea of it may be an alias, or the loopback's.
        torchrun = replace(torchrun, local_addr=place.host)
    if torchrun.max_restarts is None and request.min_nodes < request.max_nodes:
        torchrun = replace(torchrun, max_restarts=RESTARTS)
    config = replace(config, torchrun=torchrun)
    cluster = Cluster(
        "allocation" if config.cluster.kind == "allocation" else "slurm",
        f"SLURM job {place.step.partition('.')[0]}",
        min(request.min_nodes, place.nodes),
        place.nodes,
        config.rdzv_endpoint or place.endpoint,
        is_host=place.node_rank == 0,
    )
    plan = plan_configured(config, merged)
    return Job(config, request.choices, request.words, cluster, plan, merged, place.host)


def can_resolve(host: str) -> bool:
    """Tell whether this node's name leads to an address."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def check_port(job: Job) -> None:
    """Raise MachineError where this node is to serve the rendezvous and its port is not free."""
    if job.cluster.is_host and job.config.torchrun.rdzv_backend in (None, "c10d"):
        check_port_free(parse_endpoint(job.cluster.endpoint)[1])


def refuse_port(run: RunDir, place: Place, reason: str, started: float) -> int:
    """Leave word for the head, which chooses another port."""
    record = NodeRecord(
        *(place.host, place.node_rank, "failed", PORT_TAKEN, None, reason, None, 0),
        *(started, time.time()),
    )
    write_node(run.path, place.attempt, record)
    return PORT_TAKEN
