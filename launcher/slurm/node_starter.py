"""What starts a node's ranks in a SLURM job, begun before the node is planned: torchrun, or this process."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from launcher.agent.rank_starter import RankStarter
from launcher.launch.agent import preload_agent
from launcher.launch.agent_process import Agent, AgentRequest
from launcher.launch.job import Job, choose_restarts, render_agent
from launcher.launch.monitor import RankMonitor
from launcher.launch.signal_channel import SignalChannel
from launcher.runs.run_directory import RunDir
from launcher.slurm.job_request import JobRequest
from launcher.slurm.slurm_environ import TaskIdentity

AgentMaker = Callable[[Job, RankMonitor, SignalChannel], Agent]
"""Gives the agent of a planned node."""


def prepare_agent_maker(
    request: JobRequest,
    program: Sequence[str],
    run: RunDir,
    task: TaskIdentity,
    variables: Mapping[str, str],
) -> AgentMaker:
    """Begin to import torch, while the node is planned, and return what gives the agent then.

    `variables` are the environment of the ranks, or of torchrun.
    """
    run_id, log = f"{run.id}-{task.step}-{task.attempt}", run.agent_log(task.host)
    if request.agent == "direct":
        from launcher.agent.rank_starter import ExecStarter
        from launcher.agent.warm_starter import choose_starter

        by_exec = ExecStarter(log, reads_stdin=False)
        starter = choose_starter(by_exec, program, request.config.start, variables)

        def make_own_agent(job: Job, _monitor: RankMonitor, channel: SignalChannel) -> Agent:
            return make_direct_agent(AgentRequest(job, run, variables), run_id, starter, channel)

        return make_own_agent
    preloaded = preload_agent(sys.executable, variables, log)
    from launcher.launch.torchrun_agent import TorchrunAgent  # while torchrun imports torch

    def make_agent(job: Job, monitor: RankMonitor, _channel: SignalChannel) -> Agent:
        command = render_agent(job, run_id)
        return TorchrunAgent(partial(preloaded.begin, command), log, monitor.find_ranks)

    return make_agent


def make_direct_agent(
    request: AgentRequest, run_id: str, starter: RankStarter, channel: SignalChannel
) -> Agent:
    """Return the agent that starts this node's ranks itself, as the job's first node orders."""
    from launcher.agent.direct_agent import DirectAgent
    from launcher.agent.endpoint import is_port_free
    from launcher.agent.local_agent import make_node_part
    from launcher.slurm.node_control import NodeControl

    job = request.job
    restarts = choose_restarts(job.config, job.environ) or 0
    may_restart = restarts > 0 or job.config.cluster.spares > 0
    if not may_restart:
        starter.expect_ranks(len(job.plan.ranks))
    return DirectAgent(
        make_node_part(request, restarts, run_id),
        starter,
        NodeControl(job.host, channel, may_restart, is_port_free),
    )
