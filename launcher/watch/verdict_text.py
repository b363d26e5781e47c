"""The sentences of verdicts: pure.

`rank 5 on n2 has not joined all_reduce #1042 of the default group, in which 7 ranks wait: it sleeps at
data.py:88, read_shard`.
"""

from collections.abc import Collection, Mapping, Sequence

from launcher.cpulist import format_cpulist
from launcher.text import count_things
from launcher.watch.call_mismatch import Mismatch
from launcher.watch.flight_recorder import DEFAULT_GROUP
from launcher.watch.waits_for import Wait
from launcher.watch.watch_model import Call

MOST_HOSTS = 3
"""Hosts that a sentence names."""
LONGEST = 600
"""Characters of a sentence."""
DEFAULT = "the default group"


def format_ranks(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    """Return ranks for people: `rank 5 on n2`, `ranks 4-7 on n2 and 9 on n3`."""
    by_host: dict[str, list[int]] = {}
    for number in ranks:
        by_host.setdefault(hosts.get(number, ""), []).append(number)
    shown = [
        format_cpulist(frozenset(found)) + (f" on {host}" if host else "")
        for host, found in list(by_host.items())[:MOST_HOSTS]
    ]
    rest = sum(map(len, list(by_host.values())[MOST_HOSTS:]))
    shown += [f"{rest} more"] if rest else []
    return f"rank{'s' if len(ranks) > 1 else ''} {join_texts(shown)}"


def join_texts(texts: Sequence[str]) -> str:
    """Return texts as a list: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else ""


def name_wait(wait: Wait) -> str:
    """Return what ranks wait in: `all_reduce #1042 of the default group`, `init_process_group`."""
    operation = wait.operation or "a collective"
    if wait.sequence is None:
        return operation
    return f"{operation} #{wait.sequence} of {name_group_of(wait.group)}"


def name_group_of(group: str) -> str:
    """Return a group's name within a sentence."""
    return DEFAULT if group == DEFAULT_GROUP else f"group {group}"


def count_waiting(number: int) -> str:
    """Return `1 rank waits`, `7 ranks wait`."""
    return f"{count_things(number, 'rank')} {'waits' if number == 1 else 'wait'}"


def describe_others(wait: Wait | None, waiting: int) -> str:
    """Return the end of a sentence on those that wait: `, and 7 ranks wait for it in barrier`."""
    if wait is None or not waiting:
        return ""
    return f", and {count_waiting(waiting)} in {name_wait(wait)}"


def count_all_waiting(number: int, total: int) -> str:
    """Return how many ranks wait in something, and in all: `2 ranks wait (3 in all)`."""
    return count_waiting(number) + (f" ({total} in all)" if total > number else "")


def say_absent(named: str, many: bool, wait: Wait, waiting: str, doing: str) -> str:
    """Return the sentence on ranks that have not joined what others wait in."""
    if wait.is_collective:
        has = "have" if many else "has"
        return f"{named} {has} not joined {name_wait(wait)}, in which {waiting}: {doing}"
    return f"{named} {'hold' if many else 'holds'} others up: {waiting} in {name_wait(wait)}, and {doing}"


def say_mismatch(found: Mismatch, hosts: Mapping[int, str], doing: str) -> str:
    """Return the sentence on ranks that have called different collectives as one."""
    (odd, few), *others = found.calls
    differ = {call.operation for call, _ in found.calls}
    group, number = name_group_of(found.group), f"#{found.sequence}"
    begin = f"{format_ranks(few, hosts)} {'have' if len(few) > 1 else 'has'}"
    if len(differ) > 1:
        rest = join_texts([f"{name_few(ranks)} {name_call(call)}" for call, ranks in others])
        return f"{begin} called {name_call(odd)} as {number} of {group}, and {rest}: {doing}"
    rest = join_texts([f"{name_few(ranks)} {call.sizes or 'nothing'}" for call, ranks in others])
    given = odd.sizes or "nothing"
    return f"{begin} given {given} to {odd.operation} {number} of {group}, and {rest}: {doing}"


def name_few(ranks: Sequence[int]) -> str:
    """Return some ranks in short: `rank 3`, `7 ranks`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def name_call(call: Call) -> str:
    """Return a collective with its sizes."""
    return f"{call.operation} of {call.sizes}" if call.sizes else call.operation


def say_network(wait: Wait, number: int, notes: Sequence[str]) -> str:
    """Return the sentence on a collective that all have joined and that does not end."""
    who = f"all {number} ranks have" if number > 1 else "its only rank has"
    known = "" if wait.group == DEFAULT_GROUP or wait.sequence is None else " known"
    who = who.replace(" ranks", f"{known} ranks")
    end = f": {join_texts(notes)}" if notes else ": look at the network and the GPUs"
    return f"{who} joined {name_wait(wait)}, and none completes it{end}"


def say_circle(entries: Sequence[tuple[str, Wait, str]]) -> str:
    """Return the sentence on ranks that wait for each other: (ranks, what in, for whom)."""
    texts = [f"{who} in {name_wait(wait)}" + (f" for {whom}" if whom else "") for who, wait, whom in entries]
    return f"ranks wait for each other: {join_texts(texts)}"


def say_silent(hosts: Sequence[str], named: str, unreported: int) -> str:
    """Return the sentence on nodes of which nothing is heard."""
    parts = [f"{'node' if len(hosts) == 1 else 'nodes'} {join_texts(hosts[:MOST_HOSTS])}"] if hosts else []
    if len(hosts) > MOST_HOSTS:
        parts[0] += f" and {len(hosts) - MOST_HOSTS} more"
    if named and parts:
        parts[0] += f" ({named})"
    if unreported:
        parts.append(f"{count_things(unreported, 'node')} that never reported")
    return f"nothing is heard of {join_texts(parts) or named or 'any rank'}"
