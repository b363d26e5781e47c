"""What a placed rank is started with: memory policy, DataLoader workers, threads, variables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.model import HONOURED, Gpu, Machine, Memory, RankPlan, Request
from launcher.plan.policies import Place
from launcher.plan.topology import Topology


def choose_memory(machine: Machine, topology: Topology, node: int | None, home: frozenset[int]) -> Memory:
    """Prefer the rank's node; where the job may not use its memory, the nearest that it may.

    Only ordinary memory counts. Nodes as near to the GPU as the rank's own (`home`) come first.
    """
    normal = [entry for entry in machine.nodes if entry.normal and entry.id in machine.allowed_mems]
    # Sizes are all 0 where the probe could not read them.
    targets = {entry.id for entry in normal if entry.memory_kib} or {entry.id for entry in normal}
    near = targets & home or targets
    if node is None or not near:
        return Memory("default")
    nearest = topology.find_nearest(node, near)
    return Memory("preferred", frozenset((node if node in nearest else min(nearest),)))


@dataclass(frozen=True, slots=True)
class Cores:
    """Physical cores that a rank has, a shared one counted in part."""

    own: float
    """For its own process."""
    spare: float
    """For its DataLoader workers alone."""


def count_cores(topology: Topology, places: Sequence[Place]) -> tuple[Cores, ...]:
    """Cores of each rank; one that n ranks share counts 1/n for each."""
    masks = {mask for place in places for mask in (place.cpus, place.worker_cpus)}
    cores = {mask: frozenset(topology.core_of[pu] for pu in mask) for mask in masks}
    own, spare = Counter[int](), Counter[int]()
    extra = [cores[place.worker_cpus] - cores[place.cpus] for place in places]
    for place, more in zip(places, extra, strict=True):
        own.update(cores[place.cpus])
        spare.update(more)
    return tuple(
        Cores(sum(1 / own[core] for core in cores[place.cpus]), sum(1 / spare[core] for core in more))
        for place, more in zip(places, extra, strict=True)
    )


def count_workers(wanted: int, cores: Cores) -> int:
    """As many DataLoader workers as have a core each beside the rank's process, at least one.

    Rule: a core for each rank and each worker (ml-engineering book). No worker at all blocks the GPU.
    """
    return min(wanted, max(1, int(cores.own + cores.spare + 1e-6) - 1))


def count_threads(workers: int, cores: Cores) -> int:
    """The rank's own cores, less those that workers need beyond the spare ones; at least one."""
    return max(1, int(cores.own + 1e-6) - max(0, workers - int(cores.spare + 1e-6)))


def read_count(environ: Mapping[str, str], name: str, least: int) -> int | None:
    """The number in a variable, the first of a list (`OMP_NUM_THREADS=8,4`); None where there is none."""
    text = environ.get(name, "").split(",")[0].strip()
    # Longer numbers are no count of anything here, and int() refuses some thousands of digits.
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    return number if number >= least else None


def set_variables(request: Request, gpu: Gpu | None, workers: int, threads: int) -> dict[str, str]:
    """Variables of a rank, before the user's own are taken out."""
    env = {"LAUNCH_NUM_WORKERS": str(workers), "OMP_NUM_THREADS": str(threads)}
    if gpu is not None:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if request.devices == "own":
            env["CUDA_VISIBLE_DEVICES"] = gpu.uuid or str(gpu.index)
    return env


def finish_rank(
    request: Request, rank: int, gpu: Gpu | None, *, place: Place, memory: Memory, cores: Cores
) -> RankPlan:
    """Add workers, threads and variables to a placed rank; what the user has set wins."""
    environ = dict(request.environ)
    asked = read_count(environ, "LAUNCH_NUM_WORKERS", 0)
    workers = count_workers(request.num_workers, cores) if asked is None else asked
    threads = read_count(environ, "OMP_NUM_THREADS", 1) or count_threads(workers, cores)
    kept = find_kept(request, environ)
    env = set_variables(request, gpu, workers, threads)
    notes = [explain(gpu, place, cores)]
    if workers < request.num_workers and asked is None:
        notes.append(f"num_workers={workers} rather than {request.num_workers}, for want of cores")
    notes += [f"{name}={environ[name]} kept, set by the user" for name in kept]
    return RankPlan(
        local_rank=rank,
        gpu=gpu,
        cpus=place.cpus,
        worker_cpus=place.worker_cpus,
        memory=memory,
        num_workers=workers,
        omp_num_threads=threads,
        env=tuple(sorted((name, value) for name, value in env.items() if name not in kept)),
        notes=tuple(notes),
    )


def find_kept(request: Request, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the user's variables that stay; numbers that no program could read do not."""
    lost = {
        "CUDA_VISIBLE_DEVICES": request.devices == "own",
        "CUDA_DEVICE_ORDER": not environ.get("CUDA_DEVICE_ORDER"),
        "OMP_NUM_THREADS": read_count(environ, "OMP_NUM_THREADS", 1) is None,
        "LAUNCH_NUM_WORKERS": read_count(environ, "LAUNCH_NUM_WORKERS", 0) is None,
    }
    return tuple(name for name in HONOURED if name in environ and not lost[name])


def explain(gpu: Gpu | None, place: Place, cores: Cores) -> str:
    """One sentence on why a rank has these CPUs."""
    parts = [f"{cores.own:.3g} cores: {place.why}"]
    if gpu is not None and place.node is not None:
        known = gpu.node if gpu.node is not None else "unknown"
        parts.append(f"for GPU {gpu.pci} on NUMA node {known}")
    if cores.spare:
        parts.append(f"and {cores.spare:.3g} more for its workers")
    return ", ".join(parts)
