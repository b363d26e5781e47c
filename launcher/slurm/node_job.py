"""A node's part of a SLURM job: it is planned, its ranks are started and watched to their end, and recorded.

With agent=direct, the warm process begins to import torch before the node is planned.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.codec import dump
from launcher.config.program import find_program
from launcher.config.settings import SLURM_KINDS, Settings
from launcher.config.start import AgentChoice, Cluster, check_port_free, parse_endpoint, plan_node
from launcher.errors import MachineError
from launcher.launch.coordinator import GroupStart, JobEnd, Order
from launcher.launch.job import (
    STARTING,
    Job,
    build_agent_environ,
    choose_restarts,
    describe_job,
    is_port_free,
)
from launcher.launch.node_folder import keep_folder
from launcher.launch.signals import SignalChannel, name_signal, open_signal_channel
from launcher.launch.warm.read_ahead import read_ahead
from launcher.launch.watching import keep_watch_folder, watch_node
from launcher.runs.records import keep_prediction, refuse_node, write_node
from launcher.runs.run_directory import RunDir, release_space, reserve_space, write_json
from launcher.slurm.commands import TaskIdentity, drop_task_variables, read_task_identity
from launcher.slurm.job_request import JobRequest, read_job_request
from launcher.slurm.step import ALIVE_PERIOD, ASK_ALIVE, MARK, NodeReport, parse_group_order

if TYPE_CHECKING:
    from launcher.launch.ending import NodeEnd
    from launcher.launch.supervisor import Agent, Supervisor
    from launcher.report.viewer import OutputViewer

logger = logging.getLogger(__name__)

RESTARTS = 3
"""Of an elastic job, if nobody says: the loss of a node takes one at every node that remains."""
RECORD_SIZE = 16 << 10
"""Bytes that are held for the node's record, with which its first failure would be lost on a full disk."""
HOLD = 5.0
"""Seconds after which the plan is shown in any case, while nodes wait for each other."""


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
    run, run_id = RunDir(run_path, task.attempt), f"{run_path.name}-{task.step}-{task.attempt}"
    config, cluster = describe_node_part(request, task)
    merged = {**drop_task_variables(environ), **config.env}
    program = find_program(request.words, config, merged)
    read_ahead(config.start.read_ahead, program, merged)
    with keep_watch_folder(merged, enabled=config.watch.enabled) as folder:
        variables = build_agent_environ(config, cluster, merged, run, task.host, folder)
        warm = None
        if request.agent == "direct":
            from launcher.launch.warm.process import start_warm

            warm = start_warm(program, config.start, variables)
        # While torch is imported, as all that follows.
        from launcher.launch.supervisor import DirectAgent, Supervisor, TorchrunAgent
        from launcher.plan.model import plan_to_json

        if cluster.is_host and request.agent == "torchrun" and config.torchrun.rdzv_backend in (None, "c10d"):
            check_port_free(parse_endpoint(cluster.endpoint)[1])
        with open_caches(merged) as caches:
            plan, choice = plan_node(config, merged, caches), AgentChoice(request.agent, "as submitted")
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
            viewer, control = make_node_viewer(job, run, task), open_signal_channel(0)
            reserve_space(run, RECORD_SIZE)
            watching = watch_node(job, run, folder, task.node_rank)
            signal.signal(signal.SIGTERM, lambda *_: None)  # now the supervisor's, and nothing after it
            agent: Agent
            if request.agent == "direct":
                may_restart = bool(choose_restarts(job.config, job.environ) or job.config.cluster.spares)
                orders = NodeControl(job.host, control, may_restart, is_port_free)
                agent = DirectAgent(job, run, variables, run_id, orders, warm)
            else:
                # stdin brings the first node's commands, which are not for the agent.
                agent = TorchrunAgent(job, run, variables, run_id)
            supervisor = Supervisor(job, run, viewer, agent, watching, control=control)
            recorder = NodeRecorder(supervisor, task, started)
            supervisor.on_stop = recorder.write_stop
            end = supervisor.run_to_end()
            watching.close()
            state = recorder.write_end(end)
            # To srun, the first task that fails is the end of all: others may still have time to stop.
            status = 0 if state == "stopped" and supervisor.commanded else end.status
            viewer.finish(patient=end.signal is None)
            if not viewer.close():
                os._exit(status)  # a thread is stuck in a write, and the interpreter's end would wait for it
            return status


def check_node_fit(request: JobRequest, job: Job, *, is_first: bool) -> Job:
    """Judge the job's memory on its first node, if the submission could not; raises MachineError.

    Returns the job with what is chosen of the bundled program: the same on each node of the same kind.
    """
    if request.fit_model is None:
        return job
    from launcher.config.training import FitJob, settle_training

    asked = FitJob.of_plan(job.config, job.plan, request.fit_model, job.cluster.max_nodes, job.environ)
    config = settle_training(asked, judges=is_first)
    return replace(job, config=config, program=find_program(request.words, config, job.environ))


def describe_node_part(request: JobRequest, task: TaskIdentity) -> tuple[Settings, Cluster]:
    """Return the configuration of this node, and its part in the job; raises UsageError.

    torchrun is told what to call this node in the rendezvous. By this name the others find rank 0; its own
    idea may be an alias, or the loopback's. The names of the other nodes are used for nothing but their
    order, which is that of text (github.com/pytorch/pytorch/issues/191190; `_mark_rendezvous_complete` of
    torch 2.13): a number of fixed length after `~`, which comes after all that a name can begin with, gives
    it. If nodes may come and go, any can become the first.
    """
    config, torchrun = request.config, request.config.torchrun
    is_elastic = request.min_nodes < request.max_nodes
    if torchrun.local_addr is None:
        address: str | None = task.host
        if task.node_rank and not is_elastic and torchrun.rdzv_backend in (None, "c10d"):
            address = f"~{task.node_rank:06d}.{task.host}"
        else:
            try:
                socket.getaddrinfo(task.host, None)
            except OSError:
                address = None
        torchrun = replace(torchrun, local_addr=address)
    if torchrun.max_restarts is None and is_elastic:
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


def make_node_viewer(job: Job, run: RunDir, task: TaskIdentity) -> "OutputViewer":
    """Return what shows this node's ranks; the job's first node shows what was chosen and its placement."""
    from launcher.report.viewer import OutputViewer, ViewOptions
    from launcher.runs.rank_logs import Follower

    is_first, alone = task.node_rank == 0, job.world_size == 1
    mode = job.config.logs.console
    options = ViewOptions(
        mode,
        None if alone else lambda _: job.host,
        log_prefix=f"{task.host}: ",
        shared=job.cluster.kind in SLURM_KINDS and job.cluster.max_nodes > 1 and mode == "all",
        followed=job.cluster.kind == "slurm",
        heading=describe_job(job, run) if is_first else (),
        plan=job.plan if is_first else None,
        explain=job.config.explain,
        notice=STARTING if is_first and mode != "none" and job.cluster.max_nodes == 1 else "",
        hold=HOLD,
    )
    return OutputViewer(run, Follower(), options)


@dataclass(slots=True)
class NodeRecorder:
    """Writes the record of how one node's part of an attempt ended."""

    supervisor: "Supervisor"
    task: TaskIdentity
    started: float
    """Seconds since the epoch."""

    def write_stop(self, number: int, by_first_node: bool) -> None:
        """Write a record at once: SLURM may kill this process before its ranks have ended."""
        if not by_first_node:
            write_report(NodeReport("signalled", self.task.host, number=number))
        with contextlib.suppress(OSError):
            self.write("stopped", 128 + number, number, "it was killed while its ranks ended")

    def write_end(self, end: "NodeEnd") -> str | None:
        """Record how this node's part ended, and say what was not as planned; returns the kept state."""
        from launcher.launch.ending import check_success, describe_failure

        job, run, number = self.supervisor.job, self.supervisor.run, end.signal
        if number and end.failure and end.failure.exitcode == -signal.SIGTERM:
            end = replace(end, failure=None)  # SLURM sent it to the rank too
        state = "stopped" if number and not (end.failure or end.hang) and end.status else end.state
        said = "" if end.failure or end.hang or state != "failed" else end.describe_agent()
        for line in check_success(job, run, end) if state == "succeeded" else ():
            logger.warning(line)
        clean = tuple((death.process.rank, death.time) for death in end.clean)
        found = {"failure": describe_failure(job, run, end), "clean": clean, "hang": end.hang}
        try:
            self.write(state, end.status, number, said, **found, trouble=release_space(run))
        except OSError as error:
            logger.warning(f"its record could not be written ({error})")
            return None
        return state

    def write(self, state: str, status: int, number: int | None, said: str, **found: Any) -> None:  # noqa: ANN401 - its fields
        """Write this node's record as of now; raises OSError.

        Nothing is written once this task is cut off from the job: if the daemon behind it is gone, the node
        is lost to the job, which a record would hide.
        """
        supervisor, task = self.supervisor, self.task
        if supervisor.control and supervisor.control.is_cut:
            return
        record = refuse_node(task.host, task.node_rank, status, said, self.started, state)
        restarts = 0 if supervisor.newest is None else supervisor.newest - task.attempt
        found |= {"restarts": restarts, "ranks": len(supervisor.job.plan.ranks)}
        found |= {"signal": name_signal(number) if number else None}
        write_node(supervisor.run.path, task.attempt, replace(record, **found))


@dataclass(slots=True)
class NodeControl:
    """A task's end: decides nothing itself, but the end of a job in which nothing is started again."""

    host: str
    channel: SignalChannel
    """The supervisor reads it; orders are among what it has read."""
    may_restart: bool
    """The first node answers a failure, or the end of this node's ranks, with an order."""
    is_port_free: Callable[[int], bool]
    descriptor: int = 2
    """srun brings the first node what is written to it."""
    unsent: deque[NodeReport] = field(default_factory=deque)
    orders: list[Order] = field(default_factory=list)
    newest: GroupStart | None = None
    has_failed: bool = False
    """A rank of the newest start has failed here."""

    def report(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Say what has become of this node's ranks, unless that is the end, since nothing starts again."""
        if kind == "failed":
            self.has_failed = self.newest is not None and restart == self.newest.restart
        if kind == "ready" or self.may_restart:
            self.send(kind, restart, number)
        else:
            self.orders.append(JobEnd(failed=kind == "failed"))

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        self.flush()
        for line in self.channel.take_lines():
            if line == ASK_ALIVE:
                self.send("alive")
            elif order := parse_group_order(line):
                self.take_order(order)
        if self.newest is None and self.channel.descriptor is None and not self.channel.greeted:
            logger.error("the first node's orders do not reach this task: leave cluster.srun.input out")
            self.orders.append(JobEnd(failed=True))
        taken, self.orders = self.orders, []
        return taken

    def take_order(self, order: Order) -> None:
        """Keep an order for the agent, or do what it asks for."""
        if isinstance(order, JobEnd):
            takes_part = self.newest and self.newest.find_group_rank(self.host) is not None
            if order.failed and takes_part and not self.has_failed:
                self.channel.added.append(signal.SIGTERM)  # they end as by any stop that the first node sends
                return
        else:
            if order.find_group_rank(self.host) == 0 and not self.is_port_free(order.master_port):
                self.send("taken", order.restart)
                return
            self.newest, self.has_failed = order, False
        self.orders.append(order)

    def send(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Send a report, now or as soon as somebody reads."""
        self.unsent.append(NodeReport(kind, self.host, restart, number))
        self.flush()

    def flush(self) -> None:
        """Write the reports that wait, one by one, and never wait for a reader."""
        while self.unsent and write_report(self.unsent[0], self.descriptor):
            self.unsent.popleft()


def write_report(report: NodeReport, descriptor: int = 2) -> bool:
    """Write a report, whole, if that needs no waiting; tells whether that was so."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        return False
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{MARK}{dump(report)}\n".encode())
    return True


def start_alive_sender(host: str) -> None:
    """Begin, by a thread of its own: the task may wait for a filesystem, or for its ranks' ends."""

    def send_lines() -> None:
        while not pause.wait(ALIVE_PERIOD):
            write_report(report)

    report, pause = NodeReport("alive", host), threading.Event()
    write_report(report)
    threading.Thread(target=send_lines, daemon=True).start()


# What PyTorch's compilers keep for a job, on each node's own disk: network filesystems fail them

DISK_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
"""Variables that name a disk of the node's own, the first that will do winning; /tmp is the last."""
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables by which a user says where the caches are."""
PREFIX = f"launch-caches-{os.uname().nodename}-"
"""How the names of this node's folders begin; a disk that several nodes share may know no lock but each
node's own."""


def open_caches(environ: Mapping[str, str]) -> AbstractContextManager[str]:
    """Give a new folder on this node, for its owner alone, that is removed in the end.

    Libraries can be loaded from it. Empty if the user has said where the caches are, or if no disk will do:
    the compilers' own places are better than no job.
    """
    disks = (*filter(None, map(environ.get, DISK_VARIABLES)), "/tmp")  # noqa: S108 - its name is not foreseen
    return keep_folder(
        PREFIX,
        f"{environ.get('SLURM_JOB_ID', 'job')}-",
        () if all(environ.get(name) for name in CACHES) else disks,
        lambda path: not os.statvfs(str(path.parent)).f_flag & os.ST_NOEXEC,
    )
