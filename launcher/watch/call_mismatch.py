"""Ranks that have called different collectives under one sequence number of a group: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.watch.waits_for import Wait
from launcher.watch.watch_model import Call, RankEvidence

UNEVEN = ("all_to_all", "all_to_all_single", "alltoall_base", "scatter", "gather", "all_gather")
"""Operations whose input sizes may differ between ranks."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What the ranks of a group have called as one and the same collective."""

    group: str
    key: str
    sequence: int
    calls: tuple[tuple[Call, tuple[int, ...]], ...]
    """Each different call with its ranks, the one of fewest ranks first."""


def find_mismatch(ranks: Mapping[int, RankEvidence], waits: Mapping[int, Sequence[Wait]]) -> Mismatch | None:
    """Return the first incomplete collective that ranks have called differently; None if they agree."""
    pending = {
        (wait.key, wait.group, wait.sequence)
        for found in waits.values()
        for wait in found
        if wait.key and wait.sequence is not None
    }
    for key, group, sequence in sorted(pending):
        by_form = group_by_form(ranks, key, sequence)
        if len(by_form) > 1:
            found = sorted(by_form.values(), key=lambda entry: (len(entry[1]), -entry[1][0]))
            return Mismatch(group, key, sequence, tuple((call, tuple(who)) for call, who in found))
    return None


def group_by_form(
    ranks: Mapping[int, RankEvidence], key: str, sequence: int
) -> dict[tuple[str, str], tuple[Call, list[int]]]:
    """Return the ranks that have called a collective, by its operation and, if that counts, its sizes."""
    found: dict[tuple[str, str], tuple[Call, list[int]]] = {}
    for number in sorted(ranks):
        for group in ranks[number].groups:
            for call in group.calls:
                if group.key == key and call.sequence == sequence:
                    sizes = "" if call.operation in UNEVEN else call.sizes
                    found.setdefault((call.operation, sizes), (call, []))[1].append(number)
    return found
