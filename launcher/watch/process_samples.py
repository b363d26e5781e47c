"""What the kernel says of the ranks and their node between two samples: CPU, run delay, memory, faults.

A sample must not cost what it looks for. So a rank's tree is found by the kernel's lists of children and not
by a search through /proc, and its memory is its resident set: the proportional one (smaps_rollup) walks
all page tables and holds the lock that the rank's page faults need.
"""

import os
import struct
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from launcher.files import read_stat
from launcher.watch.kernel_state import read_io
from launcher.watch.neighbours import NeighbourFinder
from launcher.watch.node_samples import (
    CgroupReader,
    FindCgroups,
    NodeReader,
    NodeSample,
    list_numbers,
    read_kernel_text,
)
from launcher.watch.socket_bytes import list_connections, list_socket_inodes
from launcher.watch.watch_model import Neighbour

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
START, PROCESS_TIMES, FAULTS = 19, slice(11, 15), slice(9, 11)
"""Fields that `read_stat` gives: starttime; utime, stime, cutime, cstime; majflt, cmajflt (proc(5))."""
LARGEST_TREE = 256
"""Processes of a rank that are looked at, at most."""
MOST_THREADS = 256
"""Threads of a process whose run delay is read, at most: a program can have thousands."""
ACTIVE_CPU = 0.05
"""Cores from which on a rank's tree is active: what waits uses less than 0.02."""
STARVING = 0.25
"""Seconds per second that a thread waits for a core; on a busy machine, one that only polls has 0.05."""
ACTIVE_BYTES = 1024.0
"""The same in bytes a second: torch's store is asked for less by NCCL's monitor."""
THOROUGH = 6
"""Of so many samples one asks all threads; the others those that ran, or that had children."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """A rank and its children between two samples; None for what is not known (yet)."""

    cpu: float | None = None
    """Cores used."""
    run_delay: float | None = None
    """Seconds per second that threads were ready to run and waited for a core, summed over threads."""
    thread_delay: float | None = None
    """The same of the one thread that waited most."""
    rss: int | None = None
    """Bytes: the rank's resident memory, and its children's without what files and shared memory have."""
    major_faults: float | None = None
    """Per second."""
    throttled: float | None = None
    """Seconds per second, summed over CPUs, that a quota held back the rank's cgroup or one above it."""
    neighbours: tuple[Neighbour, ...] = ()
    """Processes outside of its tree that ran on its cores, the busiest first."""
    is_active: bool = True
    """Any of its processes did something, or that cannot be told."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All ranks of a node, by PID, and the node."""

    ranks: Mapping[int, RankSample]
    node: NodeSample


@dataclass(slots=True)
class TreeCounters:
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

    def __init__(self, find_cgroups: FindCgroups | None = None, root: str = "") -> None:
        """`find_cgroups` gives a process's cgroups; `root` is what /sys and /proc/pressure are below."""
        self.node = NodeReader(root)
        self.cgroups = CgroupReader(find_cgroups, root)
        self.neighbours = NeighbourFinder()
        self.before: dict[int, TreeCounters] = {}
        self.parents: set[int] = set()
        """Threads (TIDs) that had children."""
        self.resting: dict[int, int] = {}
        """Run delays of threads that did not run between the last two samples."""
        self.time = 0.0
        self.number = 0

    def sample(self, pids: Collection[int], still: Collection[int] = ()) -> Sample:
        """Sample the ranks with these PIDs; of one that is gone there is an empty sample. Raises nothing.

        Of `still`, those that make no progress, TCP connections are looked at, too: without that, a rank
        counts as active.
        """
        now = time.monotonic()
        elapsed, self.time = now - self.time, now
        if self.number % THOROUGH == 0:
            self.parents, self.resting = set(), {}
        trees = {pid: tree for pid in pids if (tree := self.read_tree(pid))}
        for pid in trees.keys() & still:
            trees[pid].connections = read_connections(trees[pid].pids)
        self.number += 1
        self.cgroups.update(trees, elapsed)
        found = self.neighbours.find({pid: tree.pids for pid, tree in trees.items()})
        ranks = {
            pid: build_sample(
                tree, self.before.get(pid), elapsed, self.cgroups.throttled(pid), found.get(pid, ())
            )
            for pid, tree in trees.items()
        }
        self.resting = list_unchanged(trees.values(), self.before.values())
        self.before = trees
        node = self.node.sample(self.cgroups.common_folders(), elapsed, self.cgroups.common_throttled())
        return Sample({pid: ranks.get(pid, RankSample()) for pid in pids}, node)

    def read_tree(self, pid: int) -> TreeCounters | None:
        """Add up the counters of a process and all below it; None if it is gone."""
        tree, waiting = None, [pid]
        while waiting and (tree is None or len(tree.pids) < LARGEST_TREE):
            one = waiting.pop()
            try:
                fields = read_stat(one)[1]
                tree = tree or TreeCounters(int(fields[START]))
                add_process(tree, one, fields, is_rank=one == pid)
                waiting += [child for child in self.add_threads(tree, one) if child not in tree.pids]
            except (OSError, ValueError):  # it has ended, or is hidden
                continue
        return tree

    def add_threads(self, tree: TreeCounters, pid: int) -> list[int]:
        """Add the run delay of a process's threads, and return its children."""
        children: list[int] = []
        is_thorough = self.number % THOROUGH == 0
        for thread in list_numbers(f"/proc/{pid}/task")[:MOST_THREADS]:
            here = f"/proc/{pid}/task/{thread}/"
            if (resting := self.resting.get(thread)) is not None:
                tree.delays[thread] = resting
            elif len(delay := (read_kernel_text(f"{here}schedstat") or "").split()) > 1:
                tree.delays[thread] = int(delay[1])
            if is_thorough or thread == pid or thread in self.parents:
                text = read_kernel_text(f"{here}children")
                children += map(int, text.split()) if text is not None else ask_psutil(pid, thread)
                if text and is_thorough:
                    self.parents.add(thread)
        return children


def add_process(tree: TreeCounters, pid: int, fields: list[str], *, is_rank: bool) -> None:
    """Add a process's own counters and memory.

    A child's pages of files and of shared memory are left out: libraries, and batches that the rank has
    mapped too, would count once for each of its DataLoader workers. Pages that a fork still shares count in
    each process.
    """
    tree.pids.add(pid)
    moved = read_io(pid)
    tree.bytes_moved = None if moved is None or tree.bytes_moved is None else tree.bytes_moved + moved
    tree.ticks += sum(map(int, fields[PROCESS_TIMES]))
    tree.faults += sum(map(int, fields[FAULTS]))
    pages = (read_kernel_text(f"/proc/{pid}/statm") or "").split()
    if len(pages) > 2:
        tree.rss += PAGE * (int(pages[1]) if is_rank else max(0, int(pages[1]) - int(pages[2])))


def read_connections(pids: Iterable[int]) -> Mapping[int, int] | None:
    """Return the bytes that TCP connections of processes have moved, by inode; None if that is not shown."""
    try:
        inodes = {inode for pid in pids for inode in list_socket_inodes(pid)}
        return {inode: moved for inode, moved in list_connections() if inode in inodes} if inodes else {}
    except (OSError, struct.error):
        return None


def ask_psutil(pid: int, thread: int) -> list[int]:
    """Return a process's children on kernels without lists of them (CONFIG_PROC_CHILDREN)."""
    if thread != pid:
        return []
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def build_sample(
    tree: TreeCounters,
    before: TreeCounters | None,
    elapsed: float,
    throttled: float | None,
    neighbours: tuple[Neighbour, ...],
) -> RankSample:
    """Return what has been between two readings of the same tree.

    What a child used goes to its parent once that has waited for it: so the sum over the tree grows on, and
    falls only if a child went unseen.
    """
    if before is None or before.start != tree.start or elapsed <= 0:
        return RankSample(rss=tree.rss, throttled=throttled, neighbours=neighbours)
    grown = list_growth(tree.delays, before.delays)
    cpu, run_delay = max(0, tree.ticks - before.ticks) / TICKS / elapsed, sum(grown) / 1e9 / elapsed
    moved = None
    if None not in (tree.bytes_moved, before.bytes_moved, tree.connections, before.connections):
        sent = list_growth(tree.connections or {}, before.connections or {})
        moved = max((tree.bytes_moved or 0) - (before.bytes_moved or 0), *sent, 0) / elapsed
    starves = max(grown, default=0) / 1e9 / elapsed >= STARVING
    is_active = cpu >= ACTIVE_CPU or starves or moved is None or moved >= ACTIVE_BYTES
    return RankSample(
        cpu=cpu,
        run_delay=run_delay if tree.delays else None,
        thread_delay=max(grown) / 1e9 / elapsed if tree.delays else None,
        rss=tree.rss,
        major_faults=max(0, tree.faults - before.faults) / elapsed,
        throttled=throttled,
        neighbours=neighbours,
        is_active=is_active or tree.pids != before.pids,
    )


def list_growth(now: Mapping[int, int], before: Mapping[int, int]) -> list[int]:
    """Return how much counters have grown; one that is new, or less than before, has begun at 0."""
    return [value - old if value >= (old := before.get(key, 0)) else value for key, value in now.items()]


def list_unchanged(now: Iterable[TreeCounters], before: Iterable[TreeCounters]) -> dict[int, int]:
    """Return the run delays that have not changed: those of threads that have not waited for a core since."""
    old = {thread: delay for tree in before for thread, delay in tree.delays.items()}
    return {
        thread: delay for tree in now for thread, delay in tree.delays.items() if old.get(thread) == delay
    }
