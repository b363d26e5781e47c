"""A node's work on its CPUs: each physical core, memory by NUMA node, and gloo among some processes."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace

from launcher.programs.collective_work import GroupPlace, measure_all_reduce, open_store
from launcher.programs.cpu_contention import describe_contention, read_cpu_use
from launcher.programs.cpu_work import (
    CpuState,
    choose_buffer,
    format_cpus,
    group_by_numa_node,
    list_work_cores,
    measure_cpu_matmul,
    measure_memory_bandwidth,
    name_cpu,
    pin_to_cpu,
)
from launcher.programs.work_processes import Answer, Measurement, WorkProcess
from launcher.programs.work_session import NO_TIME, WorkSession, report_missing_results

SUSPECT = 0.85
"""Share of the other CPUs' median below which all are measured again: noise passes, a busy process stays."""
MEMBERS = 4
"""CPUs that take part in the node's all_reduce."""


def work_on_cpus(session: WorkSession) -> None:
    """Measure the CPUs that this process may use."""
    cores = list_work_cores()
    buffer = choose_buffer(cores)
    processes = [WorkProcess(CpuState(cpu, name_cpu(cpu), buffer)) for cpu in cores]
    pinned = session.ask(processes, pin_to_cpu, lambda _: (), 0.0)
    for one, answer in zip(processes, pinned, strict=True):
        if answer.problem and not one.problem:
            one.give_up(answer.problem)
    session.report(*multiply_on_all(session, processes))
    session.report(*copy_in_memory(session, processes))
    session.report(reduce_among_some(session, processes))


def multiply_on_all(session: WorkSession, processes: Sequence[WorkProcess]) -> list[Measurement]:
    """Return each core's matrix product: the best of all times, again while one is slow beside the others."""
    found = multiply_once(session, processes, session.durations.matmul)
    for _ in range(session.durations.repeats):
        later = session.durations.memory + session.durations.all_reduce + 2.0
        if not list_slow(found) or session.left < session.durations.again + later:
            break
        again = multiply_once(session, processes, session.durations.again)
        found = [choose_better(*pair) for pair in zip(found, again, strict=True)]
    slow = list_slow(found)
    return [one if number in slow else replace(one, detail="") for number, one in enumerate(found)]


def multiply_once(
    session: WorkSession, processes: Sequence[WorkProcess], seconds: float
) -> list[Measurement]:
    """Return each core's matrix product, with who else used the core."""
    before = read_cpu_use()
    answers = session.ask(processes, measure_cpu_matmul, lambda _: (seconds,), seconds)
    after = read_cpu_use()
    own = {os.getpid(), *(one.process.pid or 0 for one in processes)}
    found = []
    for one, answer in zip(processes, answers, strict=True):
        state: CpuState = one.state
        result = answer.value or report_missing_results("matmul", state.where, answer, state.device)
        detail = describe_contention(state.cpu, before, after, seconds, own)
        found.append(replace(result, detail=detail))
    return found


def list_slow(found: Sequence[Measurement]) -> set[int]:
    """Return the numbers of those below SUSPECT of the others' median."""
    slow = set()
    for number, one in enumerate(found):
        others = [other.value for other in found if other is not one and other.value is not None]
        if one.value is not None and others and one.value < SUSPECT * statistics.median(others):
            slow.add(number)
    return slow


def choose_better(first: Measurement, second: Measurement) -> Measurement:
    """Return the better of a core's results; what failed stays so, and the latest company is told."""
    if first.value is None or second.value is None:
        return second if first.value is not None and second.problem else first
    best = max(first, second, key=lambda one: one.value or 0.0)
    return replace(best, detail=second.detail or best.detail)


def copy_in_memory(session: WorkSession, processes: Sequence[WorkProcess]) -> list[Measurement]:
    """Return the bandwidth of each NUMA node's memory: the sum of its cores, all copying at once."""
    seconds = session.durations.memory
    answers = session.ask(processes, measure_memory_bandwidth, lambda _: (seconds,), seconds)
    by_cpu = {one.state.cpu: (one, answer) for one, answer in zip(processes, answers, strict=True)}
    found = []
    for cores in group_by_numa_node(sorted(by_cpu)):
        where, device = f"CPU {format_cpus(cores)}", processes[0].state.device
        group = [by_cpu[core][1] for core in cores]
        missing = [answer for answer in group if answer.value is None]
        total = sum(answer.value or 0.0 for answer in group) / 1e9
        result = Measurement("memory", where, total, "GB/s", device=f"{device}, {len(cores)} cores")
        found.append(report_missing_results("memory", where, missing[0], device) if missing else result)
    return found


def reduce_among_some(session: WorkSession, processes: Sequence[WorkProcess]) -> Measurement:
    """Return the bandwidth of gloo's all_reduce among cores that are spread over the node."""
    live = [one for one in processes if not one.problem]
    count = min(MEMBERS, len(live))
    if count < 2:
        return Measurement("all_reduce", "node", reason="it takes two CPUs")
    chosen = [live[number * len(live) // count] for number in range(count)]
    device = f"{chosen[0].state.device}, {count} processes"
    return reduce_in_node(session, chosen, device)


def reduce_in_node(session: WorkSession, chosen: Sequence[WorkProcess], device: str) -> Measurement:
    """Return the bandwidth of an all_reduce among these processes."""
    count, seconds = len(chosen), session.durations.all_reduce
    (opened,) = session.ask(chosen[:1], open_store, lambda _: (count,), 0.0)
    if opened.value is None:
        return report_missing_results("all_reduce", "node", opened, device)
    limit = max(1.0, session.left)
    answers = session.ask(
        chosen,
        measure_all_reduce,
        lambda rank: (GroupPlace(rank, count, "127.0.0.1", opened.value, seconds, limit),),
        seconds,
        grace=max(5.0, limit / 2),
    )
    return summarize_group("all_reduce", "node", device, answers)


def summarize_group(measure: str, where: str, device: str, answers: Sequence[Answer]) -> Measurement:
    """Return a group's result: the first failure that is more than being left by another, else the value."""
    missing = [answer for answer in answers if answer.value is None]
    if missing:
        worst = min(missing, key=lambda answer: (answer.is_late, answer.reason == NO_TIME))
        return report_missing_results(measure, where, worst, device)
    return Measurement(measure, where, min(answer.value for answer in answers), "GB/s", device=device)
