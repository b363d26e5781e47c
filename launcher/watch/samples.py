"""What the kernel says of ranks and their node between two samples: CPU, run delay, memory, faults, network.

A sample must not cost what it looks for. So a rank's tree is found by the kernel's lists of children and not
by a search through /proc, and its memory is its resident set: the proportional one (smaps_rollup) walks
all page tables and holds the lock that the rank's page faults need.
"""

import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.files import read_stat
from launcher.watch.model import Neighbour, NodeSample, RankSample
from launcher.watch.procfs import (
    START,
    TICKS,
    list_threads,
    read_children,
    read_connections,
    read_io,
    read_kernel_text,
)

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROCESS_TIMES, _FAULTS = slice(11, 15), slice(9, 11)
"""Fields that `read_stat` gives: utime, stime, cutime, cstime; majflt, cmajflt (proc(5))."""
_LARGEST_TREE = 256
"""Processes of a rank that are looked at, at most."""
_MOST_THREADS = 256
"""Threads of a process whose run delay is read, at most: a program can have thousands."""
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


@dataclass(slots=True)
class _Tree:
    """Totals of a rank's tree since the start of its processes."""

    start: int
    """When the rank's process started, in ticks since boot: another one means that its PID is used again."""
    ticks: int = 0
    """Of CPU, with those of children that ended and were waited for."""
    faults: int = 0
    rss: int = 0
    delays: dict[int, int] = field(default_factory=dict)
    """Nanoseconds by thread."""
    pids: set[int] = field(default_factory=set)
    bytes_moved: int | None = 0
    """Read and written; None if that is not shown."""
    connections: Mapping[int, int] | None = None
    """Bytes of its TCP connections by inode, if they were looked at."""


class Sampler:
    """Samples ranks; each call says what has been since the one before."""

    def __init__(self, find_cgroups: FindCgroups = lambda _: (), root: str = "") -> None:
        """`root` is what /sys, /proc/pressure and cgroups are below."""
        self._find_cgroups = find_cgroups
        self._root = root
        self._neighbours = _NeighbourFinder()
        self._before: dict[int, _Tree] = {}
        self._counts: Mapping[str, float] = {}
        """Bytes by network device, and seconds held back by cgroup, at the last sample."""
        self._time = 0.0

    def sample(self, pids: Collection[int], still: Collection[int] = ()) -> Sample:
        """Sample the ranks with these PIDs; of one that is gone there is an empty sample. Raises nothing.

        Of `still`, those that make no progress, TCP connections are looked at, too: without that, a rank
        counts as active.
        """
        now = time.monotonic()
        elapsed, self._time = now - self._time, now
        trees = {pid: tree for pid in pids if (tree := _read_tree(pid))}
        for pid in trees.keys() & still:
            with suppress(OSError, struct.error):
                trees[pid].connections = read_connections(trees[pid].pids)
        chains = {pid: self._find_cgroups(pid) for pid in trees}
        devices = _count_bytes(Path(self._root or "/", "sys/class"))
        groups = {group for chain in chains.values() for group in chain}
        held = {group: _read_throttled(f"{self._root}/{group}") for group in groups}
        before, self._counts = self._counts, {**devices, **{g: s for g, s in held.items() if s is not None}}
        rates = {
            key: max(0.0, count - before[key]) / elapsed
            for key, count in self._counts.items()
            if key in before and elapsed > 0
        }
        neighbours = self._neighbours.find({pid: tree.pids for pid, tree in trees.items()})
        ranks, resting = dict.fromkeys(pids, RankSample()), set()
        for pid, tree in trees.items():
            # Of the cgroups with a quota that hold a rank, the strictest counts.
            throttled = max((rates[group] for group in chains[pid] if group in rates), default=None)
            ranks[pid] = RankSample(rss=tree.rss, throttled=throttled, neighbours=neighbours.get(pid, ()))
            before_tree = self._before.get(pid)
            if before_tree is None or before_tree.start != tree.start or elapsed <= 0:
                continue
            # What a child used goes to its parent once that has waited for it: so the sum over the tree grows
            # on, and falls only if a child went unseen.
            waited = [value / 1e9 / elapsed for value in _list_growth(tree.delays, before_tree.delays)]
            ranks[pid] = replace(
                ranks[pid],
                cpu=max(0, tree.ticks - before_tree.ticks) / TICKS / elapsed,
                run_delay=sum(waited) if waited else None,
                thread_delay=max(waited) if waited else None,
                major_faults=max(0, tree.faults - before_tree.faults) / elapsed,
            )
            if _is_resting(tree, before_tree, ranks[pid], elapsed):
                resting.add(pid)
        self._before = trees
        node = NodeSample(
            nic_rates=tuple((name, rates[name]) for name in devices if name in rates),
            memory_pressure=self._read_pressure("memory"),
            cpu_pressure=self._read_pressure("cpu"),
            io_pressure=self._read_pressure("io"),
        )
        return Sample(ranks, node, resting)

    def _read_pressure(self, resource: str) -> float | None:
        """Return the share of the last 10 s that some task waited for a resource; None without PSI.

        Source: the kernel's Documentation/accounting/psi.rst.
        """
        text = read_kernel_text(f"{self._root}/proc/pressure/{resource}")
        found = re.match(r"some avg10=(\d+\.?\d*) ", text)
        return float(found[1]) / 100 if found else None


def _read_tree(pid: int) -> _Tree | None:
    """Add up the counters of a process and all below it; None if it is gone.

    A child's pages of files and of shared memory are left out: libraries, and batches that the rank has
    mapped too, would count once for each of its DataLoader workers. Pages that a fork still shares count in
    each process.
    """
    tree, waiting = None, [pid]
    while waiting and (tree is None or len(tree.pids) < _LARGEST_TREE):
        one = waiting.pop()
        try:
            fields = read_stat(one)[1]
        except (OSError, ValueError):  # it has ended, or is hidden
            continue
        tree = tree or _Tree(int(fields[START]))
        tree.pids.add(one)
        tree.ticks += sum(map(int, fields[_PROCESS_TIMES]))
        tree.faults += sum(map(int, fields[_FAULTS]))
        moved = read_io(one)
        tree.bytes_moved = None if moved is None or tree.bytes_moved is None else tree.bytes_moved + moved
        if len(pages := read_kernel_text(f"/proc/{one}/statm").split()) > 2:
            tree.rss += _PAGE * (int(pages[1]) if one == pid else max(0, int(pages[1]) - int(pages[2])))
        for thread in list_threads(one)[:_MOST_THREADS]:
            if len(delay := read_kernel_text(f"/proc/{one}/task/{thread}/schedstat").split()) > 1:
                tree.delays[thread] = int(delay[1])
            waiting += [child for child in read_children(one, thread) if child not in tree.pids]
    return tree


def _is_resting(tree: _Tree, before: _Tree, sample: RankSample, elapsed: float) -> bool:
    """Tell whether a tree did nothing between two readings, and was seen whole."""
    if (sample.cpu or 0.0) >= ACTIVE_CPU or (sample.thread_delay or 0.0) >= _STARVING:
        return False
    if tree.pids != before.pids or tree.bytes_moved is None or before.bytes_moved is None:
        return False
    if tree.connections is None or before.connections is None:
        return False
    sent = _list_growth(tree.connections, before.connections)
    return max(tree.bytes_moved - before.bytes_moved, *sent, 0) / elapsed < _ACTIVE_BYTES


def _list_growth(now: Mapping[int, int], before: Mapping[int, int]) -> list[int]:
    """Return how much counters have grown; one that is new, or less than before, has begun at 0."""
    return [value - old if value >= (old := before.get(key, 0)) else value for key, value in now.items()]


# Neighbours: whose processes, other than a rank's own, run on the cores that it may use

_TIMES, _PROCESSOR = slice(11, 13), 36
"""Of the fields that `read_stat` gives: utime and stime, processor (proc(5))."""
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
        start = time.thread_time()
        seconds, self.time = now - self.time, now
        before, self.ticks = self.ticks, {}
        busy = []
        for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:  # noqa: PTH208 - names alone
            with suppress(OSError, ValueError):
                name, fields = read_stat(pid)
                key = pid, fields[START]
                self.ticks[key] = sum(map(int, fields[_TIMES]))
                share = (self.ticks[key] - before.get(key, self.ticks[key])) / TICKS / seconds
                if share >= _LEAST_SHARE:
                    busy.append((share, pid, name, int(fields[_PROCESSOR])))
        self.found = {}
        for rank, own in trees.items():
            with suppress(OSError):
                cpus = os.sched_getaffinity(rank)
                others = [Neighbour(n, pid, s) for s, pid, n, cpu in busy if pid not in own and cpu in cpus]
                self.found[rank] = tuple(sorted(others, key=lambda one: -one.share)[:_MOST_NEIGHBOURS])
        self.next_time = now + _COST * (time.thread_time() - start)
        return self.found


# The node: CPU quotas and network

_WORD = 4
"""Bytes: the unit of port_rcv_data and port_xmit_data (InfiniBand specification, PortCountersExtended)."""


def _read_throttled(folder: str) -> float | None:
    """Return the seconds that a quota has held back a cgroup in all; None if it has no such count.

    Version 1 has nanoseconds as `throttled_time`, version 2 microseconds as `throttled_usec`. The kernel adds
    up the run queues of all CPUs (Documentation/scheduler/sched-bwc.rst).
    """
    found = re.search(r"^throttled_(time|usec) (\d+)$", read_kernel_text(f"{folder}/cpu.stat"), re.MULTILINE)
    return int(found[2]) / (1e9 if found[1] == "time" else 1e6) if found else None


def _count_bytes(top: Path) -> dict[str, int]:
    """Return the bytes that each network device has received and sent.

    They are RDMA devices (InfiniBand and RoCE, which interfaces do not count; EFA has names of its own) and
    physical interfaces, or all but the loopback if none is physical, as in a container. One whose counters
    cannot be read is left out.
    """
    files: dict[str, tuple[Iterable[Path], int]] = {}
    for device in sorted(top.glob("infiniband/*")):
        words = [*device.glob("ports/*/counters/port_*_data")]
        files[device.name] = (words, _WORD) if words else (device.glob("ports/*/hw_counters/[rt]x_bytes"), 1)
    interfaces = [device for device in sorted(top.glob("net/*")) if device.name != "lo"]
    for device in [one for one in interfaces if (one / "device").exists()] or interfaces:
        files[device.name] = device.glob("statistics/[rt]x_bytes"), 1
    found = {}
    for name, (paths, unit) in files.items():
        with suppress(ValueError):
            found[name] = unit * sum(int(read_kernel_text(str(path))) for path in paths)
    return found
