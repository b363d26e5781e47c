"""The agent in the supervisor's own process: starts a node's ranks, reaps them, and starts them again."""

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from launcher.agent.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.agent.rank_starter import RankStart, RankStarter, close_on_exec
from launcher.launch.agent_process import Agent, AgentRequest
from launcher.launch.job import choose_restarts
from launcher.launch.processes import RankProcess
from launcher.launch.signals import KILL_GRACE
from launcher.protocol import LAUNCH_PARENT
from launcher.runs.node_records import name_error_file

logger = logging.getLogger(__name__)

FAILED = 1
"""Exit code of the agent, as of torchrun's, if ranks have failed or were ended."""
LOST = 1
"""Exit code of a rank that is gone, and whose own nobody knows: another process has reaped it."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default of `--signals-to-handle`, which it leaves in its ranks' environment."""


class GroupControl(Protocol):
    """Is told what becomes of a node's ranks, and gives orders: start them so, or end."""

    def report_ready(self, local_size: int) -> None:
        """Take that this node can start so many ranks."""
        ...

    def report_failure(self, restart: int, rank: int, exitcode: int) -> None:
        """Take that a rank of start number `restart` has failed (-n for signal n)."""
        ...

    def report_end(self, restart: int) -> None:
        """Take that all ranks of this node have ended with 0."""
        ...

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
class RankGroup:
    """The processes of one start on this node."""

    start: GroupStart
    patience: float
    """Seconds from SIGTERM to SIGKILL."""
    ranks: list[RankProcess] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)
    """What ranks ended with, by PID: -n for signal n."""
    reaped: set[int] = field(default_factory=set)
    kill_at: float = math.inf
    """Monotonic time of SIGKILL, once the ranks were asked to end."""
    killed: bool = False

    @property
    def alive(self) -> list[RankProcess]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.pid not in self.exits]

    @property
    def is_stuck(self) -> bool:
        """Whether ranks live on after SIGKILL: they wait in the kernel, which may take for ever."""
        return self.killed and time.monotonic() > self.kill_at + KILL_GRACE

    def note_exits(self) -> Iterator[RankProcess]:
        """Give the ranks that have ended since the last call, and reap those that ended with 0.

        The others stay zombies until `close`, so that their process groups' numbers are not given away.
        """
        for rank in self.alive:
            if (code := read_exit_code(rank.pid)) is None:
                continue
            self.exits[rank.pid] = code
            if code == 0:
                self.reap(rank)
            yield rank

    def stop(self, patience: float | None = None) -> None:
        """Ask the ranks to end by SIGTERM, if that was not done yet; `patience` can shorten their time."""
        is_new = self.kill_at == math.inf
        seconds = self.patience if patience is None else min(patience, self.patience)
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)
        if is_new:
            self.send_signal(signal.SIGTERM)

    def kill_late(self) -> None:
        """Kill ranks whose time to end is over."""
        if not self.killed and time.monotonic() >= self.kill_at:
            self.killed = True
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process groups of the living ranks."""
        for rank in self.alive:
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, number)

    def close(self) -> None:
        """Kill what is left of the groups of ranks that have failed or were ended, and reap these."""
        for rank in self.ranks:
            if rank.pid in self.exits and rank.pid not in self.reaped:
                with contextlib.suppress(OSError):
                    os.killpg(rank.pid, signal.SIGKILL)
                self.reap(rank)

    def reap(self, rank: RankProcess) -> None:
        """Reap a rank that has ended."""
        self.reaped.add(rank.pid)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG)


@dataclass(slots=True)
class DirectAgent(Agent):
    """Does what `control` orders: starts ranks by `starter`, reaps them, ends all if one has failed."""

    request: AgentRequest
    run_id: str
    """`TORCHELASTIC_RUN_ID`, what torchrun calls --rdzv-id."""
    starter: RankStarter
    control: GroupControl
    group: RankGroup | None = None
    """The newest start."""
    order: Order | None = None
    """What comes once the ranks have ended."""
    exits: dict[int, int] = field(default_factory=dict)
    """What ranks ended with, over all starts."""
    exitcode: int | None = None
    is_reported: bool = False
    """The control knows that all ranks of the newest start have ended with 0."""
    stopped: bool = False
    """A signal has ended the ranks, and nothing starts any more."""

    @property
    def pids(self) -> Collection[int]:
        """PIDs of the starter's own processes."""
        return self.starter.pids

    @property
    def children(self) -> Collection[int]:
        """PIDs of the ranks."""
        return {rank.pid for rank in self.group.ranks} if self.group else set()

    @property
    def descriptors(self) -> Collection[int]:
        """What the starter waits for, if ranks are to be started."""
        return self.starter.descriptors if isinstance(self.order, GroupStart) else ()

    def begin(self) -> None:
        """Start the ranks, if the node's part is to begin at once; raises OSError."""
        close_on_exec()
        self.control.report_ready(len(self.request.job.plan.ranks))
        for order in self.control.take_orders():
            self.order = order
        if isinstance(self.order, GroupStart) and self.starter.is_ready:
            self.start_group(self.order)

    def poll(self) -> int | None:
        """Note what ranks ended with, take orders and carry them out; return the exit code in the end."""
        if self.exitcode is None:
            self.note_exits()
            for order in () if self.stopped else self.control.take_orders():
                self.take_order(order)
            self.advance()
        return self.exitcode

    def take_order(self, order: Order) -> None:
        """End the ranks for an order. If another node has taken their place, they write nothing any more."""
        self.order, host = order, self.request.job.host
        if self.group is None:
            return
        if isinstance(order, GroupStart) and order.find_group_rank(host) is None:
            logger.info(f"another node has taken the place of {host}: SIGKILL to its ranks")
            self.group.send_signal(signal.SIGKILL)
        self.group.stop(order.patience if isinstance(order, GroupStart) else None)

    def note_exits(self) -> None:
        """Tell the control what has become of the ranks, and end the others if one has failed."""
        group = self.group
        if group is None or self.is_reported:
            return
        for rank in group.note_exits():
            code = self.exits[rank.pid] = group.exits[rank.pid]
            if code and not self.stopped:
                group.stop()
                self.control.report_failure(group.start.restart, rank.rank, code)
        if not group.alive and not any(group.exits.values()):
            self.is_reported = True
            self.control.report_end(group.start.restart)

    def advance(self) -> None:
        """Carry the order out once the ranks have ended; kill those that take too long."""
        group = self.group
        if group and group.alive:
            group.kill_late()
            if group.is_stuck:
                names = ", ".join(str(rank.rank) for rank in group.alive)
                logger.info(f"not ended by SIGKILL, since they wait in the kernel: rank {names}")
                self.exitcode = FAILED
            return
        if isinstance(self.order, GroupStart) and not self.stopped:
            if not self.starter.is_ready:
                return
            try:
                self.start_group(self.order)
            except OSError as error:
                logger.info(f"the ranks could not be started ({error})")
                self.exitcode = FAILED
        elif self.order or self.stopped:
            self.exitcode = FAILED if self.stopped or self.order == JobEnd(failed=True) else 0

    def start_group(self, start: GroupStart) -> None:
        """Start this node's ranks of a start, if it has any; raises OSError, and kills what was started."""
        job, run = self.request.job, self.request.run
        if self.group:
            self.group.close()
        self.order, self.is_reported, self.group = None, False, None
        group_rank = start.find_group_rank(job.host)
        if group_rank is None:
            return
        self.group = RankGroup(start, job.config.torchrun.shutdown_timeout)
        max_restarts = choose_restarts(job.config, job.environ) or 0
        attempt = run.first_attempt + start.restart
        try:
            for local_rank in range(start.nodes[group_rank].local_size):
                rank = start.count_ranks_before(group_rank) + local_rank
                own = make_rank_variables(start, group_rank, local_rank, self.request.environ)
                more = {
                    "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
                    "TORCHELASTIC_RUN_ID": self.run_id,
                    "TORCHELASTIC_ERROR_FILE": str(name_error_file(run, rank, attempt)),
                    LAUNCH_PARENT: str(os.getpid()),
                }
                environ = {**self.request.environ, **own, **more}
                pid = self.starter.start_rank(RankStart(local_rank, job.program, environ))
                has_terminal = self.request.has_terminal
                self.group.ranks.append(RankProcess(rank, local_rank, attempt, pid, has_terminal))
        except OSError:
            self.group.send_signal(signal.SIGKILL)
            raise

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return the ranks of the newest start."""
        return list(self.group.ranks) if self.group else []

    def read_exit(self, pid: int) -> int | None:
        """Return what a rank has just ended with, without reaping it; None if unknown."""
        return self.exits[pid] if pid in self.exits else read_exit_code(pid)

    def read_exits(self) -> Mapping[int, int]:
        """Return what the ranks of all starts ended with."""
        return self.exits

    def send_signal(self, number: int) -> None:
        """End the ranks by a signal, and start none after that. The next signals are the supervisor's."""
        self.stopped = True
        if self.group:
            self.group.send_signal(number)

    def kill(self) -> None:
        """Kill the ranks, and wait for none."""
        if self.group:
            self.group.send_signal(signal.SIGKILL)
        self.exitcode = -signal.SIGKILL

    def close(self) -> None:
        """Reap what has ended, and end the starter's processes."""
        if self.group:
            for rank in self.group.note_exits():
                self.exits[rank.pid] = self.group.exits[rank.pid]
            self.group.close()
        self.starter.close()


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


def read_exit_code(pid: int) -> int | None:
    """Return what a child ended with, -n for signal n, without reaping it; None while it lives."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # not yet adopted, or reaped by somebody else
        return None if os.path.exists(f"/proc/{pid}") else LOST  # noqa: PTH110 - no pathlib where it is asked often
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
