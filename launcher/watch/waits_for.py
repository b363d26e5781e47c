"""Which rank waits for which others, and in what: pure.

A rank that is in a collective waits for the members of its group that have not called that collective; one
that waits in torch's store waits for the ranks that are not there. Those at the end of these relations hold
all others up.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from launcher.watch.flight_recorder import DEFAULT_GROUP
from launcher.watch.rank_activity import COMPUTING, find_distributed_call, is_in_backward, stands_by_itself
from launcher.watch.watch_model import Call, GroupState, RankEvidence

JOINING = "init_process_group"


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank waits in for others."""

    operation: str
    """In torch's words; empty if it is not known."""
    key: str = ""
    """torch's name of the group; empty for a wait in the store or in an operation that is not recorded."""
    group: str = ""
    """The group's name for people."""
    sequence: int | None = None
    missing: frozenset[int] = frozenset()
    """The ranks that it waits for."""
    is_collective: bool = True
    """It is known that those that are missing have to call it, too."""


def find_waits(ranks: Mapping[int, RankEvidence], world: Set[int]) -> dict[int, tuple[Wait, ...]]:
    """Return what each rank that waits for others waits in.

    `world` are all ranks of the job, also those without evidence.
    """
    in_store = {rank: name_store_wait(found) for rank, found in ranks.items() if is_in_store(found)}
    members = find_members(ranks, world)
    waits: dict[int, tuple[Wait, ...]] = {}
    for number, rank in ranks.items():
        if rank.exit_code is not None or rank.process.state in "TZX":
            continue
        found = [
            make_group_wait(rank, group, members[group.key], ranks)
            for group in rank.groups
            if group.is_pending
        ]
        found += [
            Wait(operation, group=group.name, missing=frozenset({partner}), is_collective=False)
            for group in rank.groups
            for operation, partner in group.exchanges
        ]
        if number in in_store:
            found.append(make_store_wait(in_store[number], in_store, world))
        if not found and (operation := guess_wait(rank)):
            found.append(Wait(operation, is_collective=False))
        if found:
            waits[number] = tuple(found)
    return waits


def is_in_store(rank: RankEvidence) -> bool:
    """Tell whether a rank waits in torch's store, by its counters or, without an answer, by its stack."""
    return rank.store_wait or (not rank.answered and find_distributed_call(rank.process) == JOINING)


def name_store_wait(rank: RankEvidence) -> str:
    """Return the function in which a rank waits in the store."""
    return rank.store_operation or find_distributed_call(rank.process) or "a wait in torch's store"


def make_store_wait(operation: str, in_store: Mapping[int, str], world: Set[int]) -> Wait:
    """Return a wait in the store: for all ranks that are not there."""
    return Wait(operation, missing=frozenset(world - in_store.keys()))


def guess_wait(rank: RankEvidence) -> str:
    """Return the function of `torch.distributed` that a rank waits in by its stack alone; empty for none.

    So are point-to-point operations of gloo, which are not recorded, and ranks whose server does not answer.
    """
    if rank.process.state == "R" or rank.process.cpu >= COMPUTING:
        return ""
    operation = find_distributed_call(rank.process)
    if not operation and not rank.answered and is_in_backward(rank.process):
        return "backward"
    return operation


def find_members(ranks: Mapping[int, RankEvidence], world: Set[int]) -> dict[str, frozenset[int]]:
    """Return the members of each group as far as they are known, by torch's name of the group.

    gloo's recorder does not name them: then they are those that have ever called a collective of the group,
    and all ranks for the default group.
    """
    members: dict[str, set[int]] = {}
    for number, rank in ranks.items():
        for group in rank.groups:
            found = members.setdefault(group.key, set())
            found |= {number, *group.ranks}
            if group.name == DEFAULT_GROUP:
                found |= world
    return {key: frozenset(found) for key, found in members.items()}


def make_group_wait(
    rank: RankEvidence, group: GroupState, members: Set[int], ranks: Mapping[int, RankEvidence]
) -> Wait:
    """Return a rank's wait in its first incomplete collective of a group."""
    call = find_first_pending(group)
    missing = {
        member
        for member in members
        if member != rank.rank and not has_joined(ranks.get(member), group.key, call.sequence)
    }
    return Wait(call.operation, group.key, group.name, call.sequence, frozenset(missing))


def find_first_pending(group: GroupState) -> Call:
    """Return the first collective of a group that is not complete."""
    pending = next((call for call in group.calls if not call.is_complete), None)
    number = max(group.last_completed, 0) + 1
    return pending or Call(number, group.operation, group.sizes, is_complete=False)


def has_joined(rank: RankEvidence | None, key: str, sequence: int) -> bool:
    """Tell whether a rank has called a collective of a group.

    A rank that did not answer has if it waits in `torch.distributed` by its stack; one that is not heard of,
    or has ended, has not.
    """
    if rank is None or rank.exit_code is not None or rank.process.state in "TZX":
        return False
    if not rank.answered:
        return bool(guess_wait(rank))
    return any(group.key == key and group.last_enqueued >= sequence for group in rank.groups)


def find_roots(waits: Mapping[int, Sequence[Wait]], ranks: Mapping[int, RankEvidence]) -> frozenset[int]:
    """Return the ranks at the end of the relations: others wait for them, and they wait for nobody.

    If none is named (the members of a group are not known, or operations are not recorded), those are taken
    that do not wait while others do. In a circle, those count that do something of their own, as with GPUs,
    on which a collective can be pending while the program is elsewhere.
    """
    targets = {
        number: frozenset().union(*(wait.missing for wait in found)) for number, found in waits.items()
    }
    named = frozenset().union(*targets.values()) if targets else frozenset()
    roots = {number for number in named if not targets.get(number)}
    free = {number for number in roots if number not in waits}
    if free or not waits:
        return frozenset(free)
    idle = frozenset(
        number for number, rank in ranks.items() if number not in waits and rank.exit_code is None
    )
    circle = {number for number in named if number in ranks and stands_by_itself(ranks[number])}
    return idle or frozenset(circle) or frozenset(roots)
