"""The ranks of this node: heartbeats that their hooks write, samples, GPUs, and what is reported of them."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.files import read_file, read_stat
from launcher.inprocess.launch_inprocess import heartbeat as hook
from launcher.watch.hang import find_quantile
from launcher.watch.model import PHASES, GpuSample, Heartbeat, Rank, RankEntry, RankSample, list_fields
from launcher.watch.procfs import START, Sample
from launcher.watch.run_files import read_planned

_START_STACK = 28 - 3
"""Index of this field of proc(5)'s stat in `read_stat`."""


def read_heartbeat(path: str | os.PathLike[str]) -> Heartbeat | None:
    """Return what a rank's hook has written last; None if there is nothing, or nobody who writes it.

    That is so for a file that is not there or is none of ours, another user's, and one of a process that has
    ended or become another program. Times are converted to seconds since the epoch by the clocks of now.
    """
    structure = hook.load_structure()
    try:
        beat = structure.from_buffer_copy(read_file(path, memoryview(structure()).nbytes, own=True))
        state, *_ = fields = read_stat(beat.pid)[1]
    except (OSError, ValueError):  # ValueError: it is cut off
        return None
    # The kernel shows where a process's stack is, which an exec changes, to those alone who may trace it.
    stack = int(fields[_START_STACK])
    is_same = int(fields[START]) == beat.start_time and (not stack or beat.start_stack in (0, stack))
    if (beat.magic, beat.layout) != (hook.MAGIC, hook.LAYOUT) or state in "ZX" or not is_same:
        return None
    # The rings' oldest places may have what was written meanwhile.
    places = [number % hook.RING for number in range(max(0, beat.recorded - (hook.RING - 1)), beat.recorded)]
    steps = sorted((beat.ends[at], beat.durations[at]) for at in places)
    shift = time.time() - time.monotonic()
    return Heartbeat(
        rank=beat.rank,
        local_rank=beat.local_rank,
        pid=beat.pid,
        phase=PHASES[beat.phase],
        phase_since=beat.phase_since + shift,
        step=beat.step,
        step_time=beat.step_time and beat.step_time + shift,
        activity_time=max(beat.activity_time, beat.phase_since, beat.step_time) + shift,
        batches=beat.batches,
        data_wait=beat.data_wait,
        durations=tuple(duration for _, duration in steps),
        step_ends=tuple(end + shift for end, _ in steps),
        can_dump=beat.dump_signal > 0,
        notes=tuple(beat.notes.decode(errors="replace").splitlines()),
    )


# The ranks of this node


_MOST_START = 600.0
"""Seconds for which a rank that has made no step yet counts as making progress by its activity alone."""


@dataclass(slots=True)
class WatchedRank:
    """A rank's process and its last heartbeat."""

    entry: RankEntry
    beat: Heartbeat | None = None
    """None if no hook of it writes one."""
    last: Heartbeat | None = None
    """The last one that there was."""
    read_at: float = 0.0
    """When it was read, on the clock of its times."""
    waited: tuple[float, float] = (0.0, 0.0)
    """Seconds of waiting for data at the last sample, and when that was."""
    data_share: float | None = None
    active_at: float = 0.0
    """Monotonic time at which its process tree was last seen to do anything."""


@dataclass(slots=True)
class RankBook:
    """Keeps what is known of this node's ranks."""

    folder: Path
    """Of their heartbeats."""
    read: Callable[[Path], Heartbeat | None] = read_heartbeat
    ranks: dict[int, WatchedRank] = field(default_factory=dict)
    """By rank, of the last start; never changed in place, since other threads go through it."""
    counts_from: float = 0.0
    """Before this monotonic time nobody could make progress: this process, too, was stopped."""
    now: float = 0.0
    """Monotonic time of the last look."""

    def take(self, entries: Iterable[RankEntry]) -> None:
        """Add ranks that have started, and note that ranks have ended; a later start replaces one before."""
        ranks = dict(self.ranks)
        for entry in entries:
            known = ranks.get(entry.rank)
            if known and entry.has_ended and known.entry.pid == entry.pid:
                known.entry = entry
            elif not entry.has_ended and (known is None or entry.attempt >= known.entry.attempt):
                ranks[entry.rank] = WatchedRank(entry)
        newest = max((known.entry.attempt for known in ranks.values()), default=0)
        self.ranks = {rank: known for rank, known in ranks.items() if known.entry.attempt == newest}

    def look(self, now: float) -> None:
        """Read the heartbeats; `now` is monotonic."""
        self.now = now
        for known in self.ranks.values():
            if not known.entry.has_ended:
                beat = self.read(self.folder / f"rank-{known.entry.rank}.beat")
                # A file of the rank's last start has that one's PID.
                known.beat = beat if beat and beat.pid == known.entry.pid else None
                known.last = known.beat or known.last
                known.read_at = time.time()

    def list_still(self, seconds: float) -> Sequence[int]:
        """Return the PIDs of ranks without a step so far, or without progress for more than some seconds."""
        return [
            known.entry.pid
            for known in self.ranks.values()
            if (beat := known.beat) and (not beat.step or known.read_at - beat.activity_time > seconds)
        ]

    def take_sample(self, sample: Sample, gpus: Mapping[int, GpuSample], *, counts: bool) -> None:
        """Note which ranks are active, if that counts, and for which share of the time they waited for data.

        Before its first step, activity counts as a rank's progress: imports and the reading of data make none
        that the heartbeat has. `sample` is of the time since the last call; `gpus` are by local rank.
        """
        for known in self.ranks.values():
            gpu = gpus.get(known.entry.local_rank)
            if counts and (known.entry.pid not in sample.resting or (gpu and gpu.utilization != 0.0)):
                known.active_at = self.now
            if beat := known.beat:
                before, since = known.waited
                if since and known.read_at > since:
                    share = (beat.data_wait - before) / (known.read_at - since)
                    known.data_share = min(1.0, max(0.0, share))
                known.waited = beat.data_wait, known.read_at

    def list_beats(self) -> Mapping[int, Heartbeat]:
        """Return the heartbeats by rank."""
        return {rank: known.beat for rank, known in self.ranks.items() if known.beat}

    def list_ranks(
        self, sample: Sample, gpus: Mapping[int, GpuSample], wait_shares: Mapping[int, float]
    ) -> tuple[Rank, ...]:
        """Return the ranks' part of a report; `gpus` are by local rank, `wait_shares` by rank."""
        found = []
        for rank, known in sorted(self.ranks.items()):
            entry, beat, idle = known.entry, known.last if known.entry.has_ended else known.beat, None
            if known.beat and not entry.has_ended:
                idle = min(known.read_at - known.beat.activity_time, self.now - self.counts_from)
                if not known.beat.step and idle < _MOST_START:
                    idle = min(idle, self.now - known.active_at)
                idle = max(0.0, idle)
            own = sample.ranks.get(entry.pid, RankSample())
            phase = known.beat.phase if known.beat else "unwatched"
            found.append(
                Rank(
                    rank=rank,
                    local_rank=entry.local_rank,
                    pid=entry.pid,
                    attempt=entry.attempt,
                    phase="exited" if entry.has_ended else phase,
                    step=beat.step if beat else 0,
                    step_age=max(0.0, time.time() - beat.step_time) if beat and beat.step_time else None,
                    p50=find_quantile(beat.durations, 0.5) if beat else None,
                    p99=find_quantile(beat.durations, 0.99) if beat else None,
                    data_share=known.data_share,
                    wait_share=wait_shares.get(rank),
                    exit_code=entry.exit_code,
                    gpu=gpus.get(entry.local_rank),
                    notes=beat.notes if beat else (),
                    idle=idle,
                    quiet=max(0.0, min(self.now - known.active_at, idle or 0.0)),
                    **list_fields(own),
                )
            )
        return tuple(found)


# GPUs

_FRESH = 4
"""Intervals after which a reading is too old to be given out."""


def read_planned_gpus(run_path: Path, host: str) -> dict[int, tuple[int, str, str]]:
    """Return index, UUID and PCI address of each local rank's GPU; none if the plan cannot be read."""
    plans = read_planned(run_path, host, own=True)
    return {one.local_rank: (one.gpu.index, one.gpu.uuid, one.gpu.pci) for one in plans if one.gpu}


class GpuReader:
    """Reads the ranks' GPUs in a thread: a driver in trouble can keep a caller for minutes."""

    def __init__(
        self, open_gpus: Callable[[], Callable[[], Mapping[int, GpuSample]] | None], interval: float
    ) -> None:
        """`open_gpus` is called in the thread; it returns None if there is nothing to be read."""
        self.open_gpus = open_gpus
        self.interval = interval
        self.last: Mapping[int, GpuSample] = {}
        self.time = 0.0
        self.thread = threading.Thread(target=self._run, name="gpus", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Read again and again, until nothing is to be read."""
        read = self.open_gpus()
        while read is not None and (found := read()):
            self.last, self.time = found, time.monotonic()
            time.sleep(self.interval)

    def latest(self) -> Mapping[int, GpuSample]:
        """Return the last reading by local rank; nothing if it is too old, as with a driver that is stuck."""
        return self.last if time.monotonic() - self.time < _FRESH * self.interval else {}
