"""Who holds the others up, from the evidence of all nodes: pure.

`rank 5 on n2 has not joined all_reduce #1042 of the default group, in which 7 ranks wait: it sleeps at
data.py:88, read_shard`.

A rank that is in a collective waits for the members of its group that have not called that collective; one
that waits in torch's store waits for the ranks that are not there. Those at the end of these relations hold
all others up.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from launcher.cpulist import format_cpulist
from launcher.text import count_things, escape_text
from launcher.watch.activity import (
    COMPUTING,
    describe_activity,
    find_distributed_call,
    is_deadlocked,
    is_debugged,
    is_in_backward,
    stands_by_itself,
)
from launcher.watch.flight_recorder import DEFAULT_GROUP
from launcher.watch.model import Call, Frame, NodeEvidence, NodeReport, RankEvidence, Verdict

# Which rank waits for which others, and in what

_JOINING = "init_process_group"
_UNEVEN = ("all_to_all", "all_to_all_single", "alltoall_base", "scatter", "gather", "all_gather")
"""Operations whose input sizes may differ between ranks."""
_Ranks = Mapping[int, RankEvidence]


@dataclass(frozen=True, slots=True)
class _Wait:
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

    @property
    def call(self) -> tuple[str, str, int | None]:
        """What is the same for all ranks that wait in it."""
        return self.operation, self.key, self.sequence


_Waits = Mapping[int, Sequence[_Wait]]
"""What each rank waits in."""


def _find_waits(ranks: _Ranks, world: Set[int]) -> dict[int, tuple[_Wait, ...]]:
    """Return what each rank that waits for others waits in.

    `world` are all ranks of the job, also those without evidence. gloo's recorder does not name the members
    of a group: then they are those that have ever called a collective of the group, and all ranks for the
    default group.
    """
    in_store: dict[int, str] = {}
    members: dict[str, set[int]] = defaultdict(set)
    for number, rank in ranks.items():
        function = find_distributed_call(rank.process)
        # By its counters or, without an answer, by its stack.
        if rank.store_wait or (not rank.answered and function == _JOINING):
            in_store[number] = rank.store_operation or function or "a wait in torch's store"
        for group in rank.groups:
            members[group.key] |= {number, *group.ranks}
            if group.name == DEFAULT_GROUP:
                members[group.key] |= world
    waits: dict[int, tuple[_Wait, ...]] = {}
    for number, rank in ranks.items():
        if rank.exit_code is not None or rank.process.state in "TZX":
            continue
        found = []
        for group in rank.groups:
            if call := group.pending:
                missing = frozenset(
                    member
                    for member in members[group.key] - {number}
                    if not _has_joined(ranks.get(member), group.key, call.sequence)
                )
                found.append(_Wait(call.operation, group.key, group.name, call.sequence, missing))
            for operation, partner in group.exchanges:
                found.append(
                    _Wait(operation, group=group.name, missing=frozenset({partner}), is_collective=False)
                )
        if number in in_store:
            found.append(_Wait(in_store[number], missing=frozenset(world - in_store.keys())))
        if not found and (operation := _guess_wait(rank)):
            found.append(_Wait(operation, is_collective=False))
        if found:
            waits[number] = tuple(found)
    return waits


def _guess_wait(rank: RankEvidence) -> str:
    """Return the function of `torch.distributed` that a rank waits in by its stack alone; empty for none.

    So are point-to-point operations of gloo, which are not recorded, and ranks whose server does not answer.
    """
    if rank.process.state == "R" or rank.process.cpu >= COMPUTING:
        return ""
    operation = find_distributed_call(rank.process)
    if not operation and not rank.answered and is_in_backward(rank.process):
        return "backward"
    return operation


def _has_joined(rank: RankEvidence | None, key: str, sequence: int) -> bool:
    """Tell whether a rank has called a collective of a group.

    A rank that did not answer has if it waits in `torch.distributed` by its stack; one that is not heard of,
    or has ended, has not.
    """
    if rank is None or rank.exit_code is not None or rank.process.state in "TZX":
        return False
    if not rank.answered:
        return bool(_guess_wait(rank))
    return any(group.key == key and group.last_enqueued >= sequence for group in rank.groups)


def _find_roots(waits: _Waits, ranks: _Ranks) -> frozenset[int]:
    """Return the ranks at the end of the relations: others wait for them, and they wait for nobody.

    If none is named (the members of a group are not known, or operations are not recorded), those are taken
    that do not wait while others do. In a circle, those count that do something of their own, as with GPUs,
    on which a collective can be pending while the program is elsewhere.
    """
    targets = {
        number: frozenset().union(*(wait.missing for wait in found)) for number, found in waits.items()
    }
    named = frozenset().union(*targets.values())
    free = frozenset(number for number in named if number not in waits)
    if free or not waits:
        return free
    idle = frozenset(
        number for number, rank in ranks.items() if number not in waits and rank.exit_code is None
    )
    circle = frozenset(number for number in named if number in ranks and stands_by_itself(ranks[number]))
    return idle or circle or frozenset(number for number in named if not targets[number])


def _find_mismatch(ranks: _Ranks, waits: _Waits) -> tuple[_Wait, list[tuple[Call, list[int]]]] | None:
    """Return the first incomplete collective that ranks have called differently; None if they agree.

    Each different call comes with its ranks, the one of fewest ranks first; the wait is in that one. Calls
    differ by their operation and, if that counts, their sizes.
    """
    pending = {
        (wait.key, wait.group, wait.sequence)
        for found in waits.values()
        for wait in found
        if wait.key and wait.sequence is not None
    }
    for key, name, sequence in sorted(pending):
        by_form: dict[tuple[str, str], tuple[Call, list[int]]] = {}
        for number in sorted(ranks):
            for group in ranks[number].groups:
                for call in group.calls if group.key == key else ():
                    if call.sequence == sequence:
                        sizes = "" if call.operation in _UNEVEN else call.sizes
                        by_form.setdefault((call.operation, sizes), (call, []))[1].append(number)
        if len(by_form) > 1:
            found = sorted(by_form.values(), key=lambda entry: (len(entry[1]), -entry[1][0]))
            return _Wait(found[0][0].operation, key, name, sequence), found
    return None


# The verdict

_MOST_PLACES = 3
"""Different places that a sentence names."""
_MOST_HOSTS = 3
_MOST_CIRCLE = 4
"""Waits that a sentence names of ranks that wait for each other."""
_LONGEST = 600
"""Characters of a sentence."""


def judge_evidence(nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport]) -> Verdict:
    """Return who holds the others up, as far as the evidence says, in words harmless on a terminal."""
    return _Job(nodes, reports).judge()


class _Job:
    """The evidence of all nodes with what follows from it.

    `reports` are the last reports of all nodes: a node or rank in them without evidence is not heard of.
    """

    def __init__(self, nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport]) -> None:
        self.ranks = {rank.rank: rank for node in nodes for rank in node.ranks}
        self.hosts = {state.rank: report.host for report in reports for state in report.ranks}
        """Of every rank that has been heard of, now or before."""
        self.hosts |= {number: rank.host for number, rank in self.ranks.items()}
        heard = {node.host for node in nodes} | {rank.host for rank in self.ranks.values()}
        reported = {report.host for report in reports}
        self.silent = sorted(reported - heard)
        """Hosts without evidence."""
        expected = max((report.nodes for report in reports), default=0)
        self.unreported = max(expected - len(reported | heard), 0)
        """Nodes that have never reported."""
        self.waits: _Waits = _find_waits(self.ranks, frozenset(self.hosts))

    def judge(self) -> Verdict:
        if mismatch := _find_mismatch(self.ranks, self.waits):
            return self._blame_mismatch(*mismatch)
        if roots := _find_roots(self.waits, self.ranks):
            return self._blame_roots(sorted(roots))
        if self.silent or self.unreported:
            return self._blame_silent(sorted(self.hosts.keys() - self.ranks.keys()))
        if not self.waits:
            return self._blame_roots(sorted(self.ranks))
        return self._blame_circle()

    def _blame(
        self,
        kind: str,
        text: str,
        ranks: Sequence[int],
        wait: _Wait | None = None,
        **more: Any,  # noqa: ANN401 - fields of Verdict
    ) -> Verdict:
        hosts = dict.fromkeys(self.hosts[number] for number in ranks if number in self.hosts)
        if wait:
            more |= {"group": wait.group, "operation": wait.operation, "sequence": wait.sequence}
        return Verdict(kind, escape_text(text, _LONGEST), tuple(ranks), tuple(hosts), **more)

    def _blame_mismatch(self, wait: _Wait, calls: Sequence[tuple[Call, list[int]]]) -> Verdict:
        """Blame the fewest ranks that have called another collective than the others as one."""
        (odd, few), *others = calls
        doing, frame = self._describe(few)
        waiting = sum(len(ranks) for _, ranks in others)
        text = f"{self._name(few)} {'have' if len(few) > 1 else 'has'}"
        number = f"#{wait.sequence} of {_name_group(wait.group)}"
        is_one_operation = len({call.operation for call, _ in calls}) == 1
        rest = []
        for call, ranks in others:
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
            given = f"{call.operation} of {call.sizes}" if call.sizes else call.operation
            rest.append(f"{who} {(call.sizes or 'nothing') if is_one_operation else given}")
        if is_one_operation:
            text += f" given {odd.sizes or 'nothing'} to {odd.operation} {number}"
        else:
            called = f"{odd.operation} of {odd.sizes}" if odd.sizes else odd.operation
            text += f" called {called} as {number}"
        text += f", and {_join(rest)}: {doing}"
        return self._blame("mismatch", text, few, wait, waiting=waiting, frame=frame, is_final=True)

    def _blame_roots(self, roots: Sequence[int]) -> Verdict:
        """Blame ranks at the end of all waiting, by the first kind that some of them are of.

        A rank that is stopped goes first: it explains all others.
        """
        heard = {number: self.ranks[number] for number in roots if number in self.ranks}
        stopped = [number for number, rank in heard.items() if rank.process.state == "T"]
        exited = [number for number, rank in heard.items() if _has_exited(rank)]
        debugged = [number for number, rank in heard.items() if number not in exited and is_debugged(rank)]
        absent = [number for number in heard if number not in {*stopped, *exited}]
        if stopped:
            wait, waiting, others = self._find_main_wait(stopped)
            text = f"{self._name(stopped)} {'are' if len(stopped) > 1 else 'is'} stopped (SIGSTOP){others}"
            return self._blame("stopped", text, stopped, wait, waiting=waiting, is_final=waiting > 0)
        if debugged:
            wait, waiting, others = self._find_main_wait(debugged)
            doing, frame = describe_activity(self.ranks[debugged[0]])
            text = f"{self._name(debugged[:1])} {doing}{others}"
            return self._blame("debugged", text, debugged, wait, waiting=waiting, frame=frame)
        if exited and (self.waits or not absent):
            wait, waiting, others = self._find_main_wait(exited)
            codes = sorted({code for number in exited if (code := heard[number].exit_code) is not None})
            how = f" with exit code {', '.join(map(str, codes))}" if codes else ""
            text = f"{self._name(exited)} {'have' if len(exited) > 1 else 'has'} ended{how}{others}"
            return self._blame("exited", text, exited, wait, waiting=waiting, is_final=waiting > 0)
        return self._blame_absent(absent) if absent else self._blame_silent(roots)

    def _blame_absent(self, ranks: Sequence[int]) -> Verdict:
        """Blame ranks that have not joined what others wait in, or that all stand still."""
        wait, waiting, _ = self._find_main_wait(ranks)
        doing, frame = self._describe(ranks)
        named, many = self._name(ranks), len(ranks) > 1
        final = any(is_deadlocked(self.ranks[number]) for number in ranks)
        if wait is None:
            text = f"{named} {'make' if many else 'makes'} no step: {doing}"
            return self._blame("standstill", text, ranks, frame=frame, is_final=final)
        total = len(self.waits.keys() - set(ranks))
        wait_in = _count_waiting(waiting) + (f" ({total} in all)" if total > waiting else "")
        if wait.is_collective:
            has = "have" if many else "has"
            text = f"{named} {has} not joined {_name_wait(wait)}, in which {wait_in}: {doing}"
        else:
            holds = "hold" if many else "holds"
            text = f"{named} {holds} others up: {wait_in} in {_name_wait(wait)}, and {doing}"
        waits = max(waiting, total)
        return self._blame("absent", text, ranks, wait, waiting=waits, frame=frame, is_final=final)

    def _blame_silent(self, ranks: Sequence[int]) -> Verdict:
        """Blame nodes and ranks that have not been heard of."""
        wait, waiting, others = self._find_main_wait(ranks)
        heard = [number for number in ranks if self.hosts.get(number) not in self.silent]
        named = self._name(heard) if heard else format_ranks(ranks) if ranks else ""
        parts = []
        if hosts := self.silent:
            more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
            named_too = f" ({named})" if named else ""
            nodes = "node" if len(hosts) == 1 else "nodes"
            parts.append(f"{nodes} {_join(hosts[:_MOST_HOSTS])}{more}{named_too}")
        if self.unreported:
            parts.append(f"{count_things(self.unreported, 'node')} that never reported")
        text = f"nothing is heard of {_join(parts) or named or 'any rank'}{others}"
        return self._blame("silent", text, ranks, wait, waiting=waiting)

    def _blame_circle(self) -> Verdict:
        """Blame those of fewest ranks where all wait: for each other, or for what does not end by itself."""
        by_call: dict[tuple[str, str, int | None], tuple[_Wait, list[int]]] = {}
        for number in sorted(self.waits):
            for wait in self.waits[number]:
                by_call.setdefault(wait.call, (wait, []))[1].append(number)
        entries = sorted(by_call.values(), key=lambda entry: -len(entry[1]))
        wait, ranks = entries[0]
        if not any(found.missing for found, _ in entries) and (len(entries) == 1 or wait.key):
            known = "" if wait.group == DEFAULT_GROUP or wait.sequence is None else "known "
            who = f"all {len(ranks)} {known}ranks have" if len(ranks) > 1 else "its only rank has"
            errors = [
                f"the GPU of {self._name([number])} reported XID {', '.join(map(str, rank.gpu.xids))}"
                for number, rank in sorted(self.ranks.items())
                if rank.gpu and rank.gpu.xids
            ]
            hint = _join(errors) or "look at the network and the GPUs"
            text = f"{who} joined {_name_wait(wait)}, and none completes it: {hint}"
            _, frame = describe_activity(self.ranks[ranks[0]])
            return self._blame("network", text, ranks, wait, waiting=len(ranks), frame=frame)
        said = []
        for each, found in entries[: -_MOST_CIRCLE - 1 : -1]:
            whom = f" for {format_ranks(sorted(each.missing))}" if each.missing else ""
            said.append(f"{self._name(found)} in {_name_wait(each)}{whom}")
        wait, odd = entries[-1]
        _, frame = describe_activity(self.ranks[odd[0]])
        # A send or receive that is not recorded may be under way.
        final = all(each.key and each.is_collective for each, _ in entries)
        text = f"ranks wait for each other: {_join(said)}"
        waits = len(self.waits)
        return self._blame("mismatch", text, odd, wait, waiting=waits, frame=frame, is_final=final)

    def _find_main_wait(self, culprits: Sequence[int]) -> tuple[_Wait | None, int, str]:
        """Return what most ranks wait in for these, how many, and the end of a sentence that says so.

        If nobody waits for them, it is what most ranks wait in at all.
        """
        found: dict[tuple[str, str, int | None], tuple[_Wait, int]] = {}
        for is_direct in (True, False):
            for number, waits in self.waits.items():
                for wait in waits:
                    if number not in culprits and (not is_direct or wait.missing.intersection(culprits)):
                        found[wait.call] = wait, found.get(wait.call, (wait, 0))[1] + 1
            if found:
                wait, waiting = max(found.values(), key=lambda entry: entry[1])
                return wait, waiting, f", and {_count_waiting(waiting)} in {_name_wait(wait)}"
        return None, 0, ""

    def _describe(self, ranks: Sequence[int]) -> tuple[str, Frame | None]:
        """Return what ranks do, the same said once, and where the first one is."""
        doings: dict[str, int] = {}
        frame = None
        for number in ranks:
            doing, place = describe_activity(self.ranks[number], is_waiting=number in self.waits)
            frame = frame or place
            doings.setdefault(doing, number)
        if len(doings) == 1:
            (doing,) = doings
            return f"{'it' if len(ranks) == 1 else f'rank {ranks[0]}'} {doing}", frame
        shown = [f"rank {number} {doing}" for doing, number in list(doings.items())[:_MOST_PLACES]]
        return "; ".join(shown), frame

    def _name(self, ranks: Collection[int]) -> str:
        return format_ranks(ranks, self.hosts)


def _has_exited(rank: RankEvidence) -> bool:
    """Tell whether a rank has ended."""
    return rank.exit_code is not None or rank.process.state in ("Z", "X")


def format_ranks(ranks: Iterable[int], hosts: Mapping[int, str] | None = None) -> str:
    """Return ranks for people: `rank 5 on n2`, `ranks 4-7 on n2 and 9 on n3`."""
    by_host: dict[str, list[int]] = {}
    for number in ranks:
        by_host.setdefault((hosts or {}).get(number, ""), []).append(number)
    groups = list(by_host.items())
    shown = [
        format_cpulist(frozenset(found)) + (f" on {host}" if host else "")
        for host, found in groups[:_MOST_HOSTS]
    ]
    rest = sum(len(found) for _, found in groups[_MOST_HOSTS:])
    shown += [f"{rest} more"] if rest else []
    is_one = sum(len(found) for _, found in groups) == 1
    return f"rank{'' if is_one else 's'} {_join(shown)}"


def _join(texts: Sequence[str]) -> str:
    """Return texts as a list: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else ""


def _name_wait(wait: _Wait) -> str:
    """Return what ranks wait in: `all_reduce #1042 of the default group`, `init_process_group`."""
    operation = wait.operation or "a collective"
    return (
        operation if wait.sequence is None else f"{operation} #{wait.sequence} of {_name_group(wait.group)}"
    )


def _name_group(group: str) -> str:
    """Return a group's name within a sentence."""
    return "the default group" if group == DEFAULT_GROUP else f"group {group}"


def _count_waiting(number: int) -> str:
    """Return `1 rank waits`, `7 ranks wait`."""
    return f"{count_things(number, 'rank')} {'waits' if number == 1 else 'wait'}"
