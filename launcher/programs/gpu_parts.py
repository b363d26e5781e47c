"""A node's work on its GPUs: all at once, each part within its time."""

from collections.abc import Sequence
from dataclasses import asdict

from launcher.programs.cpu_parts import reduce_in_node
from launcher.programs.gpu_work import (
    GpuIdentity,
    GpuState,
    count_torch_gpus,
    measure_copies,
    measure_gpu_matmul,
    measure_peer_copy,
    start_gpu,
)
from launcher.programs.work_processes import Answer, Measurement, WorkProcess
from launcher.programs.work_session import WorkSession, report_missing_results

START = 20.0
"""Seconds that CUDA may take to start."""
LEAST = 2.0
"""Seconds beyond its time, and that of the other GPUs, with which a GPU counts as hung."""


def find_gpus(session: WorkSession) -> int | None:
    """Return how many GPUs torch sees; None if CUDA does not answer, which is reported.

    A process of its own asks: this one has to stay without CUDA, since it forks.
    """
    asking = WorkProcess(None)
    (answer,) = session.ask([asking], count_torch_gpus, lambda _: (), 0.0, grace=START)
    asking.give_up("")
    if answer.value is None:
        session.report(report_missing_results("matmul", "node", answer))
        return None
    return int(answer.value)


def work_on_gpus(session: WorkSession, count: int) -> None:
    """Measure all GPUs that torch sees."""
    processes = start_all(session, count)
    multiply_and_copy(session, processes)
    live = [one for one in processes if not one.problem]
    if len(live) > 1:
        copy_to_peers(session, live)
        device = f"{live[0].state.device}, {len(live)} GPUs"
        session.report(reduce_in_node(session, live, device))


def start_all(session: WorkSession, count: int) -> list[WorkProcess]:
    """Start a process and a context for each GPU; report those that fail, and print which GPUs there are."""
    processes = [WorkProcess(GpuState(index)) for index in range(count)]
    answers = session.ask(processes, start_gpu, lambda _: (), 0.0, grace=START, least=LEAST)
    for one, answer in zip(processes, answers, strict=True):
        if isinstance(answer.value, GpuIdentity):
            one.state.device = answer.value.name
        elif not one.problem:
            one.give_up(answer.problem or answer.reason)
    identities = [answer.value for answer in answers if isinstance(answer.value, GpuIdentity)]
    session.print_line({"gpus": [asdict(one) for one in identities]})
    failed = zip(processes, answers, strict=True)
    session.report(
        *(
            report_missing_results("matmul", one.state.where, answer)
            for one, answer in failed
            if not isinstance(answer.value, GpuIdentity)
        )
    )
    return [one for one in processes if not one.problem]


def multiply_and_copy(session: WorkSession, processes: Sequence[WorkProcess]) -> None:
    """Report each GPU's matrix product and copies."""
    seconds = session.durations.matmul
    answers = session.ask(processes, measure_gpu_matmul, lambda _: (seconds,), seconds, least=LEAST)
    session.report(*collect_results(processes, answers, "matmul"))
    seconds = session.durations.copies
    answers = session.ask(processes, measure_copies, lambda _: (seconds,), seconds, least=LEAST)
    for one, answer in zip(processes, answers, strict=True):
        missing = report_missing_results("copy_to", one.state.where, answer, one.state.device)
        session.report(*(answer.value or (missing,)))


def copy_to_peers(session: WorkSession, processes: Sequence[WorkProcess]) -> None:
    """Report copies from each GPU to the next one, the last one's to the first."""
    seconds = session.durations.peers
    indices = [one.state.index for one in processes]
    peers = [*indices[1:], indices[0]]
    answers = session.ask(
        processes, measure_peer_copy, lambda number: (peers[number], seconds), seconds, least=LEAST
    )
    session.report(*collect_results(processes, answers, "peer_copy"))


def collect_results(
    processes: Sequence[WorkProcess], answers: Sequence[Answer], measure: str
) -> list[Measurement]:
    """Return the processes' results; a line for each that has none, too."""
    return [
        answer.value or report_missing_results(measure, one.state.where, answer, one.state.device)
        for one, answer in zip(processes, answers, strict=True)
    ]
