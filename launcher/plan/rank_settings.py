"""What a placed rank is started with: memory policy, DataLoader workers, threads, variables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.allocator import set_allocator, set_malloc
from launcher.plan.cpu_sets import RankPlacement
from launcher.plan.environment import VariablesAndNotes, list_kept
from launcher.plan.gc_policy import render_gc_policy
from launcher.plan.model import Gpu, Machine, Memory, RankPlan, Request
from launcher.plan.nic_choice import RankNic, is_verbs
from launcher.plan.usable_cores import Topology
from launcher.plan.workers_and_threads import Cores, WorkerBudget, set_threads, set_workers
from launcher.protocol import LAUNCH_GC, LAUNCH_NIC


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The placement of all ranks of a node; sequences are in the order of local ranks."""

    machine: Machine
    topology: Topology
    binding: str
    gpus: Sequence[Gpu | None]
    local_nodes_by_rank: Sequence[frozenset[int]]
    """NUMA nodes nearest to each rank's GPU."""
    placements: Sequence[RankPlacement]
    memories: Sequence[Memory]
    links: Sequence[RankNic | None]


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


def set_devices(request: Request, gpu: Gpu | None, gpu_variable: tuple[str, str] | None) -> VariablesAndNotes:
    """Variables that tell a rank of its GPU; `gpu_variable` shows the GPU, unless the rank is to see all."""
    env = {}
    if gpu is not None and gpu.vendor != "amd":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if gpu_variable is not None and request.devices != "all":
        env[gpu_variable[0]] = gpu_variable[1]
    return env, ()


def set_nic(request: Request, link: RankNic | None) -> VariablesAndNotes:
    """Variables that tell a rank of its NIC.

    `NCCL_IB_HCA` has the form for an exact name, since `mlx5_1` alone is a prefix that selects mlx5_10 too
    (NCCL's documentation, "Environment Variables").
    """
    if link is None:
        return {}, ()
    env = {LAUNCH_NIC: link.nic.name}
    if request.nic and is_verbs(link.nic):
        return env | {"NCCL_IB_HCA": f"={link.nic.name}"}, ()
    efa = f"NCCL_IB_HCA is not set: {link.nic.name} is an EFA device, which NCCL reaches by libfabric"
    return env, [efa] if request.nic else []


def set_collector(request: Request) -> VariablesAndNotes:
    """Garbage collection in the rank's interpreter."""
    return {LAUNCH_GC: render_gc_policy(request.gc)}, ()


def set_caches(request: Request) -> VariablesAndNotes:
    """Where PyTorch's compilers keep what they have made; a node's ranks share it."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: f"{request.caches}/{folder}" for name, folder in folders.items() if request.caches}, ()


def build_rank_plan(
    request: Request,
    placed: NodePlacement,
    rank: int,
    gpu_variable: tuple[str, str] | None,
    *,
    cores: Cores,
    budget: WorkerBudget,
    why: str,
) -> RankPlan:
    """Add workers, threads and variables to a placed rank; what the user has set wins.

    `gpu_variable` and its value show the rank's GPU, `budget` has the limits of its workers.
    """
    environ = dict(request.environ)
    placement, link = placed.placements[rank], placed.links[rank]
    workers, loading = set_workers(request, budget, cores)
    threads, threading = set_threads(environ, workers, cores)
    parts = (loading, threading, *set_others(request, placed, rank, gpu_variable))
    env, notes = join_parts(parts, environ, show_devices=request.devices != "all")
    return RankPlan(
        local_rank=rank,
        gpu=placed.gpus[rank],
        cpus=placement.cpus,
        worker_cpus=placement.worker_cpus,
        memory=placed.memories[rank],
        num_workers=workers,
        omp_num_threads=threads,
        nic=link.nic.name if link else None,
        env=env,
        notes=(why, *notes),
    )


def set_others(
    request: Request, placed: NodePlacement, rank: int, gpu_variable: tuple[str, str] | None
) -> tuple[VariablesAndNotes, ...]:
    """What a rank is started with beside its workers and threads."""
    gpu = placed.gpus[rank]
    return (
        set_collector(request),
        set_devices(request, gpu, gpu_variable),
        set_nic(request, placed.links[rank]),
        set_allocator(request, gpu, placed.machine.kernel),
        set_malloc(request),
        set_caches(request),
    )


def join_parts(
    parts: Sequence[VariablesAndNotes], environ: Mapping[str, str], *, show_devices: bool
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """All variables but those that stay as the user has them, by name, and all notes."""
    env = {name: value for variables, _ in parts for name, value in variables.items()}
    kept = list_kept(environ, env if show_devices else {})
    notes = [note for _, notes in parts for note in notes]
    notes += [f"{name}={environ[name]} kept, set by the user" for name in kept]
    return tuple(sorted((name, value) for name, value in env.items() if name not in kept)), tuple(notes)
