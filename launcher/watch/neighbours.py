"""Processes that run on a rank's cores and are not its own."""

import os
import time
from collections.abc import Collection, Iterable, Mapping

from launcher.files import read_stat
from launcher.watch.node_samples import list_numbers
from launcher.watch.watch_model import Neighbour

TICKS = os.sysconf("SC_CLK_TCK")
TIMES, THREADS, START, PROCESSOR = slice(11, 13), 17, 19, 36
"""Of the fields that `read_stat` gives: utime and stime, num_threads, starttime, processor (proc(5))."""
LEAST_SHARE = 0.05
"""Cores: what uses less does not hold a rank up by much."""
MOST = 3
"""Neighbours that are told of for each rank."""
MOST_BUSY = 32
"""Busy processes whose threads are looked at, at most."""
COST = 1000
"""The next search comes no sooner than so many times what the last one took: 0.1% of a core at most."""
Busy = tuple[int, str, dict[int, float]]
"""A process's PID, its name, and the cores that it used, by the CPU that they were."""


class NeighbourFinder:
    """Searches all processes that are to be seen, as often as that is cheap."""

    def __init__(self) -> None:
        self.before: dict[tuple[int, int], int] = {}
        """CPU ticks by process or thread (TID) and its start, at the last search."""
        self.time = 0.0
        self.next_time = 0.0
        self.found: dict[int, tuple[Neighbour, ...]] = {}

    def find(self, trees: Mapping[int, Collection[int]]) -> Mapping[int, tuple[Neighbour, ...]]:
        """Return the neighbours of each rank, by its PID; `trees` has the PIDs of its own processes.

        The cores are those that the rank may use (its affinity). Between searches it is the last result.
        """
        if (now := time.monotonic()) < self.next_time:
            return self.found
        start = time.thread_time()
        elapsed, self.time = now - self.time, now
        busy = self.list_busy(elapsed)
        self.found = {pid: choose_neighbours(busy, pid, own) for pid, own in trees.items()}
        self.next_time = now + COST * (time.thread_time() - start)
        return self.found

    def list_busy(self, elapsed: float) -> list[Busy]:
        """Return the processes that have used a share of a core since the last search, and where."""
        counters: dict[tuple[int, int], int] = {}
        grown: list[tuple[int, int, str, list[str]]] = []
        for pid in list_numbers("/proc"):
            try:
                name, fields = read_stat(pid)
                growth = self.count(counters, pid, fields)
            except (OSError, ValueError):
                continue
            if growth is not None and growth >= LEAST_SHARE * elapsed * TICKS:
                grown.append((growth, pid, name, fields))
        grown.sort(key=lambda item: -item[0])
        seconds = elapsed * TICKS
        busy = [
            (pid, name, self.place(counters, pid, fields, growth / seconds))
            for growth, pid, name, fields in grown[:MOST_BUSY]
        ]
        self.before = counters
        return busy

    def count(self, counters: dict[tuple[int, int], int], key: int, fields: list[str]) -> int | None:
        """Note a process's or thread's CPU ticks; return their growth, or None if it was not there before."""
        name = key, int(fields[START])
        counters[name] = sum(map(int, fields[TIMES]))
        before = self.before.get(name)
        return None if before is None else counters[name] - before

    def place(
        self, counters: dict[tuple[int, int], int], pid: int, fields: list[str], cores: float
    ) -> dict[int, float]:
        """Share out the cores that a process used over the CPUs on which its threads ran last.

        Threads have their part by what each used since the last search, or in all if that is not known.
        """
        if fields[THREADS] == "1":
            return {int(fields[PROCESSOR]): cores}
        parts: dict[int, float] = {}
        for thread in list_numbers(f"/proc/{pid}/task"):
            try:
                fields = read_stat(f"{pid}/task/{thread}")[1]
                growth = self.count(counters, -thread, fields)
            except (OSError, ValueError):
                continue
            used = counters[-thread, int(fields[START])] if growth is None else growth
            parts[int(fields[PROCESSOR])] = parts.get(int(fields[PROCESSOR]), 0) + used
        total = sum(parts.values())
        return {cpu: cores * part / total for cpu, part in parts.items()} if total else {}


def choose_neighbours(busy: Iterable[Busy], pid: int, own: Collection[int]) -> tuple[Neighbour, ...]:
    """Return the busiest processes on the cores of a rank, which are not its own."""
    try:
        cpus = os.sched_getaffinity(pid)
    except OSError:
        return ()
    shares = (
        Neighbour(name, other, sum(cores for cpu, cores in places.items() if cpu in cpus))
        for other, name, places in busy
        if other not in own
    )
    found = [neighbour for neighbour in shares if neighbour.share >= LEAST_SHARE]
    return tuple(sorted(found, key=lambda neighbour: -neighbour.share)[:MOST])
