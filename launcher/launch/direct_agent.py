"""The agent in the supervisor's own process: starts a node's ranks, reaps them, and starts them again."""

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from launcher.launch.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.launch.endpoint import make_endpoint_finder
from launcher.launch.job import Job, choose_restarts, render_shim, shares_terminal
from launcher.launch.processes import RankProcess, RankSet
from launcher.launch.signals import FORWARDED, KILL_GRACE, STOPPING
from launcher.launch.torchrun_agent import open_log
from launcher.launch.warm.process import NOT_FORKED, WarmProcess, start_warm
from launcher.launch.warm.program import ExecNeededError
from launcher.protocol import LAUNCH_PARENT
from launcher.runs.node_records import name_error_file
from launcher.runs.run_directory import RunDir, closing_descriptor

logger = logging.getLogger(__name__)

FAILED = 1
"""Exit code of the agent, as of torchrun's, if ranks have failed or were ended; also that of a rank whose own
nobody knows, since another process has reaped it."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default of `--signals-to-handle`, which it leaves in its ranks' environment."""
TakeWarm = Callable[[Sequence[str], Mapping[str, str]], WarmProcess | None]
"""Gives the warm process that was started before for a program's argv and environment."""


class GroupControl(Protocol):
    """Is told what becomes of a node's ranks, and gives orders: start them so, or end."""

    def report_ready(self, local_size: int) -> None:
        """Take that this node can start so many ranks."""

    def report_failure(self, restart: int, rank: int, exitcode: int) -> None:
        """Take that a rank of start number `restart` has failed (-n for signal n)."""

    def report_end(self, restart: int) -> None:
        """Take that all ranks of this node have ended with 0."""

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        ...


@dataclass(slots=True)
class LocalControl:
    """Decides for the one node of a job."""

    coordinator: Coordinator
    orders: list[Order | None] = field(default_factory=list)

    def report_ready(self, local_size: int) -> None:
        """Order the first start."""
        self.orders.append(self.coordinator.note_ready(self.coordinator.hosts[0], local_size))

    def report_failure(self, restart: int, _rank: int, _exitcode: int) -> None:
        """Order another start, or the end."""
        self.orders.append(self.coordinator.note_failure(self.coordinator.hosts[0], restart))

    def report_end(self, restart: int) -> None:
        """Order the end."""
        self.orders.append(self.coordinator.note_end(self.coordinator.hosts[0], restart))

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        taken, self.orders = self.orders, []
        return [order for order in taken if order is not None]


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
    """All ranks that the supervisor has found."""
    start: GroupStart | None = None
    """The newest start."""
    group: list[RankProcess] = field(default_factory=list)
    """Its ranks on this node."""
    exits: dict[int, int] = field(default_factory=dict)
    """What they ended with, by PID: -n for signal n."""
    seen: int = 0
    """Deaths that were looked at."""
    kill_at: float = math.inf
    """Monotonic time of SIGKILL, once the ranks were asked to end."""
    killed: bool = False
    order: Order | None = None
    """What comes once the ranks have ended."""
    exitcode: int | None = None
    is_reported: bool = False
    """The control knows that all ranks of the newest start have ended with 0."""
    stopped: bool = False
    """A signal has ended the ranks, and nothing starts any more."""

    @property
    def children(self) -> Collection[int]:
        """PIDs of the ranks, and of the warm process: nobody else may reap them."""
        return {*(rank.pid for rank in self.group), *self.pids}

    @property
    def pids(self) -> Collection[int]:
        """PIDs of processes of its own, which it ends itself and which are no leftovers."""
        return (self.warm.process.pid,) if self.warm and self.warm.process.poll() is None else ()

    @property
    def alive(self) -> list[RankProcess]:
        """The ranks that have not ended."""
        return [rank for rank in self.group if rank.pid not in self.exits]

    @property
    def descriptors(self) -> Collection[int]:
        """The warm process's channel, if ranks wait for its imports."""
        is_waiting = isinstance(self.order, GroupStart) and not self.is_ready
        return (self.warm.channel.fileno(),) if is_waiting and self.warm else ()

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be started without waiting."""
        return self.warm is None or self.warm.is_ready

    def begin(self) -> None:
        """Start the ranks, if the node's part is to begin at once; raises OSError."""
        close_on_exec()
        self.control.report_ready(len(self.job.plan.ranks))
        for order in self.control.take_orders():
            self.order = order
        if isinstance(self.order, GroupStart) and self.is_ready:
            self.start_group(self.order)

    def poll(self) -> int | None:
        """Note what ranks ended with, take orders and carry them out; return the exit code in the end."""
        if self.exitcode is None:
            self.note_deaths()
            for order in () if self.stopped else self.control.take_orders():
                self.take_order(order)
            self.advance()
        return self.exitcode

    def note_deaths(self) -> None:
        """Tell the control what has become of the ranks, and end the others if one has failed.

        Those that ended with 0 are reaped. The others stay zombies until `close_group`, so that their process
        groups' numbers are not given away.
        """
        restart = self.start.restart if self.start else 0
        for death in self.ranks.deaths[self.seen :]:
            code = FAILED if death.exitcode is None else death.exitcode
            self.exits[death.process.pid] = code
            if code == 0:
                reap(death.process.pid)
            elif not self.stopped:
                self.end_group()
                self.control.report_failure(restart, death.process.rank, code)
        self.seen = len(self.ranks.deaths)
        if self.group and not self.is_reported and not self.alive and not any(self.exits.values()):
            self.is_reported = True
            self.control.report_end(restart)

    def take_order(self, order: Order) -> None:
        """End the ranks for an order. If another node has taken their place, they write nothing any more."""
        self.order, host = order, self.job.host
        if not self.group:
            return
        if isinstance(order, GroupStart) and order.find_group_rank(host) is None:
            logger.info(f"another node has taken the place of {host}: SIGKILL to its ranks")
            self.signal_group(signal.SIGKILL)
        self.end_group(order.patience if isinstance(order, GroupStart) else None)

    def end_group(self, patience: float | None = None) -> None:
        """Ask the ranks to end by SIGTERM, if that was not done yet; `patience` can shorten their time."""
        is_new = self.kill_at == math.inf
        seconds: float = self.job.config.torchrun.shutdown_timeout
        if patience is not None:
            seconds = min(patience, seconds)
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)
        if is_new:
            self.signal_group(signal.SIGTERM)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process groups of the living ranks."""
        for rank in self.alive:
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, number)

    def advance(self) -> None:
        """Carry the order out once the ranks have ended; kill those that take too long."""
        if self.alive:
            now = time.monotonic()
            if not self.killed and now >= self.kill_at:
                self.killed = True
                self.signal_group(signal.SIGKILL)
            if self.killed and now > self.kill_at + KILL_GRACE:
                names = ", ".join(str(rank.rank) for rank in self.alive)
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

    def start_group(self, start: GroupStart) -> None:
        """Start this node's ranks of a start, if it has any; raises OSError, and kills what was started."""
        job, run = self.job, self.run
        self.close_group()
        self.order, self.is_reported, self.start = None, False, start
        self.kill_at, self.killed = math.inf, False
        group_rank = start.find_group_rank(job.host)
        if group_rank is None:
            return
        attempt = run.first_attempt + start.restart
        more = {
            "TORCHELASTIC_MAX_RESTARTS": str(choose_restarts(job.config, job.environ) or 0),
            "TORCHELASTIC_RUN_ID": self.run_id,
            LAUNCH_PARENT: str(os.getpid()),
        }
        try:
            for local_rank in range(start.nodes[group_rank].local_size):
                rank = start.count_ranks_before(group_rank) + local_rank
                own = make_rank_variables(start, group_rank, local_rank, self.environ)
                own["TORCHELASTIC_ERROR_FILE"] = str(name_error_file(run, rank, attempt))
                pid = self.start_rank({**self.environ, **own, **more})
                self.group.append(RankProcess(rank, local_rank, attempt, pid, self.has_terminal))
        except OSError:
            self.signal_group(signal.SIGKILL)
            raise
        if self.warm and not self.may_restart:
            self.warm.close()  # it takes memory
            self.warm = None

    def start_rank(self, environ: Mapping[str, str]) -> int:
        """Fork a rank from the warm process, or execute it, and return its PID; raises OSError.

        What it prints before the shim has opened its own logs goes to the agent's log.
        """
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open_log(self.run.agent_log(self.job.host)))
            stdin = 0
            if not self.reads_stdin:
                null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                stdin = stack.enter_context(closing_descriptor(null))
            streams = (stdin, log, log)
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
        for rank in self.group:
            if self.exits.get(rank.pid):
                with contextlib.suppress(OSError):
                    os.killpg(rank.pid, signal.SIGKILL)
                reap(rank.pid)
        self.group, self.exits = [], {}

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return the ranks of the newest start."""
        return self.group

    def send_signal(self, number: int) -> None:
        """End the ranks by a signal, and start none after that. The next signals are the supervisor's."""
        self.stopped = True
        self.signal_group(number)

    def kill(self) -> None:
        """Kill the ranks, and wait for none."""
        self.signal_group(signal.SIGKILL)
        self.exitcode = -signal.SIGKILL

    def close(self) -> None:
        """Reap what has ended, and end the warm process."""
        self.close_group()
        if self.warm:
            self.warm.close()


def spawn_rank(argv: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> int:
    """Execute the shim for a program's argv, in a session of its own, and return its PID; raises OSError.

    It ends with this process. Signals that `launch` passes on would end the shim: they are blocked until it
    has the program's own dispositions. Those that end a job are as torchrun's ranks have them: not ignored,
    even with nohup.
    """
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


def close_on_exec() -> None:
    """Keep descriptors beyond stderr that this process was started with from its children."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are what is wanted
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)


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
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "WORLD_SIZE": world_size,
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(len(group.nodes)),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(group.restart),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **({"OMP_NUM_THREADS": "1"} if local_size > 1 and "OMP_NUM_THREADS" not in environ else {}),
    }


def make_local_agent(
    job: Job,
    run: RunDir,
    environ: Mapping[str, str],
    take_warm: TakeWarm | None = None,
    *,
    has_terminal: bool = False,
) -> DirectAgent:
    """Return the agent of a job's one node.

    `take_warm` gives a warm process that was started before this, if there is one for the program.
    """
    restarts = choose_restarts(job.config, job.environ) or 0
    host, _, port = job.cluster.endpoint.rpartition(":")
    endpoint = (host.strip("[]"), int(port)) if job.config.rdzv_endpoint else None
    # What the plan gives to all ranks alike is there for what an import reads.
    pairs = [set(rank.env) for rank in job.plan.ranks]
    known = {**environ, **(dict(sorted(set.intersection(*pairs))) if pairs else {})}
    warm = take_warm(job.program, known) if take_warm else None
    coordinator = Coordinator((job.host,), 1, restarts, make_endpoint_finder(endpoint))
    return DirectAgent(
        job,
        run,
        environ,
        run.id,
        LocalControl(coordinator),
        warm or start_warm(job.program, job.config.start, known),
        may_restart=restarts > 0,
        has_terminal=has_terminal,
        reads_stdin=not shares_terminal(job),
    )
