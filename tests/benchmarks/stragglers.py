"""Slow ranks in real programs: are rank and cause right, and how soon?

`make bench ARGS="stragglers runs=6 kinds=data,quota"`.
"""

import os
import subprocess
import sys
import time
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.benchmarks.jobs import HERE, Job, make_command, print_head, print_row, read_state, start_job

PROGRAM = HERE / "slow_rank_program.py"
RANKS, ONSET, STEPS = 2, 60, 100
"""Step from which on a rank is slow, and steps within which it is to be found."""
REALLY = 0.06
"""Excess by the ranks' own clocks from which on a rank in a healthy run was slower, whatever the reason."""
CGROUP = Path("/sys/fs/cgroup/cpu")
COMPUTE = "--compute=600000"
"""About 20 ms of a core."""
KINDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "healthy sleeping": ((), ""),
    "healthy computing": ((COMPUTE,), ""),
    "sleep in forward": (("--extra=0.012",), "program"),
    "data": (("--data=0.012",), "data"),
    "neighbour": ((COMPUTE,), "run_delay"),
    "quota": ((COMPUTE,), "cpu_quota"),
}
"""Words of the program, in whose steps of 0.1 s one rank is about 10% slower, and the right cause."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a run showed."""

    longer: float
    """The slow rank's own part of a step after ONSET in that before."""
    told: tuple[int, str] | None = None
    """Rank and cause."""
    after: int = 0
    """Steps from ONSET until it was told."""


def run_kind(folder: Path, kind: str, slow: int) -> Found:
    """Run a program under `launch` until a rank is told of, or long enough."""
    options = (f"--folder={folder}", f"--slow={slow}", *KINDS[kind][0])
    words = [str(PROGRAM), *options]
    with ExitStack() as stack:
        job = stack.enter_context(start_job(folder, make_command(["launch", "name=slow"], words, RANKS)))
        job.await_true(lambda: count_steps(folder) >= ONSET, 300)
        (folder / "slow").touch()
        slow_down(job, kind, slow, stack)
        onset, begun = count_steps(folder), time.time()
        told: list[dict[str, object]] = []
        while not told and count_steps(folder) < onset + STEPS + 60:
            time.sleep(0.5)
            told = read_state(folder).get("stragglers", [])
            if job.process.poll() is not None:
                raise RuntimeError("".join(line for _, line in job.lines[-20:]))
        own = array("d", (folder / f"own-{slow}").read_bytes())
        longer = median(own[onset + 1 :]) / median(own[10:onset]) - 1
        if not told:
            return Found(longer)
        # The state is written each few seconds, and says when a rank was told of.
        passed = (float(str(told[0]["time"])) - begun) / (time.time() - begun)
        after = round(passed * (count_steps(folder) - onset))
        return Found(longer, (int(str(told[0]["rank"])), str(told[0]["cause"])), after)


def count_steps(folder: Path) -> int:
    """Steps that rank 0 has made: the program writes a double in each."""
    path = folder / "own-0"
    return path.stat().st_size // 8 if path.exists() else 0


def slow_down(job: Job, kind: str, slow: int, stack: ExitStack) -> None:
    """Take CPU time from a rank, if the program does not sleep itself; raises OSError without cgroups."""
    pid = job.find_rank(slow)
    if kind == "neighbour":
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(loop.wait)
        stack.callback(loop.kill)
        os.sched_setaffinity(loop.pid, os.sched_getaffinity(pid))
    elif kind == "quota":
        before = read_cpu(pid)
        time.sleep(2)
        used = (read_cpu(pid) - before) / 2
        group = CGROUP / f"straggler-{os.getpid()}"
        group.mkdir()
        stack.callback(group.rmdir)
        stack.callback(job.process.wait)
        stack.callback(job.process.terminate)
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(20000 * 0.85 * used))))
        (group / "cgroup.procs").write_text(str(pid))


def read_cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bench_stragglers(folder: Path, options: Mapping[str, str]) -> None:
    """Run each kind in turn."""
    results: dict[str, list[Found]] = {kind: [] for kind in options.get("kinds", ",".join(KINDS)).split(",")}
    runs = int(options.get("runs", "6"))
    for number in range(runs):
        for kind, several in results.items():
            place = folder / f"{number}-{kind.replace(' ', '-')}"
            several.append(run_kind(place, kind, number % RANKS))
    more = ("own part longer by", "told in 100 steps", "right rank", "right cause", "steps to the word")
    print_head("Real programs", "", "runs", *more)
    for kind, several in results.items():
        first = [(number % RANKS, run) for number, run in enumerate(several) if run.told]
        right = [run for slow, run in first if run.told and run.told[0] == slow]
        causes = sum(run.told is not None and run.told[1] == KINDS[kind][1] for run in right)
        steps = f"{median(run.after for _, run in first):.0f}" if first else ""
        told: tuple[object, object] = len(right), causes
        if not KINDS[kind][1]:
            told = f"{sum(run.longer >= REALLY for _, run in first)} really slower", ""
        longer, soon = median(run.longer for run in several), sum(run.after <= STEPS for _, run in first)
        print_row(kind, len(several), f"{longer:+.1%}", soon, *told, steps)
