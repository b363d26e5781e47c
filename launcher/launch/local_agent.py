"""The agent of a job on this machine alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.launch.agent import AgentRequest
from launcher.launch.coordinator import Coordinator, Order
from launcher.launch.direct_agent import DirectAgent
from launcher.launch.endpoint import make_endpoint_finder
from launcher.launch.job import choose_restarts, shares_terminal
from launcher.launch.rank_starter import RankStarter
from launcher.launch.warm.warm_process import WarmProcess, WarmStarter, choose_starter

TakeWarm = Callable[[Sequence[str], Mapping[str, str]], WarmProcess | None]
"""Gives the warm process for a program's argv and environment."""


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


def make_local_agent(request: AgentRequest, take_warm: TakeWarm | None = None) -> DirectAgent:
    """Return the agent of a job's one node.

    `take_warm` gives a warm process that was started before this, if there is one for the program.
    """
    job = request.job
    restarts = choose_restarts(job.config, job.environ) or 0
    host, _, port = job.cluster.endpoint.rpartition(":")
    endpoint = (host.strip("[]"), int(port)) if job.config.rdzv_endpoint else None
    by_exec = RankStarter(request.run.agent_log(job.host), reads_stdin=not shares_terminal(job))
    # What the plan gives to all ranks alike is there for what an import reads.
    pairs = [set(rank.env) for rank in job.plan.ranks]
    environ = {**request.environ, **(dict(sorted(set.intersection(*pairs))) if pairs else {})}
    if early := take_warm(job.program, environ) if take_warm else None:
        starter: RankStarter = WarmStarter(by_exec.log, by_exec.reads_stdin, warm=early)
    else:
        starter = choose_starter(by_exec, job.program, job.config.start, environ)
    if not restarts:
        starter.expect_ranks(len(job.plan.ranks))
    coordinator = Coordinator((job.host,), 1, restarts, make_endpoint_finder(endpoint))
    return DirectAgent(request, request.run.id, starter, LocalControl(coordinator))
