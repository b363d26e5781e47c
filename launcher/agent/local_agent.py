"""The agent of a job on this machine alone."""

from collections.abc import Callable, Mapping, Sequence

from launcher.agent.coordinator import Coordinator
from launcher.agent.direct_agent import DirectAgent, NodePart
from launcher.agent.endpoint import make_endpoint_finder
from launcher.agent.group import GroupStart
from launcher.agent.group_control import LocalControl
from launcher.agent.rank_starter import ExecStarter, RankStarter
from launcher.agent.rank_variables import RankSettings, make_rank_variables
from launcher.agent.warm_process import WarmProcess, WarmStarter, choose_starter
from launcher.launch.agent_process import AgentRequest
from launcher.launch.job import Job, choose_restarts, shares_terminal
from launcher.plan.model import Plan
from launcher.runs.node_records import name_error_file

TakeWarm = Callable[[Sequence[str], Mapping[str, str]], WarmProcess | None]
"""Gives the warm process for a program's argv and environment."""


def make_local_agent(request: AgentRequest, take_warm: TakeWarm | None = None) -> DirectAgent:
    """Return the agent of a job's one node.

    `take_warm` gives a warm process that was started before this, if there is one for the program.
    """
    job = request.job
    restarts = choose_restarts(job.config, job.environ) or 0
    coordinator = Coordinator((job.host,), 1, restarts, make_endpoint_finder(read_endpoint(job)))
    starter = make_starter(request, take_warm)
    if not restarts:
        starter.expect_ranks(len(job.plan.ranks))
    part = make_node_part(request, restarts, request.run.id)
    return DirectAgent(part, starter, LocalControl(coordinator, job.host))


def make_starter(request: AgentRequest, take_warm: TakeWarm | None) -> RankStarter:
    """Return what starts the ranks: forks of the warm process that was started before, if there is one."""
    job = request.job
    by_exec = ExecStarter(request.run.agent_log(job.host), reads_stdin=not shares_terminal(job))
    environ = {**request.environ, **find_common_env(job.plan)}
    early = take_warm(job.program, environ) if take_warm else None
    if early:
        return WarmStarter(by_exec, early)
    return choose_starter(by_exec, job.program, job.config.start, environ)


def find_common_env(plan: Plan) -> dict[str, str]:
    """Return the variables that the plan gives to all ranks alike, for what an import reads."""
    pairs = [set(rank.env) for rank in plan.ranks]
    return dict(sorted(set.intersection(*pairs))) if pairs else {}


def make_node_part(request: AgentRequest, max_restarts: int, run_id: str) -> NodePart:
    """Return what the agent of a node needs to know of its job; `run_id` is what torchrun calls --rdzv-id."""
    job, run = request.job, request.run
    settings = RankSettings(run_id, max_restarts, request.environ)

    def make_variables(start: GroupStart, group_rank: int, local_rank: int) -> dict[str, str]:
        rank, attempt = start.count_ranks_before(group_rank) + local_rank, run.first_attempt + start.restart
        error_file = str(name_error_file(run, rank, attempt))
        return make_rank_variables(start, group_rank, local_rank, settings, error_file)

    return NodePart(
        host=job.host,
        local_size=len(job.plan.ranks),
        argv=job.program,
        environ=request.environ,
        make_variables=make_variables,
        patience=job.config.torchrun.shutdown_timeout,
        first_attempt=run.first_attempt,
        has_terminal=request.has_terminal,
    )


def read_endpoint(job: Job) -> tuple[str, int] | None:
    """Return the host and the port of `rdzv_endpoint`; None if it is not set."""
    host, _, port = job.cluster.endpoint.rpartition(":")
    return (host.strip("[]"), int(port)) if job.config.rdzv_endpoint else None
