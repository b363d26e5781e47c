"""Two nodes together: an all_reduce between all of their GPUs, or between a process on each."""

from dataclasses import dataclass

from launcher.programs.collective_work import GroupPlace, measure_all_reduce
from launcher.programs.cpu_parts import summarize_group
from launcher.programs.cpu_work import CpuState, name_cpu
from launcher.programs.gpu_parts import start_all
from launcher.programs.work_processes import WorkProcess
from launcher.programs.work_session import WorkSession


@dataclass(frozen=True, slots=True)
class PairPlace:
    """What a node has to know to meet the other one."""

    host: str
    port: int
    rank: int
    name: str
    """Of the pair: `n1-n2`."""


def work_in_pair(session: WorkSession, pair: PairPlace, gpus: int) -> None:
    """Report the bandwidth between this node and the other; both have to have as many GPUs."""
    processes = start_all(session, gpus) if gpus else [WorkProcess(CpuState(0, name_cpu(0), 0))]
    count, seconds = len(processes), session.durations.pair
    if gpus and count < gpus:
        return  # it is reported, and the other node would wait
    device = f"{processes[0].state.device}, {count} on each node"
    limit = max(1.0, session.left - 1.0)
    answers = session.ask(
        processes,
        measure_all_reduce,
        lambda number: (
            GroupPlace(
                pair.rank * count + number, 2 * count, pair.host, pair.port, seconds, limit, is_pair=True
            ),
        ),
        seconds,
        grace=limit,
    )
    session.report(summarize_group("pair", pair.name, device, answers))
