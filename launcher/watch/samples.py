"""What the kernel says of ranks and their node between two samples: CPU, run delay, memory, faults, network.

A sample must not cost what it looks for. So a rank's tree is found by the kernel's lists of children and not
by a search through /proc, and its memory is its resident set: the proportional one (smaps_rollup) walks
all page tables and holds the lock that the rank's page faults need.
"""

import os
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.files import read_stat
from launcher.watch.model import Neighbour, NodeSample, RankSample
from launcher.watch.procfs import (
    START,
    TICKS,
    list_connections,
    list_numbers,
    list_socket_inodes,
    read_children,
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
_THOROUGH = 6
"""Of so many samples one asks all threads; the others those that ran, or that had children."""


# Ranks


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

    def __init__(self, find_cgroups: "FindCgroups | None" = None, root: str = "") -> None:
        """`find_cgroups` gives a process's cgroups; `root` is what /sys and /proc/pressure are below."""
        self._node = NodeReader(find_cgroups, root)
        self._neighbours = _NeighbourFinder()
        self._before: dict[int, _Tree] = {}
        self._parents: set[int] = set()
        """Threads (TIDs) that had children."""
        self._delays: dict[int, int] = {}
        self._resting: dict[int, int] = {}
        """Run delays of threads, and of those that did not run between the last two samples."""
        self._time = 0.0
        self._number = 0

    def sample(self, pids: Collection[int], still: Collection[int] = ()) -> Sample:
        """Sample the ranks with these PIDs; of one that is gone there is an empty sample. Raises nothing.

        Of `still`, those that make no progress, TCP connections are looked at, too: without that, a rank
        counts as active.
        """
        now = time.monotonic()
        elapsed, self._time = now - self._time, now
        if self._number % _THOROUGH == 0:
            self._parents, self._resting = set(), {}
        trees = {pid: tree for pid in pids if (tree := self._read_tree(pid))}
        for pid in trees.keys() & still:
            trees[pid].connections = _read_connections(trees[pid].pids)
        self._number += 1
        node, throttled = self._node.sample(trees, elapsed)
        neighbours = self._neighbours.find({pid: tree.pids for pid, tree in trees.items()})
        ranks, resting = dict.fromkeys(pids, RankSample()), set()
        for pid, tree in trees.items():
            ranks[pid] = RankSample(
                rss=tree.rss, throttled=throttled.get(pid), neighbours=neighbours.get(pid, ())
            )
            before = self._before.get(pid)
            if before is None or before.start != tree.start or elapsed <= 0:
                continue
            # What a child used goes to its parent once that has waited for it: so the sum over the tree grows
            # on, and falls only if a child went unseen.
            waited = [value / 1e9 / elapsed for value in list_growth(tree.delays, before.delays)]
            ranks[pid] = replace(
                ranks[pid],
                cpu=max(0, tree.ticks - before.ticks) / TICKS / elapsed,
                run_delay=sum(waited) if waited else None,
                thread_delay=max(waited) if waited else None,
                major_faults=max(0, tree.faults - before.faults) / elapsed,
            )
            if _is_resting(tree, before, ranks[pid], elapsed):
                resting.add(pid)
        delays = {thread: delay for tree in trees.values() for thread, delay in tree.delays.items()}
        self._resting = dict(delays.items() & self._delays.items())
        self._before, self._delays = trees, delays
        return Sample(ranks, node, resting)

    def _read_tree(self, pid: int) -> _Tree | None:
        """Add up the counters of a process and all below it; None if it is gone."""
        tree, waiting = None, [pid]
        while waiting and (tree is None or len(tree.pids) < _LARGEST_TREE):
            one = waiting.pop()
            try:
                fields = read_stat(one)[1]
                tree = tree or _Tree(int(fields[START]))
                _add_process(tree, one, fields, is_rank=one == pid)
                waiting += [child for child in self._add_threads(tree, one) if child not in tree.pids]
            except (OSError, ValueError):  # it has ended, or is hidden
                continue
        return tree

    def _add_threads(self, tree: _Tree, pid: int) -> list[int]:
        """Add the run delay of a process's threads, and return its children."""
        children: list[int] = []
        is_thorough = self._number % _THOROUGH == 0
        for thread in list_numbers(f"/proc/{pid}/task")[:_MOST_THREADS]:
            if (resting := self._resting.get(thread)) is not None:
                tree.delays[thread] = resting
            else:
                delay = (read_kernel_text(f"/proc/{pid}/task/{thread}/schedstat") or "").split()
                if len(delay) > 1:
                    tree.delays[thread] = int(delay[1])
            if is_thorough or thread == pid or thread in self._parents:
                found = read_children(pid, thread)
                children += found
                if found and is_thorough:
                    self._parents.add(thread)
        return children


def _add_process(tree: _Tree, pid: int, fields: list[str], *, is_rank: bool) -> None:
    """Add a process's own counters and memory.

    A child's pages of files and of shared memory are left out: libraries, and batches that the rank has
    mapped too, would count once for each of its DataLoader workers. Pages that a fork still shares count in
    each process.
    """
    tree.pids.add(pid)
    moved = read_io(pid)
    tree.bytes_moved = None if moved is None or tree.bytes_moved is None else tree.bytes_moved + moved
    tree.ticks += sum(map(int, fields[_PROCESS_TIMES]))
    tree.faults += sum(map(int, fields[_FAULTS]))
    pages = (read_kernel_text(f"/proc/{pid}/statm") or "").split()
    if len(pages) > 2:
        tree.rss += _PAGE * (int(pages[1]) if is_rank else max(0, int(pages[1]) - int(pages[2])))


def _read_connections(pids: Iterable[int]) -> Mapping[int, int] | None:
    """Return the bytes that TCP connections of processes have moved, by inode; None if that is not shown."""
    try:
        return list_connections({inode for pid in pids for inode in list_socket_inodes(pid)})
    except (OSError, struct.error):
        return None


def _is_resting(tree: _Tree, before: _Tree, sample: RankSample, elapsed: float) -> bool:
    """Tell whether a tree did nothing between two readings, and was seen whole."""
    if (
        (sample.cpu or 0.0) >= ACTIVE_CPU
        or (sample.thread_delay or 0.0) >= _STARVING
        or tree.pids != before.pids
    ):
        return False
    if tree.bytes_moved is None or before.bytes_moved is None:
        return False
    if tree.connections is None or before.connections is None:
        return False
    sent = list_growth(tree.connections, before.connections)
    return max(tree.bytes_moved - before.bytes_moved, *sent, 0) / elapsed < _ACTIVE_BYTES


def list_growth(now: Mapping[int, int], before: Mapping[int, int]) -> list[int]:
    """Return how much counters have grown; one that is new, or less than before, has begun at 0."""
    return [value - old if value >= (old := before.get(key, 0)) else value for key, value in now.items()]


# Neighbours: whose processes, other than a rank's own, run on the cores that it may use

_TIMES, _PROCESSOR = slice(11, 13), 36
"""Of the fields that `read_stat` gives: utime and stime, processor (proc(5))."""
_LEAST_SHARE = 0.05
"""Cores: what uses less does not hold a rank up by much."""
_MOST_NEIGHBOURS = 3
"""That are told of for each rank."""
_MOST_BUSY = 32
"""Busy processes whose threads are looked at, at most."""
_COST = 1000
"""The next search comes no sooner than so many times what the last one took: 0.1% of a core at most."""


class _NeighbourFinder:
    """Searches all processes that are to be seen, as often as that is cheap."""

    def __init__(self) -> None:
        self.ticks: dict[tuple[int, int], int] = {}
        """CPU ticks by process, or thread (minus its TID), and its start, at the last search."""
        self.time = 0.0
        self.next_time = 0.0
        self.found: dict[int, tuple[Neighbour, ...]] = {}

    def find(self, trees: Mapping[int, Collection[int]]) -> Mapping[int, tuple[Neighbour, ...]]:
        """Return the neighbours of each rank, by its PID; `trees` has the PIDs of its own processes.

        The cores are those that the rank may use (its affinity). Between searches it is the last result. The
        cores that a process used are shared out over the CPUs on which its threads ran last, by what each
        used since the last search, or in all if that is not known.
        """
        if (now := time.monotonic()) < self.next_time:
            return self.found
        start = time.thread_time()
        seconds, self.time = (now - self.time) * TICKS, now
        before, self.ticks = self.ticks, {}

        def count(key: int, fields: list[str]) -> int:
            name = key, int(fields[START])
            ticks = self.ticks[name] = sum(map(int, fields[_TIMES]))
            return ticks - before.get(name, ticks if key > 0 else 0)

        grown: list[tuple[int, int, str]] = []
        for pid in list_numbers("/proc"):
            with suppress(OSError, ValueError):
                name, fields = read_stat(pid)
                grown.append((count(pid, fields), pid, name))
        busy = []
        for growth, pid, name in sorted(grown, reverse=True)[:_MOST_BUSY]:
            if growth < _LEAST_SHARE * seconds:
                break
            parts: Counter[int] = Counter()
            for thread in list_numbers(f"/proc/{pid}/task"):
                with suppress(OSError, ValueError):
                    fields = read_stat(f"{pid}/task/{thread}")[1]
                    parts[int(fields[_PROCESSOR])] += count(-thread, fields)
            whole = seconds * max(1, parts.total())
            busy.append((pid, name, {cpu: growth * part / whole for cpu, part in parts.items()}))
        self.found = {}
        for rank, own in trees.items():
            with suppress(OSError):
                cpus = os.sched_getaffinity(rank)
                shares = (
                    Neighbour(name, pid, sum(cores for cpu, cores in places.items() if cpu in cpus))
                    for pid, name, places in busy
                    if pid not in own
                )
                known = sorted(
                    (one for one in shares if one.share >= _LEAST_SHARE), key=lambda one: -one.share
                )
                self.found[rank] = tuple(known[:_MOST_NEIGHBOURS])
        self.next_time = now + _COST * (time.thread_time() - start)
        return self.found


# The node: CPU quotas, network, pressure

Groups = tuple[int, Sequence[str]]
"""A hierarchy's version (1 or 2), and a process's cgroup in it with those above it, innermost first: paths of
directories below the root without a leading slash."""
FindCgroups = Callable[[int], Mapping[str, Groups]]
"""Gives the cgroups of a process (PID) by controller."""
_LIST_AGAIN = 12
"""Samples after which network devices are listed again."""
_WORD = 4
"""Bytes: the unit of port_rcv_data and port_xmit_data (InfiniBand specification, PortCountersExtended)."""


class NodeReader:
    """Reads counters of the node and of the ranks' cgroups; each call says what has been since the last."""

    def __init__(self, find_cgroups: FindCgroups | None, root: str) -> None:
        self._find_cgroups = find_cgroups
        self._root = root
        self._number = 0
        self._devices: Mapping[str, list[tuple[Path, int]]] = {}
        """Files that count bytes, and their unit, by device."""
        self._before: Mapping[str, float] = {}
        """Counts by device and by cgroup."""

    def sample(self, pids: Iterable[int], elapsed: float) -> tuple[NodeSample, Mapping[int, float | None]]:
        """Sample the node, and by how much CPU quotas held back these ranks.

        `elapsed` are the seconds since the last call. Of a rank, and of all of them together, it is what the
        strictest quota did that holds for them.
        """
        find = self._find_cgroups
        chains = {pid: find(pid).get("cpu", (2, ())) for pid in pids} if find else {}
        throttled = {
            folder: _read_throttled(f"{self._root}/{folder}", version)
            for folder, version in {
                one: version for version, chain in chains.values() for one in chain
            }.items()
        }
        if self._number % _LIST_AGAIN == 0:
            self._devices = _list_devices(Path(self._root or "/", "sys/class"))
        self._number += 1
        moved = {name: _add_up(files) for name, files in self._devices.items()}
        counts = {key: count for key, count in {**throttled, **moved}.items() if count is not None}
        rates = {
            key: max(0.0, count - self._before[key]) / elapsed
            for key, count in counts.items()
            if key in self._before and elapsed > 0
        }
        self._before = counts

        def find_strictest(folders: Iterable[str]) -> float | None:
            return max((rates[folder] for folder in folders if folder in rates), default=None)

        version, first = next(iter(chains.values()), (2, ()))
        common = [folder for folder in first if all(folder in chain for _, chain in chains.values())]
        psi = {
            resource: self._read_pressure(common if version == 2 else (), resource)
            for resource in ("memory", "cpu", "io")
        }
        node = NodeSample(
            nic_rates=tuple((name, rates[name]) for name in self._devices if name in rates),
            memory_pressure=psi["memory"],
            cpu_pressure=psi["cpu"],
            io_pressure=psi["io"],
            throttled=find_strictest(common),
        )
        return node, {pid: find_strictest(folders) for pid, (_, folders) in chains.items()}

    def _read_pressure(self, folders: Sequence[str], resource: str) -> float | None:
        """Return the share of the last 10 s that some task waited for a resource.

        It is that of the innermost cgroup that tells, else the node's; None if the kernel has no PSI. Source:
        the kernel's Documentation/accounting/psi.rst.
        """
        for place in (*(f"{folder}/{resource}.pressure" for folder in folders), f"proc/pressure/{resource}"):
            text = read_kernel_text(f"{self._root}/{place}") or ""
            if found := re.match(r"some avg10=(\d+\.?\d*) ", text):
                return float(found[1]) / 100
        return None


def _read_throttled(folder: str, version: int) -> float | None:
    """Return the seconds that a quota has held back a cgroup in all; None if it has no such count.

    Version 1 has nanoseconds as `throttled_time`, version 2 microseconds as `throttled_usec`. The kernel adds
    up the run queues of all CPUs (Documentation/scheduler/sched-bwc.rst).
    """
    name, unit = ("throttled_time", 1e9) if version == 1 else ("throttled_usec", 1e6)
    found = re.search(rf"^{name} (\d+)$", read_kernel_text(f"{folder}/cpu.stat") or "", re.MULTILINE)
    return int(found[1]) / unit if found else None


def _list_devices(top: Path) -> dict[str, list[tuple[Path, int]]]:
    """Return the files that count the bytes of each network device, and their unit.

    They are RDMA devices (InfiniBand and RoCE, which interfaces do not count; EFA has names of its own) and
    physical interfaces, or all but the loopback if none is physical, as in a container.
    """
    found = {}
    for device in sorted(top.glob("infiniband/*")):
        words = [(file, _WORD) for file in device.glob("ports/*/counters/port_*_data")]
        found[device.name] = words or [(file, 1) for file in device.glob("ports/*/hw_counters/[rt]x_bytes")]
    interfaces = [device for device in sorted(top.glob("net/*")) if device.name != "lo"]
    for device in [one for one in interfaces if (one / "device").exists()] or interfaces:
        found[device.name] = [(file, 1) for file in device.glob("statistics/[rt]x_bytes")]
    return found


def _add_up(files: Iterable[tuple[Path, int]]) -> int | None:
    """Return the sum of counters in their units; None if one cannot be read."""
    total = 0
    for path, unit in files:
        text = (read_kernel_text(str(path)) or "").strip()
        if not (text.isascii() and text.isdecimal()):
            return None
        total += int(text) * unit
    return total
