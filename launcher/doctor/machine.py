"""One machine: what the job may use of it, its settings, the plan tried on the spot, and the last run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from launcher.doctor.job import compare_paths
from launcher.doctor.model import Facts, Finding, Health, Wanted, found, or_ok, read_tables
from launcher.doctor.node import (
    check_free_memory,
    check_gpus,
    check_leftovers,
    check_load,
    check_needed_paths,
    check_shm,
    check_unread,
    check_versions,
)
from launcher.plan.model import Gpu, Machine, Plan
from launcher.plan.resources import count_node_cores
from launcher.plan.variables import OFF_VALUES
from launcher.runs.records import RunRecords, compare_rank

CAP_IPC_LOCK, CAP_SYS_RESOURCE = 14, 24
"""Capabilities that lift RLIMIT_MEMLOCK and RLIMIT_NPROC (capabilities(7))."""
FILES_LEAST = 4096
"""Descriptors that leave room for batches of a few hundred tensors: four times the usual default."""
THREADS_EACH = 64
"""Threads of one process, generously: OpenMP's, autograd's, NCCL's, the pin-memory thread's."""
SWAPPED = 64 << 10
"""Swap in KiB that any machine may have in use."""
HARDWARE = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose `powersave` is dynamic: the processor chooses, by the energy preference."""
SPARING = ("power", "balance_power")
"""Energy preferences that hold clocks down."""
RUNNING = {
    True: "irqbalance runs",
    False: "irqbalance does not run",
    None: "irqbalance cannot be seen from here",
}


@dataclass(frozen=True, slots=True)
class BindingTrial:
    """What became of the plan's placements when processes tried them just now."""

    tried: int = 0
    """Ranks that tried theirs."""
    problems: tuple[str, ...] = ()
    """What the kernel took otherwise, in the shim's words."""
    refused: tuple[str, ...] = ()
    """The problems of ranks whose memory policy was not taken."""
    reason: str = ""
    """Why nothing was tried."""


@dataclass(frozen=True, slots=True)
class Case:
    """All that is judged of this machine."""

    plan: Plan
    """Where a job would run now."""
    facts: Facts
    trial: BindingTrial
    num_workers: int = 2
    """DataLoader workers that each rank would like."""
    binding: str = "exclusive"
    """The plan's policy."""
    environ: Mapping[str, str] | None = None
    """The environment that ranks would inherit; None for another machine's."""
    run: RunRecords | None = None
    """The last run; None if there is none."""
    run_reason: str = ""
    """Why there is no run to compare."""
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def machine(self) -> Machine:
        """The machine that is planned for."""
        return self.plan.machine

    @property
    def health(self) -> Health:
        """Limits and settings; empty for a snapshot."""
        return self.facts.health or Health()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that ranks would use, each once."""
        return tuple(dict.fromkeys(rank.gpu for rank in self.plan.ranks if rank.gpu))

    def unchecked(self, check: str, reason: str) -> Finding:
        """Return the finding of a check that could not be made, and why."""
        return found(
            f"unchecked.{check}", "unknown", reason=reason if self.health.live else "not in these files"
        )


def judge_machine(case: Case) -> tuple[Finding, ...]:
    """Judge this machine and the last run, in the order of the report."""
    return tuple(finding for check in CHECKS for finding in check(case))


def judge_plan(case: Case) -> Iterator[Finding]:
    """The warnings of the probe and of the planner, and files that nobody understands."""
    for warning in case.plan.warnings:
        if warning.subject == "machine":
            yield found("placement.probe", "warning", warning=warning.what)
        else:
            yield found("placement.plan", "warning", warning=warning.what, fix=warning.fix)
    for oddity in case.health.oddities:
        yield found("placement.odd_file", "note", oddity=oddity)
    if not case.plan.warnings:
        yield found("placement.planned", "ok", ranks=len(case.plan.ranks))


def judge_binding_trial(case: Case) -> Iterator[Finding]:
    """What happened when processes tried the plan by the very shim that starts ranks."""
    trial = case.trial
    refused = [found("placement.memory_refused", "warning", problem=one) for one in trial.refused]
    otherwise = [found("placement.otherwise", "warning", problem=one) for one in trial.problems]
    untried = [case.unchecked("binding", trial.reason)] if trial.reason else []
    yield from or_ok((*refused, *otherwise, *untried), "placement.tried", tried=trial.tried)


def judge_cpuset(case: Case) -> Iterator[Finding]:
    """The CPUs and memory nodes that the job may use."""
    machine, allowed = case.machine, case.machine.allowed_cpus
    problems = []
    # NUMA nodes with a GPU whose CPUs the job may not use; if none is left, the plan may warn.
    for node in sorted({gpu.node for gpu in case.gpus if gpu.node is not None}):
        cpus = frozenset(cpu.id for cpu in machine.cpus if cpu.node == node)
        lost = cpus - allowed
        if lost and (lost != cpus or case.binding == "none"):
            level, near = (
                "warning" if lost == cpus else "note",
                [g.index for g in case.gpus if g.node == node],
            )
            counts = {"usable": len(cpus) - len(lost), "cpus": len(cpus), "lost": lost, "gpus": tuple(near)}
            problems.append(found("cpus.uncovered", level, node=node, **counts))
    # Cores of which the job may use some threads; one thread of every core is somebody's choice.
    cores: dict[int, set[int]] = {}
    for cpu in machine.cpus:
        cores.setdefault(cpu.core, set()).add(cpu.id)
    if cut := [pus for pus in cores.values() if pus & allowed and pus - allowed]:
        level = "warning" if any(len(pus) > 1 and pus <= allowed for pus in cores.values()) else "note"
        others = frozenset().union(*cut) - allowed
        problems.append(found("cpus.cut", level, cores=len(cut), others=others))
    used = {cpu.node for cpu in machine.cpus if cpu.id in allowed}
    usual = {node.id for node in machine.nodes if node.id in used and node.normal and node.memory_kib}
    if barred := frozenset(usual - machine.allowed_mems):
        problems.append(found("cpus.barred_memory", "warning", nodes=barred, mems=machine.allowed_mems))
    count = len(machine.cpus)
    share = "all" if len(allowed) == count else f"{len(allowed)} of"
    yield from or_ok(problems, "cpus.cpuset", share=share, cpus=count, nodes=len(used))
    if isolated := machine.isolated & allowed:
        yield found("cpus.isolated", "note", cpus=isolated)


def judge_count(case: Case) -> Iterator[Finding]:
    """Cores against the processes that will be busy, and the cgroup's CPU quota.

    Source: the kernel's Documentation/scheduler/sched-bwc.rst.
    """
    machine, ranks = case.machine, len(case.plan.ranks)
    cores = len({cpu.core for cpu in machine.cpus if cpu.id in machine.allowed_cpus})
    needed = count_node_cores(ranks, case.num_workers)
    level = "ok" if cores >= needed else "warning" if case.gpus else "note"
    yield found(
        "cpus.cores", level, cores=cores, ranks=ranks, workers=ranks * case.num_workers, needed=needed
    )
    quota, usable = machine.limits.cpus, len(machine.allowed_cpus)
    if quota is None:
        yield found("cpus.no_quota", "ok")
    else:
        yield found("cpus.quota", "ok" if quota >= usable else "warning", quota=quota, usable=usable)


def judge_size(case: Case) -> Iterator[Finding]:
    """Memory of the job against the sum of its GPUs' (a rule of the Machine Learning Engineering book)."""
    machine = case.machine
    normal = sum(node.memory_kib for node in machine.nodes if node.normal) or machine.memory_kib
    limit = machine.limits.memory_kib
    size = min(normal, limit) if limit is not None else normal
    source = " (the cgroup's limit)" if size == limit else ""
    sizes = [gpu.memory_mib for gpu in case.gpus]
    if not size:
        yield case.unchecked("memory", "unknown")
    elif not sizes:
        yield found("memory.no_gpus", "ok", size=size, source=source)
    elif not all(sizes):
        yield case.unchecked("gpu_sizes", "the GPUs' memory is not known")
    else:
        total = sum(sizes) << 10
        level = "ok" if size >= total else "warning"
        yield found("memory.size", level, size=size, source=source, total=total, gpus=len(sizes))


def judge_balancing(case: Case) -> Iterator[Finding]:
    """Settings of the kernel that move or reclaim memory between NUMA nodes.

    Source: the kernel's Documentation/admin-guide/sysctl/kernel.rst ("If the target workload is already
    bound to NUMA nodes then this feature should be disabled") and vm.rst.
    """
    balancing, reclaim = case.health.numa_balancing, case.health.zone_reclaim
    if sum(node.normal and node.memory_kib > 0 for node in case.machine.nodes) < 2:
        yield found("memory.one_node", "ok")
        return
    if balancing is None:
        yield case.unchecked("balancing", "the kernel shows no such setting")
    elif balancing:
        yield found("memory.balancing", "warning", value=balancing)
    if reclaim:
        yield found("memory.reclaim", "warning", value=reclaim)
    if balancing == 0 and not reclaim:
        yield found("memory.balancing", "ok")


def judge_hugepages(case: Case) -> Iterator[Finding]:
    """Transparent huge pages, and a twentieth of the memory or more that is set aside as huge pages.

    Source: the kernel's Documentation/admin-guide/mm/transhuge.rst and hugetlbpage.rst.
    """
    health = case.health
    idle = sum(pool.free * pool.size_kib for pool in health.hugepages or ())
    is_reserved = bool(idle) and idle * 20 >= case.machine.memory_kib
    if is_reserved:
        yield found("memory.reserved", "warning", idle=idle)
    if not health.transparent:
        yield case.unchecked("huge_pages", "the kernel shows no such setting")
    elif health.transparent == "never":
        yield found("memory.never_huge", "note")
    elif health.defrag == "always":
        yield found("memory.defrag", "note", mode=health.transparent)
    elif not is_reserved:
        yield found("memory.huge_pages", "ok", mode=health.transparent, idle=idle)


def judge_swap(case: Case) -> Iterator[Finding]:
    """Swap in use."""
    used, eager = case.health.swap_kib, case.health.swappiness
    if used is None:
        yield case.unchecked("swap", "proc/meminfo does not show it")
    else:
        setting = "" if eager is None else f" (vm.swappiness={eager})"
        yield found("memory.swap", "ok" if used <= SWAPPED else "note", used=used, setting=setting)


def judge_devices(case: Case) -> Iterator[Finding]:
    """The GPUs that were found against those that the driver shows in /proc."""
    machine, shown = case.machine, case.health.driver_gpus or ()
    nvidia = [gpu.pci for gpu in machine.gpus if gpu.vendor == "nvidia"]
    if not machine.gpus and not shown:
        yield found("gpu.none", "ok")
        return
    lost = tuple(pci for pci in shown if pci not in nvidia)
    extra = tuple(pci for pci in nvidia if shown and pci not in shown)
    problems = []
    if lost:
        level = "note" if nvidia else "warning"
        problems.append(found("gpu.closed", level, shown=len(shown), opened=len(nvidia), lost=lost))
    if extra:
        problems.append(found("gpu.not_in_proc", "note", extra=extra))
    names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.name))
    names = names and f": {names}"
    yield from or_ok(problems, "gpu.used", used=len(case.gpus), gpus=len(machine.gpus), names=names)


def judge_places(case: Case) -> Iterator[Finding]:
    """GPUs whose NUMA node the firmware does not tell."""
    nodes = {cpu.node for cpu in case.machine.cpus}
    if case.gpus and len(nodes) > 1:
        lost = tuple(gpu.index for gpu in case.gpus if gpu.node is None and not gpu.local_cpus)
        yield found("gpu.places", "warning" if lost else "ok", gpus=lost, nodes=len(nodes))


def judge_links(case: Case) -> Iterator[Finding]:
    """PCI links with fewer lanes than the device has; their speed drops at idle, and says nothing."""
    known = [device for device in case.health.devices if device.width and device.max_width]
    narrow = (
        found("gpu.narrow_link", "warning", name=one.name, width=one.width, max_width=one.max_width)
        for one in known
        if (one.width or 0) < (one.max_width or 0)
    )
    yield from or_ok(narrow, "gpu.narrow_link", if_known=known, devices=len(known))
    if (case.machine.gpus or case.machine.nics) and not known:
        yield case.unchecked("links", "sysfs does not show it (a virtual machine?)")


def judge_persistence(case: Case) -> Iterator[Finding]:
    """Persistence mode. Source: NVIDIA's "Driver Persistence" guide."""
    used = {gpu.pci: gpu.index for gpu in case.gpus if gpu.vendor == "nvidia"}
    modes = {gpu.pci: gpu.persistence for gpu in case.facts.gpus if gpu.pci in used}
    modes = {pci: mode for pci, mode in modes.items() if mode is not None}
    off = tuple(used[pci] for pci, mode in modes.items() if not mode)
    if modes:
        yield found("gpu.persistence", "note" if off else "ok", gpus=off)
    elif used:
        yield case.unchecked("persistence", "NVML does not answer")


def judge_shm(case: Case) -> Iterator[Finding]:
    """Size of /dev/shm, through which DataLoader workers and NCCL hand data over."""
    if case.facts.shm_kib is None:
        yield case.unchecked("shm", "no such mount was found")
    yield from check_shm(case.facts, case.wanted)


def judge_files(case: Case) -> Iterator[Finding]:
    """Open files, of which ranks may have as many as the hard limit says: the shim raises theirs to it.

    Source: PyTorch's notes on multiprocessing, sharing strategy `file_descriptor`.
    """
    files = case.health.files
    if files is None:
        yield case.unchecked("files", "proc/self/limits does not show them")
    else:
        is_low = files.hard is not None and files.hard < FILES_LEAST
        limit = "unlimited" if files.hard is None else files.hard
        yield found("limits.files", "warning" if is_low else "ok", files=limit)


def judge_locked(case: Case) -> Iterator[Finding]:
    """Locked memory, which RDMA needs. Source: NCCL's troubleshooting (`--ulimit memlock=-1`)."""
    locked, nics = case.health.locked, case.machine.nics
    if nics and locked is None:
        yield case.unchecked("locked", "proc/self/limits does not show it")
    elif nics and locked:
        if locked.soft is None or case.health.capabilities >> CAP_IPC_LOCK & 1:
            yield found("limits.locked", "ok")
        else:
            yield found("limits.locked", "warning", locked=locked.soft >> 10, nic=nics[0].name)


def judge_processes(case: Case) -> Iterator[Finding]:
    """Processes and threads, of the user (RLIMIT_NPROC) and of the cgroup (pids.max)."""
    health, ranks = case.health, case.plan.ranks
    needed = sum(THREADS_EACH + rank.omp_num_threads + rank.num_workers * THREADS_EACH for rank in ranks)
    is_lifted = health.processes is None or health.capabilities >> CAP_SYS_RESOURCE & 1
    users = None if is_lifted or health.processes is None else health.processes.soft
    limits = {"limits.user_processes": users, "limits.cgroup_processes": health.pids_max}
    known = {rule: limit for rule, limit in limits.items() if limit is not None}
    low = {rule: limit for rule, limit in known.items() if limit < needed}
    for rule, limit in low.items():
        yield found(rule, "warning", limit=limit, ranks=len(ranks), needed=needed)
    if health.processes is None and health.pids_max is None:
        yield case.unchecked("processes", "proc/self/limits does not show them")
    elif not low:
        lowest = min(known.values()) if known else "unlimited"
        yield found("limits.user_processes", "ok", limit=lowest, needed=needed)


def judge_node(case: Case) -> Iterator[Finding]:
    """What preflight checks of a node before a job, but for what this machine's checks have.

    What others do at this moment is a note: it is another matter when a job begins.
    """
    facts, wanted = case.facts, case.wanted
    for check in (check_gpus, check_needed_paths, check_free_memory, check_versions, check_unread):
        yield from check(facts, wanted)
    for finding in compare_paths((facts,), wanted):
        yield replace(finding, host="")
    for busy in (check_leftovers, check_load):
        for finding in busy(facts, wanted):
            yield finding if finding.level == "ok" else replace(finding, level="note")


def judge_clocks(case: Case) -> Iterator[Finding]:
    """The governors of the allowed CPUs, those of one driver, governor and preference together."""
    if not case.health.clocks:
        yield case.unchecked("clocks", "there is no cpufreq (as in most virtual machines)")
    for clock in case.health.clocks:
        rule, level = "clocks.slow", "warning"
        if clock.governor == "performance":
            level = "ok"
        elif clock.driver in HARDWARE and clock.governor == "powersave":
            sparing = "warning" if clock.preference in SPARING else "note"
            rule, level = "clocks.preference", "ok" if clock.preference == "performance" else sparing
        elif clock.governor == "userspace":
            rule, level = "clocks.fixed", "note"
        elif clock.governor == "powersave":
            rule = "clocks.lowest"
        driver = clock.driver or "driver unknown"
        choice = f"{driver}, {clock.preference}" if clock.preference else driver
        yield found(rule, level, governor=clock.governor, driver=choice, cpus=clock.cpus)


def judge_interrupts(case: Case) -> Iterator[Finding]:
    """Devices of whose interrupts most go to CPUs of other NUMA nodes alone."""
    machine, irqbalance = case.machine, RUNNING[case.health.irqbalance]
    places = {gpu.node for gpu in machine.gpus} | {nic.node for nic in machine.nics}
    nodes = {cpu.node for cpu in machine.cpus}
    shown = [device for device in case.health.devices if device.node is not None and device.interrupts]
    if places <= {None} or len(nodes) < 2:
        reason = "one NUMA node" if len(nodes) < 2 else "no GPU or NIC with a known NUMA node"
        yield found("interrupts.nowhere_far", "ok", reason=reason, irqbalance=irqbalance)
        return
    if not shown:
        yield case.unchecked("interrupts", f"sysfs or /proc/irq does not show them; {irqbalance}")
        return
    problems = []
    for device in shown:
        near = frozenset(cpu.id for cpu in machine.cpus if cpu.node == device.node)
        far = [cpus for cpus in device.interrupts if near.isdisjoint(cpus)]
        if near and 2 * len(far) > len(device.interrupts):
            level, taken = "warning" if device.nic else "note", frozenset().union(*far)
            counts = {"far": len(far), "count": len(device.interrupts), "name": device.name}
            where = {"node": device.node, "taken": taken, "near": near}
            problems.append(found("interrupts.far", level, **counts, **where, irqbalance=irqbalance))
    yield from or_ok(problems, "interrupts.near", devices=len(shown), irqbalance=irqbalance)


def judge_environment(case: Case) -> Iterator[Finding]:
    """The environment that ranks would inherit."""
    environ = case.environ
    if environ is None:
        yield case.unchecked("environment", "unknown")
        return
    variables = read_tables()["variable"]
    problems = [
        found(rule, level, name=name, value=environ[name])
        for name, (rule, level) in variables.items()
        if environ.get(name, "").strip().lower() not in OFF_VALUES
    ]
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        problems.append(found("environment.debug", "note"))
    yield from or_ok(problems, "environment.clean", count=len(variables))


def judge_last_run(case: Case) -> Iterator[Finding]:
    """Every host's records against its plan."""
    run = case.run
    if run is None:
        yield found("run.not_compared", "unknown", reason=case.run_reason)
        return
    problems = [*judge_run_records(run, is_live=run.state == "running")]
    yield from problems
    ranks, name = sum(len(host.records) for host in run.hosts), ", ".join(filter(None, (run.path, run.state)))
    level = "note" if problems else "ok"
    yield found("run.compared", level, run=name, ranks=ranks, hosts=len(run.hosts))


def judge_run_records(run: RunRecords, *, is_live: bool) -> Iterator[Finding]:
    """What a run's records say against its plans; those of a run that is going on may be still to come."""
    for text in run.damaged:
        yield found("run.damaged", "warning", problem=text)
    for host in run.hosts:
        if not host.planned:
            ranks = tuple(record.rank for record in host.records)
            yield found("run.no_plan", "warning", host=host.name, ranks=ranks)
            continue
        records = {record.local_rank: record for record in host.records}
        for rank in host.planned:
            if record := records.get(rank.local_rank):
                for difference in compare_rank(rank, record):
                    values = {"rank": record.rank, "difference": difference}
                    yield found("run.differs", "error", host=host.name, **values)
            else:
                values = {"local_rank": rank.local_rank, "attempt": ""}
                values["attempt"] = f" in attempt {host.attempt}" if host.attempt else ""
                rule, level = ("run.no_record_yet", "note") if is_live else ("run.no_record", "warning")
                yield found(rule, level, host=host.name, **values)
        planned = {rank.local_rank for rank in host.planned}
        for record in host.records:
            for problem in record.problems:
                yield found("run.problem", "warning", host=host.name, rank=record.rank, problem=problem)
            if record.local_rank not in planned:
                values = {"rank": record.rank, "local_rank": record.local_rank}
                yield found("run.not_planned", "warning", host=host.name, **values)


CHECKS = (
    *(judge_plan, judge_binding_trial, judge_cpuset, judge_count),
    *(judge_size, judge_balancing, judge_hugepages, judge_swap),
    *(judge_devices, judge_places, judge_links, judge_persistence),
    *(judge_shm, judge_files, judge_locked, judge_processes, judge_node),
    *(judge_clocks, judge_interrupts, judge_environment, judge_last_run),
)
"""Each gives findings on one matter: at least one, or none if the machine has nothing of the kind."""
