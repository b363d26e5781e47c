"""Machine snapshots read back from JSON."""

from dataclasses import dataclass, replace

from launcher.decode import DecodeError, convert, parse_json
from launcher.errors import UsageError
from launcher.plan.json_form import KIND
from launcher.plan.model import SCHEMA, Cpu, Machine, NumaNode


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """The cores that are in one place, as a snapshot has them."""

    package: int
    node: int
    l3: int
    capacity: int
    cores: tuple[frozenset[int], ...]
    """The PUs of each core."""


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A NUMA node, as a snapshot has it."""

    id: int
    memory_kib: int
    normal: bool
    distances: tuple[int, ...]
    """To each node of the machine, in their order."""


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
    groups = convert(tuple[CoreGroup, ...], data.get("cores"), 0)
    entries = convert(tuple[NodeEntry, ...], data.get("nodes"), 0)
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
