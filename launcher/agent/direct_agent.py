"""The agent in the supervisor's own process: starts the ranks of this node, and starts them anew."""

import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from launcher.agent.coordinator import JobEnd, Order
from launcher.agent.group import GroupStart, RankStart
from launcher.agent.group_control import GroupControl
from launcher.agent.rank_group import RankGroup, read_exit_code
from launcher.agent.rank_starter import RankStarter, close_on_exec
from launcher.launch.processes import RankProcess
from launcher.protocol import LAUNCH_PARENT

logger = logging.getLogger(__name__)

FAILED = 1
"""Exit code of the agent, as of torchrun's, if ranks have failed or were ended."""


@dataclass(frozen=True, slots=True)
class NodePart:
    """What the agent needs to know of its node and its job."""

    host: str
    local_size: int
    """Ranks of this node."""
    argv: tuple[str, ...]
    """The program's."""
    environ: Mapping[str, str]
    """Each rank's, before the agent's own variables."""
    make_variables: Callable[[GroupStart, int, int], dict[str, str]]
    """Gives the agent's variables for a rank, by start, number of the node, and local rank."""
    patience: float
    """Seconds that ranks have after SIGTERM."""
    first_attempt: int = 0
    has_terminal: bool = False


@dataclass(slots=True)
class DirectAgent:
    """Does what `control` orders: starts ranks by `starter`, reaps them, ends all if one has failed."""

    node: NodePart
    starter: RankStarter
    control: GroupControl
    label: str = "launch"
    gets_signals: bool = False
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
        self.control.report_ready(self.node.local_size)
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
        self.order = order
        if self.group is None:
            return
        if isinstance(order, GroupStart) and order.find_group_rank(self.node.host) is None:
            logger.info(f"another node has taken the place of {self.node.host}: SIGKILL to its ranks")
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
        if self.group:
            self.group.close()
        self.order, self.is_reported = None, False
        group_rank = start.find_group_rank(self.node.host)
        if group_rank is None:
            self.group = None
            return
        self.group = RankGroup(start, self.node.patience)
        try:
            for local_rank in range(start.nodes[group_rank].local_size):
                self.start_rank(self.group, group_rank, local_rank)
        except OSError:
            self.group.send_signal(signal.SIGKILL)
            raise

    def start_rank(self, group: RankGroup, group_rank: int, local_rank: int) -> None:
        """Start one rank; raises OSError."""
        node, start = self.node, group.start
        parent = {LAUNCH_PARENT: str(os.getpid())}
        environ = {**node.environ, **node.make_variables(start, group_rank, local_rank), **parent}
        pid = self.starter.start_rank(RankStart(local_rank, node.argv, environ))
        rank = start.count_ranks_before(group_rank) + local_rank
        attempt = node.first_attempt + start.restart
        group.ranks.append(RankProcess(rank, local_rank, attempt, pid, node.has_terminal))

    def list_ranks(self) -> list[RankProcess]:
        """Return the ranks of the newest start."""
        return list(self.group.ranks) if self.group else []

    def read_exit(self, pid: int) -> int | None:
        """Return what a rank has just ended with, without reaping it; None if unknown."""
        return self.exits[pid] if pid in self.exits else read_exit_code(pid)

    def read_exits(self) -> Mapping[int, int]:
        """Return what the ranks of all starts ended with."""
        return self.exits

    def was_signalled(self) -> bool:
        """Tell that no signal comes to the agent past the supervisor, in whose process it is."""
        return False

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
