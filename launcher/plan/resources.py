"""What each rank is started with by its share of the node: DataLoader workers, threads, memory policy.

The rules of thumb are shared with the doctor and `launch fit`; each has its source.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil

from launcher.plan.model import DataloaderConfig, Machine, Memory, PlanWarning, RankPlan, Request, warn
from launcher.plan.topology import Placement, Topology, find_usable
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
    return ranks * (workers + 1) + ceil(count_system_cores(ranks))


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

    @property
    def room(self) -> int:
        """DataLoader workers that they are enough for: one core for the process, one for each worker."""
        return int(self.own_cores + self.worker_cores + ROUNDING) - 1

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


def count_cores(ranks: Sequence[Placement]) -> list[Cores]:
    """Cores of each rank; one that n ranks share counts 1/n for each."""
    own = [{core.id for core in rank.own} for rank in ranks]
    lent = [{core.id for core in rank.lent} for rank in ranks]
    own_users, lent_users = Counter(chain(*own)), Counter(chain(*lent))
    users = Counter(pu for rank in ranks for pu in rank.cpus)
    return [
        Cores(
            own_cores=sum(1 / own_users[core] for core in mine),
            worker_cores=sum(1 / lent_users[core] for core in more),
            cpus=sum(1 / users[pu] for pu in rank.cpus),
        )
        for rank, mine, more in zip(ranks, own, lent, strict=True)
    ]


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


def limit_workers(loader: DataloaderConfig, machine: Machine, ranks: int) -> Iterator[WorkerLimit]:
    """Limits by memory, shared memory and descriptors.

    Half of the memory that the job may use: the rest is for ranks, page cache and checkpoints. What is in
    /dev/shm counts as memory too, and against a cgroup's limit. Half of /dev/shm, through which batches come:
    the rest is for NCCL and a second DataLoader. Descriptors of a rank's process, whose soft limit is raised
    to the hard one at its start.
    """
    limits, shm = machine.limits, loader.worker_shm_mib / 1024
    memory = loader.worker_gib and loader.worker_gib + shm
    for rule, what, kib, each in (
        ("workers_memory", "memory", count_memory_kib(machine) or None, memory),
        ("workers_shm", "/dev/shm", limits.shm_kib, shm),  # noqa: S108 - a name in a text
    ):
        if kib is not None and each:
            gib = kib / (1 << 20)
            most = int(min(MEMORY_SHARE * gib / (each * ranks), 1e6))
            yield WorkerLimit(most, f"{gib:.3g} GiB of {what}, {each:.3g} GiB for each worker", rule)
    if limits.files is not None:
        most = max(0, limits.files - FILES_RANK) // FILES_WORKER
        yield WorkerLimit(most, f"{limits.files} open files", "workers_files")


def budget_workers(
    request: Request, machine: Machine, cores: Sequence[Cores]
) -> tuple[list[tuple[int, str]], list[PlanWarning]]:
    """Return the number of each rank's DataLoader workers, with why it is that, and warnings of shortages.

    `cores` are those of each rank. The node's cores: `cores = ranks * (workers + 1) + 4`; a CPU quota counts
    as cores. Source: S. Bekman, Machine Learning Engineering Open Book, chapter on CPUs. A number that the
    user has set or measured is taken as it is; else there is at least one, unless none are asked for: without
    one the GPU waits for every batch. Of cores it warns only if the user set a number (unmeasured).
    """
    loader, ranks, usable_cpus = request.dataloader, len(cores), find_usable(machine)
    usable = len({cpu.core for cpu in machine.cpus if cpu.id in usable_cpus})
    total = min(usable, machine.limits.cpus or usable)
    left = int(total - ranks - count_system_cores(ranks) + ROUNDING)
    rooms = [max(0, each.room) for each in cores]
    numbers = range(max(rooms), 0, -1)
    most = next((n for n in numbers if sum(min(n, room) for room in rooms) <= left), 0)
    by_cores = WorkerLimit(most, f"{total:g} cores and {ranks} rank{'' if ranks == 1 else 's'}")
    limits = (by_cores, *limit_workers(loader, machine, ranks))
    requested = count_requested_workers(request)
    usual = WORKLOADS.get(loader.workload, loader.num_workers if loader.workload else None)
    source = f"dataloader={loader.workload}" if loader.num_workers == usual else WORKERS_KEY
    if read_variable_count(request.environ, LAUNCH_NUM_WORKERS) is not None:
        source = LAUNCH_NUM_WORKERS
    is_limited = source.startswith("dataloader=") and not loader.measured
    chosen, warnings = [], []
    for each in cores:
        count = f"{each.own_cores + each.worker_cores:.3g}"
        own = WorkerLimit(each.room, f"its {count} core{'' if count == '1' else 's'}")
        limit = min((own, *limits), key=lambda limit: limit.max_workers)
        most = max(0, limit.max_workers)
        workers = min(requested, max(1, most)) if is_limited else requested
        bound = f"; at most {most} for {limit.what}" if requested else ""
        chosen.append((workers, f"num_workers={workers}: {source} asks for {requested}{bound}"))
    room = min(by_cores.max_workers, *rooms)
    has_quota = any(each.is_limited for each in cores)  # a quota has a warning of its own
    if source == WORKERS_KEY and not (has_quota or loader.measured) and max(1, room) < requested:
        warnings.append(warn("workers", requested=requested, room=room, what=by_cores.what))
    planned = min(requested, max(1, room)) if is_limited else requested
    for limit in limits:
        if limit.rule and limit.max_workers < planned:
            values = {"source": source, "requested": requested, "ranks": ranks}
            warnings.append(warn(limit.rule, **values, room=limit.max_workers, what=limit.what))
    return chosen, warnings


def count_requested_workers(request: Request) -> int:
    """DataLoader workers that each rank would like; the user's LAUNCH_NUM_WORKERS wins."""
    asked = read_variable_count(request.environ, LAUNCH_NUM_WORKERS)
    return request.dataloader.num_workers if asked is None else asked


def choose_memory(machine: Machine, topology: Topology, rank: Placement) -> Memory:
    """Prefer the rank's node; if the job may not use its memory, the nearest that it may.

    Only ordinary memory counts. The nodes nearest to the GPU come first.
    """
    normal = [entry for entry in machine.nodes if entry.normal and entry.id in machine.allowed_mems]
    # Sizes are all 0 if the probe could not read them.
    targets = {entry.id for entry in normal if entry.memory_kib} or {entry.id for entry in normal}
    preferred = targets & rank.local_nodes or targets
    if rank.node is None or not preferred:
        return Memory("default")
    nearest = topology.find_nearest(rank.node, preferred)
    return Memory("preferred", frozenset((rank.node if rank.node in nearest else min(nearest),)))


def build_rank_plan(
    request: Request,
    kernel: str,
    local_rank: int,
    placement: Placement,
    gpu_variable: tuple[str, str] | None,
    *,
    cores: Cores,
    num_workers: int,
    notes: list[str],
) -> RankPlan:
    """Add threads and variables to a placed rank with its workers; what the user has set wins.

    `gpu_variable` and its value show the rank's GPU. `kernel` is the release of the node's kernel.

    OMP_NUM_THREADS alone is set, as torchrun does: MKL and OpenBLAS take it too, and a number of their own
    would win over an OMP_NUM_THREADS that the program sets before it imports torch. Inductor's compile
    processes are one for each hardware thread of the rank, up to Inductor's maximum: left alone, it counts
    the affinity, which ranks that share their CPUs have as a whole
    (github.com/pytorch/pytorch/issues/190941).
    """
    environ, gpu, nic = request.environ, placement.gpu, placement.nic
    # The rank's own cores, less those that workers need beyond the spare ones; at least one.
    spare = int(cores.worker_cores + ROUNDING)
    threads = max(1, int(cores.own_cores + ROUNDING) - max(0, num_workers - spare))
    threads = read_variable_count(environ, "OMP_NUM_THREADS") or threads
    max_threads = read_variable_count(environ, "NUMEXPR_MAX_THREADS") or MAX_NUMEXPR_THREADS
    has_own = request.devices != "all"
    env = {
        LAUNCH_NUM_WORKERS: str(num_workers),
        LAUNCH_GC: render_gc(request.gc),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(MAX_COMPILE_THREADS, int(cores.cpus + ROUNDING)))),
        LAUNCH_LOADER_DEFAULT: "1" if request.dataloader.default else "",
        "NUMEXPR_NUM_THREADS": str(max_threads) if threads > max_threads else "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID" if gpu and gpu.vendor != "amd" else "",
        LAUNCH_NIC: nic.name if nic else "",
        # PyTorch's compilers keep there what they have made; a node's ranks share it.
        "TORCHINDUCTOR_CACHE_DIR": f"{request.caches}/inductor" if request.caches else "",
        "TRITON_CACHE_DIR": f"{request.caches}/triton" if request.caches else "",
    }
    env = {name: value for name, value in env.items() if value}
    if gpu_variable is not None and has_own:
        env[gpu_variable[0]] = gpu_variable[1]
    if nic and request.binding.nic:
        # EFA goes by libfabric. Its devices have a link layer of their own, and are named `efa_0` by the
        # kernel, `rdmap16s27` by udev.
        if nic.link_layer or not nic.name.startswith(("efa", "rdma")):
            # `=` is the form for an exact name: `mlx5_1` alone is a prefix that selects mlx5_10 too (NCCL's
            # documentation, "Environment Variables").
            env["NCCL_IB_HCA"] = f"={nic.name}"
        else:
            notes.append(f"NCCL_IB_HCA is not set: NCCL reaches {nic.name}, an EFA device, by libfabric")
    for variables, more in (set_allocator(request, gpu, kernel), set_malloc(request)):
        env |= variables
        notes += more
    kept = [name for name in HONOURED if name in environ and is_kept(environ, name, env if has_own else ())]
    notes += [f"{name}={environ[name]} kept, set by the user" for name in kept]
    env = {name: env[name] for name in sorted(env) if name not in kept}
    return RankPlan(
        local_rank=local_rank,
        gpu=gpu,
        cpus=placement.cpus,
        worker_cpus=placement.worker_cpus,
        memory=placement.memory,
        num_workers=num_workers,
        omp_num_threads=threads,
        nic=nic.name if nic else None,
        env=tuple(env.items()),
        notes=tuple(notes),
        variables=list_variables(request, env),
    )
