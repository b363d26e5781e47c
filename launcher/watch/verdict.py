"""Who holds the others up, from the evidence of all nodes: pure.

`rank 5 on n2 has not joined all_reduce #1042 of the default group, in which 7 ranks wait: it sleeps at
data.py:88, read_shard`.

A rank that is in a collective waits for the members of its group that have not called that collective; one
that waits in torch's store waits for the ranks that are not there. Those at the end of these relations hold
all others up. What they do follows from the kernel's word (state, system call, wait channel), and where from
their stacks: it is the innermost line of the main thread in the program's own code.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from launcher.cpulist import format_cpulist
from launcher.text import count_things, escape_text, name_some
from launcher.watch.flight_recorder import DEFAULT_GROUP
from launcher.watch.model import Call, Frame, NodeEvidence, NodeReport, ProcessState, RankEvidence, Verdict
from launcher.watch.procfs import WAITS

# What a rank does

_FILES = {name: re.compile(pattern) for name, pattern in WAITS["file"].items()}
_WAITING_FOR_DATA = ("_try_get_data", "_get_data", "_next_data")
_DISTRIBUTED_WRAPPERS = ("wrapper", "_wrapper", "func_wrapper", "inner", "_fn")
_JOIN_FUNCTIONS = ("join", "_wait_for_tstate_lock")
_LOCK_FUNCTIONS = (*_JOIN_FUNCTIONS, "acquire", "wait", "__enter__", "wait_for")
_COMPUTING = 0.5
"""Cores from which on it computes, whatever state a look has found."""
_AT_REST = 5.0
"""Seconds without activity after which what waits for a lock does not run now and then."""
_UNSPECIFIC = ("stands", "waits for a lock", "waits for input", "waits for the network")
"""Verbs that a call of `torch.distributed` says more than."""
_STATES = {"Z": "has ended", "X": "has ended", "T": "is stopped (SIGSTOP)", "R": "computes"}


def _is_in(frame: Frame, *files: str, functions: Collection[str] = ()) -> bool:
    """Tell whether a line is in one of these files, and in one of these functions."""
    is_there = any(_FILES[name].search(frame.file) for name in files)
    return is_there and (not functions or frame.function in functions)


def _is_library(frame: Frame) -> bool:
    """Tell whether a line is not the program's own: torch's, a package's, Python's, the hook's."""
    return _is_in(frame, "standard", "installed", "torch", "hook") and not _is_in(frame, "bundled")


class _Activity:
    """What a process does, and where."""

    def __init__(self, process: ProcessState, cpu: float = 0.0) -> None:
        """`cpu` are the cores that it uses."""
        self.process, self.cpu = process, cpu
        self.frames = process.main_stack.frames if process.main_stack else ()
        own = next((at for at, frame in enumerate(self.frames) if not _is_library(frame)), None)
        self.inner = self.frames[:own]
        """The lines of the main thread within the innermost one of the program's own code."""
        packages = [
            one for one in self.frames if _is_in(one, "installed") and not _is_in(one, "torch", "hook")
        ]
        outer = self.frames[len(self.inner) :]
        self.place = next(iter((*outer, *packages, *self.frames)), None)
        """The innermost line of the program's own code. If it has none, as a program that is installed
        itself: of another package than torch; else the innermost line of all."""
        self.waits_for_data = any(
            _is_in(one, "dataloader", functions=_WAITING_FOR_DATA) for one in self.inner
        )
        self.in_lock = any(_is_in(one, "threading", functions=_LOCK_FUNCTIONS) for one in self.frames[:1])
        self.in_backward = any(_is_in(one, "autograd") for one in self.inner[:1])
        """It is in autograd's engine, in which DDP waits for its buckets."""
        inside = [one.function for one in self.inner if _is_in(one, "distributed")]
        self.call = next((name for name in reversed(inside) if name not in _DISTRIBUTED_WRAPPERS), "")
        """The function of `torch.distributed` that the program has called and is in; empty for none."""
        self.is_debugged = process.tracer > 0 or any(_is_in(one, "debugger") for one in self.frames)

    @cached_property
    def verb(self) -> str:
        """What it does: `sleeps`, `reads a file`, `computes`, `stands`."""
        process = self.process
        if process.tracer:
            return f"is held by a debugger (PID {process.tracer})"
        if process.state in _STATES:
            return _STATES[process.state]
        if self.cpu >= _COMPUTING:
            return "computes"
        if self.in_lock:
            return "waits for a lock"
        channel: str = WAITS["channel"].get(process.wait_channel, "")
        said: str = channel or WAITS["call"].get(process.system_call, {}).get("says", "")
        if process.state == "D" and not channel:
            where = f", {process.wait_channel}" if process.wait_channel else ""
            return f"{said or 'waits for a disk or a device'} (state D{where})"
        return said or "stands"

    @property
    def stands_by_itself(self) -> bool:
        """It does something of its own rather than wait in `torch.distributed`."""
        is_unclear = self.verb in ("stands", "waits for a lock") and not self.in_lock
        return not (self.call or self.in_backward or is_unclear)

    @property
    def is_in_dataset(self) -> bool:
        """It is a DataLoader worker that fetches an item, rather than wait for one to fetch."""
        for frame in self.frames:
            if _is_in(frame, "worker_loop"):
                return False
            if not _is_library(frame) or _is_in(frame, "worker_fetch"):
                return True
        return False


def _show_place(frame: Frame | None) -> str:
    """Return ` at data.py:88, read_shard`, or an empty text."""
    return f" at {PurePath(frame.file).name}:{frame.line}, {frame.function}" if frame else ""


def _is_deadlocked(rank: RankEvidence) -> bool:
    """Tell whether all Python threads of a rank wait for locks, or for the end of such a thread.

    Then nobody is left who releases one.
    """
    if rank.process.system_call not in ("", "futex") or rank.quiet < _AT_REST:
        return False
    threads = [stack for stack in rank.process.stacks if stack.frames]
    return any(one.is_current and one.awaits_lock for one in threads) and all(
        one.awaits_lock or _is_in(one.frames[0], "threading", functions=_JOIN_FUNCTIONS) for one in threads
    )


def _find_stuck_worker(children: Sequence[ProcessState]) -> _Activity | None:
    """Return the worker that has not answered: one that has ended or is stopped, else one in a dataset.

    A worker without work waits for its queue in torch's loop, which has no line of the program's own.
    """
    workers = [_Activity(child) for child in children]
    for is_stuck in (
        lambda one: one.process.state in "ZX",
        lambda one: one.process.state in "Tt",
        lambda one: one.process.state == "D",
        lambda one: one.is_in_dataset,
        lambda one: not one.frames and one.verb == "sleeps",
    ):
        if found := next(filter(is_stuck, workers), None):
            return found
    return None


# Which rank waits for which others, and in what

_IN_STORE = ("init_process_group", "new_group")
"""Functions in which all ranks wait for each other in torch's store."""
_UNEVEN = ("all_to_all", "all_to_all_single", "alltoall_base", "scatter", "gather", "all_gather")
"""Operations whose input sizes may differ between ranks."""
_MOST = 4
"""Hosts, places and waits that a sentence names."""
_LONGEST = 600
"""Characters of a sentence."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a rank waits in for others."""

    operation: str
    """In torch's words; empty if it is not known."""
    key: str = ""
    """torch's name of the group; empty for a wait in the store, or in an operation that is not recorded."""
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

    @property
    def label(self) -> str:
        """What it is for people: `all_reduce #1042 of the default group`, `init_process_group`."""
        return f"{self.operation or 'a collective'}{self.where}"

    @property
    def where(self) -> str:
        """Which one of its group it is: ` #1042 of the default group`."""
        group = "the default group" if self.group == DEFAULT_GROUP else f"group {self.group}"
        return "" if self.sequence is None else f" #{self.sequence} of {group}"


def judge_evidence(nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport]) -> Verdict:
    """Return who holds the others up, as far as the evidence says, in words harmless on a terminal."""
    return _Job(nodes, reports).judge()


class _Job:
    """The evidence of all nodes with what follows from it.

    `reports` are the last reports of all nodes: a node or rank in them without evidence is not heard of.
    """

    def __init__(self, nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport]) -> None:
        self.ranks = {rank.rank: rank for node in nodes for rank in node.ranks}
        self.doing = {
            number: _Activity(rank.process, 0.0 if rank.children else rank.cpu or 0.0)
            for number, rank in self.ranks.items()
        }
        self.hosts = {state.rank: report.host for report in reports for state in report.ranks}
        """Of every rank that has been heard of, now or before."""
        self.hosts |= {number: rank.host for number, rank in self.ranks.items()}
        heard = {node.host for node in nodes}
        reported = {report.host for report in reports}
        self.silent = sorted(reported - heard)
        """Hosts without evidence."""
        expected = max((report.nodes for report in reports), default=0)
        self.unreported = max(expected - len(reported | heard), 0)
        """Nodes that have never reported."""
        self.waits = self._find_waits()
        """What each rank that waits for others waits in."""

    def _find_waits(self) -> dict[int, list[_Wait]]:
        """Find the waits.

        gloo's recorder does not name the members of a group: then they are those that have ever called a
        collective of the group, and all ranks for the default group.
        """
        world = frozenset(self.hosts)
        in_store: dict[int, str] = {}
        members: dict[str, set[int]] = defaultdict(set)
        for number, rank in self.ranks.items():
            if (call := self.doing[number].call) in _IN_STORE:
                in_store[number] = call
            for group in rank.groups:
                members[group.key] |= {number, *group.ranks}
                members[group.key] |= world if group.name == DEFAULT_GROUP else set()
        waits: dict[int, list[_Wait]] = defaultdict(list)
        for number, rank in self.ranks.items():
            if not self._is_running(number):
                continue
            for group in rank.groups:
                if pending := group.pending:
                    missing = frozenset(
                        member
                        for member in members[group.key] - {number}
                        if not self._has_joined(member, group.key, pending.sequence)
                    )
                    waits[number].append(
                        _Wait(pending.operation, group.key, group.name, pending.sequence, missing)
                    )
                waits[number] += [
                    _Wait(operation, group=group.name, missing=frozenset({partner}), is_collective=False)
                    for operation, partner in group.exchanges
                ]
            if number in in_store:
                waits[number].append(_Wait(in_store[number], missing=world - in_store.keys()))
            if not waits[number] and (operation := self._guess_wait(number)):
                waits[number].append(_Wait(operation, is_collective=False))
        return {number: found for number, found in waits.items() if found}

    def _is_running(self, number: int) -> bool:
        """Tell whether a rank is heard of, and has not ended nor been stopped."""
        rank = self.ranks.get(number)
        return rank is not None and rank.exit_code is None and rank.process.state not in "TZX"

    def _has_joined(self, number: int, key: str, sequence: int) -> bool:
        """Tell whether a rank has called a collective of a group; without an answer its stack tells."""
        if not self._is_running(number):
            return False
        rank = self.ranks[number]
        if not rank.answered:
            return bool(self._guess_wait(number))
        return any(group.key == key and group.last_enqueued >= sequence for group in rank.groups)

    def _guess_wait(self, number: int) -> str:
        """Return the function of `torch.distributed` that a rank waits in by its stack; empty for none.

        It counts for point-to-point operations of gloo, which are not recorded, and without an answer.
        """
        doing = self.doing[number]
        if doing.verb == "computes":
            return ""
        is_backward = not doing.call and not self.ranks[number].answered and doing.in_backward
        return "backward" if is_backward else doing.call

    def judge(self) -> Verdict:
        if mismatch := self._judge_mismatch():
            return mismatch
        if roots := self._find_roots():
            return self._blame_roots(sorted(roots))
        if self.silent or self.unreported:
            return self._blame_silent(sorted(self.hosts.keys() - self.ranks.keys()))
        return self._blame_circle() if self.waits else self._blame_roots(sorted(self.ranks))

    def _find_roots(self) -> Collection[int]:
        """Return the ranks at the end of the relations: others wait for them, and they wait for nobody.

        If none is named (the members of a group are not known, or operations are not recorded), those are
        taken that do not wait while others do. In a circle, those count that do something of their own, as
        with GPUs, on which a collective can be pending while the program is elsewhere.
        """
        targets = {n: {rank for one in own for rank in one.missing} for n, own in self.waits.items()}
        named = {rank for missing in targets.values() for rank in missing}
        free = named - targets.keys()
        if free or not self.waits:
            return free
        idle = [one for one, rank in self.ranks.items() if one not in targets and rank.exit_code is None]
        circle = [one for one in named if one in self.ranks and self.doing[one].stands_by_itself]
        return idle or circle or [one for one in named if not targets[one]]

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

    def _judge_mismatch(self) -> Verdict | None:
        """Blame the fewest ranks that have called another collective than the others as one, if some have.

        It is the first incomplete one. Calls differ by their operation and, if that counts, their sizes.
        """
        waits = {(one.key, one.sequence or 0): one for own in self.waits.values() for one in own if one.key}
        for (key, sequence), wait in sorted(waits.items(), key=lambda item: item[0]):
            by_form: dict[tuple[str, str], tuple[Call, list[int]]] = {}
            for number, rank in sorted(self.ranks.items()):
                for call in (call for group in rank.groups if group.key == key for call in group.calls):
                    if call.sequence == sequence:
                        sizes = "" if call.operation in _UNEVEN else call.sizes
                        by_form.setdefault((call.operation, sizes), (call, []))[1].append(number)
            if len(by_form) < 2:
                continue
            (odd, few), *others = sorted(by_form.values(), key=lambda entry: (len(entry[1]), -entry[1][0]))
            differ = len({operation for operation, _ in by_form}) > 1

            shown = [
                " of ".join(filter(None, (call.operation, call.sizes))) if differ else call.sizes or "nothing"
                for call, _ in ((odd, few), *others)
            ]
            rest = [
                f"{f'rank {ranks[0]}' if len(ranks) == 1 else f'{len(ranks)} ranks'} {what}"
                for (_, ranks), what in zip(others, shown[1:], strict=True)
            ]
            did = f"called {shown[0]} as" if differ else f"given {shown[0]} to {odd.operation}"
            doing, frame = self._describe(few)
            text = f"{self._say(few, 'has', 'have')} {did}{wait.where}, and {', '.join(rest)}: {doing}"
            waiting = sum(len(ranks) for _, ranks in others)
            called = replace(wait, operation=odd.operation)
            return self._blame("mismatch", text, few, called, waiting=waiting, frame=frame, is_final=True)
        return None

    def _blame_roots(self, roots: Sequence[int]) -> Verdict:
        """Blame ranks at the end of all waiting, by the first kind that some of them are of.

        A rank that is stopped goes first: it explains all others.
        """
        heard = {number: self.ranks[number] for number in roots if number in self.ranks}
        stopped = [number for number, rank in heard.items() if rank.process.state == "T"]
        exited = [
            number
            for number, rank in heard.items()
            if rank.exit_code is not None or rank.process.state in ("Z", "X")
        ]
        absent = [number for number in heard if number not in {*stopped, *exited}]
        debugged = [number for number in absent if self.doing[number].is_debugged]
        found, frame = stopped, None
        if stopped:
            kind, text = "stopped", f"{self._say(stopped, 'is', 'are')} stopped (SIGSTOP)"
        elif debugged:
            doing, frame = self._describe_one(debugged[0])
            found, kind, text = debugged, "debugged", f"{self._name(debugged[:1])} {doing}"
        elif exited and (self.waits or not absent):
            codes = sorted({code for number in exited if (code := heard[number].exit_code) is not None})
            how = f" with exit code {', '.join(map(str, codes))}" if codes else ""
            found, kind, text = exited, "exited", f"{self._say(exited, 'has', 'have')} ended{how}"
        else:
            return self._blame_absent(absent) if absent else self._blame_silent(roots)
        wait, waiting, others = self._find_main_wait(found)
        is_final = waiting > 0 and kind != "debugged"
        return self._blame(kind, text + others, found, wait, waiting=waiting, frame=frame, is_final=is_final)

    def _blame_absent(self, ranks: Sequence[int]) -> Verdict:
        """Blame ranks that have not joined what others wait in, or that all stand still."""
        wait, waiting, _ = self._find_main_wait(ranks)
        doing, frame = self._describe(ranks)
        is_final = any(_is_deadlocked(self.ranks[number]) for number in ranks)
        if wait is None:
            text = f"{self._say(ranks, 'makes', 'make')} no step: {doing}"
            return self._blame("standstill", text, ranks, frame=frame, is_final=is_final)
        total = len(self.waits.keys() - set(ranks))
        wait_in = _count_waiting(waiting) + (f" ({total} in all)" if total > waiting else "")
        text = f"{self._say(ranks, 'holds', 'hold')} others up: {wait_in} in {wait.label}, and {doing}"
        if wait.is_collective:
            text = f"{self._say(ranks, 'has', 'have')} not joined {wait.label}, in which {wait_in}: {doing}"
        waiting = max(waiting, total)
        return self._blame("absent", text, ranks, wait, waiting=waiting, frame=frame, is_final=is_final)

    def _blame_silent(self, ranks: Sequence[int]) -> Verdict:
        """Blame nodes and ranks that have not been heard of."""
        wait, waiting, others = self._find_main_wait(ranks)
        heard = [number for number in ranks if self.hosts.get(number) not in self.silent]
        named = self._name(heard) if heard else _format_ranks(ranks) if ranks else ""
        parts = []
        if self.silent:
            nodes = "node" if len(self.silent) == 1 else "nodes"
            parts.append(f"{nodes} {name_some(self.silent, _MOST)}{named and f' ({named})'}")
        if self.unreported:
            parts.append(f"{count_things(self.unreported, 'node')} that never reported")
        text = f"nothing is heard of {' and '.join(parts) or named or 'any rank'}{others}"
        return self._blame("silent", text, ranks, wait, waiting=waiting)

    def _blame_circle(self) -> Verdict:
        """Blame those of fewest ranks where all wait: for each other, or for what does not end by itself."""
        entries = self._list_waits()
        wait, ranks = entries[0]
        if not any(found.missing for found, _ in entries) and (len(entries) == 1 or wait.key):
            known = "" if wait.group == DEFAULT_GROUP or wait.sequence is None else "known "
            who = f"all {len(ranks)} {known}ranks have" if len(ranks) > 1 else "its only rank has"
            errors = [
                f"the GPU of {self._name([number])} reported XID {', '.join(map(str, rank.gpu.xids))}"
                for number, rank in sorted(self.ranks.items())
                if rank.gpu and rank.gpu.xids
            ]
            hint = ", ".join(errors) or "look at the network and the GPUs"
            text = f"{who} joined {wait.label}, and none completes it: {hint}"
            frame = self._describe_one(ranks[0])[1]
            return self._blame("network", text, ranks, wait, waiting=len(ranks), frame=frame)
        said = []
        for each, found in entries[: -_MOST - 1 : -1]:
            whom = f" for {_format_ranks(sorted(each.missing))}" if each.missing else ""
            said.append(f"{self._name(found)} in {each.label}{whom}")
        wait, odd = entries[-1]
        # A send or receive that is not recorded may be under way.
        final = all(each.key and each.is_collective for each, _ in entries)
        text, frame = f"ranks wait for each other: {', '.join(said)}", self._describe_one(odd[0])[1]
        return self._blame("mismatch", text, odd, wait, waiting=len(self.waits), frame=frame, is_final=final)

    def _list_waits(
        self, apart: Collection[int] = (), target: Collection[int] = ()
    ) -> list[tuple[_Wait, list[int]]]:
        """Return what ranks wait in, with these ranks, what most wait in first.

        Left out are the ranks `apart`, and waits for other ranks than `target`, if that is given.
        """
        by_call: dict[tuple[str, str, int | None], tuple[_Wait, list[int]]] = {}
        for number in sorted(self.waits.keys() - set(apart)):
            for wait in self.waits[number]:
                if not target or wait.missing.intersection(target):
                    by_call.setdefault(wait.call, (wait, []))[1].append(number)
        return sorted(by_call.values(), key=lambda entry: -len(entry[1]))

    def _find_main_wait(self, culprits: Sequence[int]) -> tuple[_Wait | None, int, str]:
        """Return what most ranks wait in for these, how many, and the end of a sentence that says so.

        If nobody waits for them, it is what most ranks wait in at all.
        """
        for wait, ranks in self._list_waits(culprits, culprits) or self._list_waits(culprits):
            return wait, len(ranks), f", and {_count_waiting(len(ranks))} in {wait.label}"
        return None, 0, ""

    def _describe_one(self, number: int) -> tuple[str, Frame | None]:
        """Return what a rank does and where, as a sentence without its subject, and the line."""
        rank, one = self.ranks[number], self.doing[number]
        doing, place, state = one.verb, one.place, rank.process.state
        if state not in "TtZX" and one.waits_for_data:
            if worker := _find_stuck_worker(rank.children):
                text = f"which {worker.verb}{_show_place(worker.place)}"
                return f"waits for DataLoader worker {worker.process.pid}, {text}", worker.place or place
            which = "its DataLoader workers" if rank.children else "a DataLoader worker that is gone"
            doing = f"waits for {which}"
        elif one.is_debugged and not rank.process.tracer:
            doing = "is in a debugger"
        elif doing in _UNSPECIFIC and one.call:
            doing = f"waits in {one.call}"
        elif doing in _UNSPECIFIC and number in self.waits and not one.in_lock:
            doing = "waits"
        elif rank.phase == "ended" and state not in "TZX":
            doing = f"is about to exit and {doing}"
        return f"{doing}{_show_place(place)}", place

    def _describe(self, ranks: Sequence[int]) -> tuple[str, Frame | None]:
        """Return what ranks do, the same said once, and where the first one is."""
        found = {number: self._describe_one(number) for number in ranks}
        doings: dict[str, int] = {}
        for number, (doing, _) in found.items():
            doings.setdefault(doing, number)
        frame = next((place for _, place in found.values() if place), None)
        if len(ranks) == 1:
            return f"it {found[ranks[0]][0]}", frame
        shown = [f"rank {number} {doing}" for doing, number in doings.items()]
        return "; ".join(shown[:_MOST]), frame

    def _name(self, ranks: Collection[int]) -> str:
        return _format_ranks(ranks, self.hosts)

    def _say(self, ranks: Collection[int], one: str, several: str) -> str:
        """Return ranks with their verb."""
        return f"{self._name(ranks)} {one if len(ranks) == 1 else several}"


def _format_ranks(ranks: Collection[int], hosts: Mapping[int, str] | None = None) -> str:
    """Return ranks for people: `rank 5 on n2`, `ranks 4-7 on n2, 9 on n3`."""
    by_host: dict[str, list[int]] = {}
    for number in ranks:
        by_host.setdefault((hosts or {}).get(number, ""), []).append(number)
    shown = [
        format_cpulist(frozenset(found)) + (f" on {host}" if host else "") for host, found in by_host.items()
    ]
    more = " nodes" if len(shown) > _MOST else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {name_some(shown, _MOST)}{more}"


def _count_waiting(number: int) -> str:
    """Return `1 rank waits`, `7 ranks wait`."""
    return f"{count_things(number, 'rank')} {'waits' if number == 1 else 'wait'}"
