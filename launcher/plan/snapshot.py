"""Machine snapshots read back from JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from launcher.cpulist import parse_cpulist
from launcher.errors import UsageError
from launcher.plan.codec import KIND, PLACE
from launcher.plan.model import SCHEMA, Cache, Cpu, Gpu, Limits, Machine, Nic, NumaNode


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
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"the machine snapshot is incomplete or damaged ({error!r}): save it again"
        ) from error


def describe_json(data: object) -> str:
    """What a JSON value is, for people."""
    if isinstance(data, dict):
        return f"an object with {', '.join(sorted(map(str, data))[:5]) or 'nothing in it'}"
    return f"a {type(data).__name__}"


def build_machine(data: Mapping[str, object]) -> Machine:
    """Build the value; KeyError, TypeError or ValueError where a part is missing or wrong."""
    cpus = [cpu for item in take_objects(data, "cores") for cpu in cpus_from_json(item)]
    if not cpus or len({cpu.id for cpu in cpus}) < len(cpus):
        raise ValueError("no CPUs, or one twice")
    entries = take_objects(data, "nodes")
    ids = [take_int(entry, "id") for entry in entries]
    if len(set(ids)) < len(ids):
        raise ValueError("a node twice")
    return Machine(
        cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)),
        nodes=tuple(node_from_json(entry, ids) for entry in entries),
        gpus=tuple(gpu_from_json(item) for item in take_objects(data, "gpus")),
        nics=tuple(nic_from_json(item) for item in take_objects(data, "nics")),
        caches=tuple(cache_from_json(item) for item in take_objects(data, "caches")),
        limits=limits_from_json(data["limits"]),
        name=take_text(data, "name"),
        kernel=take_text(data, "kernel") if "kernel" in data else "",  # older snapshots have none
        source=take_text(data, "source"),
        allowed_cpus=parse_cpulist(take_text(data, "allowed_cpus")),
        allowed_mems=parse_cpulist(take_text(data, "allowed_mems")),
        isolated=parse_cpulist(take_text(data, "isolated")),
        memory_kib=take_int(data, "memory_kib"),
        warnings=take_texts(data, "warnings"),
    )


def cpus_from_json(item: Mapping[str, object]) -> Iterator[Cpu]:
    """Build the CPUs of the cores that are in one place."""
    package, node, l3, capacity = (take_int(item, name) for name in PLACE)
    for pus in map(parse_cpulist, take_texts(item, "cores")):
        for pu in pus:
            yield Cpu(pu, min(pus), package, node, l3, capacity)


def node_from_json(item: Mapping[str, object], ids: Sequence[int]) -> NumaNode:
    """Build a NUMA node; `ids` are the nodes that its distances lead to."""
    far = take_array(item, "distances")
    if not isinstance(item["normal"], bool):
        raise TypeError(f"node {item['id']!r}")
    distances = {str(other): distance for other, distance in zip(ids, far, strict=True)}
    pairs = tuple((other, take_int(distances, str(other))) for other in ids)
    return NumaNode(take_int(item, "id"), take_int(item, "memory_kib"), item["normal"], pairs)


def cache_from_json(item: Mapping[str, object]) -> Cache:
    """Build a last-level cache."""
    return Cache(take_int(item, "id"), take_int(item, "level"), take_int(item, "size_kib"))


def nic_from_json(item: Mapping[str, object]) -> Nic:
    """Build an RDMA device."""
    if not isinstance(item["active"], bool):
        raise TypeError(f"active is {item['active']!r}")
    return Nic(
        name=take_text(item, "name"),
        pci=take_text(item, "pci"),
        node=None if item["node"] is None else take_int(item, "node"),
        path=take_texts(item, "path"),
        link_layer=take_text(item, "link_layer"),
        rate_gbps=take_number(item, "rate_gbps"),
        active=item["active"],
    )


def limits_from_json(data: object) -> Limits:
    """Build the limits, each of which may be null."""
    if not isinstance(data, dict):
        raise TypeError(f"limits is {data!r}")
    return Limits(
        cpus=None if data["cpus"] is None else take_number(data, "cpus"),
        memory_kib=None if data["memory_kib"] is None else take_int(data, "memory_kib"),
        shm_kib=None if data["shm_kib"] is None else take_int(data, "shm_kib"),
        files=None if data.get("files") is None else take_int(data, "files"),  # older snapshots have none
    )


def gpu_from_json(item: Mapping[str, object]) -> Gpu:
    """Build a GPU."""
    return Gpu(
        index=take_int(item, "index"),
        uuid=take_text(item, "uuid"),
        pci=take_text(item, "pci"),
        node=None if item["node"] is None else take_int(item, "node"),
        local_cpus=parse_cpulist(take_text(item, "local_cpus")),
        name=take_text(item, "name"),
        mig=take_texts(item, "mig"),
        vendor=take_text(item, "vendor"),
        path=take_texts(item, "path"),
        memory_mib=take_int(item, "memory_mib"),
    )


def take_int(data: Mapping[str, object], name: str) -> int:
    """A whole number from 0; JSON's true and false are none."""
    value = data[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{name} is {value!r}")
    return value


def take_number(data: Mapping[str, object], name: str) -> float:
    """A finite number from 0."""
    value = data[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < inf:
        raise TypeError(f"{name} is {value!r}")
    return value


def take_text(data: Mapping[str, object], name: str) -> str:
    """A string."""
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}")
    return value


def take_array(data: Mapping[str, object], name: str) -> list[object]:
    """A list of anything."""
    value = data[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r}")
    return value


def take_texts(data: Mapping[str, object], name: str) -> tuple[str, ...]:
    """A list of strings."""
    texts = tuple(item for item in take_array(data, name) if isinstance(item, str))
    if len(texts) < len(take_array(data, name)):
        raise TypeError(f"{name} holds other things than strings")
    return texts


def take_objects(data: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    """A list of objects."""
    objects: list[Mapping[str, object]] = [item for item in take_array(data, name) if isinstance(item, dict)]
    if len(objects) < len(take_array(data, name)):
        raise TypeError(f"{name} holds other things than objects")
    return objects
