"""What each rank is started with by its share of the node: DataLoader workers, threads, memory policy.

The rules of thumb are shared with the doctor and `launch fit`; each has its source.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.plan.devices import RankNic
from launcher.plan.model import DataloaderConfig, Gpu, Machine, Memory, PlanWarning, RankPlan, Request, warn
from launcher.plan.topology import CpuSets, Topology, find_usable
from launcher.plan.variables import (
    HONOURED,
    is_kept,
    list_variables,
    read_variable_count,
    render_gc,
    set_allocator,
    set_malloc,
)
from launcher.protocol import LAUNCH_GC, LAUNCH_LOADER_DEFAULT, LAUNCH_NIC, LAUNCH_NUM_WORKERS

SYSTEM_CORES = 4
"""Cores of a node beside those of ranks and workers, in the book's rule `gpus * (num_workers + 1) + 4`."""
MIN_CORES_PER_RANK = 4
"""Cores of a rank at least: its process, two DataLoader workers, one more for communication threads."""
MEMORY_SHARE = 0.5
"""Part of the memory and of /dev/shm that DataLoader workers may take."""
FILES_RANK, FILES_WORKER = 512, 64
"""Descriptors of a rank's process: for libraries, GPUs and NCCL's sockets, with room; for each worker 6 for
its queues and its end, and one for each tensor of the two batches ahead, 29 in each. PyTorch's notes on
multiprocessing (sharing strategy `file_descriptor`); counted with torch 2.13: 8 more for each worker at 2
tensors a batch, 29 at 20."""
WORKLOADS = {"text": 2, "vision": 4, "video": 8, "none": 0}
"""DataLoader workers for each rank by what they do: 2 for text, 3 to 4 and sometimes more for images.

Source: S. Bekman, Machine Learning Engineering Open Book. The files of the group `dataloader` agree."""
MAX_NUMEXPR_THREADS = 64
"""NUMEXPR_MAX_THREADS if it is not set; NumExpr does not load with more in OMP_NUM_THREADS."""
MAX_COMPILE_THREADS = 32
"""Inductor's own maximum (torch/_inductor/config.py, `decide_compile_threads`)."""
ROUNDING = 1e-6
"""Tolerance: shares of cores are sums of fractions."""
WORKERS_KEY = "dataloader.num_workers"


def count_system_cores(ranks: int) -> float:
    """Cores of a node for communication and the system: four for eight GPUs, fewer for fewer ranks.

    Source: S. Bekman, Machine Learning Engineering Open Book, chapter on CPUs.
    """
    return min(SYSTEM_CORES, ranks / 2)


def count_node_cores(ranks: int, workers: int) -> int:
    """Cores that a node needs for as many ranks, with as many DataLoader workers each."""
    return ranks * (workers + 1) + -int(-count_system_cores(ranks) // 1)


def count_rank_cores(workers: int) -> int:
    """Cores that a rank should have for its process, its DataLoader workers and communication threads."""
    return max(MIN_CORES_PER_RANK, workers + 2)


@dataclass(frozen=True, slots=True)
class Cores:
    """The physical cores of a rank; a core that n ranks share counts 1/n."""

    own_cores: float
    """For its own process."""
    worker_cores: float
    """For its DataLoader workers alone."""
    cpus: float = 0
    """Hardware threads of its own process."""
    is_limited: bool = False
    """The CPU quota of the cgroup is less than the time of these cores."""

    def within(self, share: float | None) -> "Cores":
        """What there is of them within a share of a cgroup's CPU quota; None is no quota.

        A quota counts time on hardware threads, of which a core needs one to be busy.
        """
        if share is None:
            return self
        return Cores(
            own_cores=min(self.own_cores, share),
            worker_cores=max(0, min(self.worker_cores, share - self.own_cores)),
            cpus=min(self.cpus, share),
            is_limited=share < self.own_cores + self.worker_cores,
        )

    def bound_workers(self) -> "WorkerLimit":
        """Workers by the rank's own cores: one core for its process, one for each worker."""
        total = self.own_cores + self.worker_cores
        what = f"its {total:.3g} {'CPUs of time' if self.is_limited else 'cores'}"
        return WorkerLimit(int(total + ROUNDING) - 1, "its one core" if total == 1 else what)


def count_cores(topology: Topology, sets: Sequence[CpuSets]) -> tuple[Cores, ...]:
    """Cores of each rank; one that n ranks share counts 1/n for each."""
    masks = {mask for each in sets for mask in (each.cpus, each.worker_cpus)}
    cores = {mask: frozenset(topology.core_of[pu].id for pu in mask) for mask in masks}
    own_counts, worker_counts, users = Counter[int](), Counter[int](), Counter[int]()
    extra = [cores[each.worker_cpus] - cores[each.cpus] for each in sets]
    for each, more in zip(sets, extra, strict=True):
        own_counts.update(cores[each.cpus])
        worker_counts.update(more)
        users.update(each.cpus)
    return tuple(
        Cores(
            own_cores=sum(1 / own_counts[core] for core in cores[each.cpus]),
            worker_cores=sum(1 / worker_counts[core] for core in more),
            cpus=sum(1 / users[pu] for pu in each.cpus),
        )
        for each, more in zip(sets, extra, strict=True)
    )


def count_memory_kib(machine: Machine) -> int:
    """Return the memory that the job may use, on the NUMA nodes that it may allocate from; 0 if unknown."""
    allowed = [node for node in machine.nodes if node.normal and node.id in machine.allowed_mems]
    there = sum(node.memory_kib for node in allowed) if len(allowed) < len(machine.nodes) else 0
    return min(filter(None, (machine.memory_kib, machine.limits.memory_kib, there)), default=0)


@dataclass(frozen=True, slots=True)
class WorkerLimit:
    """A limit on the DataLoader workers of each rank, and why."""

    max_workers: int
    what: str
    """The resource and its amount, for people."""
    rule: str = ""
    """Of the warning if it bounds a job; empty for cores, of which a job has what it asks for."""
    enough_gib: int = 0
    """How much would be enough."""


def limit_workers(
    loader: DataloaderConfig, machine: Machine, ranks: int, workers: int
) -> Iterator[WorkerLimit]:
    """Limits by memory, shared memory and descriptors on the `workers` that each rank would like.

    Half of the memory that the job may use: the rest is for ranks, page cache and checkpoints. What is in
    /dev/shm counts as memory too, and against a cgroup's limit. Half of /dev/shm, through which batches come:
    the rest is for NCCL and a second DataLoader. Descriptors of a rank's process, whose soft limit is raised
    to the hard one at its start.
    """
    gib, limits = count_memory_kib(machine) / (1 << 20), machine.limits
    if gib and loader.worker_gib:
        each = loader.worker_gib + loader.worker_shm_mib / 1024
        what = f"{gib:.3g} GiB of memory, {each:.3g} GiB for each worker"
        yield WorkerLimit(int(min(MEMORY_SHARE * gib / (each * ranks), 1e6)), what, "workers_memory")
    each = loader.worker_shm_mib
    if limits.shm_kib is not None and each:
        mib = limits.shm_kib / 1024
        what = f"{mib:.3g} MiB of /dev/shm, {each:.3g} MiB for each worker"
        enough = int(min(workers * ranks * each / MEMORY_SHARE / 1024, 1e6)) + 1
        most = int(min(MEMORY_SHARE * mib / (each * ranks), 1e6))
        yield WorkerLimit(most, what, "workers_shm", enough)
    if limits.files is not None:
        most = max(0, limits.files - FILES_RANK) // FILES_WORKER
        yield WorkerLimit(most, f"{limits.files} open files", "workers_files")


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

    def choose(self, cores: Cores) -> tuple[int, str]:
        """The number of a rank's DataLoader workers, and why it is that.

        At least one, unless none are asked for: without one the GPU waits for every batch.
        """
        limit = min((cores.bound_workers(), *self.limits), key=lambda limit: limit.max_workers)
        most = max(0, limit.max_workers)
        workers = min(self.requested, max(1, most)) if self.is_limited else self.requested
        note = f"num_workers={workers}: {self.source} asks for {self.requested}"
        note += f"; at most {most} for {limit.what}" if self.requested else ""
        note += ", yet at least 1" if self.is_limited and workers > most else ""
        return workers, note

    def find_shortages(self, cores: Sequence[Cores], *, measured: bool) -> Iterator[PlanWarning]:
        """Warn if resources allow fewer workers; about cores only if the user set a number (unmeasured)."""
        by_rank = [each.bound_workers().max_workers for each in cores]
        room = max(0, min(self.limits[0].max_workers, *by_rank))
        planned = min(self.requested, max(1, room)) if self.is_limited else self.requested
        has_quota = any(each.is_limited for each in cores)  # a quota has a warning of its own
        is_own = self.source == WORKERS_KEY and not (has_quota or measured)
        if is_own and max(1, room) < self.requested:
            yield warn("workers", requested=self.requested, room=room, what=self.limits[0].what)
        for limit in self.limits:
            if limit.rule and limit.max_workers < planned:
                yield warn(
                    limit.rule,
                    source=self.source,
                    requested=self.requested,
                    ranks=len(cores),
                    room=limit.max_workers,
                    what=limit.what,
                    enough=limit.enough_gib,
                )


def count_requested_workers(request: Request) -> int:
    """DataLoader workers that each rank would like; the user's LAUNCH_NUM_WORKERS wins."""
    asked = read_variable_count(request.environ, LAUNCH_NUM_WORKERS, 0)
    return request.dataloader.num_workers if asked is None else asked


def budget_workers(request: Request, machine: Machine, cores: Sequence[Cores]) -> WorkerBudget:
    """Return the requested workers and the node's limits; `cores` are those of each rank.

    The node's cores: `cores = ranks * (workers + 1) + 4`; a CPU quota counts as cores. Source: S. Bekman,
    Machine Learning Engineering Open Book, chapter on CPUs.
    """
    loader, ranks, quota = request.dataloader, len(cores), machine.limits.cpus
    usable_cpus = find_usable(machine)
    usable = len({cpu.core for cpu in machine.cpus if cpu.id in usable_cpus})
    total, named = (usable, "cores") if quota is None or quota >= usable else (quota, "CPUs of time")
    # The largest number w with `sum(min(w, m) for m in max_by_rank) <= left`.
    left = int(total - ranks - count_system_cores(ranks) + ROUNDING)
    max_by_rank = sorted(max(0, each.bound_workers().max_workers) for each in cores)
    most = max_by_rank[-1]
    for at, room in enumerate(max_by_rank):
        share = left // (ranks - at)
        if share < room:
            most = max(0, share)
            break
        left -= room
    wanted = count_requested_workers(request)
    by_cores = WorkerLimit(most, f"{total:g} {named} and {ranks} rank{'' if ranks == 1 else 's'}")
    usual = WORKLOADS.get(loader.workload, loader.num_workers if loader.workload else None)
    source, is_limited = f"dataloader={loader.workload}", not loader.measured
    if read_variable_count(request.environ, LAUNCH_NUM_WORKERS, 0) is not None:
        source, is_limited = LAUNCH_NUM_WORKERS, False
    elif loader.num_workers != usual:
        source, is_limited = WORKERS_KEY, False
    return WorkerBudget(
        source, wanted, is_limited, (by_cores, *limit_workers(loader, machine, ranks, wanted))
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank is, before it has workers, threads and variables."""

    gpu: Gpu | None
    local_nodes: frozenset[int]
    """NUMA nodes nearest to its GPU."""
    sets: CpuSets
    memory: Memory
    link: RankNic | None


def choose_memory(
    machine: Machine, topology: Topology, node: int | None, local_nodes: frozenset[int]
) -> Memory:
    """Prefer the rank's node; if the job may not use its memory, the nearest that it may.

    Only ordinary memory counts. The nodes nearest to the GPU (`local_nodes`) come first.
    """
    normal = [entry for entry in machine.nodes if entry.normal and entry.id in machine.allowed_mems]
    # Sizes are all 0 if the probe could not read them.
    targets = {entry.id for entry in normal if entry.memory_kib} or {entry.id for entry in normal}
    preferred = targets & local_nodes or targets
    if node is None or not preferred:
        return Memory("default")
    nearest = topology.find_nearest(node, preferred)
    return Memory("preferred", frozenset((node if node in nearest else min(nearest),)))


def build_rank_plan(
    request: Request,
    kernel: str,
    local_rank: int,
    placement: Placement,
    gpu_variable: tuple[str, str] | None,
    *,
    cores: Cores,
    budget: WorkerBudget,
    why: str,
) -> RankPlan:
    """Add workers, threads and variables to a placed rank; what the user has set wins.

    `gpu_variable` and its value show the rank's GPU, `budget` has the limits of its workers. `kernel` is the
    release of the node's kernel.

    OMP_NUM_THREADS alone is set, as torchrun does: MKL and OpenBLAS take it too, and a number of their own
    would win over an OMP_NUM_THREADS that the program sets before it imports torch. Inductor's compile
    processes are one for each hardware thread of the rank, up to Inductor's maximum: left alone, it counts
    the affinity, which ranks that share their CPUs have as a whole
    (github.com/pytorch/pytorch/issues/190941).
    """
    environ, gpu, link = request.environ, placement.gpu, placement.link
    workers, note = budget.choose(cores)
    notes = [why, note]
    # The rank's own cores, less those that workers need beyond the spare ones; at least one.
    spare = int(cores.worker_cores + ROUNDING)
    threads = max(1, int(cores.own_cores + ROUNDING) - max(0, workers - spare))
    threads = read_variable_count(environ, "OMP_NUM_THREADS", 1) or threads
    max_threads = read_variable_count(environ, "NUMEXPR_MAX_THREADS", 1) or MAX_NUMEXPR_THREADS
    env = {
        LAUNCH_NUM_WORKERS: str(workers),
        LAUNCH_GC: render_gc(request.gc),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(MAX_COMPILE_THREADS, int(cores.cpus + ROUNDING)))),
    }
    if request.dataloader.default:
        env[LAUNCH_LOADER_DEFAULT] = "1"
    if threads > max_threads:
        env["NUMEXPR_NUM_THREADS"] = str(max_threads)
    if gpu is not None and gpu.vendor != "amd":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if gpu_variable is not None and request.devices != "all":
        env[gpu_variable[0]] = gpu_variable[1]
    if link is not None:
        env[LAUNCH_NIC] = link.nic.name
    if link is not None and request.binding.nic:
        # `=` is the form for an exact name: `mlx5_1` alone is a prefix that selects mlx5_10 too (NCCL's
        # documentation, "Environment Variables").
        if link.is_verbs:
            env["NCCL_IB_HCA"] = f"={link.nic.name}"
        else:
            notes.append(
                f"NCCL_IB_HCA is not set: {link.nic.name} is an EFA device, which NCCL reaches by libfabric"
            )
    for variables, more in (set_allocator(request, gpu, kernel), set_malloc(request)):
        env |= variables
        notes += more
    if request.caches:  # PyTorch's compilers keep there what they have made; a node's ranks share it
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{request.caches}/inductor"
        env["TRITON_CACHE_DIR"] = f"{request.caches}/triton"
    decided = env if request.devices != "all" else {}
    kept = [name for name in HONOURED if name in environ and is_kept(environ, name, decided)]
    notes += [f"{name}={environ[name]} kept, set by the user" for name in kept]
    env = {name: env[name] for name in sorted(env) if name not in kept}
    return RankPlan(
        local_rank=local_rank,
        gpu=gpu,
        cpus=placement.sets.cpus,
        worker_cpus=placement.sets.worker_cpus,
        memory=placement.memory,
        num_workers=workers,
        omp_num_threads=threads,
        nic=link.nic.name if link else None,
        env=tuple(env.items()),
        notes=tuple(notes),
        variables=list_variables(request, env),
    )
