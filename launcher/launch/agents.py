"""What starts a node's ranks, reaps them, and starts them again: this process, or torchrun."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from launcher.files import Descriptor, open_append, open_below
from launcher.launch.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.launch.job import (
    Job,
    choose_restarts,
    make_endpoint_finder,
    render_agent,
    render_shim,
    shares_terminal,
)
from launcher.launch.processes import RankProcess, RankSet, list_ranks, prepare_agent
from launcher.launch.signals import FORWARDED, STOPPING, StopStages
from launcher.launch.terminal import Terminal
from launcher.launch.warm.process import NOT_FORKED, WarmProcess, start_warm
from launcher.launch.warm.program import ExecNeededError
from launcher.protocol import LAUNCH_PARENT
from launcher.runs.records import AppliedReader, name_error_file
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

FAILED = 1
"""Exit code of the agent, as of torchrun's, if ranks have failed or were ended."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default of `--signals-to-handle`, which it leaves in its ranks' environment."""
HEARD = b"death signal"
"""What torchelastic's agent says of a signal that it got (torch/distributed/elastic/agent/server/api.py)."""
TakeWarm = Callable[[Sequence[str], Mapping[str, str]], WarmProcess | None]
"""Gives the warm process that was started before for a program's argv and environment."""


class GroupControl(Protocol):
    """Is told what becomes of a node's ranks, and gives orders: start them so, or end."""

    def report(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Take `ready` (to start `number` ranks); of start `restart`, `failed` (rank `number`) or `ended`."""

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        ...


@dataclass(slots=True)
class LocalControl:
    """Decides for the one node of a job."""

    coordinator: Coordinator
    orders: list[Order] = field(default_factory=list)

    def report(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Tell the coordinator, and keep its order."""
        order = self.coordinator.note(kind, self.coordinator.hosts[0], restart, number)
        self.orders += [order] if order else []

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        taken, self.orders = self.orders, []
        return taken


@dataclass(slots=True)
class DirectAgent:
    """Does what `control` orders: starts ranks, reaps them, ends all if one has failed."""

    job: Job
    run: RunDir
    environ: Mapping[str, str]
    """Each rank's, before the agent's own variables (see `launcher.launch.job.build_agent_environ`)."""
    run_id: str
    """`TORCHELASTIC_RUN_ID`, what torchrun calls --rdzv-id."""
    control: GroupControl
    warm: WarmProcess | None = None
    """Ranks are forked from it, unless something is against that; the first reason is told."""
    may_restart: bool = True
    has_terminal: bool = False
    """The job's one rank has a pseudo-terminal."""
    reads_stdin: bool = False
    """Ranks have this process's stdin, as torchrun's have; else they have an empty one."""

    label: ClassVar[str] = "launch"
    """Its name in messages."""
    ranks: RankSet = field(default_factory=RankSet)
    """All ranks that it has started."""
    start: GroupStart | None = None
    """The newest one."""
    group: list[RankProcess] = field(default_factory=list)
    """Its ranks on this node."""
    seen: int = 0
    """Deaths that were looked at."""
    ending: StopStages | None = None
    """The ranks were asked to end, since one has failed, or for an order."""
    order: Order | None = None
    """What comes once the ranks have ended."""
    exitcode: int | None = None
    is_reported: bool = False
    """The control knows that all ranks of the newest start have ended with 0."""
    stopped: bool = False
    """A signal has ended the ranks, and nothing starts any more."""

    @property
    def helpers(self) -> Collection[int]:
        """PID of the warm process, which is ended here and is no leftover."""
        return (self.warm.process.pid,) if self.warm and self.warm.process.poll() is None else ()

    @property
    def children(self) -> Collection[int]:
        """PIDs of the ranks, and of the warm process: nobody else may reap them."""
        return {*(rank.pid for rank in self.group), *self.helpers}

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be started without waiting."""
        return self.warm is None or self.warm.is_ready

    @property
    def descriptors(self) -> Collection[int]:
        """The warm process's channel, if ranks wait for its imports."""
        return (self.warm.channel.fileno(),) if self.warm and not self.warm.is_ready else ()

    def begin(self) -> None:
        """Start the ranks, if the node's part is to begin at once; raises OSError."""
        self.environ = {
            **self.environ,
            "TORCHELASTIC_MAX_RESTARTS": str(choose_restarts(self.job.config, self.job.environ) or 0),
            "TORCHELASTIC_RUN_ID": self.run_id,
            LAUNCH_PARENT: str(os.getpid()),
        }
        self.control.report("ready", number=len(self.job.plan.ranks))
        for order in self.control.take_orders():
            self.order = order
        if isinstance(self.order, GroupStart) and self.is_ready:
            self.start_group(self.order)

    def poll(self) -> int | None:
        """Note what ranks ended with, take orders and carry them out; return the exit code in the end."""
        if self.exitcode is not None:
            return self.exitcode
        self.note_deaths()
        for order in () if self.stopped else self.control.take_orders():
            self.take_order(order)
        if self.ranks.alive:
            if self.ending and time.monotonic() >= self.ending.deadline:
                if (number := self.ending.next_stage()) is not None:
                    self.ranks.signal_groups(number)
                else:
                    names = ", ".join(str(rank.rank) for rank in self.ranks.alive.values())
                    logger.info(f"not ended by SIGKILL, since they wait in the kernel: rank {names}")
                    self.exitcode = FAILED
        elif isinstance(self.order, GroupStart) and not self.stopped:
            if self.is_ready:
                try:
                    self.start_group(self.order)
                except OSError as error:
                    logger.info(f"the ranks could not be started ({error})")
                    self.exitcode = FAILED
        elif self.order or self.stopped:
            self.exitcode = FAILED if self.stopped or self.order == JobEnd(failed=True) else 0
        return self.exitcode

    def note_deaths(self) -> None:
        """Tell the control what has become of the ranks, and end the others if one has failed.

        Those that ended with 0 are reaped. The others stay zombies until `close_group`, so that their process
        groups' numbers are not given away. Whoever was reaped by another process has failed.
        """
        restart = self.start.restart if self.start else 0
        for death in self.ranks.deaths[self.seen :]:
            if death.exitcode == 0:
                reap(death.process.pid)
            elif not self.stopped:
                self.end_group()
                self.control.report("failed", restart, death.process.rank)
        self.seen = len(self.ranks.deaths)
        if self.group and not self.is_reported and not self.ranks.alive and not self.list_failed():
            self.is_reported = True
            self.control.report("ended", restart)

    def list_failed(self) -> list[RankProcess]:
        """Return the ranks of the newest start that have ended, and not with 0."""
        return [one.process for one in self.ranks.deaths if one.exitcode != 0 and one.process in self.group]

    def take_order(self, order: Order) -> None:
        """End the ranks for an order. If another node has taken their place, they write nothing any more."""
        self.order, host, patience = order, self.job.host, None
        if isinstance(order, GroupStart):
            patience = order.patience
            if self.group and order.find_group_rank(host) is None:
                logger.info(f"another node has taken the place of {host}: SIGKILL to its ranks")
                self.ranks.signal_groups(signal.SIGKILL)
        if self.group:
            self.end_group(patience)

    def end_group(self, patience: float | None = None) -> None:
        """Ask the ranks to end by SIGTERM, if that was not done yet; `patience` can shorten their time."""
        seconds: float = self.job.config.torchrun.shutdown_timeout
        if patience is not None:
            seconds = min(patience, seconds)
        if self.ending is None:
            self.ending = StopStages.begin(signal.SIGTERM, seconds)
            self.ending.next_stage()
            self.ranks.signal_groups(signal.SIGTERM)
        elif self.ending.current == signal.SIGTERM:
            self.ending.deadline = min(self.ending.deadline, time.monotonic() + seconds)

    def start_group(self, start: GroupStart) -> None:
        """Start this node's ranks of a start, if it has any; raises OSError, and kills what was started."""
        job, run = self.job, self.run
        self.close_group()
        self.order, self.is_reported, self.start, self.ending = None, False, start, None
        group_rank = start.find_group_rank(job.host)
        if group_rank is None:
            return
        attempt = run.first_attempt + start.restart
        try:
            for local_rank in range(start.nodes[group_rank].local_size):
                rank = start.count_ranks_before(group_rank) + local_rank
                own = make_rank_variables(start, group_rank, local_rank, self.environ)
                own["TORCHELASTIC_ERROR_FILE"] = str(name_error_file(run, rank, attempt))
                pid = self.start_rank({**self.environ, **own})
                self.group.append(RankProcess(rank, local_rank, attempt, pid, self.has_terminal))
                self.ranks.add(self.group[-1:])
        except OSError:
            self.ranks.signal_groups(signal.SIGKILL)
            raise
        if self.warm and not self.may_restart:
            self.warm.close()  # it takes memory
            self.warm = None

    def start_rank(self, environ: Mapping[str, str]) -> int:
        """Fork a rank from the warm process, or execute it, and return its PID; raises OSError.

        What it prints before the shim has opened its own logs goes to the agent's log.
        """
        empty = Descriptor(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        with empty, open_log(self.run.agent_log(self.job.host)) as log:
            streams = (0 if self.reads_stdin else empty, log, log)
            if self.warm:
                try:
                    return self.warm.fork_rank(self.job.program, environ, streams)
                except ExecNeededError as error:
                    logger.info(NOT_FORKED.format(error))
                self.warm.close()
                self.warm = None
            return spawn_rank(self.job.program, environ, streams)

    def close_group(self) -> None:
        """Kill what is left of the groups of ranks that have failed or were ended, and reap these."""
        for rank in self.list_failed():
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, signal.SIGKILL)
            reap(rank.pid)
        self.group = []

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return ranks that are not among `ranks` yet: there are none."""
        return ()

    def send_signal(self, number: int) -> None:
        """End the ranks by a signal, and start none after that. The next signals are the supervisor's."""
        self.stopped = True
        self.ranks.signal_groups(number)

    def kill(self) -> None:
        """Kill the ranks, and wait for none."""
        self.ranks.signal_groups(signal.SIGKILL)
        self.exitcode = -signal.SIGKILL

    def close(self) -> None:
        """Reap what has ended, and end the warm process."""
        self.close_group()
        if self.warm:
            self.warm.close()


@dataclass(slots=True)
class TorchrunAgent:
    """Runs torchrun, whose children are the ranks."""

    job: Job
    run: RunDir
    environ: Mapping[str, str]
    run_id: str
    """What torchrun calls --rdzv-id."""
    stdin: int | None = None

    label: ClassVar[str] = "torchrun"
    helpers: ClassVar[Collection[int]] = ()
    descriptors: ClassVar[Collection[int]] = ()
    ranks: RankSet = field(default_factory=RankSet)
    """All ranks that were found."""
    log_begin: int = 0
    """Bytes of the log that are of earlier starts."""
    process: "subprocess.Popen[bytes]" = field(init=False)
    reader: AppliedReader = field(init=False)

    @property
    def children(self) -> Collection[int]:
        """PID of torchrun: nobody else may reap it."""
        return (self.process.pid,)

    def begin(self) -> None:
        """Start torchrun in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone.

        Raises OSError. It ends with this process.
        """
        parent = os.getpid()
        self.reader = AppliedReader(self.run.path)
        with open_log(self.run.agent_log(self.job.host)) as descriptor:
            self.log_begin = os.fstat(descriptor).st_size
            self.process = subprocess.Popen(
                render_agent(self.job, self.run_id),
                env=dict(self.environ),
                stdin=self.stdin,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - there is one thread
            )

    def poll(self) -> int | None:
        """Return torchrun's exit code (-n for signal n); None while it runs."""
        return self.process.poll()

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return ranks that torchrun has started, new ones at least.

        Their records tell, of those too that came and went between two calls. If other nodes share the
        folder of records, the ranks are found among torchrun's children, and the records are read once, when
        torchrun has ended and there are too few.
        """
        agent, known, first = self.process.pid, len(self.ranks.known), self.run.first_attempt
        if self.job.cluster.max_nodes > 1 and (
            known >= len(self.job.plan.ranks) or Path(f"/proc/{agent}").exists()
        ):
            return list_ranks(agent, first)
        # There are records of other nodes and of earlier starts: their PIDs say nothing here.
        own = [r for r in self.reader.read_new() if (r.host, r.agent) == (self.job.host, agent)]
        return [RankProcess(r.rank, r.local_rank, r.attempt, r.pid, r.has_terminal) for r in own]

    def was_signalled(self) -> bool:
        """Tell whether torchrun has said, since this start, that it was sent a signal."""
        with contextlib.suppress(OSError), self.run.agent_log(self.job.host).open("rb") as file:
            file.seek(self.log_begin)
            return HEARD in file.read()
        return False

    def send_signal(self, number: int) -> None:
        """Send torchrun a signal, which it passes on to the ranks."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End torchrun at once."""
        self.process.kill()

    def close(self) -> None:
        """Its ranks have ended, or are ended by others."""


Agent = DirectAgent | TorchrunAgent


def make_agent(
    job: Job,
    run: RunDir,
    environ: Mapping[str, str],
    terminal: Terminal | None = None,
    take_warm: TakeWarm | None = None,
) -> Agent:
    """Return what starts a job's ranks on this machine, with variables of `build_agent_environ`.

    `take_warm` gives a warm process that was started before this, if there is one for the program.
    """
    environ = {**environ, **(terminal.variables if terminal else {})}
    if job.agent.kind != "direct":
        return TorchrunAgent(job, run, environ, run.id, subprocess.DEVNULL if shares_terminal(job) else None)
    restarts = choose_restarts(job.config, job.environ) or 0
    host, _, port = job.cluster.endpoint.rpartition(":")
    endpoint = (host.strip("[]"), int(port)) if job.config.rdzv_endpoint else None
    # What the plan gives to all ranks alike is there for what an import reads.
    pairs = [set(rank.env) for rank in job.plan.ranks]
    known = {**environ, **(dict(sorted(set.intersection(*pairs))) if pairs else {})}
    warm = take_warm(job.program, known) if take_warm else None
    return DirectAgent(
        job,
        run,
        environ,
        run.id,
        LocalControl(Coordinator((job.host,), 1, restarts, make_endpoint_finder(endpoint))),
        warm or start_warm(job.program, job.config.start, known),
        may_restart=restarts > 0,
        has_terminal=terminal is not None,
        reads_stdin=not shares_terminal(job),
    )


def spawn_rank(argv: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> int:
    """Execute the shim for a program's argv, in a session of its own, and return its PID; raises OSError.

    It ends with this process. Signals that `launch` passes on would end the shim: they are blocked until it
    has the program's own dispositions. Those that end a job are as torchrun's ranks have them: not ignored,
    even with nohup. Descriptors beyond stderr that this process was started with are not for them.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are what is wanted
        with contextlib.suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return os.posix_spawn(
        sys.executable,
        render_shim(argv),
        environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, stream, number) for number, stream in enumerate(streams)],
        setsid=True,
        setsigmask=(*mask, *FORWARDED),
        setsigdef=(*STOPPING, signal.SIGPIPE),
    )


def reap(pid: int) -> None:
    """Reap a rank that has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def make_rank_variables(
    group: GroupStart, group_rank: int, local_rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return torchrun's variables for a rank of the node with number `group_rank`: those of its start.

    `environ` is the agent's. From _start_workers of torch/distributed/elastic/agent/server/
    local_elastic_agent.py, launch_agent of launcher/api.py and config_from_args of distributed/run.py
    (torch 2.13, with a static rendezvous).
    """
    local_size = group.nodes[group_rank].local_size
    rank, world_size = str(group.count_ranks_before(group_rank) + local_rank), str(group.world_size)
    return {
        **{"RANK": rank, "LOCAL_RANK": str(local_rank), "ROLE_RANK": rank, "ROLE_NAME": "default"},
        **{"WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": str(local_size)},
        **{"GROUP_RANK": str(group_rank), "GROUP_WORLD_SIZE": str(len(group.nodes))},
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(group.restart),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **({"OMP_NUM_THREADS": "1"} if local_size > 1 and "OMP_NUM_THREADS" not in environ else {}),
    }


def open_log(log: Path) -> Descriptor:
    """Open an agent's log in a run directory, to append to it; raises OSError."""
    with open_below(log.parents[1], log.parent.name) as logs:
        return open_append(logs, log.name)
