"""torch's flight recorder of a rank: which collectives of which group it has called, and which are complete.

Gloo's entries keep the state `scheduled` for ever and name no members; what is complete follows from
`retired` and `pg_status`. NCCL adds states (`started`, `completed`) and, in `pg_config`, the members.
Point-to-point operations of gloo are not recorded at all.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.codec import DecodeError, parse_json
from launcher.watch.watch_model import Call, GroupState

MOST_CALLS = 64
"""Collectives of a group that are kept, the last ones; a step of DDP has one for each bucket."""
MOST_GROUPS = 256
LONGEST = 200
"""Characters of names and sizes."""
DEFAULT_GROUP = "default group"
DEFAULT_DESCRIPTIONS = ("default_pg", "default_process_group")
UNDESCRIBED = ("", "undefined")
POINT_TO_POINT = re.compile(r"\b(send|recv) \d+(?:->|<-)(\d+)$")
TORCH_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
}
"""Names in profiles that differ from the functions of `torch.distributed`."""


def parse_trace(data: bytes) -> tuple[GroupState, ...]:
    """Return the state of each process group from the answer of `fr_trace_json`; raises DecodeError.

    An unknown form of single entries leaves them out.
    """
    trace = parse_json(data)
    if not isinstance(trace, dict):
        raise DecodeError("the flight recorder's answer is no object")
    entries = [entry for entry in as_list(trace.get("entries")) if isinstance(entry, dict)]
    statuses, configs = as_mapping(trace.get("pg_status")), as_mapping(trace.get("pg_config"))
    by_group: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for entry in entries:
        name, description = name_group(entry)
        by_group.setdefault((str(entry.get("pg_id", "")), name, description), []).append(entry)
    found = [
        describe_group(key, as_mapping(statuses.get(key[0])), group, configs)
        for key, group in by_group.items()
    ]
    return tuple(state for state in found if state.last_enqueued > 0 or state.exchanges)[:MOST_GROUPS]


def name_group(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return torch's name of an entry's group and its description."""
    names = [str(part)[:LONGEST] for part in as_list(entry.get("process_group"))]
    name, description, *_ = [*names, "", ""]
    return name, description


def describe_group(
    key: tuple[str, str, str],
    status: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    configs: Mapping[str, Any],
) -> GroupState:
    """Return one group's state from its status and its entries in the order of their calls."""
    _, name, description = key
    completed = as_number(status.get("last_completed_collective"))
    calls = list_calls(entries, completed)
    enqueued = max(as_number(status.get("last_enqueued_collective")), *(call.sequence for call in calls), -1)
    completed = max((call.sequence for call in calls if call.is_complete), default=completed)
    last = next((call for call in calls if call.sequence == enqueued), None)
    members = read_members(as_mapping(configs.get(name))) if name else ()
    return GroupState(
        name=show_group(name, description),
        ranks=members,
        last_enqueued=enqueued,
        last_completed=min(completed, enqueued),
        operation=last.operation if last else "",
        sizes=last.sizes if last else "",
        is_pending=enqueued > max(completed, 0),
        key=name or description,
        calls=calls,
        exchanges=list_exchanges(entries, members),
    )


def show_group(name: str, description: str) -> str:
    """Return a group's name for people: `default group`, `mesh_dp`, `1`."""
    if description in DEFAULT_DESCRIPTIONS or (name == "0" and description in UNDESCRIBED):
        return DEFAULT_GROUP
    short = name if len(name) <= 12 else f"{name[:8]}…"  # a hash of the members
    return short if description in UNDESCRIBED else description


def list_calls(entries: Sequence[Mapping[str, Any]], completed: int) -> tuple[Call, ...]:
    """Return the last collectives of one group, ascending, without point-to-point operations."""
    calls: dict[int, Call] = {}
    for entry in entries:
        sequence = as_number(entry.get("collective_seq_id"))
        if entry.get("is_p2p") is True or sequence < 1:
            continue
        is_complete = (
            sequence <= completed or entry.get("state") == "completed" or entry.get("retired") is True
        )
        calls[sequence] = Call(sequence, name_operation(entry), show_sizes(entry), is_complete)
    return tuple(calls[sequence] for sequence in sorted(calls)[-MOST_CALLS:])


def list_exchanges(
    entries: Sequence[Mapping[str, Any]], members: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    """Return the point-to-point operations that are not complete, each once: `nccl:recv 3<-0` is with rank 0.

    The numbers are those within the group, which its members translate. Source: the names that torch's own
    analysis reads (torch.distributed.flight_recorder).
    """
    found = [
        POINT_TO_POINT.search(str(entry.get("profiling_name", ""))[:LONGEST])
        for entry in entries
        if entry.get("is_p2p") is True and entry.get("state") != "completed" and not entry.get("retired")
    ]
    partners = [(match[1], int(match[2])) for match in found if match]
    named = [(kind, members[other] if other < len(members) else other) for kind, other in partners]
    return tuple(dict.fromkeys(named))[-MOST_CALLS:]


def name_operation(entry: Mapping[str, Any]) -> str:
    """Return an entry's operation in torch's words: `gloo:all_reduce` is `all_reduce`."""
    name = str(entry.get("profiling_name", ""))[:LONGEST].partition(":")
    operation = name[2] or name[0]
    return TORCH_NAMES.get(operation, operation)


def show_sizes(entry: Mapping[str, Any]) -> str:
    """Return input sizes with their types: `[2, 3] Float, [5] Int`."""
    sizes, types = as_list(entry.get("input_sizes")), as_list(entry.get("input_dtypes"))
    names = [f" {kind}" for kind in types] + [""] * len(sizes)
    shown = ", ".join(json.dumps(size) + name for size, name in zip(sizes, names, strict=False))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def read_members(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a group's global ranks, which are a text as `[0, 1, 2]`; empty if they are not known."""
    return tuple(int(number) for number in re.findall(r"\d+", str(config.get("ranks", ""))[: 1 << 16]))


def as_number(value: object) -> int:
    """Return a number, which torch may write as a text; -1 for anything else."""
    try:
        return int(str(value))
    except ValueError:
        return -1


def as_list(value: object) -> Sequence[Any]:
    """Return a list as it is, and an empty one for anything else."""
    return value if isinstance(value, list) else []


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return an object as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}
