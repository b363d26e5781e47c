"""Machine snapshots read back from JSON."""

import json
from collections.abc import Mapping

from launcher.cpulist import parse_cpulist
from launcher.errors import UsageError
from launcher.plan.model import SCHEMA, Cpu, Gpu, Machine, NumaNode

KIND = "machine"
"""What a snapshot says that it is."""


def parse_machine(text: str) -> Machine:
    """Read a snapshot's text, or that of a plan, which holds one.

    Raises UsageError for what is not a whole snapshot of a known schema.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a machine snapshot, or cut short ({error}): save it again") from error
    return machine_from_json(data.get("machine") if isinstance(data, dict) and "ranks" in data else data)


def machine_from_json(data: object) -> Machine:
    """Read a snapshot's JSON value. Raises UsageError as `parse_machine` does."""
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(
            f"not a machine snapshot ({describe(data)}): make one with `launch plan format=json > FILE`"
        )
    schema = data.get("schema")
    if not isinstance(schema, int) or schema != SCHEMA:
        raise UsageError(
            f"the machine snapshot has schema {schema!r}, and this version reads {SCHEMA}: "
            "update launch, or save it again"
        )
    try:
        return build_machine(data)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"the machine snapshot is incomplete or damaged ({error!r}): save it again"
        ) from error


def describe(data: object) -> str:
    """What a JSON value is, for people."""
    if isinstance(data, dict):
        return f"an object with {', '.join(sorted(map(str, data))[:5]) or 'nothing in it'}"
    return f"a {type(data).__name__}"


def build_machine(data: Mapping[str, object]) -> Machine:
    """Build the value; KeyError, TypeError or ValueError where a part is missing or wrong."""
    cpus = tuple(build_cpu(item) for item in take_objects(data, "cpus"))
    if not cpus or len({cpu.id for cpu in cpus}) < len(cpus):
        raise ValueError("no CPUs, or one twice")
    return Machine(
        cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)),
        nodes=tuple(build_node(item) for item in take_objects(data, "nodes")),
        gpus=tuple(build_gpu(item) for item in take_objects(data, "gpus")),
        allowed_cpus=parse_cpulist(take_text(data, "allowed_cpus")),
        allowed_mems=parse_cpulist(take_text(data, "allowed_mems")),
        isolated=parse_cpulist(take_text(data, "isolated")),
        memory_kib=take_int(data, "memory_kib"),
        warnings=take_texts(data, "warnings"),
    )


def build_cpu(item: Mapping[str, object]) -> Cpu:
    """Build a CPU from its numbers."""
    names = ("id", "core", "package", "node", "l3", "capacity")
    return Cpu(*(take_int(item, name) for name in names))


def build_node(item: Mapping[str, object]) -> NumaNode:
    """Build a NUMA node; its distances keep their order."""
    distances = item["distances"]
    if not isinstance(distances, dict) or not isinstance(item["normal"], bool):
        raise TypeError(f"node {item['id']!r}")
    pairs = tuple((int(other), take_int(distances, other)) for other in distances)
    return NumaNode(take_int(item, "id"), take_int(item, "memory_kib"), item["normal"], pairs)


def build_gpu(item: Mapping[str, object]) -> Gpu:
    """Build a GPU."""
    return Gpu(
        index=take_int(item, "index"),
        uuid=take_text(item, "uuid"),
        pci=take_text(item, "pci"),
        node=None if item["node"] is None else take_int(item, "node"),
        local_cpus=parse_cpulist(take_text(item, "local_cpus")),
        name=take_text(item, "name"),
        mig=take_texts(item, "mig"),
    )


def take_int(data: Mapping[str, object], name: str) -> int:
    """A whole number; JSON's true and false are none."""
    value = data[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def take_text(data: Mapping[str, object], name: str) -> str:
    """A string."""
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}")
    return value


def take_list(data: Mapping[str, object], name: str) -> list[object]:
    """A list of anything."""
    value = data[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r}")
    return value


def take_texts(data: Mapping[str, object], name: str) -> tuple[str, ...]:
    """A list of strings."""
    texts = tuple(item for item in take_list(data, name) if isinstance(item, str))
    if len(texts) < len(take_list(data, name)):
        raise TypeError(f"{name} holds other things than strings")
    return texts


def take_objects(data: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    """A list of objects."""
    objects: list[Mapping[str, object]] = [item for item in take_list(data, name) if isinstance(item, dict)]
    if len(objects) < len(take_list(data, name)):
        raise TypeError(f"{name} holds other things than objects")
    return objects
