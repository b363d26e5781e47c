"""The JSON form of plans and machine snapshots."""

from dataclasses import dataclass, replace

from launcher.codec import DecodeError, convert, parse_json, to_plain
from launcher.errors import UsageError
from launcher.plan.model import SCHEMA, Cpu, Machine, NumaNode, Plan, RankPlan

KIND = "machine"
"""What a snapshot says that it is."""


def plan_to_json(plan: Plan) -> dict[str, object]:
    """Return a plan as `launch plan format=json` prints it."""
    return {
        "schema": SCHEMA,
        "machine": machine_to_json(plan.machine),
        "ranks": [rank_to_json(rank) for rank in plan.ranks],
        "warnings": list(plan.warnings),
    }


def rank_to_json(rank: RankPlan) -> dict[str, object]:
    """Return one rank's part of a plan; of its GPU what names it, the rest is in the machine."""
    gpu = rank.gpu and {"index": rank.gpu.index, "uuid": rank.gpu.uuid, "pci": rank.gpu.pci}
    variables = [{k: v for k, v in to_plain(one).items() if v or k != "why"} for one in rank.variables]
    return {**to_plain(rank), "gpu": gpu, "variables": variables}


@dataclass(frozen=True, slots=True)
class _CoreGroup:
    """The cores that are in one place, as a snapshot has them."""

    package: int
    node: int
    l3: int
    capacity: int
    cores: tuple[frozenset[int], ...]
    """The PUs of each core."""


@dataclass(frozen=True, slots=True)
class _NodeEntry:
    """A NUMA node, as a snapshot has it."""

    id: int
    memory_kib: int
    normal: bool
    distances: tuple[int, ...]
    """To each node of the machine, in their order."""


def machine_to_json(machine: Machine) -> dict[str, object]:
    """Return a machine as a snapshot holds it; `machine_from_json` reads it back.

    Cores that are in one place stand together, and distances are a row without the nodes' numbers: files of
    machines with hundreds of CPUs stay short.
    """
    groups: dict[tuple[int, int, int, int], dict[int, set[int]]] = {}
    for cpu in machine.cpus:
        place = (cpu.package, cpu.node, cpu.l3, cpu.capacity)
        groups.setdefault(place, {}).setdefault(cpu.core, set()).add(cpu.id)
    cores = [
        _CoreGroup(package, node, l3, capacity, tuple(map(frozenset, found.values())))
        for (package, node, l3, capacity), found in groups.items()
    ]
    ids = [node.id for node in machine.nodes]
    nodes = [
        _NodeEntry(node.id, node.memory_kib, node.normal, tuple(map(node.distance, ids)))
        for node in machine.nodes
    ]
    data = {
        **to_plain(replace(machine, cpus=(), nodes=())),
        "cores": to_plain(cores),
        "nodes": to_plain(nodes),
    }
    del data["cpus"]
    if not machine.kernel:
        del data["kernel"]
    # What people look for comes first.
    first = [
        name
        for name in ("name", "kernel", "source", "cores", "caches", "nodes", "gpus", "nics")
        if name in data
    ]
    return {"schema": SCHEMA, "kind": KIND, **{name: data[name] for name in first}, **data}


def parse_machine(text: str) -> Machine:
    """Read a snapshot's text, or that of a plan, which holds one.

    Raises UsageError for what is not a whole snapshot of a known schema.
    """
    try:
        data = parse_json(text)
    except DecodeError as error:
        raise UsageError(f"not a machine snapshot, or cut short ({error}): save it again") from error
    return machine_from_json(data.get("machine") if isinstance(data, dict) and "ranks" in data else data)


def machine_from_json(data: object) -> Machine:
    """Read a snapshot's JSON value. Raises UsageError as `parse_machine` does."""
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(
            f"not a machine snapshot ({describe_json(data)}): make one with `launch topo save=FILE`"
        )
    schema = data.get("schema")
    if isinstance(schema, bool) or schema != SCHEMA:
        raise UsageError(
            f"the machine snapshot has schema {schema!r}, and this version reads {SCHEMA}: "
            "update launch, or save it again"
        )
    try:
        return build_machine(data)
    except ValueError as error:
        raise UsageError(f"the machine snapshot is incomplete or damaged ({error}): save it again") from error


def describe_json(data: object) -> str:
    """What a JSON value is, for people."""
    if isinstance(data, dict):
        return f"an object with {', '.join(sorted(map(str, data))[:5]) or 'nothing in it'}"
    return f"a {type(data).__name__}"


def build_machine(data: dict[str, object]) -> Machine:
    """Build the value; raises ValueError if a part is missing or wrong."""
    groups = convert(tuple[_CoreGroup, ...], data.get("cores"), 0)
    entries = convert(tuple[_NodeEntry, ...], data.get("nodes"), 0)
    cpus = [
        Cpu(pu, min(core), group.package, group.node, group.l3, group.capacity)
        for group in groups
        for core in group.cores
        for pu in core
    ]
    ids = [entry.id for entry in entries]
    if not cpus or len({cpu.id for cpu in cpus}) < len(cpus):
        raise ValueError("no CPUs, or one twice")
    if len(set(ids)) < len(ids):
        raise ValueError("a node twice")
    nodes = tuple(
        NumaNode(entry.id, entry.memory_kib, entry.normal, tuple(zip(ids, entry.distances, strict=True)))
        for entry in entries
    )
    machine = convert(Machine, {**data, "cpus": [], "nodes": []}, 0)
    return replace(machine, cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)), nodes=nodes)
