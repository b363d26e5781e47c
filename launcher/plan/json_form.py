"""The JSON form of plans and machine snapshots; launcher.plan.snapshot reads it back."""

from collections.abc import Mapping

from launcher.cpulist import format_cpulist
from launcher.plan.gc_policy import parse_gc_policy, render_gc_policy
from launcher.plan.model import (
    SCHEMA,
    Cache,
    Gpu,
    Limits,
    Machine,
    Nic,
    NumaNode,
    Plan,
    RankPlan,
    Request,
    Variable,
)

KIND = "machine"
"""What a snapshot says that it is."""
PLACE = ("package", "node", "l3", "capacity")
"""What the cores of one group of a snapshot have in common."""


def plan_to_json(plan: Plan) -> dict[str, object]:
    """A plan as `launch plan format=json` prints it."""
    return {
        "schema": SCHEMA,
        "machine": machine_to_json(plan.machine),
        "ranks": [rank_to_json(rank) for rank in plan.ranks],
        "warnings": list(plan.warnings),
    }


def rank_to_json(rank: RankPlan) -> dict[str, object]:
    """One rank's part of a plan."""
    gpu = rank.gpu
    return {
        "local_rank": rank.local_rank,
        "gpu": {"index": gpu.index, "uuid": gpu.uuid, "pci": gpu.pci} if gpu else None,
        "cpus": format_cpulist(rank.cpus),
        "worker_cpus": format_cpulist(rank.worker_cpus),
        "memory": {"policy": rank.memory.policy, "nodes": format_cpulist(rank.memory.nodes)},
        "num_workers": rank.num_workers,
        "omp_num_threads": rank.omp_num_threads,
        "nic": rank.nic,
        "env": dict(rank.env),
        "variables": [variable_to_json(variable) for variable in rank.variables],
        "notes": list(rank.notes),
    }


def variable_to_json(variable: Variable) -> dict[str, object]:
    """A variable with who set it, and why if there is something to say."""
    why = {"why": variable.why} if variable.why else {}
    return {"name": variable.name, "value": variable.value, "from": variable.source, **why}


def machine_to_json(machine: Machine) -> dict[str, object]:
    """A machine as a snapshot holds it; `machine_from_json` reads it back."""
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "name": machine.name,
        **({"kernel": machine.kernel} if machine.kernel else {}),
        "source": machine.source,
        "cores": cores_to_json(machine),
        "caches": [take_fields(cache) for cache in machine.caches],
        "nodes": [node_to_json(machine, node) for node in machine.nodes],
        "gpus": [gpu_to_json(gpu) for gpu in machine.gpus],
        "nics": [{**take_fields(nic), "path": list(nic.path)} for nic in machine.nics],
        "allowed_cpus": format_cpulist(machine.allowed_cpus),
        "allowed_mems": format_cpulist(machine.allowed_mems),
        "isolated": format_cpulist(machine.isolated),
        "memory_kib": machine.memory_kib,
        "limits": take_fields(machine.limits),
        "warnings": list(machine.warnings),
    }


def take_fields(value: Cache | Nic | Limits) -> dict[str, object]:
    """The fields of a value by name."""
    return {name: getattr(value, name) for name in value.__slots__}


def cores_to_json(machine: Machine) -> list[dict[str, object]]:
    """The cores, those of one package, node, cache and capacity together; a cpulist of PUs for each core."""
    groups: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for cpu in machine.cpus:
        place = (cpu.package, cpu.node, cpu.l3, cpu.capacity)
        groups.setdefault(place, {}).setdefault(cpu.core, []).append(cpu.id)
    return [
        {
            **dict(zip(PLACE, place, strict=True)),
            "cores": [format_cpulist(frozenset(pus)) for pus in cores.values()],
        }
        for place, cores in groups.items()
    ]


def node_to_json(machine: Machine, node: NumaNode) -> dict[str, object]:
    """A NUMA node; a distance for each node of the machine, in their order."""
    return {
        "id": node.id,
        "memory_kib": node.memory_kib,
        "normal": node.normal,
        "distances": [node.distance(other.id) for other in machine.nodes],
    }


def gpu_to_json(gpu: Gpu) -> dict[str, object]:
    """A GPU with all that is known of it."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "pci": gpu.pci,
        "node": gpu.node,
        "local_cpus": format_cpulist(gpu.local_cpus),
        "name": gpu.name,
        "mig": list(gpu.mig),
        "vendor": gpu.vendor,
        "path": list(gpu.path),
        "memory_mib": gpu.memory_mib,
    }


def request_to_json(request: Request, root: str) -> dict[str, object]:
    """LAUNCH_REQUEST: what is asked of every node of a job, and the root of the machine's files there.

    What depends on the node is left out: the number of ranks, the environment, folders and libraries.
    """
    return {
        "root": root,
        "binding": request.binding,
        "strict": request.strict,
        "reserve_cores": request.reserve_cores,
        "devices": request.devices,
        "workload": request.workload,
        "num_workers": request.num_workers,
        "worker_gib": request.worker_gib,
        "worker_shm_mib": request.worker_shm_mib,
        "loader_default": request.loader_default,
        "measured": request.measured,
        "gc": render_gc_policy(request.gc),
        "allocator": request.allocator,
        "host_allocator": request.host_allocator,
        "nic": request.nic,
        "configured": dict(request.configured),
    }


def request_from_json(data: object) -> tuple[Request, str]:
    """Read LAUNCH_REQUEST back, and the root in it; raises ValueError for what is not as written above."""
    if not isinstance(data, dict):
        raise ValueError("not an object")
    request = Request(
        binding=take_text(data, "binding"),
        strict=take_flag(data, "strict"),
        reserve_cores=int(take_number(data, "reserve_cores")),
        devices=take_text(data, "devices"),
        workload=take_text(data, "workload"),
        num_workers=int(take_number(data, "num_workers")),
        worker_gib=take_number(data, "worker_gib"),
        worker_shm_mib=take_number(data, "worker_shm_mib"),
        loader_default=take_flag(data, "loader_default"),
        measured=take_flag(data, "measured"),
        gc=parse_gc_policy(take_text(data, "gc")),
        allocator=take_text(data, "allocator"),
        host_allocator=take_text(data, "host_allocator"),
        nic=take_flag(data, "nic"),
        configured=take_texts(data, "configured"),
    )
    return request, take_text(data, "root")


def take_text(data: Mapping[str, object], name: str) -> str:
    """The text of this name; raises ValueError."""
    value = data.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def take_flag(data: Mapping[str, object], name: str) -> bool:
    """The truth value of this name; raises ValueError."""
    value = data.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is neither true nor false")
    return value


def take_number(data: Mapping[str, object], name: str) -> float:
    """The number of this name; raises ValueError."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is no number")
    return value


def take_texts(data: Mapping[str, object], name: str) -> tuple[tuple[str, str], ...]:
    """The names and texts of an object; raises ValueError."""
    value = data.get(name)
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{name} is no object of texts")
    return tuple(value.items())
