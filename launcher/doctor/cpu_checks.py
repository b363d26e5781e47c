"""CPUs: the job's cpuset against NUMA nodes and cores, whether there are enough of them, and their clocks."""

import re
from collections.abc import Iterator

from launcher.cpulist import format_cpulist
from launcher.doctor.facts import Clock
from launcher.doctor.finding import Case, Finding, report_ok, report_unchecked
from launcher.plan.rules import count_node_cores
from launcher.text import count_things

CPUS = "CPUs"
CLOCKS = "clocks"
HARDWARE = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose `powersave` is dynamic: the processor chooses, by the energy preference."""
SPARING = ("power", "balance_power")
"""Energy preferences that hold clocks down."""
LOWEST = "with this driver, powersave is always the lowest frequency"
SLOW = "clocks rise after the load has come: launching kernels and loading data happen in short bursts"
EAGER = "sudo cpupower frequency-set -g performance"
PREFER = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference"


def judge_cpuset(case: Case) -> Iterator[Finding]:
    """The CPUs and memory nodes that the job may use."""
    machine = case.machine
    found = [*find_uncovered(case), *find_cut_cores(case), *find_barred_memory(case)]
    yield from found
    if not found:
        nodes = {cpu.node for cpu in machine.cpus if cpu.id in machine.allowed_cpus}
        usable, every = len(machine.allowed_cpus), len(machine.cpus)
        share = f"{'all' if usable == every else f'{usable} of'} {count_things(every, 'CPU')}"
        yield report_ok(CPUS, f"{share} on {count_things(len(nodes), 'NUMA node')}, whole cores, with memory")
    if spared := machine.isolated & machine.allowed_cpus:
        yield Finding(
            "note",
            CPUS,
            f"CPUs {format_cpulist(spared)} are isolated (isolcpus)",
            "the kernel does not balance load over them, so ranks get the others",
            "boot without isolcpus if they are meant for training",
        )


def find_uncovered(case: Case) -> Iterator[Finding]:
    """NUMA nodes with a GPU whose CPUs the job may not use, or may use in part."""
    machine = case.machine
    for node in sorted({gpu.node for gpu in case.gpus if gpu.node is not None}):
        cpus = frozenset(cpu.id for cpu in machine.cpus if cpu.node == node)
        lost = cpus - machine.allowed_cpus
        told = any(format_cpulist(cpus) in find_cpulists(warning) for warning in case.plan.warnings)
        if not lost or (lost == cpus and told):
            continue
        gpus = ", ".join(str(gpu.index) for gpu in case.gpus if gpu.node == node)
        yield Finding(
            "warning" if lost == cpus else "note",
            CPUS,
            f"{len(cpus) - len(lost)} of {len(cpus)} CPUs of NUMA node {node}, next to GPU {gpus}, are in "
            f"the job's cpuset; CPUs {format_cpulist(lost)} are not",
            "ranks get what is left there, or run on another node and reach their GPU across it",
            "ask for more CPUs (SLURM: --cpus-per-task or --exclusive; docker: --cpuset-cpus)",
        )


def find_cpulists(text: str) -> set[str]:
    """Return the CPU lists in a sentence, each as a whole."""
    return {word.strip(",-") for word in re.findall(r"[\d,-]+", text)}


def find_cut_cores(case: Case) -> Iterator[Finding]:
    """Cores of which the job may use some threads; one thread of every core is somebody's choice."""
    allowed = case.machine.allowed_cpus
    cores: dict[int, set[int]] = {}
    for cpu in case.machine.cpus:
        cores.setdefault(cpu.core, set()).add(cpu.id)
    cut = [pus for pus in cores.values() if pus & allowed and pus - allowed]
    whole = [pus for pus in cores.values() if len(pus) > 1 and pus <= allowed]
    if not cut:
        return
    others = frozenset(cpu for pus in cut for cpu in pus - allowed)
    yield Finding(
        "warning" if whole else "note",
        CPUS,
        f"{count_things(len(cut), 'core')} cut in two: the other hardware threads, CPUs "
        f"{format_cpulist(others)}, are not this job's",
        "another job there would share the cores' execution units and caches",
        "ask for whole cores (SLURM: --hint=nomultithread or --exclusive; docker: --cpuset-cpus)",
    )


def find_barred_memory(case: Case) -> Iterator[Finding]:
    """NUMA nodes whose CPUs the job may use, but not their memory."""
    machine = case.machine
    with_cpus = {cpu.node for cpu in machine.cpus if cpu.id in machine.allowed_cpus}
    barred = {node.id for node in machine.nodes if node.id in with_cpus and node.normal and node.memory_kib}
    if barred := barred - machine.allowed_mems:
        yield Finding(
            "warning",
            CPUS,
            f"the job may use CPUs of NUMA node {format_cpulist(barred)}, but memory of "
            f"{format_cpulist(machine.allowed_mems) or 'none'} alone",
            "ranks there take all their memory from another node",
            f"add nodes {format_cpulist(barred)} to cpuset.mems (docker: --cpuset-mems)",
        )


def judge_count(case: Case) -> Iterator[Finding]:
    """Cores against the processes that will be busy, and the cgroup's CPU quota."""
    machine, ranks = case.machine, len(case.plan.ranks)
    cores = len({cpu.core for cpu in machine.cpus if cpu.id in machine.allowed_cpus})
    needed = count_node_cores(ranks, case.num_workers)
    workers = count_things(ranks * case.num_workers, "DataLoader worker")
    said = f"{count_things(cores, 'core')} for {count_things(ranks, 'rank')} and {workers}, {needed} wanted"
    if cores >= needed:
        yield report_ok(CPUS, said)
    else:
        yield Finding(
            "warning" if case.gpus else "note",
            CPUS,
            said,
            "one core for each rank, one for each worker, up to four for the system: with fewer, processes "
            "wait for one another while GPUs idle",
            f"ask for {needed} cores, or set dataloader.num_workers to fewer",
        )
    yield judge_quota(case)


def judge_quota(case: Case) -> Finding:
    """The cgroup's CPU time against its CPUs.

    Source: the kernel's Documentation/scheduler/sched-bwc.rst.
    """
    quota, usable = case.machine.limits.cpus, len(case.machine.allowed_cpus)
    if quota is None:
        return report_ok(CPUS, "no CPU quota found")
    if quota >= usable:
        return report_ok(CPUS, f"CPU quota of {quota:g} for {usable} CPUs")
    return Finding(
        "warning",
        CPUS,
        f"the cgroup's CPU quota is {quota:g} CPUs, for {usable} CPUs in the cpuset",
        "once the quota of a period is used, every thread of the job stops until the next one",
        f"raise it to {usable} (Kubernetes: limits.cpu; docker: --cpus), or narrow the cpuset to that",
    )


def judge_clocks(case: Case) -> Iterator[Finding]:
    """The governors of the allowed CPUs."""
    if not case.health.clocks:
        yield report_unchecked(case, CLOCKS, "frequency", "there is no cpufreq (as in most virtual machines)")
    for clock in case.health.clocks:
        yield judge_clock(clock)


def judge_clock(clock: Clock) -> Finding:
    """CPUs of one driver, governor and preference."""
    choice = f", {clock.preference}" if clock.preference else ""
    said = (
        f"{clock.governor} ({clock.driver or 'driver unknown'}{choice}) on CPUs {format_cpulist(clock.cpus)}"
    )
    if clock.governor == "performance":
        return report_ok(CLOCKS, said)
    if clock.driver in HARDWARE and clock.governor == "powersave":
        if clock.preference == "performance":
            return report_ok(CLOCKS, said)
        return Finding("warning" if clock.preference in SPARING else "note", CLOCKS, said, SLOW, PREFER)
    if clock.governor == "userspace":
        why = "clocks stay where somebody has put them"
        return Finding("note", CLOCKS, said, why, f"cpupower frequency-info shows where; {EAGER}")
    why = LOWEST if clock.governor == "powersave" else SLOW
    return Finding("warning", CLOCKS, said, why, EAGER)
