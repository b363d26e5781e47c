"""What the kernel says of processes and their node, without their help: state, where they wait, CPU, memory,
files, TCP, CPU quotas.

It is read from `/proc/PID` (proc(5)), by sock_diag(7) and from sysfs. What may not be read (another user's
process, a kernel without `wchan`) is left out. A look never waits for the process itself, but reading can
block in a stuck kernel, so those who look at a hang do so in a thread that may be left behind.

A sample must not cost what it looks for. So a rank's tree is found by the kernel's lists of children and not
by a search through /proc, and its memory is its resident set: the proportional one (smaps_rollup) walks
all page tables and holds the lock that the rank's page faults need.
"""

import os
import platform
import re
import socket
import struct
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.files import Descriptor, read_stat
from launcher.watch.model import Neighbour, NodeSample, ProcessState, RankSample

START = 22 - 3
"""Index into what `read_stat` returns."""
_TIMES, _ALL_TIMES, _FAULTS, _PROCESSOR = slice(11, 13), slice(11, 15), slice(9, 11), 36
"""The same of utime and stime; these with cutime and cstime; majflt and cmajflt; processor."""
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_LARGEST_ENTRY = 1 << 16
_LARGEST_TREE = 256
"""Processes of a rank that are looked at, at most."""
_MOST_THREADS = 256
"""Threads of a process whose run delay and children are read, at most: a program can have thousands."""
WAITS: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("waits.toml").read_text())
_NAMES: Mapping[int, str] = {
    row[platform.machine()]: name for name, row in WAITS["call"].items() if platform.machine() in row
}


def read_kernel_text(path: str) -> str:
    """Return the text of a small file of procfs or sysfs; empty if it cannot be read."""
    with suppress(OSError), Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        return os.read(descriptor, _LARGEST_ENTRY).decode("utf-8", "replace")
    return ""


def list_threads(pid: int) -> list[int]:
    """Return the threads of a process; none if they cannot be listed."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - takes microseconds
    except OSError:
        return []


def read_system_call(pid: int, entry: str = "syscall") -> str:
    """Return the name of the system call that a thread is in; its number if the name is not known.

    It is the main thread, unless `entry` is another's, `task/TID/syscall`.
    """
    number = read_kernel_text(f"/proc/{pid}/{entry}").partition(" ")[0].strip()
    if not number.isdecimal():  # `running`, -1 outside of calls, or no permission
        return ""
    return _NAMES.get(int(number), number)


def has_open(pid: int, path: Path) -> bool:
    """Tell whether a process has a file open under any descriptor."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone
            with suppress(OSError):  # closed meanwhile
                if Path(f"/proc/{pid}/fd/{name}").samefile(path):
                    return True
    return False


# Processes: counters since their start, to compare with a later look


@dataclass(frozen=True, slots=True)
class Process:
    """What the kernel has counted of a process."""

    pid: int
    start: int
    """Clock ticks since boot: by this a later process with the same PID is known."""
    ticks: int
    """Of CPU time, of all of its threads, and of children that have ended and were waited for."""
    faults: int
    """Major page faults, with those of such children."""
    memory: int
    """Resident bytes."""
    shared: int
    """Of these, pages of files and of shared memory."""
    moved: int | None
    """Bytes read and written, by system calls and by paging; None if that is not shown. Paging is in both
    counts if a call caused it: this is to see whether anything moves."""
    delays: Mapping[int, int]
    """Nanoseconds that threads were ready to run and waited for a core."""
    children: Sequence[int]


def read_process(pid: int) -> Process | None:
    """Read the counters of a process; None if it is gone, or hidden."""
    try:
        fields = read_stat(pid)[1]
    except (OSError, ValueError):
        return None
    pages = [_PAGE * int(number) for number in read_kernel_text(f"/proc/{pid}/statm").split()] or [0] * 3
    moved = re.findall(r"^(?:rchar|wchar|read_bytes): (\d+)$", read_kernel_text(f"/proc/{pid}/io"), re.M)
    delays: dict[int, int] = {}
    children: list[int] = []
    for thread in list_threads(pid)[:_MOST_THREADS]:
        here = f"/proc/{pid}/task/{thread}"
        children += [int(child) for child in read_kernel_text(f"{here}/children").split()]
        if len(delay := read_kernel_text(f"{here}/schedstat").split()) > 1:
            delays[thread] = int(delay[1])
    return Process(
        pid=pid,
        start=int(fields[START]),
        ticks=sum(map(int, fields[_ALL_TIMES])),
        faults=sum(map(int, fields[_FAULTS])),
        memory=pages[1],
        shared=pages[2],
        moved=sum(map(int, moved)) if moved else None,
        delays=delays,
        children=children,
    )


def read_tree(pid: int, most: int = _LARGEST_TREE, *, tcp: bool = False) -> dict[int, Process]:
    """Read a process and those below it, by PID, the process itself first; empty if it is gone.

    If asked, what all of them moved over TCP counts as the first one's: children inherit connections.
    """
    found: dict[int, Process] = {}
    waiting = [pid]
    while waiting and len(found) < most:
        if (process := read_process(waiting.pop())) is not None:
            found[process.pid] = process
            waiting += [child for child in process.children if child not in found]
    if tcp and (first := found.get(pid)) and first.moved is not None:
        try:
            found[pid] = replace(first, moved=first.moved + _count_sent(found))
        except (OSError, struct.error):
            found[pid] = replace(first, moved=None)
    return found


def describe_process(pid: int) -> ProcessState:
    """Return what the kernel says of a process now; its state is X if it is gone."""
    try:
        name, fields = read_stat(pid)
    except (OSError, ValueError):
        return ProcessState(pid, "X")
    tracer = re.search(r"^TracerPid:\t(\d+)$", read_kernel_text(f"/proc/{pid}/status"), re.MULTILINE)
    return ProcessState(
        pid=pid,
        state=fields[0],
        wait_channel=read_kernel_text(f"/proc/{pid}/wchan").strip("\x00\n ").removeprefix("0"),
        system_call=read_system_call(pid),
        tracer=int(tracer[1]) if tracer else 0,
        command=name,
    )


# Bytes over TCP: a download needs neither CPU nor files, and /proc/PID/io does not count what recv(2) has.
# The kernel lists all TCP connections of the network namespace with their counters (`struct tcp_info`,
# linux/tcp.h), also to users without rights; those of a process are known by the inodes of its descriptors.

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_AND_DUMP = 0x1 | 0x300
_ERROR, _DONE = 2, 3
_INET_DIAG_INFO = 2
_STATES = 1 << 1 | 1 << 8
"""TCP_ESTABLISHED and TCP_CLOSE_WAIT."""
_REQUEST = struct.Struct("=IHHII BBBBI48x")
"""`struct nlmsghdr` (length, type, flags, sequence, PID) and `struct inet_diag_req_v2` (family, protocol,
extensions, padding, states, and any address)."""
_INODE, _ATTRIBUTES = 16 + 68, 16 + 72
"""Where a message has its `struct inet_diag_msg`'s inode, and what follows it."""
_ACKED = 4 + 120
"""Where `struct tcp_info` in its attribute has tcpi_bytes_acked, of 64 bits, before tcpi_bytes_received."""


def _count_sent(pids: Collection[int]) -> int:
    """Return the bytes that open TCP connections of processes have sent and received.

    Raises OSError, and struct.error for what the kernel does not say in that form.
    """
    links = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone
            with suppress(OSError):  # closed meanwhile
                links.add(os.readlink(f"/proc/{pid}/fd/{name}"))  # noqa: PTH115 - many and short
    inodes = {int(target[8:-1]) for target in links if target.startswith("socket:[")}
    found: dict[int, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6) if inodes else ():
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diag:
            diag.settimeout(0.5)
            ask = family, socket.IPPROTO_TCP, 1 << _INET_DIAG_INFO - 1, 0, _STATES
            diag.send(_REQUEST.pack(_REQUEST.size, _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0, *ask))
            kinds = {0}
            while not kinds & {_ERROR, _DONE}:
                messages = list(_split(diag.recv(1 << 16), "=IH"))
                kinds = {kind for kind, _ in messages}
                for _, message in messages:
                    for part, value in _split(message[_ATTRIBUTES:], "=HH"):
                        if part == _INET_DIAG_INFO and len(value) >= _ACKED + 16:  # since Linux 4.1
                            (inode,) = struct.unpack_from("=I", message, _INODE)
                            found[inode] = sum(struct.unpack_from("=QQ", value, _ACKED))
    return sum(moved for inode, moved in found.items() if inode in inodes)


def _split(data: bytes, form: str) -> Iterator[tuple[int, bytes]]:
    """Give the type and the whole of each message or attribute of netlink, which begins with its length."""
    while len(data) >= 4:
        size, kind = struct.unpack_from(form, data)
        yield kind, data[:size]
        data = data[max(size, 4) + 3 & ~3 :]


# Samples of ranks and their node

ACTIVE_CPU = 0.05
"""Cores from which on a rank's tree is active: what waits uses less than 0.02."""
_STARVING = 0.25
"""Seconds per second that a thread waits for a core; on a busy machine, one that only polls has 0.05."""
_ACTIVE_BYTES = 16 * 1024.0
"""The same in bytes a second. A rank with torch's store asks it 100 times a second whether all others have
joined (`TCPStore::waitForWorkers`), which is 5 kB/s with torch 2.13; NCCL's monitor asks it for less."""
FindCgroups = Callable[[int], Sequence[str]]
"""Gives the cgroups of a process (PID) for CPU, innermost first, as directories below the root."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All ranks of a node, by PID, and the node."""

    ranks: Mapping[int, RankSample] = field(default_factory=dict)
    node: NodeSample = field(default_factory=NodeSample)
    resting: Collection[int] = ()
    """PIDs of ranks none of whose processes did anything; what cannot be seen counts as activity."""


class Sampler:
    """Samples ranks; each call says what has been since the one before."""

    def __init__(self, find_cgroups: FindCgroups = lambda _: (), root: str = "") -> None:
        """`root` is what /proc/pressure and cgroups are below."""
        self._find_cgroups = find_cgroups
        self._root = root
        self._neighbours = _NeighbourFinder()
        self._trees: dict[int, dict[int, Process]] = {}
        """The ranks' processes at the last sample."""
        self._still: Collection[int] = ()
        self._throttled: Mapping[str, float] = {}
        """Seconds held back by cgroup."""
        self._time = 0.0

    def sample(self, pids: Collection[int], still: Collection[int] = ()) -> Sample:
        """Sample the ranks with these PIDs; of one that is gone there is an empty sample. Raises nothing.

        Of `still`, those that make no progress, TCP connections are looked at, too: without that, a rank
        counts as active.
        """
        now = time.monotonic()
        elapsed, self._time = max(now - self._time, 1e-3), now
        trees = {pid: tree for pid in pids if (tree := read_tree(pid, tcp=pid in still))}
        chains = {pid: self._find_cgroups(pid) for pid in trees}
        groups = {group for chain in chains.values() for group in chain}
        read = {group: _read_throttled(f"{self._root}/{group}") for group in groups}
        known, self._throttled = self._throttled, {key: one for key, one in read.items() if one is not None}
        rates = {
            key: max(0.0, one - known[key]) / elapsed for key, one in self._throttled.items() if key in known
        }
        neighbours = self._neighbours.find(trees)
        ranks, resting = dict.fromkeys(pids, RankSample()), set()
        for pid, tree in trees.items():
            # A child's pages of files and of shared memory are left out: libraries, and batches that the rank
            # has mapped too, would count once for each of its DataLoader workers. Pages that a fork still
            # shares count in each process.
            memory = [max(0, one.memory - (one.shared if one.pid != pid else 0)) for one in tree.values()]
            # Of the cgroups with a quota that hold a rank, the strictest counts.
            throttled = max((rates[group] for group in chains[pid] if group in rates), default=None)
            ranks[pid] = RankSample(rss=sum(memory), throttled=throttled, neighbours=neighbours.get(pid, ()))
            before = self._trees.get(pid, {})
            if pid not in before or before[pid].start != tree[pid].start:
                continue
            # What a child used goes to its parent once that has waited for it: so the sum over the tree grows
            # on, and falls only if a child went unseen.
            cpu, faults, moved = (
                max(0, sum(map(count, tree.values())) - sum(map(count, before.values()))) / elapsed
                for count in (
                    lambda one: one.ticks / _TICKS,
                    lambda one: one.faults,
                    lambda one: one.moved or 0,
                )
            )
            delays = {thread: delay for one in before.values() for thread, delay in one.delays.items()}
            waited = [
                max(0, delay - delays.get(thread, 0)) / 1e9 / elapsed
                for one in tree.values()
                for thread, delay in one.delays.items()
            ]
            ranks[pid] = replace(
                ranks[pid],
                cpu=cpu,
                run_delay=sum(waited) if waited else None,
                thread_delay=max(waited) if waited else None,
                major_faults=faults,
            )
            # It rests if it did nothing, and was seen whole.
            is_seen = pid in still and pid in self._still and tree.keys() == before.keys()
            is_seen &= None not in [one.moved for one in (*tree.values(), *before.values())]
            is_quiet = cpu < ACTIVE_CPU and max(waited, default=0) < _STARVING and moved < _ACTIVE_BYTES
            if is_seen and is_quiet:
                resting.add(pid)
        self._trees, self._still = trees, still
        pressures = {f"{name}_pressure": self._read_pressure(name) for name in ("memory", "cpu", "io")}
        return Sample(ranks, NodeSample(**pressures), resting)

    def _read_pressure(self, resource: str) -> float | None:
        """Return the share of the last 10 s that some task waited for a resource; None without PSI.

        Source: the kernel's Documentation/accounting/psi.rst.
        """
        text = read_kernel_text(f"{self._root}/proc/pressure/{resource}")
        found = re.match(r"some avg10=(\d+\.?\d*) ", text)
        return float(found[1]) / 100 if found else None


# Neighbours: whose processes, other than a rank's own, run on the cores that it may use

_LEAST_SHARE = 0.05
"""Cores: what uses less does not hold a rank up by much."""
_MOST_NEIGHBOURS = 3
"""That are told of for each rank."""
_COST = 1000
"""The next search comes no sooner than so many times what the last one took: 0.1% of a core at most."""


class _NeighbourFinder:
    """Searches all processes that are to be seen, as often as that is cheap."""

    def __init__(self) -> None:
        self.ticks: dict[tuple[int, str], int] = {}
        """CPU ticks by process and its start, at the last search."""
        self.time = self.next_time = 0.0
        self.found: dict[int, tuple[Neighbour, ...]] = {}

    def find(self, trees: Mapping[int, Collection[int]]) -> Mapping[int, tuple[Neighbour, ...]]:
        """Return the neighbours of each rank, by its PID; `trees` has the PIDs of its own processes.

        A process counts for the CPU on which its main thread ran last, and a rank's cores are those that it
        may use (its affinity). Between searches it is the last result.
        """
        if (now := time.monotonic()) < self.next_time:
            return self.found
        start, seconds, self.time = time.thread_time(), now - self.time, now
        before, self.ticks, self.found = self.ticks, {}, {}
        busy = []
        for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
            with suppress(OSError, ValueError):
                command, fields = read_stat(pid := int(name))
                ticks = self.ticks[pid, fields[START]] = sum(map(int, fields[_TIMES]))
                share = (ticks - before.get((pid, fields[START]), ticks)) / _TICKS / seconds
                if share >= _LEAST_SHARE:
                    busy.append((int(fields[_PROCESSOR]), Neighbour(command, pid, share)))
        busy.sort(key=lambda one: -one[1].share)
        for rank, own in trees.items():
            with suppress(OSError):
                cpus = os.sched_getaffinity(rank)
                others = [one for cpu, one in busy if one.pid not in own and cpu in cpus]
                self.found[rank] = tuple(others[:_MOST_NEIGHBOURS])
        self.next_time = now + _COST * (time.thread_time() - start)
        return self.found


def _read_throttled(folder: str) -> float | None:
    """Return the seconds that a quota has held back a cgroup in all; None if it has no such count.

    Version 1 has nanoseconds as `throttled_time`, version 2 microseconds as `throttled_usec`. The kernel adds
    up the run queues of all CPUs (Documentation/scheduler/sched-bwc.rst).
    """
    found = re.search(r"^throttled_(time|usec) (\d+)$", read_kernel_text(f"{folder}/cpu.stat"), re.MULTILINE)
    return int(found[2]) / (1e9 if found[1] == "time" else 1e6) if found else None
