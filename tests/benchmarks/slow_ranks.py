"""Real programs with a slow rank, and without: is it found, is it the right one, and the right cause?"""

import os
import subprocess
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from launcher.probe.cgroups import list_cgroups
from launcher.probe.sysfs import Tree
from launcher.watch.collective_times import CollectiveReader
from launcher.watch.process_samples import Sampler
from launcher.watch.stragglers import StragglerFinder
from launcher.watch.watch_model import Heartbeat, NodeReport, RankState, Straggler
from tests.benchmarks.slow_rank_simulation import bench_simulated_stragglers
from tests.inprocess.watched import list_heartbeats, make_watched_environ

PROGRAM = Path(__file__).with_name("slow_rank_program.py")
RANKS = 2
ONSET = 60
"""Step from which on a rank is slow."""
STEPS = 100
"""Steps within which it is to be found, and that a healthy run has more than ONSET."""
SLEEP = 0.1
MORE = 0.012
"""Seconds more in a step: about 10% with what else it takes."""
REALLY = 0.06
"""Excess by the ranks' own clocks from which on a rank in a healthy run was slower, whatever the reason."""
LOOP = "while True: pass"
CGROUP = Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of slowness."""

    arguments: tuple[str, ...]
    cause: str = ""
    """The right one; empty for healthy runs."""


COMPUTE = "--compute=600000"
"""About 20 ms of a core."""
KINDS: Mapping[str, Kind] = {
    "healthy, sleeping": Kind(()),
    "healthy, computing": Kind((COMPUTE,)),
    "sleep in forward": Kind((f"--extra={MORE}",), "program"),
    "data": Kind((f"--data={MORE}",), "data"),
    "neighbour": Kind((COMPUTE,), "run_delay"),
    "quota": Kind((COMPUTE,), "cpu_quota"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a run showed."""

    slow: int
    stragglers: tuple[Straggler, ...]
    told_after: int | None
    """Steps from ONSET until the first one was told."""
    longer: float
    """Median step after ONSET in the one before."""
    truth: float | None = None
    """By how much the own part of the first straggler's steps really was longer than the other rank's."""


class Job:
    """A program's ranks, watched as the node's watcher does it."""

    def __init__(self, folder: Path, kind: str, slow: int, stack: ExitStack) -> None:
        self.folder, self.slow, self.kind, self.stack = folder, slow, kind, stack
        self.beats_folder = folder / "beats"
        self.beats_folder.mkdir(mode=0o700)
        arguments = ("--folder", str(folder), f"--slow={slow}", f"--sleep={SLEEP}", *KINDS[kind].arguments)
        self.ranks = [self.start(rank, arguments) for rank in range(RANKS)]
        self.reader = CollectiveReader(self.beats_folder, RANKS)
        self.finder = StragglerFinder()
        self.sampler = Sampler(lambda pid: list_cgroups(Tree(), ("cpu",), pid))
        self.number = 0
        self.states: tuple[RankState, ...] = ()
        self.waited: tuple[float, dict[int, float]] = (0.0, {})

    def start(self, rank: int, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a rank on its core."""
        cores = sorted(os.sched_getaffinity(0))
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env=make_watched_environ(self.beats_folder, **variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
        return process

    def slow_down(self) -> None:
        """Have the slow rank take longer from now on."""
        (self.folder / "slow").touch()
        pid = self.ranks[self.slow].pid
        if self.kind == "neighbour":
            loop = subprocess.Popen([sys.executable, "-c", LOOP])
            self.stack.callback(loop.wait)
            self.stack.callback(loop.kill)
            os.sched_setaffinity(loop.pid, os.sched_getaffinity(pid))
        elif self.kind == "quota":
            self.set_quota(pid)

    def set_quota(self, pid: int) -> None:
        """Give a rank a cgroup with less CPU time than it has used; raises OSError without cgroups."""
        before = read_cpu(pid)
        time.sleep(2)
        used = (read_cpu(pid) - before) / 2
        group = CGROUP / f"straggler-{os.getpid()}"
        group.mkdir()
        self.stack.callback(group.rmdir)
        self.stack.callback(self.ranks[self.slow].wait)
        self.stack.callback(self.ranks[self.slow].kill)
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(20000 * 0.85 * used))))
        (group / "cgroup.procs").write_text(str(pid))

    def look(self) -> tuple[int, tuple[Straggler, ...]]:
        """Look as the watcher does, once a second; return the step, and new stragglers."""
        beats = list_heartbeats(self.beats_folder)
        times = self.reader.read(beats, time.time())
        if self.number % 5 == 0:
            samples = self.sampler.sample([beat.pid for beat in beats])
            shares = self.measure_data_shares(beats)
            self.states = tuple(
                RankState(
                    beat.rank,
                    beat.local_rank,
                    beat.pid,
                    0,
                    beat.phase,
                    beat.step,
                    0.0,
                    data_share=shares.get(beat.rank),
                    cpu=samples.ranks[beat.pid].cpu,
                    run_delay=samples.ranks[beat.pid].run_delay,
                    thread_delay=samples.ranks[beat.pid].thread_delay,
                    major_faults=samples.ranks[beat.pid].major_faults,
                    throttled=samples.ranks[beat.pid].throttled,
                    neighbours=samples.ranks[beat.pid].neighbours,
                )
                for beat in beats
            )
        self.number += 1
        count = 1 + (self.number - 1) // 5
        report = NodeReport("here", 0, 1, 0, time.time(), count, 5.0, self.states, collectives=times)
        return max((beat.step for beat in beats), default=0), self.finder.update([report])

    def measure_data_shares(self, beats: Sequence[Heartbeat]) -> dict[int, float]:
        """Return the share of the time since the last call that each rank waited for data."""
        now, before = time.monotonic(), self.waited
        self.waited = now, {beat.rank: beat.data_wait for beat in beats}
        return {
            beat.rank: (beat.data_wait - before[1][beat.rank]) / (now - before[0])
            for beat in beats
            if beat.rank in before[1]
        }


def read_cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_job(folder: Path, kind: str, slow: int) -> Found:
    """Run a program until its slow rank is told of, or long enough; return what was found."""
    with ExitStack() as stack:
        job = Job(folder, kind, slow, stack)
        found: list[Straggler] = []
        told_after, step, is_slow, onset = None, 0, False, ONSET
        while step < onset + STEPS + 60 and not (found and KINDS[kind].cause):
            time.sleep(1)
            step, new = job.look()
            if any(rank.poll() is not None for rank in job.ranks):
                raise RuntimeError("a rank has ended")
            if step >= ONSET and not is_slow:
                job.slow_down()
                is_slow = True
                onset = list_heartbeats(job.beats_folder)[0].step
            found += new
            if new and told_after is None:
                told_after = step - onset
        beat = list_heartbeats(job.beats_folder)[0]
        first = beat.step - len(beat.durations)
        before, after = beat.durations[10 : onset - first], beat.durations[onset - first + 1 :]
        longer = median(after) / median(before) - 1
        return Found(slow, tuple(found), told_after, longer, measure_truth(folder, found))


def measure_truth(folder: Path, found: Sequence[Straggler]) -> float | None:
    """Return by how much the first straggler's own part of its steps was longer, as the ranks timed it."""
    if not found:
        return None
    own = {rank: array("d", (folder / f"own-{rank}").read_bytes()) for rank in range(RANKS)}
    part = slice(found[0].first_step - 1, found[0].last_step)
    (other,) = set(range(RANKS)) - {found[0].rank}
    return median(own[found[0].rank][part]) / median(own[other][part]) - 1


def bench_stragglers(folder: Path, options: Mapping[str, str]) -> None:
    """Simulated runs (`simulated=400`), then real ones (`runs=20` of each kind)."""
    if simulated := int(options.get("simulated", "400")):
        bench_simulated_stragglers(simulated)
    if runs := int(options.get("runs", "20")):
        bench_slow_ranks(folder, runs)


def bench_slow_ranks(folder: Path, runs: int) -> None:
    """Run all kinds in turn, and print a row for each."""
    results: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    for number in range(runs):
        for kind in KINDS:
            place = folder / f"{number}-{kind.replace(' ', '-')}"
            place.mkdir()
            found = run_job(place, kind, number % RANKS)
            results[kind].append(found)
            truth = "" if found.truth is None else f"really {found.truth:+.1%}"
            print(number, kind, f"{found.longer:+.1%}", found.told_after, truth, found.stragglers, flush=True)
    print(
        "| | runs | steps longer by | found within 100 steps | right rank | right cause | steps to the word |"
    )
    print("|---" * 7 + "|")
    for kind, several in results.items():
        print(f"| {kind} | {describe_runs(several, KINDS[kind].cause)} |")


def describe_runs(runs: Sequence[Found], cause: str) -> str:
    """Return a row of the table."""
    first = [(run, run.stragglers[0]) for run in runs if run.stragglers]
    within = [run for run, _ in first if run.told_after is not None and run.told_after <= STEPS]
    right = [run for run, straggler in first if straggler.rank == run.slow]
    causes = [run for run, straggler in first if straggler.rank == run.slow and straggler.cause == cause]
    steps = median(run.told_after or 0 for run, _ in first) if first else 0
    longer = median(run.longer for run in runs)
    if not cause:
        really = sum(run.truth is not None and run.truth >= REALLY for run, _ in first)
        return f"{len(runs)} | {longer:+.1%} | {len(first)} reported, {really} really slower | | | "
    cells = (len(runs), f"{longer:+.1%}", len(within), len(right), len(causes), f"{steps:.0f}")
    return " | ".join(map(str, cells))
