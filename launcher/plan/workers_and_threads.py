"""How many DataLoader workers and threads each rank gets, by its cores and the node's memory and limits."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.cpu_sets import RankPlacement
from launcher.plan.environment import VariablesAndNotes, read_variable_count
from launcher.plan.model import Machine, Request
from launcher.plan.rules import FILES_RANK, FILES_WORKER, MEMORY_SHARE, WORKLOADS, count_system_cores
from launcher.plan.usable_cores import Topology, find_usable
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_NUM_WORKERS

WORKERS_KEY = "dataloader.num_workers"
ROUNDING = 1e-6
"""Tolerance: shares of cores are sums of fractions."""
SHM_FIX = (
    "make it larger (docker --shm-size={}g or --ipc=host, Kubernetes an emptyDir with medium Memory), or set "
    "dataloader.worker_shm_mib to what the batches of one take"
)
MEMORY_FIX = (
    "ask for more (cluster.mem, the container's limit), or set dataloader.worker_gib to what one takes"
)
FILES_FIX = "raise the hard limit (limits.conf, docker --ulimit nofile=1048576, LimitNOFILE of slurmd)"
MAX_NUMEXPR_THREADS = 64
"""NUMEXPR_MAX_THREADS if it is not set; NumExpr does not load with more in OMP_NUM_THREADS."""
MAX_COMPILE_THREADS = 32
"""Inductor's own maximum (torch/_inductor/config.py, `decide_compile_threads`)."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The physical cores of a rank; a core that n ranks share counts 1/n."""

    own_cores: float
    """For its own process."""
    worker_cores: float
    """For its DataLoader workers alone."""
    cpus: float = 0
    """Hardware threads of its own process."""
    limited: bool = False
    """The CPU quota of the cgroup is less than the time of these cores."""


def count_cores(topology: Topology, placements: Sequence[RankPlacement]) -> tuple[Cores, ...]:
    """Cores of each rank; one that n ranks share counts 1/n for each."""
    masks = {mask for placement in placements for mask in (placement.cpus, placement.worker_cpus)}
    cores = {mask: frozenset(topology.core_of[pu] for pu in mask) for mask in masks}
    own_counts, worker_counts, users = Counter[int](), Counter[int](), Counter[int]()
    extra = [cores[placement.worker_cpus] - cores[placement.cpus] for placement in placements]
    for placement, more in zip(placements, extra, strict=True):
        own_counts.update(cores[placement.cpus])
        worker_counts.update(more)
        users.update(placement.cpus)
    return tuple(
        Cores(
            own_cores=sum(1 / own_counts[core] for core in cores[placement.cpus]),
            worker_cores=sum(1 / worker_counts[core] for core in more),
            cpus=sum(1 / users[pu] for pu in placement.cpus),
        )
        for placement, more in zip(placements, extra, strict=True)
    )


def count_usable(machine: Machine) -> int:
    """Cores that the job may use, those kept back for the system and those of no rank among them."""
    usable = find_usable(machine)
    return len({cpu.core for cpu in machine.cpus if cpu.id in usable})


def limit_cores(cores: Sequence[Cores], quota: float | None) -> tuple[Cores, ...]:
    """What each rank has of its cores within its even share of a cgroup's CPU quota.

    A quota counts time on hardware threads, of which a core needs one to be busy.
    """
    if quota is None:
        return tuple(cores)
    share = quota / len(cores)
    return tuple(
        Cores(
            own_cores=min(have.own_cores, share),
            worker_cores=max(0, min(have.worker_cores, share - have.own_cores)),
            cpus=min(have.cpus, share),
            limited=share < have.own_cores + have.worker_cores,
        )
        for have in cores
    )


@dataclass(frozen=True, slots=True)
class WorkerLimit:
    """A limit on the DataLoader workers of each rank, and why."""

    max_workers: int
    what: str
    """The resource and its amount, for people."""
    fix: str = ""
    """How to get more of it; empty if that is obvious."""


@dataclass(frozen=True, slots=True)
class WorkerBudget:
    """The requested DataLoader workers, and the limits that all ranks of a node share."""

    source: str
    """Where the request comes from: the workload, `dataloader.num_workers`, or the user's variable."""
    requested: int
    is_limited: bool
    """False if the user has set or measured the number: then it is taken as it is."""
    limits: tuple[WorkerLimit, ...]
    """The limit by the node's cores comes first."""


def budget_workers(request: Request, machine: Machine, cores: Sequence[Cores]) -> WorkerBudget:
    """Return the requested workers and the node's limits; `cores` are those of each rank."""
    asked, ranks = read_requested_variable(request), len(cores)
    wanted = count_requested_workers(request)
    limits = (
        bound_by_node_cores(machine, cores),
        *bound_by_memory(request, machine, ranks),
        *bound_by_shm(machine, wanted * ranks, ranks, request.worker_shm_mib),
        *bound_by_files(machine),
    )
    source = name_request_source(request) if asked is None else LAUNCH_NUM_WORKERS
    return WorkerBudget(
        source, wanted, asked is None and source != WORKERS_KEY and not request.measured, limits
    )


def read_requested_variable(request: Request) -> int | None:
    """The number in the user's LAUNCH_NUM_WORKERS; None without one."""
    return read_variable_count(dict(request.environ), LAUNCH_NUM_WORKERS, 0)


def count_requested_workers(request: Request) -> int:
    """DataLoader workers that each rank would like."""
    asked = read_requested_variable(request)
    return request.num_workers if asked is None else asked


def name_request_source(request: Request) -> str:
    """Name the key that asks: the workload, or the number if that is not the workload's."""
    usual = WORKLOADS.get(request.workload, request.num_workers if request.workload else None)
    return WORKERS_KEY if request.num_workers != usual else f"dataloader={request.workload}"


def bound_by_node_cores(machine: Machine, cores: Sequence[Cores]) -> WorkerLimit:
    """Workers by the node's cores: `cores = ranks * (workers + 1) + 4`; a CPU quota counts as cores.

    Source: S. Bekman, Machine Learning Engineering Open Book, chapter on CPUs.
    """
    ranks, usable, quota = len(cores), count_usable(machine), machine.limits.cpus
    total, named = (usable, "cores") if quota is None or quota >= usable else (quota, "CPUs of time")
    max_by_rank = [max(0, bound_by_rank_cores(each).max_workers) for each in cores]
    max_workers = level_workers(max_by_rank, int(total - ranks - count_system_cores(ranks) + ROUNDING))
    return WorkerLimit(max_workers, f"{total:g} {named} and {ranks} rank{'' if ranks == 1 else 's'}")


def bound_by_rank_cores(cores: Cores) -> WorkerLimit:
    """Workers by the rank's own cores: one core for its process, one for each worker."""
    total = cores.own_cores + cores.worker_cores
    named = "CPUs of time" if cores.limited else "cores"
    return WorkerLimit(
        int(total + ROUNDING) - 1, "its one core" if total == 1 else f"its {total:.3g} {named}"
    )


def level_workers(max_by_rank: Sequence[int], total: int) -> int:
    """The largest number w with `sum(min(w, m) for m in max_by_rank) <= total`."""
    left = total
    for at, room in enumerate(sorted(max_by_rank)):
        share = left // (len(max_by_rank) - at)
        if share < room:
            return max(0, share)
        left -= room
    return max(max_by_rank)


def count_memory_kib(machine: Machine) -> int:
    """Return the memory that the job may use, on the NUMA nodes that it may allocate from; 0 if unknown."""
    allowed = [node for node in machine.nodes if node.normal and node.id in machine.allowed_mems]
    there = sum(node.memory_kib for node in allowed) if len(allowed) < len(machine.nodes) else 0
    return min(filter(None, (machine.memory_kib, machine.limits.memory_kib, there)), default=0)


def bound_by_memory(request: Request, machine: Machine, ranks: int) -> Iterator[WorkerLimit]:
    """Half of the memory that the job may use: the rest is for ranks, page cache and checkpoints.

    What is in /dev/shm counts as memory too, and against a cgroup's limit.
    """
    have = count_memory_kib(machine)
    each = request.worker_gib + request.worker_shm_mib / 1024
    if have and request.worker_gib:
        gib = have / (1 << 20)
        what = f"{gib:.3g} GiB of memory, {each:.3g} GiB for each worker"
        yield WorkerLimit(count_parts(MEMORY_SHARE * gib, each * ranks), what, MEMORY_FIX)


def bound_by_shm(machine: Machine, workers: int, ranks: int, each: float) -> Iterator[WorkerLimit]:
    """Half of /dev/shm, through which batches come: the rest is for NCCL and a second DataLoader.

    `workers` are asked for on the node, and take so much of it `each`, in MiB.
    """
    if machine.limits.shm_kib is not None and each:
        mib = machine.limits.shm_kib / 1024
        what = f"{mib:.3g} MiB of /dev/shm, {each:.3g} MiB for each worker"
        enough = int(min(workers * each / MEMORY_SHARE / 1024, 1e6)) + 1
        yield WorkerLimit(count_parts(MEMORY_SHARE * mib, each * ranks), what, SHM_FIX.format(enough))


def bound_by_files(machine: Machine) -> Iterator[WorkerLimit]:
    """Descriptors of a rank's process, whose soft limit is raised to the hard one at its start."""
    files = machine.limits.files
    if files is not None:
        yield WorkerLimit(max(0, files - FILES_RANK) // FILES_WORKER, f"{files} open files", FILES_FIX)


def count_parts(total: float, each: float) -> int:
    """How many parts of size `each` fit into the total, at most a million."""
    return int(min(total / each, 1e6))


def set_workers(request: Request, budget: WorkerBudget, cores: Cores) -> tuple[int, VariablesAndNotes]:
    """The number of a rank's DataLoader workers, with its variables and why it is that.

    At least one, unless none are asked for: without one the GPU waits for every batch.
    """
    limit = min((bound_by_rank_cores(cores), *budget.limits), key=lambda limit: limit.max_workers)
    max_workers = max(0, limit.max_workers)
    workers = min(budget.requested, max(1, max_workers)) if budget.is_limited else budget.requested
    note = f"num_workers={workers}: {budget.source} asks for {budget.requested}"
    note += f"; at most {max_workers} for {limit.what}" if budget.requested else ""
    note += ", yet at least 1" if budget.is_limited and workers > max_workers else ""
    env = {LAUNCH_NUM_WORKERS: str(workers)}
    return workers, (env | {LAUNCH_LOADER_DEFAULT: "1"} if request.loader_default else env, [note])


def find_worker_shortages(request: Request, budget: WorkerBudget, cores: Sequence[Cores]) -> Iterator[str]:
    """Warn if more workers are requested than resources allow; about cores only if the user set a number."""
    room = max(
        0, min(budget.limits[0].max_workers, *(bound_by_rank_cores(each).max_workers for each in cores))
    )
    planned = min(budget.requested, max(1, room)) if budget.is_limited else budget.requested
    has_quota = any(each.limited for each in cores)  # a quota has a warning of its own
    if (
        budget.source == WORKERS_KEY
        and max(1, room) < budget.requested
        and not (has_quota or request.measured)
    ):
        yield (
            f"{WORKERS_KEY}={budget.requested} is more than there are cores for, which is {room} on each "
            f"rank ({budget.limits[0].what}): workers and ranks will wait for cores: "
            "ask for more CPUs, or set fewer"
        )
    for limit in budget.limits:
        if limit.fix and limit.max_workers < planned:
            yield (
                f"{budget.source} asks for {budget.requested} DataLoader workers on each of "
                f"{len(cores)} ranks, "
                f"and there is room for {limit.max_workers} ({limit.what}): {limit.fix}"
            )


def set_threads(environ: Mapping[str, str], workers: int, cores: Cores) -> tuple[int, VariablesAndNotes]:
    """The threads of a rank's libraries and its compiler's processes; the user's number if there is one.

    OMP_NUM_THREADS alone, as torchrun sets it: MKL and OpenBLAS take it too, and a number of their own would
    win over an OMP_NUM_THREADS that the program sets before it imports torch.
    """
    threads = read_variable_count(environ, "OMP_NUM_THREADS", 1) or count_threads(workers, cores)
    env = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(count_compilers(cores))}
    max_threads = read_variable_count(environ, "NUMEXPR_MAX_THREADS", 1) or MAX_NUMEXPR_THREADS
    if threads > max_threads:
        env["NUMEXPR_NUM_THREADS"] = str(max_threads)
    return threads, (env, ())


def count_threads(workers: int, cores: Cores) -> int:
    """The rank's own cores, less those that workers need beyond the spare ones; at least one."""
    return max(1, int(cores.own_cores + 1e-6) - max(0, workers - int(cores.worker_cores + 1e-6)))


def count_compilers(cores: Cores) -> int:
    """Inductor's compile processes: one for each hardware thread of the rank, up to Inductor's maximum.

    Left alone, it counts the affinity, which ranks that share their CPUs have as a whole
    (github.com/pytorch/pytorch/issues/190941).
    """
    return max(1, min(MAX_COMPILE_THREADS, int(cores.cpus + 1e-6)))
