"""torch's server in a rank (`_WorkerServer`), asked over its Unix socket, and what it answers.

It is experimental in torch: what it does not answer in time, or at all, is missing from the evidence.

The flight recorder tells which collectives of which group a rank has called, and which are complete. Gloo's
entries keep the state `scheduled` for ever and name no members; what is complete follows from `retired` and
`pg_status`. NCCL adds states (`started`, `completed`) and, in `pg_config`, the members. Point-to-point
operations of gloo are not recorded at all.
"""

import json
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from launcher.codec import DecodeError, parse_json
from launcher.watch.model import Call, GroupState

_LARGEST_ANSWER = 16 << 20
"""Bytes of an answer that are read; a flight recorder with 2,000 entries has one MiB."""


class ServerError(Exception):
    """The server did not answer; the text says why."""


class UnknownHandlerError(ServerError):
    """The server has no such handler, as in an older torch."""


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        """Connect to the path; raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def post_handler(path: Path, handler: str, timeout: float) -> bytes:
    """Return the answer of a handler, as `fr_trace_json`; raises ServerError.

    The timeout is for each read and write, so that a server that answers byte by byte may take longer.
    """
    if timeout <= 0:
        raise ServerError("no time was left to ask it")
    with closing(_UnixConnection(path, timeout)) as connection:
        try:
            connection.request("POST", f"/handler/{handler}")
            answer = connection.getresponse()
            data = answer.read(_LARGEST_ANSWER + 1)
        except TimeoutError:
            raise ServerError(f"no answer within {timeout:g} s") from None
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(str(error) or type(error).__name__) from None
    if answer.status == 404:
        raise UnknownHandlerError(f"it has no {handler}")
    if answer.status != 200:
        raise ServerError(f"answered with status {answer.status}")
    if len(data) > _LARGEST_ANSWER:
        raise ServerError(f"answered with more than {_LARGEST_ANSWER >> 20} MiB")
    return data


def read_trace(path: Path, timeout: float) -> bytes:
    """Return the flight recorder, by its older name if that is all there is; raises ServerError."""
    try:
        return post_handler(path, "fr_trace_json", timeout)
    except UnknownHandlerError:
        return post_handler(path, "dump_nccl_trace_json", timeout)


def parse_wait_counters(data: bytes) -> tuple[bool, str]:
    """Tell whether a rank waits in torch's store, and in which function of `torch.distributed`.

    Source: torch's wait counters (`wait_counter_values`), of which those that are being waited in have an
    `active_count`. Raises ServerError.
    """
    try:
        counters: dict[str, Any] = json.loads(data)
        active = [name for name, values in counters.items() if int(values["active_count"]) > 0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ServerError("its wait counters are not as expected") from None
    functions = [name.rpartition("c10d.")[2] for name in active if "c10d." in name]
    stores = [name for name in active if "Store__" in name]
    return bool(functions or stores), (functions[0] if functions else "")


# The flight recorder

MOST_CALLS = 64
"""Collectives of a group that are kept, the last ones; a step of DDP has one for each bucket."""
_MOST_GROUPS = 256
_LONGEST = 200
"""Characters of names and sizes."""
DEFAULT_GROUP = "default group"
_DEFAULT_DESCRIPTIONS = ("default_pg", "default_process_group")
_UNDESCRIBED = ("", "undefined")
_POINT_TO_POINT = re.compile(r"\b(send|recv) \d+(?:->|<-)(\d+)$")
_TORCH_NAMES = {
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
Entry = Mapping[str, Any]
"""What the recorder has of a call."""


def load_trace(data: bytes) -> tuple[Sequence[Entry], Entry, Entry]:
    """Return the entries, `pg_status` and `pg_config` of an answer; raises DecodeError.

    An unknown form of single entries leaves them out.
    """
    trace = parse_json(data)
    if not isinstance(trace, dict):
        raise DecodeError("the flight recorder's answer is no object")
    entries = [entry for entry in as_list(trace.get("entries")) if isinstance(entry, dict)]
    return entries, _as_mapping(trace.get("pg_status")), _as_mapping(trace.get("pg_config"))


def parse_trace(data: bytes) -> tuple[GroupState, ...]:
    """Return the state of each process group from a flight recorder; raises DecodeError."""
    entries, statuses, configs = load_trace(data)
    by_group: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        by_group.setdefault((str(entry.get("pg_id", "")), *name_group(entry)), []).append(entry)
    found = []
    for (number, name, description), group in by_group.items():
        status = _as_mapping(statuses.get(number))
        completed = as_number(status.get("last_completed_collective"))
        calls = _list_calls(group, completed)
        enqueued = max(
            as_number(status.get("last_enqueued_collective")), *(one.sequence for one in calls), -1
        )
        completed = max((call.sequence for call in calls if call.is_complete), default=completed)
        last = next((call for call in calls if call.sequence == enqueued), None)
        members = read_members(configs, name)
        exchanges = _list_exchanges(group, members)
        if enqueued > 0 or exchanges:
            found.append(
                GroupState(
                    name=_show_group(name, description),
                    ranks=members,
                    last_enqueued=enqueued,
                    last_completed=min(completed, enqueued),
                    operation=last.operation if last else "",
                    sizes=last.sizes if last else "",
                    is_pending=enqueued > max(completed, 0),
                    key=name or description,
                    calls=calls,
                    exchanges=exchanges,
                )
            )
    return tuple(found[:_MOST_GROUPS])


def name_group(entry: Entry) -> tuple[str, str]:
    """Return torch's name of an entry's group and its description."""
    names = [str(part)[:_LONGEST] for part in as_list(entry.get("process_group"))]
    name, description, *_ = [*names, "", ""]
    return name, description


def read_members(configs: Entry, name: str) -> tuple[int, ...]:
    """Return a group's global ranks, which are a text as `[0, 1, 2]`; empty if they are not known."""
    ranks = _as_mapping(configs.get(name)).get("ranks", "") if name else ""
    return tuple(int(number) for number in re.findall(r"\d+", str(ranks)[: 1 << 16]))


def _show_group(name: str, description: str) -> str:
    """Return a group's name for people: `default group`, `mesh_dp`, `1`."""
    if description in _DEFAULT_DESCRIPTIONS or (name == "0" and description in _UNDESCRIBED):
        return DEFAULT_GROUP
    short = name if len(name) <= 12 else f"{name[:8]}…"  # a hash of the members
    return short if description in _UNDESCRIBED else description


def _list_calls(entries: Sequence[Entry], completed: int) -> tuple[Call, ...]:
    """Return the last collectives of one group, ascending, without point-to-point operations."""
    calls: dict[int, Call] = {}
    for entry in entries:
        if not is_collective(entry):
            continue
        sequence = as_number(entry.get("collective_seq_id"))
        is_complete = (
            sequence <= completed or entry.get("state") == "completed" or entry.get("retired") is True
        )
        name = str(entry.get("profiling_name", ""))[:_LONGEST].partition(":")
        operation = name[2] or name[0]  # `gloo:all_reduce`
        # `[2, 3] Float, [5] Int`
        sizes, types = as_list(entry.get("input_sizes")), as_list(entry.get("input_dtypes"))
        names = [f" {kind}" for kind in types] + [""] * len(sizes)
        shown = ", ".join(json.dumps(size) + kind for size, kind in zip(sizes, names, strict=False))
        shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
        calls[sequence] = Call(sequence, _TORCH_NAMES.get(operation, operation), shown, is_complete)
    return tuple(calls[sequence] for sequence in sorted(calls)[-MOST_CALLS:])


def _list_exchanges(entries: Sequence[Entry], members: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Return the point-to-point operations that are not complete, each once: `nccl:recv 3<-0` is with rank 0.

    The numbers are those within the group, which its members translate. Source: the names that torch's own
    analysis reads (torch.distributed.flight_recorder).
    """
    found: dict[tuple[str, int], None] = {}
    for entry in entries:
        is_open = entry.get("state") != "completed" and not entry.get("retired")
        match = _POINT_TO_POINT.search(str(entry.get("profiling_name", ""))[:_LONGEST])
        if entry.get("is_p2p") is True and is_open and match:
            other = int(match[2])
            found[match[1], members[other] if other < len(members) else other] = None
    return tuple(found)[-MOST_CALLS:]


def is_collective(entry: Entry) -> bool:
    """Tell whether an entry is one of all ranks of a group."""
    return entry.get("is_p2p") is not True and as_number(entry.get("collective_seq_id")) > 0


def as_number(value: object) -> int:
    """Return a number, which torch may write as a text; -1 for anything else."""
    try:
        return int(str(value))
    except ValueError:
        return -1


def as_list(value: object) -> Sequence[Any]:
    """Return a list as it is, and an empty one for anything else."""
    return value if isinstance(value, list) else []


def _as_mapping(value: object) -> Mapping[str, Any]:
    """Return an object as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}
