"""Where a placement falls short of what was asked, and what the user should know besides."""

from collections.abc import Iterator, Mapping, Sequence

from launcher.cpulist import format_cpulist
from launcher.plan.allocator import find_missing
from launcher.plan.cores import Cores
from launcher.plan.model import Gpu, Machine, Memory, Request
from launcher.plan.policies import Place
from launcher.plan.rules import BINDS, COLLECTORS, find_binders
from launcher.plan.topology import Topology, find_usable, gather_pus
from launcher.plan.variables import COUNTS, read_count


def find_shortfalls(
    request: Request,
    machine: Machine,
    topology: Topology,
    *,
    gpus: Sequence[Gpu | None],
    places: Sequence[Place],
    memories: Sequence[Memory],
) -> tuple[str, ...]:
    """What the machine could not give, as `what happened: fix`; nothing where no binding was asked for."""
    if request.binding == "none":
        return ()
    return (
        *find_remote(machine, topology, gpus),
        *find_foreign_memory(machine, places, memories),
        *find_isolated(machine),
        *find_unreserved(machine, topology, request.reserve_cores),
        *(find_crowded(topology, places) if request.binding == "exclusive" else ()),
    )


def find_remote(machine: Machine, topology: Topology, gpus: Sequence[Gpu | None]) -> Iterator[str]:
    """Ranks that run away from their GPU because the job may use none of the CPUs beside it."""
    wanted: dict[frozenset[int], set[int]] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None:
            near = frozenset(cpu.id for cpu in machine.cpus if cpu.node == gpu.node) or gpu.local_cpus
            wanted.setdefault(near, set()).add(rank)
    for near, ranks in wanted.items():
        if near and near.isdisjoint(topology.core_of):
            yield (
                f"local rank {format_cpulist(ranks)} needs CPUs {format_cpulist(near)}, next to its GPU, "
                f"but this job may use {format_cpulist(frozenset(topology.core_of))}, and runs elsewhere: "
                "ask for those CPUs (cpus_per_task, or the whole node), or set binding=none"
            )


def find_foreign_memory(
    machine: Machine, places: Sequence[Place], memories: Sequence[Memory]
) -> Iterator[str]:
    """Ranks whose own node has memory that the job's cpuset leaves out."""
    barred = {entry.id for entry in machine.nodes if entry.normal and entry.memory_kib} - machine.allowed_mems
    for node, ranks in group_ranks(places).items():
        if node in barred:
            yield (
                f"local rank {format_cpulist(ranks)} runs on NUMA node {node}, but this job may use "
                f"the memory of {format_cpulist(machine.allowed_mems) or 'no node'}, so its memory comes "
                f"from {format_cpulist(memories[min(ranks)].nodes) or 'wherever the kernel finds it'}: "
                f"ask for node {node}'s memory (cpuset.mems)"
            )


def find_crowded(topology: Topology, places: Sequence[Place]) -> Iterator[str]:
    """NUMA nodes with more ranks than cores."""
    for node, ranks in group_ranks(places).items():
        cores = topology.cores[node]
        if len(ranks) > len(cores):
            yield (
                f"local rank {format_cpulist(ranks)} must share {len(cores)} cores (CPUs "
                f"{format_cpulist(gather_pus(cores))}) of NUMA node {node} and will wait for one another: "
                "ask for more CPUs (cpus_per_task), or start fewer ranks (nproc_per_node)"
            )


def find_isolated(machine: Machine) -> Iterator[str]:
    """A job that may use isolated CPUs only."""
    usable = find_usable(machine)
    if usable <= machine.isolated:
        yield (
            f"this job may use isolated CPUs only ({format_cpulist(usable)}), "
            "which the kernel does not balance: ask for others, or start without isolcpus"
        )


def find_unreserved(machine: Machine, topology: Topology, reserve: int) -> Iterator[str]:
    """Reserved cores that could not be kept back."""
    usable = find_usable(machine)
    total = len({cpu.core for cpu in machine.cpus if cpu.id in usable})
    kept = total - sum(len(cores) for cores in topology.cores.values())
    if kept < reserve:
        yield f"reserve_cores={reserve}, but only {kept} of {total} cores can be kept back: reserve fewer"


def group_ranks(places: Sequence[Place]) -> Mapping[int, set[int]]:
    """Local ranks by NUMA node."""
    groups: dict[int, set[int]] = {}
    for rank, place in enumerate(places):
        if place.node is not None:
            groups.setdefault(place.node, set()).add(rank)
    return groups


def find_advice(
    request: Request, machine: Machine, visible: Sequence[Gpu], cores: Sequence[Cores]
) -> Iterator[str]:
    """Settings that are legal, but seldom meant; `cores` are those of each rank."""
    environ = dict(request.environ)
    count = len(cores)
    if visible and count > len(visible):
        yield (
            f"{count} ranks for {len(visible)} GPUs: local rank r gets GPU r % {len(visible)}, "
            "and NCCL refuses two ranks on one GPU: "
            f"set nproc_per_node={len(visible)} unless the program means it (MPS)"
        )
    if len(visible) > 1 and request.devices == "all" and any(gpu.uuid.startswith("MIG-") for gpu in visible):
        yield "CUDA opens one MIG instance in a process, so every rank would use the first: set devices=own"
    order = environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in visible}) > 1:
        yield f"CUDA_DEVICE_ORDER={order} may not number GPUs as this plan does: unset it, or set PCI_BUS_ID"
    for name, least in COUNTS.items():
        if environ.get(name) and read_count(environ, name, least) is None:
            yield f"{name}={environ[name]} is no number from {least} on, and is replaced: correct or unset it"
    for name in find_binders(environ):
        yield f"{name}={environ[name]} is set, and {BINDS}: unset {name}"
    if fault := find_policy_fault(environ.get("LAUNCH_GC") or "default"):
        yield (
            f"LAUNCH_GC={environ['LAUNCH_GC']}: {fault}, and garbage is left to Python: give default, "
            "synchronized,warmup=30,every=50, disabled,every=50 or frozen,warmup=30"
        )
    nic = environ.get("LAUNCH_NIC")
    if nic and nic not in (known := [device.name for device in machine.nics]):
        yield (
            f"LAUNCH_NIC={nic} is none of this machine's RDMA devices ({', '.join(known) or 'none found'}): "
            "correct or unset it"
        )
    yield from find_quota(machine, cores)
    yield from find_missing(request)


def find_policy_fault(text: str) -> str:
    """What the rank's interpreter would not take of a policy for garbage collection; empty where it does."""
    name, *words = text.split(",")
    if name not in COLLECTORS:
        return f"there is no policy {name!r}"
    for word in words:
        key, _, value = word.partition("=")
        if word != "log" and (key not in ("warmup", "every") or read_count({key: value}, key, 0) is None):
            return f"{word!r} is neither log nor a number of steps, warmup=N or every=N"
    return ""


def find_quota(machine: Machine, cores: Sequence[Cores]) -> Iterator[str]:
    """A cgroup's CPU quota that keeps ranks from using their cores."""
    quota = machine.limits.cpus
    total = sum(each.own + each.spare for each in cores)
    if quota is not None and quota < total - 1e-6:
        yield (
            f"the cgroup's quota gives this job the time of {quota:g} CPUs, on {total:.3g} cores, and the "
            "kernel halts what goes beyond: workers and threads are counted within "
            f"{quota / len(cores):.3g} for each of {len(cores)} ranks: raise the CPU limit "
            "(resources.limits.cpu in Kubernetes) or remove it"
        )
