"""What a placed rank is started with: memory policy, DataLoader workers, threads, variables."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.model import HONOURED, Gpu, Machine, Memory, RankPlan, Request
from launcher.plan.nics import Link, is_verbs
from launcher.plan.policies import Place
from launcher.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class Scene:
    """What was decided for all ranks of a node."""

    machine: Machine
    topology: Topology
    binding: str
    gpus: Sequence[Gpu | None]
    places: Sequence[Place]
    memories: Sequence[Memory]
    links: Sequence[Link | None]


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
    limited: bool = False
    """A cgroup's quota leaves it less time than the cores would have."""


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


def limit_cores(cores: Sequence[Cores], quota: float | None) -> tuple[Cores, ...]:
    """What each rank has of its cores within its even share of a cgroup's CPU quota.

    A quota counts time on hardware threads, of which a core needs one to be busy.
    """
    if quota is None:
        return tuple(cores)
    share = quota / len(cores)
    return tuple(
        Cores(own, min(have.spare, share - own), limited=share < have.own + have.spare)
        for have in cores
        for own in (min(have.own, share),)
    )


def set_devices(
    request: Request, gpu: Gpu | None, own: tuple[str, str] | None, link: Link | None
) -> dict[str, str]:
    """Variables that tell a rank of its GPU and NIC; `own` shows the GPU alone.

    `NCCL_IB_HCA` has the form for an exact name, since `mlx5_1` alone is a prefix that selects mlx5_10 too
    (NCCL's documentation, "Environment Variables").
    """
    env = {}
    if gpu is not None and gpu.vendor != "amd":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if own is not None and request.devices == "own":
        env[own[0]] = own[1]
    if link is not None:
        env["LAUNCH_NIC"] = link.nic.name
        if request.nic and is_verbs(link.nic):
            env["NCCL_IB_HCA"] = f"={link.nic.name}"
    return env


def finish_rank(
    request: Request, scene: Scene, rank: int, own: tuple[str, str] | None, *, cores: Cores, why: str
) -> RankPlan:
    """Add workers, threads and variables to a placed rank; what the user has set wins.

    `own` are the variable and value that show the rank's GPU alone.
    """
    environ = dict(request.environ)
    gpu, place, link = scene.gpus[rank], scene.places[rank], scene.links[rank]
    asked = read_count(environ, "LAUNCH_NUM_WORKERS", 0)
    workers = count_workers(request.num_workers, cores) if asked is None else asked
    threads = read_count(environ, "OMP_NUM_THREADS", 1) or count_threads(workers, cores)
    env = {"LAUNCH_NUM_WORKERS": str(workers), "OMP_NUM_THREADS": str(threads), "LAUNCH_GC": request.gc}
    env |= set_devices(request, gpu, own, link)
    kept = find_kept(environ, env if request.devices == "own" else {})
    notes = [why, *find_lacks(request, link, cores, workers if asked is None else request.num_workers)]
    return RankPlan(
        local_rank=rank,
        gpu=gpu,
        cpus=place.cpus,
        worker_cpus=place.worker_cpus,
        memory=scene.memories[rank],
        num_workers=workers,
        omp_num_threads=threads,
        nic=link.nic.name if link else None,
        env=tuple(sorted((name, value) for name, value in env.items() if name not in kept)),
        notes=(*notes, *(f"{name}={environ[name]} kept, set by the user" for name in kept)),
    )


def find_lacks(request: Request, link: Link | None, cores: Cores, workers: int) -> Iterator[str]:
    """What a rank does not get of what was asked for."""
    if workers < request.num_workers:
        lack = "CPU time" if cores.limited else "cores"
        yield f"num_workers={workers} rather than {request.num_workers}, for want of {lack}"
    if request.nic and link and not is_verbs(link.nic):
        yield f"NCCL_IB_HCA is not set: {link.nic.name} is an EFA device, which NCCL reaches by libfabric"


def find_kept(environ: Mapping[str, str], decided: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the user's variables that stay.

    Not those that show a GPU alone, which are among the `decided` ones, nor numbers that no program could
    read; an empty value is as good as none but where it hides GPUs.
    """
    lost = {
        "CUDA_VISIBLE_DEVICES": "CUDA_VISIBLE_DEVICES" in decided,
        "HIP_VISIBLE_DEVICES": "HIP_VISIBLE_DEVICES" in decided or not environ.get("HIP_VISIBLE_DEVICES"),
        "CUDA_DEVICE_ORDER": not environ.get("CUDA_DEVICE_ORDER"),
        "OMP_NUM_THREADS": read_count(environ, "OMP_NUM_THREADS", 1) is None,
        "LAUNCH_NUM_WORKERS": read_count(environ, "LAUNCH_NUM_WORKERS", 0) is None,
        "LAUNCH_GC": not environ.get("LAUNCH_GC"),
        "LAUNCH_NIC": not environ.get("LAUNCH_NIC"),
        "NCCL_IB_HCA": not environ.get("NCCL_IB_HCA"),
    }
    return tuple(name for name in HONOURED if name in environ and not lost.get(name))
