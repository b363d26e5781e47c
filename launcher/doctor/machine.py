"""One machine: what the job may use of it, its settings, the plan tried on the spot, and the last run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from launcher.doctor import node as node_checks
from launcher.doctor.job import compare_paths
from launcher.doctor.model import Facts, Finding, Health, Wanted, found, or_ok, read_tables
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


@dataclass(frozen=True, slots=True)
class Case:
    """All that is judged of this machine."""

    plan: Plan
    """Where a job would run now."""
    facts: Facts
    trial: Sequence[Finding] = ()
    """What came of it when processes tried the plan."""
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
        told = reason if self.health.live else "not in these files"
        return found(f"unchecked.{check}", "unknown", reason=told)


def judge_machine(case: Case) -> tuple[Finding, ...]:
    """Judge this machine and the last run, in the order of the report."""
    checked = (finding for check in CHECKS for finding in check(case))
    return (*judge_plan(case.plan), *case.trial, *checked)


def judge_plan(plan: Plan) -> Iterator[Finding]:
    """The warnings of the probe and of the planner."""
    for warning in plan.warnings:
        if warning.rule == "machine":
            yield found("placement.probe", "warning", warning=warning.what)
        else:
            yield found("placement.plan", "warning", warning=warning.what, fix=warning.fix)
    if not plan.warnings:
        yield found("placement.planned", "ok", ranks=len(plan.ranks))


def judge_cpuset(case: Case) -> Iterator[Finding]:
    """The CPUs and memory nodes that the job may use."""
    machine, allowed = case.machine, case.machine.allowed_cpus
    problems = []
    # NUMA nodes with a GPU whose CPUs the job may not use; if none is left, the plan may warn.
    for node in sorted({gpu.node for gpu in case.gpus if gpu.node is not None}):
        cpus = frozenset(cpu.id for cpu in machine.cpus if cpu.node == node)
        lost, near = cpus - allowed, tuple(gpu.index for gpu in case.gpus if gpu.node == node)
        if lost and (lost != cpus or case.binding == "none"):
            counts = {"usable": len(cpus) - len(lost), "cpus": len(cpus), "lost": lost, "gpus": near}
            level = "warning" if lost == cpus else "note"
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
    if isolated := machine.isolated & allowed:
        problems.append(found("cpus.isolated", "note", cpus=isolated))
    count = len(machine.cpus)
    share = "all" if len(allowed) == count else f"{len(allowed)} of"
    yield from or_ok(problems, "cpus.cpuset", share=share, cpus=count, nodes=len(used))


def judge_count(case: Case) -> Iterator[Finding]:
    """Cores against the processes that will be busy, and the cgroup's CPU quota.

    Source: the kernel's Documentation/scheduler/sched-bwc.rst.
    """
    machine, ranks = case.machine, len(case.plan.ranks)
    cores = len({cpu.core for cpu in machine.cpus if cpu.id in machine.allowed_cpus})
    workers, needed = ranks * case.num_workers, count_node_cores(ranks, case.num_workers)
    level = "ok" if cores >= needed else "warning" if case.gpus else "note"
    yield found("cpus.cores", level, cores=cores, ranks=ranks, workers=workers, needed=needed)
    quota, usable = machine.limits.cpus, len(machine.allowed_cpus)
    if quota is None:
        yield found("cpus.no_quota", "ok")
    else:
        yield found("cpus.quota", "ok" if quota >= usable else "warning", quota=quota, usable=usable)


def judge_size(case: Case) -> Iterator[Finding]:
    """Memory of the job against the sum of its GPUs' (a rule of the Machine Learning Engineering book)."""
    machine = case.machine
    normal = sum(node.memory_kib for node in machine.nodes if node.normal) or machine.memory_kib
    size = min(normal, machine.limits.memory_kib or normal)
    sizes = [gpu.memory_mib for gpu in case.gpus]
    if not size or not all(sizes):
        yield case.unchecked("memory", "the GPUs' memory is not known" if size else "unknown")
    elif not sizes:
        yield found("memory.no_gpus", "ok", size=size)
    else:
        total = sum(sizes) << 10
        level = "ok" if size >= total else "warning"
        yield found("memory.size", level, size=size, total=total, gpus=len(sizes))


def judge_memory(case: Case) -> Iterator[Finding]:
    """Settings of the kernel that move, reclaim or reserve memory, and swap in use.

    Source: the kernel's Documentation/admin-guide/sysctl/kernel.rst ("If the target workload is already
    bound to NUMA nodes then this feature should be disabled"), vm.rst, transhuge.rst and hugetlbpage.rst.
    """
    health, nodes = case.health, [node for node in case.machine.nodes if node.normal and node.memory_kib]
    balancing, reclaim, idle = health.numa_balancing, health.zone_reclaim, health.hugepages_kib
    if len(nodes) < 2:
        yield found("memory.one_node", "ok")
    elif balancing is None:
        yield case.unchecked("balancing", "the kernel shows no such setting")
    elif balancing or not reclaim:
        yield found("memory.balancing", "warning" if balancing else "ok", value=balancing)
    if reclaim and len(nodes) > 1:
        yield found("memory.reclaim", "warning", value=reclaim)
    if idle and idle * 20 >= case.machine.memory_kib:
        yield found("memory.reserved", "warning", idle=idle)
    if not health.transparent:
        yield case.unchecked("huge_pages", "the kernel shows no such setting")
    elif health.transparent == "never":
        yield found("memory.never_huge", "note")
    else:
        level = "note" if health.defrag == "always" else "ok"
        yield found("memory.defrag", level, mode=health.transparent)
    if health.swap_kib is None:
        yield case.unchecked("swap", "proc/meminfo does not show it")
    else:
        yield found("memory.swap", "ok" if health.swap_kib <= SWAPPED else "note", used=health.swap_kib)


def judge_devices(case: Case) -> Iterator[Finding]:
    """The GPUs that were found against those that the driver shows in /proc, and their places."""
    machine, shown = case.machine, case.health.driver_gpus
    nvidia = [gpu.pci for gpu in machine.gpus if gpu.vendor == "nvidia"]
    if not machine.gpus and not shown:
        yield found("gpu.none", "ok")
        return
    if lost := tuple(pci for pci in shown if pci not in nvidia):
        level = "note" if nvidia else "warning"
        yield found("gpu.closed", level, shown=len(shown), opened=len(nvidia), lost=lost)
    else:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.name))
        yield found("gpu.used", "ok", used=len(case.gpus), gpus=len(machine.gpus), names=names)
    nodes = {cpu.node for cpu in machine.cpus}
    if case.gpus and len(nodes) > 1:
        placeless = tuple(gpu.index for gpu in case.gpus if gpu.node is None)
        yield found("gpu.places", "warning" if placeless else "ok", gpus=placeless, nodes=len(nodes))


def judge_links(case: Case) -> Iterator[Finding]:
    """PCI links with fewer lanes than the device has (their speed drops at idle, and says nothing), and
    persistence mode. Source: NVIDIA's "Driver Persistence" guide.
    """
    known = [one for one in case.health.links if one.width and one.max_width]
    narrow = [asdict(one) for one in known if (one.width or 0) < (one.max_width or 0)]
    problems = [found("gpu.narrow_link", "warning", **values) for values in narrow]
    yield from or_ok(problems, "gpu.narrow_link", if_known=known, devices=len(known))
    if (case.machine.gpus or case.machine.nics) and not known:
        yield case.unchecked("links", "sysfs does not show it (a virtual machine?)")
    used = {gpu.pci: gpu.index for gpu in case.gpus if gpu.vendor == "nvidia"}
    modes = {gpu.pci: gpu.persistence for gpu in case.facts.gpus if gpu.persistence is not None}
    told = [pci for pci in used if pci in modes]
    if used and not told:
        yield case.unchecked("persistence", "NVML does not answer")
    elif used:
        off = tuple(used[pci] for pci in told if not modes[pci])
        yield found("gpu.persistence", "note" if off else "ok", gpus=off)


def judge_limits(case: Case) -> Iterator[Finding]:
    """Shared memory, open files, locked memory, and processes with their threads.

    Ranks may have as many open files as the hard limit says: the shim raises theirs to it. Sources: PyTorch's
    notes on multiprocessing, sharing strategy `file_descriptor`; NCCL's troubleshooting (`memlock=-1`).
    """
    health, ranks, nics = case.health, case.plan.ranks, case.machine.nics
    if case.facts.shm_kib is None:
        yield case.unchecked("shm", "no such mount was found")
    yield from node_checks.check_shm(case.facts, case.wanted)
    if not health.files:
        yield case.unchecked("files", "proc/self/limits does not show them")
    else:
        hard = health.files[-1]
        level = "warning" if hard is not None and hard < FILES_LEAST else "ok"
        yield found("limits.files", level, files="unlimited" if hard is None else hard)
    if nics and health.locked:
        soft = health.locked[0]
        if soft is None or health.capabilities >> CAP_IPC_LOCK & 1:
            yield found("limits.locked", "ok")
        else:
            yield found("limits.locked", "warning", locked=soft >> 10, nic=nics[0].name)
    needed = sum(THREADS_EACH + rank.omp_num_threads + rank.num_workers * THREADS_EACH for rank in ranks)
    is_lifted = not health.processes or health.capabilities >> CAP_SYS_RESOURCE & 1
    users = None if is_lifted else health.processes[0]
    limits = {"limits.user_processes": users, "limits.cgroup_processes": health.pids_max}
    known = {rule: limit for rule, limit in limits.items() if limit is not None}
    values = {"ranks": len(ranks), "needed": needed}
    low = [found(rule, "warning", limit=limit, **values) for rule, limit in known.items() if limit < needed]
    lowest, is_known = min(known.values(), default="unlimited"), bool(health.processes or known)
    yield from or_ok(low, "limits.user_processes", if_known=is_known, limit=lowest, needed=needed)


def judge_node(case: Case) -> Iterator[Finding]:
    """What preflight checks of a node before a job, but for what this machine's checks have.

    What others do at this moment is a note: it is another matter when a job begins.
    """
    facts, wanted = case.facts, case.wanted
    yield from node_checks.check_gpus(facts, wanted)
    yield from node_checks.check_needed_paths(facts, wanted)
    yield from node_checks.check_free_memory(facts, wanted)
    yield from node_checks.check_versions(facts, wanted)
    yield from node_checks.check_unread(facts, wanted)
    for finding in compare_paths((facts,), wanted):
        yield replace(finding, host="")
    for finding in (*node_checks.check_leftovers(facts, wanted), *node_checks.check_load(facts, wanted)):
        yield finding if finding.level == "ok" else replace(finding, level="note")


def judge_clocks(case: Case) -> Iterator[Finding]:
    """The governors of the allowed CPUs, those of one driver, governor and preference together."""
    if not case.health.clocks:
        yield case.unchecked("clocks", "there is no cpufreq (as in most virtual machines)")
    for clock in case.health.clocks:
        rule, level = "clocks.slow", "warning"
        if clock.driver in HARDWARE and clock.governor == "powersave":
            sparing = "warning" if clock.preference in SPARING else "note"
            rule, level = "clocks.preference", "ok" if clock.preference == "performance" else sparing
        elif clock.governor in ("performance", "userspace"):
            level = "ok" if clock.governor == "performance" else "note"
        driver = ", ".join(filter(None, (clock.driver or "driver unknown", clock.preference)))
        yield found(rule, level, governor=clock.governor, driver=driver, cpus=clock.cpus)


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
            record = records.pop(rank.local_rank, None)
            if record is None:
                attempt = f" in attempt {host.attempt}" if host.attempt else ""
                rule, level = ("run.no_record_yet", "note") if is_live else ("run.no_record", "warning")
                yield found(rule, level, host=host.name, local_rank=rank.local_rank, attempt=attempt)
                continue
            for text in compare_rank(rank, record):
                yield found("run.differs", "error", host=host.name, rank=record.rank, difference=text)
        for record in host.records:
            for text in record.problems:
                yield found("run.problem", "warning", host=host.name, rank=record.rank, problem=text)
        for record in records.values():
            values = {"rank": record.rank, "local_rank": record.local_rank}
            yield found("run.not_planned", "warning", host=host.name, **values)


CHECKS = (
    *(judge_cpuset, judge_count, judge_size, judge_memory),
    *(judge_devices, judge_links, judge_limits, judge_node),
    *(judge_clocks, judge_environment, judge_last_run),
)
"""Each gives findings on one matter: at least one, or none if the machine has nothing of the kind."""
