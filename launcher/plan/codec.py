"""The JSON form of plans and machine snapshots, written and read back."""

from launcher.cpulist import format_cpulist
from launcher.plan.model import SCHEMA, Cpu, Gpu, Machine, NumaNode, Plan, RankPlan
from launcher.plan.snapshot import KIND, machine_from_json, parse_machine

__all__ = ["machine_from_json", "machine_to_json", "parse_machine", "plan_to_json"]


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
        "notes": list(rank.notes),
    }


def machine_to_json(machine: Machine) -> dict[str, object]:
    """A machine as a snapshot holds it; `machine_from_json` reads it back."""
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "cpus": [{name: getattr(cpu, name) for name in Cpu.__slots__} for cpu in machine.cpus],
        "nodes": [node_to_json(node) for node in machine.nodes],
        "gpus": [gpu_to_json(gpu) for gpu in machine.gpus],
        "allowed_cpus": format_cpulist(machine.allowed_cpus),
        "allowed_mems": format_cpulist(machine.allowed_mems),
        "isolated": format_cpulist(machine.isolated),
        "memory_kib": machine.memory_kib,
        "warnings": list(machine.warnings),
    }


def node_to_json(node: NumaNode) -> dict[str, object]:
    """A NUMA node; distances by node number."""
    return {
        "id": node.id,
        "memory_kib": node.memory_kib,
        "normal": node.normal,
        "distances": {str(other): distance for other, distance in node.distances},
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
    }
