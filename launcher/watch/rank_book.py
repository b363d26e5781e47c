"""The ranks of this node as the watcher knows them: who runs, their heartbeats, what is reported."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.watch.process_samples import ACTIVE_CPU, RankSample
from launcher.watch.progress_limit import RankProgress, find_quantile, find_slow_step
from launcher.watch.watch_model import GpuSample, Heartbeat, RankState
from launcher.watch.watcher_settings import RankEntry

NO_SAMPLE = RankSample()
MOST_START = 600.0
"""Seconds for which a rank that has made no step yet counts as making progress by its activity alone."""


@dataclass(slots=True)
class WatchedProcess:
    """A rank's process and its last heartbeat."""

    entry: RankEntry
    beat: Heartbeat | None = None
    """None if no hook of it writes one."""
    last: Heartbeat | None = None
    """The last one that there was."""
    read_at: float = 0.0
    """When it was read, on the clock of its times."""
    has_ended: bool = False
    waited: tuple[float, float] = (0.0, 0.0)
    """Seconds of waiting for data at the last report, and when that was."""
    data_share: float | None = None
    active_at: float = 0.0
    """Monotonic time at which its process tree was last seen to do anything."""

    @property
    def phase(self) -> str:
        """As in RankState."""
        if self.has_ended:
            return "exited"
        return self.beat.phase if self.beat else "unwatched"


@dataclass(slots=True)
class RankBook:
    """Keeps what is known of this node's ranks."""

    folder: Path
    read: Callable[[Path], Heartbeat | None]
    ranks: dict[int, WatchedProcess] = field(default_factory=dict)
    """By rank, of torchrun's last start; never changed in place, since other threads go through it."""
    counts_from: float = 0.0
    """Before this monotonic time nobody could make progress: this process, too, was stopped."""
    wait_shares: Mapping[int, float] = field(default_factory=dict)
    """Share of the time that ranks wait for others, by rank, as far as it is known."""
    now: float = 0.0
    """Monotonic time of the last look."""
    sampled_at: float = 0.0
    """Monotonic time of the last samples."""

    def add_ranks(self, entries: Iterable[RankEntry]) -> None:
        """Add ranks that have started; a later start of a rank replaces the one before."""
        ranks = dict(self.ranks)
        for entry in entries:
            known = ranks.get(entry.rank)
            if known is None or entry.attempt >= known.entry.attempt:
                ranks[entry.rank] = WatchedProcess(entry)
        newest = max((known.entry.attempt for known in ranks.values()), default=0)
        self.ranks = {rank: known for rank, known in ranks.items() if known.entry.attempt == newest}

    def note_ends(self, entries: Iterable[RankEntry]) -> None:
        """Note that ranks have ended."""
        for entry in entries:
            known = self.ranks.get(entry.rank)
            if known and known.entry.pid == entry.pid:
                known.entry, known.has_ended = replace(known.entry, exit_code=entry.exit_code), True

    def look(self, now: float) -> None:
        """Read the heartbeats; `now` is monotonic."""
        self.now = now
        for known in self.ranks.values():
            if known.has_ended:
                continue
            beat = self.read(self.folder / f"rank-{known.entry.rank}.beat")
            # A file of the rank's last start has that one's PID.
            known.beat = beat if beat and beat.pid == known.entry.pid else None
            known.last = known.beat or known.last
            known.read_at = time.time()

    def forgive(self, now: float) -> None:
        """Leave out the time so far: nobody could run in it, or this process was not there to see."""
        self.counts_from = now

    def measure_idle(self, known: WatchedProcess) -> float | None:
        """Return the seconds since a rank's last activity; None if it is not watched."""
        if known.beat is None or known.has_ended:
            return None
        idle = min(known.read_at - known.beat.activity_time, self.now - self.counts_from)
        if not known.beat.step and idle < MOST_START:
            idle = min(idle, self.now - known.active_at)
        return max(0.0, idle)

    def measure_quiet(self, known: WatchedProcess) -> float:
        """Return the seconds since a rank's last activity, or progress."""
        return max(0.0, min(self.now - known.active_at, self.measure_idle(known) or 0.0))

    def list_still(self, seconds: float) -> Sequence[int]:
        """Return the PIDs of ranks without a step so far, or without progress for more than some seconds."""
        return [
            known.entry.pid
            for known in self.ranks.values()
            if (beat := known.beat) and (not beat.step or known.read_at - beat.activity_time > seconds)
        ]

    def note_activity(self, samples: Mapping[int, RankSample], gpus: Mapping[int, GpuSample]) -> None:
        """Note which ranks are active; before its first step, that counts as a rank's progress.

        Imports and the reading of data make no progress that the heartbeat has. `samples` are by PID, and
        of the time since the last call: a rank that used the CPU for part of it is taken to have done so
        first. `gpus` are by local rank.
        """
        elapsed, self.sampled_at = self.now - self.sampled_at if self.sampled_at else 0.0, self.now
        for known in self.ranks.values():
            sample, gpu = samples.get(known.entry.pid, NO_SAMPLE), gpus.get(known.entry.local_rank)
            used = (sample.cpu or 0.0) + (sample.run_delay or 0.0)
            if sample.is_active or (gpu and gpu.utilization != 0.0):
                rest = 1 - min(used, 1.0) if used >= ACTIVE_CPU else 0.0
                known.active_at = self.now - elapsed * rest

    def list_progress(self) -> tuple[RankProgress, ...]:
        """Return what counts of each rank."""
        return tuple(
            RankProgress(
                known.entry.rank, known.phase, known.beat.step if known.beat else 0, self.measure_idle(known)
            )
            for known in self.ranks.values()
        )

    def list_beats(self) -> Mapping[int, Heartbeat]:
        """Return the heartbeats by rank."""
        return {rank: known.beat for rank, known in self.ranks.items() if known.beat}

    def list_pids(self) -> Sequence[int]:
        """Return the PIDs of the ranks that run."""
        return [known.entry.pid for known in self.ranks.values() if not known.has_ended]

    def find_slow_step(self) -> float:
        """Return the seconds of the slow steps of the last 256, over all ranks."""
        return max((find_slow_step(beat.durations) for beat in self.list_beats().values()), default=0.0)

    def measure_data_shares(self) -> None:
        """Find the share of the time since the last call that each rank waited for data."""
        for known in self.ranks.values():
            if known.beat is None:
                continue
            before, since = known.waited
            elapsed = known.read_at - since
            if since and elapsed > 0:
                known.data_share = min(1.0, max(0.0, known.beat.data_wait - before) / elapsed)
            known.waited = known.beat.data_wait, known.read_at

    def list_states(
        self, samples: Mapping[int, RankSample], gpus: Mapping[int, GpuSample]
    ) -> tuple[RankState, ...]:
        """Return the ranks' part of a report; `samples` are by PID, and `gpus` by local rank."""
        ranks = sorted(self.ranks.values(), key=lambda known: known.entry.rank)
        return tuple(
            self.make_state(known, samples.get(known.entry.pid, NO_SAMPLE), gpus.get(known.entry.local_rank))
            for known in ranks
        )

    def make_state(self, known: WatchedProcess, sample: RankSample, gpu: GpuSample | None) -> RankState:
        """Return one rank's."""
        entry, beat = known.entry, known.last if known.has_ended else known.beat
        durations = beat.durations if beat else ()
        return RankState(
            rank=entry.rank,
            local_rank=entry.local_rank,
            pid=entry.pid,
            attempt=entry.attempt,
            phase=known.phase,
            step=beat.step if beat else 0,
            step_age=max(0.0, time.time() - beat.step_time) if beat and beat.step_time else None,
            p50=find_quantile(durations, 0.5),
            p99=find_quantile(durations, 0.99),
            data_share=known.data_share,
            wait_share=self.wait_shares.get(entry.rank),
            cpu=sample.cpu,
            run_delay=sample.run_delay,
            thread_delay=sample.thread_delay,
            rss=sample.rss,
            major_faults=sample.major_faults,
            throttled=sample.throttled,
            neighbours=sample.neighbours,
            exit_code=entry.exit_code,
            gpu=gpu,
            notes=beat.notes if beat else (),
            idle=self.measure_idle(known),
            quiet=self.measure_quiet(known),
        )
