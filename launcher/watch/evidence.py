"""Evidence of one node for a hang: what ranks last did, stacks, torch's flight recorder, the kernel, GPUs.

Nothing of it needs a hung rank's help. All ranks are looked at at once, each in a thread of its own that is
left behind if it does not end in time; what it has found by then counts. Each step has its own timeout,
within the deadline of all, and leaves a note if it fails. Whether a rank does anything is not measured here:
its node's samples tell.
"""

import ctypes
import linecache
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.codec import DecodeError
from launcher.files import read_signals
from launcher.watch.flight_recorder import TRACE, ServerError, parse_trace, post_handler
from launcher.watch.model import (
    Frame,
    Heartbeat,
    NodeEvidence,
    ProcessState,
    Rank,
    RankEvidence,
    Stack,
    list_fields,
)
from launcher.watch.procfs import (
    describe_process,
    has_open,
    list_threads,
    read_kernel_text,
    read_system_call,
    read_tree,
)

DEADLINE = 4.0
"""Seconds after which gathering ends with what there is."""
_STACK_PATIENCE = 0.8
_CHILD_PATIENCE = 0.2
_SERVER_PATIENCE = 0.7
_ALL_CHILDREN = 0.8
"""Seconds for the stacks of all children of a rank."""
_MOST_PROCESSES = 65
"""Processes of a rank that are looked at."""
_CANNOT_ANSWER = {
    "T": "it is stopped and cannot answer",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
    "X": "it has ended",
}
"""States in which a process gets no signal and runs no server. In state D, its other threads do."""
_TAKES_LOCK = re.compile(r"\s*(with\s+[\w.\[\]]+\s*:|.*\.acquire\(\)$)")
"""A line that waits for nothing but a lock, if it waits: `with open(path):` could wait for a file."""


def gather_node(
    folder: Path,
    ranks: Sequence[Rank],
    heartbeats: Mapping[int, Heartbeat],
    host: str,
    node_rank: int,
    number: int,
    *,
    deadline: float = DEADLINE,
) -> NodeEvidence:
    """Return the evidence of a node's ranks for hang `number`, at the latest about `deadline` seconds later.

    `folder` has the ranks' stacks and sockets; `heartbeats` are by rank.
    """
    start, now = time.monotonic(), time.time()
    looks = []
    for rank in ranks:
        beat = heartbeats.get(rank.rank)
        unseen = ProcessState(rank.pid, "S" if rank.exit_code is None else "X")
        # Progress alone counts here: before its first step, a report has it that activity is progress.
        idle = max(now - max(beat.activity_time, beat.phase_since), 0.0) if beat else rank.idle
        evidence = RankEvidence(**{**list_fields(rank), "idle": idle}, host=host, process=unseen)
        look = _RankLook(evidence, folder, start + deadline, can_dump=bool(beat and beat.can_dump))
        look.start()
        looks.append(look)
    for look in looks:
        look.join(max(0.0, start + deadline - time.monotonic()))
        if look.is_alive():
            look.note("its evidence was not complete in time")
    found, seconds = tuple(look.evidence for look in looks), round(time.monotonic() - start, 3)
    return NodeEvidence(host, node_rank, number, time.time(), seconds, found)


class _RankLook(threading.Thread):
    """A look at one rank, step by step; `evidence` has at any time what was found so far."""

    def __init__(self, evidence: RankEvidence, folder: Path, deadline: float, *, can_dump: bool) -> None:
        super().__init__(name="evidence", daemon=True)
        self.evidence, self.deadline, self.can_dump = evidence, deadline, can_dump
        self.dump, self.socket = (folder / f"rank-{evidence.rank}.{word}" for word in ("stack", "sock"))

    def run(self) -> None:
        """Look at the rank and its children, and ask them."""
        if self.evidence.exit_code is not None:
            return
        pid = self.evidence.pid
        children = [describe_process(one) for one in read_tree(pid, _MOST_PROCESSES) if one != pid]
        self._add(process=describe_process(pid), children=tuple(children))
        if reason := _CANNOT_ANSWER.get(self.evidence.process.state):
            self.note(reason)
        else:
            self._read_stacks()
            try:
                trace = post_handler(self.socket, self._limit(_SERVER_PATIENCE), *TRACE)
                self._add(groups=parse_trace(trace), answered=True)
            except (ServerError, DecodeError) as error:
                self.note(f"no flight recorder from torch's server: {error}")
        if self.can_dump:
            self._read_stacks_of_children()

    def _add(self, **found: Any) -> None:  # noqa: ANN401 - fields of RankEvidence
        self.evidence = replace(self.evidence, **found)

    def note(self, text: str) -> None:
        """Tell what could not be had."""
        self._add(notes=(*self.evidence.notes, text))

    def _limit(self, seconds: float) -> float:
        """Return so many seconds, or those that are left."""
        return min(seconds, max(self.deadline - time.monotonic(), 0.0))

    def _read_stacks(self) -> None:
        pid, reason = self.evidence.pid, "its hook has no handler for stacks"
        if self.can_dump and not (reason := check_signal(pid, self.dump)):
            if found := request_stacks(pid, self.dump, self._limit(_STACK_PATIENCE)):
                stacks = tuple(replace(one, awaits_lock=_takes_lock(one)) for one in found)
                self._add(process=replace(self.evidence.process, stacks=stacks))
                return
            reason = check_signal(pid, self.dump) or "it did not react to the stack signal"
        self.note(f"no stacks from faulthandler: {reason}")

    def _read_stacks_of_children(self) -> None:
        """Get those of children that have the rank's handler and file, one by one."""
        children, end = [], time.monotonic() + self._limit(_ALL_CHILDREN)
        for child in self.evidence.children:
            if child.state not in _CANNOT_ANSWER and time.monotonic() <= end:
                stacks = request_stacks(child.pid, self.dump, self._limit(_CHILD_PATIENCE))
                child = replace(child, stacks=stacks)  # noqa: PLW2901
            children.append(child)
        self._add(children=tuple(children))


def _takes_lock(stack: Stack) -> bool:
    """Tell whether a thread's line takes a lock, by the program's text."""
    frame = stack.frames[0] if stack.frames else None
    line = linecache.getline(frame.file, frame.line) if frame and frame.file.startswith("/") else ""
    return bool(_TAKES_LOCK.match(line.rstrip("\n")))


# Python stacks, by `faulthandler`, which the hook in the rank has registered on a real-time signal with a
# file. It works within the signal's handler, so also while C code holds the GIL. A process without a handler
# would die of the signal, and one that has closed the file may have another behind its descriptor: then no
# signal is sent.

_SERVER_THREAD = "pt_workerserver"
STACK_SIGNAL = signal.SIGRTMIN + 8
"""The signal on which the hook registers faulthandler."""
_POLL = 0.02
"""Seconds between two looks at the file."""
_SETTLED = 0.06
"""Seconds without a further byte after which a dump is complete; faulthandler writes it at one go."""
_LARGEST_DUMP = 1 << 20
"""Bytes of a dump that are read; 100 threads of 100 frames have less."""
_HEADER = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def check_signal(pid: int, path: Path) -> str:
    """Return why a process must not be sent the signal for stacks, or an empty text."""
    if not (read_signals(pid, "SigCgt") or 0) >> (STACK_SIGNAL - 1) & 1:
        return "it has no handler for the stack signal"
    if not has_open(pid, path):
        return "it has closed the file for stacks"
    return ""


def request_stacks(pid: int, path: Path, patience: float) -> tuple[Stack, ...]:
    """Have a process append its stacks to its file, and return them; empty if none came in time.

    It gets no signal if `check_signal` has something against it at the last moment: it may have begun to end,
    or become another program. Processes that share a file are to be asked one after the other.
    """
    with suppress(OSError):
        thread = choose_thread(pid)
        if check_signal(pid, path):
            return ()
        os.truncate(path, 0)  # its writers append to it
        libc = ctypes.CDLL(None)
        if thread == pid or not hasattr(libc, "tgkill"):  # glibc before 2.30
            os.kill(pid, STACK_SIGNAL)
        elif libc.tgkill(pid, thread, int(STACK_SIGNAL)):
            return ()
        size, changed, deadline = 0, time.monotonic(), time.monotonic() + patience
        while time.monotonic() < deadline and not (size and time.monotonic() - changed >= _SETTLED):
            time.sleep(_POLL)
            if (now := path.stat().st_size) != size:
                size, changed = now, time.monotonic()
        with path.open("rb") as file:
            return parse_stacks(file.read(_LARGEST_DUMP).decode("utf-8", "replace"))
    return ()


def choose_thread(pid: int) -> int:
    """Return the thread that is to handle the signal: an idle one if there is one, else the main thread.

    The handler writes the stacks of all threads, whichever it runs in. A signal cuts short what sleeps or
    polls in C code (signal(7)): `sleep()` would return early. It does not reach a thread that waits for a
    dead disk (state D). So a thread is taken that waits for a lock, which goes on after a signal, and has not
    blocked ours; if possible one of torch's server, which the hook has started.
    """
    idle = {
        read_kernel_text(f"/proc/{pid}/task/{thread}/comm").strip(): thread
        for thread in list_threads(pid)
        if thread != pid
        and read_system_call(pid, f"task/{thread}/syscall") == "futex"
        and (blocked := read_signals(f"{pid}/task/{thread}", "SigBlk")) is not None
        and not blocked >> (STACK_SIGNAL - 1) & 1
    }
    return idle.get(_SERVER_THREAD, next(iter(idle.values()), pid))


def parse_stacks(text: str) -> tuple[Stack, ...]:
    """Return the threads of a dump of faulthandler, of which the main thread comes last.

    The thread that handled the signal is called `Current thread`; it is the main thread unless that blocks
    signals. Lines of other forms, such as C frames, are left out.
    """
    threads: list[tuple[str, bool, list[Frame]]] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            threads.append((header[3] or header[2], header[1] == "Current thread", []))
        elif threads and (found := _FRAME.match(line)):
            number = int(found[2]) if found[2].isdecimal() else 0
            threads[-1][2].append(Frame(found[1], number, found[3]))
    main = len(threads) - 1
    if text.rstrip().endswith("..."):  # cut off after a hundred threads
        main = next((at for at, (_, is_current, _) in enumerate(threads) if is_current), main)
    return tuple(
        Stack(name, tuple(frames), is_current=number == main)
        for number, (name, _, frames) in enumerate(threads)
    )
