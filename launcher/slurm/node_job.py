"""What starts a node's ranks in a SLURM job, begun before the node is planned: torchrun, or this process."""

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.program import find_program
from launcher.config.settings import Settings
from launcher.config.start import AgentChoice, Cluster, check_port_free, parse_endpoint
from launcher.errors import MachineError
from launcher.launch.job import Job, build_agent_environ, choose_restarts, render_agent
from launcher.launch.monitor import RankMonitor
from launcher.launch.signal_channel import SignalChannel
from launcher.launch.torchrun_agent import TorchrunAgent, check_open_files
from launcher.launch.warm.read_ahead import reading_ahead
from launcher.launch.watching import keep_watch_folder
from launcher.plan.model import Plan
from launcher.runs.memory_records import keep_prediction
from launcher.runs.node_records import refuse_node, write_node
from launcher.runs.run_directory import RunDir, write_json
from launcher.slurm.compiler_caches import open_caches
from launcher.slurm.job_request import JobRequest, read_job_request
from launcher.slurm.node_channel import start_alive_sender
from launcher.slurm.slurm_environ import PORT_TAKEN, TaskIdentity, drop_task_variables, read_task_identity

if TYPE_CHECKING:
    from launcher.launch.supervisor import Agent

AgentMaker = Callable[[Job, RankMonitor, SignalChannel], "Agent"]
"""Gives the agent of a planned node."""


def prepare_agent_maker(
    request: JobRequest,
    program: Sequence[str],
    run: RunDir,
    task: TaskIdentity,
    variables: Mapping[str, str],
) -> AgentMaker:
    """Begin to import torch, while the node is planned, and return what gives the agent then.

    `variables` are the environment of the ranks, or of torchrun. An agent of ours starts this node's ranks
    itself, as the job's first node orders.
    """
    run_id, log = f"{run.id}-{task.step}-{task.attempt}", run.agent_log(task.host)
    if request.agent != "direct":

        def make_torchrun(job: Job, monitor: RankMonitor, _channel: SignalChannel) -> "Agent":
            # stdin brings the first node's commands, which are not for the agent.
            command = render_agent(job, run_id)
            return TorchrunAgent(command, variables, log, subprocess.DEVNULL, monitor.find_ranks)

        return make_torchrun
    from launcher.launch.warm.process import start_warm

    warm = start_warm(program, request.config.start, variables)

    def make_own_agent(job: Job, _monitor: RankMonitor, channel: SignalChannel) -> "Agent":
        from launcher.launch.direct_agent import DirectAgent
        from launcher.launch.endpoint import is_port_free
        from launcher.slurm.node_channel import NodeControl

        restarts = choose_restarts(job.config, job.environ) or 0
        may_restart = restarts > 0 or job.config.cluster.spares > 0
        control = NodeControl(job.host, channel, may_restart, is_port_free)
        return DirectAgent(job, run, variables, run_id, control, warm, may_restart)

    return make_own_agent


RESTARTS = 3
"""Of an elastic job, if nobody says: the loss of a node takes one at every node that remains."""


def run_node(run_path: Path, environ: Mapping[str, str], started: float) -> int:
    """Run this node's part to its end, and return its exit code; raises LaunchError or OSError."""
    task = read_task_identity(environ)
    request = read_job_request(run_path, environ)
    if request.config.cluster.spares:
        start_alive_sender(task.host)
    try:
        os.chdir(request.directory)
    except OSError as error:
        raise MachineError(
            f"{task.host} cannot enter {request.directory} ({error.strerror}): submit from a folder that all"
            " nodes share"
        ) from None
    check_open_files()
    run = RunDir(run_path, task.attempt)
    config, cluster = describe_node_part(request, task)
    merged = {**drop_task_variables(environ), **config.env}
    program = find_program(request.words, config, merged)
    with (
        reading_ahead(config.start.read_ahead, program, merged) as helpers,
        keep_watch_folder(merged, enabled=config.watch.enabled) as folder,
    ):
        variables = build_agent_environ(config, cluster, merged, run, task.host, watch_folder=folder)
        make_agent = prepare_agent_maker(request, program, run, task, variables)
        from launcher.plan.model import plan_to_json
        from launcher.slurm.node_agent import run_agent  # as all that follows, while torch is imported

        if cluster.is_host and config.torchrun.rdzv_backend in (None, "c10d"):
            try:
                check_port_free(parse_endpoint(cluster.endpoint)[1])
            except MachineError as error:  # the batch script's process chooses another port
                record = refuse_node(task.host, task.node_rank, PORT_TAKEN, str(error), started)
                write_node(run.path, task.attempt, record)
                return PORT_TAKEN
        with open_caches(merged) as caches:
            plan, choice = plan_here(config, merged, caches), AgentChoice(request.agent, "as submitted")
            job = Job(config, program, cluster, plan, merged, task.host, choice)
            job = check_node_fit(request, job, is_first=task.node_rank == 0)
            if task.node_rank == 0:
                device = "gpu" if any(rank.gpu for rank in job.plan.ranks) else "cpu"
                keep_prediction(run, job.program, device, len(job.plan.ranks) * cluster.max_nodes)
            path = run.plan_path(job.host)
            try:
                write_json(path, plan_to_json(job.plan))
            except OSError as error:
                raise MachineError(
                    f"{path} cannot be written ({error.strerror}): is there room, and is it shared?"
                ) from None
            return run_agent(
                job,
                run,
                task,
                make_agent,
                started=started,
                folder=folder,
                helpers=helpers,
            )


def plan_here(config: Settings, environ: Mapping[str, str], caches: str = "") -> Plan:
    """Plan this node; raises UsageError or MachineError. `caches` is a folder for the compilers' caches."""
    from launcher.config.request import make_request
    from launcher.plan.allocator import read_host
    from launcher.plan.planner import plan
    from launcher.probe.machine import locate_malloc, probe

    machine = probe(config.machine.root)
    request = make_request(config, environ, machine, caches)
    library = locate_malloc(read_host(config.allocator), environ, config.machine.root)
    return plan(machine, replace(request, host_library=library))


def check_node_fit(request: JobRequest, job: Job, *, is_first: bool) -> Job:
    """Judge the job's memory on its first node, if the submission could not; raises MachineError.

    Returns the job with what is chosen of the bundled program: the same on each node of the same kind.
    """
    if request.fit_model is None:
        return job
    from launcher.config.training import settle_planned

    config = settle_planned(
        job.config,
        job.plan,
        request.fit_model,
        nodes=job.cluster.max_nodes,
        is_bundled=request.is_bundled,
        environ=job.environ,
        judges=is_first,
    )
    return replace(job, config=config, program=find_program(request.words, config, job.environ))


def describe_node_part(request: JobRequest, task: TaskIdentity) -> tuple[Settings, Cluster]:
    """Return the configuration of this node, and its part in the job; raises UsageError."""
    config, torchrun = request.config, request.config.torchrun
    if torchrun.local_addr is None:
        is_fixed = request.min_nodes == request.max_nodes and torchrun.rdzv_backend in (None, "c10d")
        torchrun = replace(torchrun, local_addr=choose_address(task, keeps_order=is_fixed))
    if torchrun.max_restarts is None and request.min_nodes < request.max_nodes:
        torchrun = replace(torchrun, max_restarts=RESTARTS)
    cluster = Cluster(
        "allocation" if config.cluster.kind == "allocation" else "slurm",
        f"SLURM job {task.step.partition('.')[0]}",
        min(request.min_nodes, task.nodes),
        min(request.max_nodes, task.nodes),  # the step has spare nodes too
        config.rdzv_endpoint or task.endpoint,
        is_host=task.node_rank == 0,
    )
    return replace(config, torchrun=torchrun), cluster


def choose_address(task: TaskIdentity, *, keeps_order: bool) -> str | None:
    """Return what torchrun is to call this node in the rendezvous; None for its own idea.

    By this name the others find rank 0; torchrun's own may be an alias, or the loopback's. The names of the
    other nodes are used for nothing but their order, which is that of text (github.com/pytorch/pytorch/
    issues/191190; `_mark_rendezvous_complete` of torch 2.13): a number of fixed length after `~`, which comes
    after all that a name can begin with, gives it. If nodes may come and go, any can become the first.
    """
    if keeps_order and task.node_rank:
        return f"~{task.node_rank:06d}.{task.host}"
    try:
        return task.host if socket.getaddrinfo(task.host, None) else None
    except OSError:
        return None
