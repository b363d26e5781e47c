"""Preflight's measured work on this machine: healthy nodes, a core with a busy process, and the seconds.

`python -m tests.benchmarks preflight runs=100 hogs=10 deep=3`: a run is the node's own program, judged as in
a job of one node. What it says of a healthy node is printed in full: on a machine that others use, a process
of theirs that stays on one CPU is found like any other.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.node_facts import NodeFinding, PreflightReport
from launcher.doctor.slow_devices import WORK
from launcher.preflight.preflight_report import make_report
from launcher.preflight.preflight_request import PreflightRequest, parse_answer
from tests.conftest import clean_environ

SECONDS = {"light": 10.0, "deep": 60.0}
HOG = "while True: pass"
QUIET = 0.3
"""Share of the CPUs' time that others use, up to which a machine is called quiet."""
WAIT = 20.0
"""Seconds to wait for that."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A run of the node's program."""

    report: PreflightReport
    seconds: float
    load: float
    """Share of the CPUs' time that others used just before."""

    @property
    def slow(self) -> list[NodeFinding]:
        """Warnings and errors about the measured work."""
        found = (one for one in self.report.findings if one.finding.subject == WORK)
        return [one for one in found if one.finding.level in ("warning", "error")]

    @property
    def values(self) -> Mapping[str, float]:
        """Measured values by their names."""
        work = self.report.nodes[0].work if self.report.nodes else ()
        return {f"{one.measure} {one.where}": one.value for one in work if one.value is not None}


def bench_preflight(_: Path, options: Mapping[str, str]) -> None:
    """Run them all, and print what was found."""
    healthy = [check_node("light") for _ in progress(int(options.get("runs", "100")))]
    if healthy:
        print_healthy(healthy)
    cpus = sorted(os.sched_getaffinity(0))
    hogs = int(options.get("hogs", "10"))
    found = [check_with_hog(cpus[number % len(cpus)]) for number in progress(hogs)]
    print_hogs(found)
    deep = [check_node("deep") for _ in range(int(options.get("deep", "1")))]
    for kind, runs in (("light", healthy), ("deep", deep)):
        if runs:
            times = [one.seconds for one in runs]
            print(f"{kind}: {min(times):.1f} to {max(times):.1f} s, median {statistics.median(times):.1f} s")


def progress(count: int) -> Iterator[int]:
    """Give numbers, and print a dot for each tenth."""
    for number in range(count):
        if number % 10 == 9:
            print(".", end="", flush=True)
        yield number
    print()


def check_node(kind: str) -> Checked:
    """Run the node's program once, and judge it."""
    load = measure_cpu_use(0.3)
    request = PreflightRequest(kind, ("this",), SECONDS[kind], time.time())
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.preflight", request.to_json()],
        env={**clean_environ(), "SLURMD_NODENAME": "this"},
        capture_output=True,
        text=True,
        check=True,
        timeout=2 * SECONDS[kind],
    )
    seconds = time.monotonic() - begin
    answers = [answer for line in done.stdout.splitlines() if (answer := parse_answer(line))]
    facts = {answer.facts.host: answer.facts for answer in answers if answer.is_final}
    return Checked(make_report(request, facts, (), {}, gpus=None, seconds=seconds), seconds, load)


def check_with_hog(cpu: int) -> tuple[int, Checked]:
    """Run it while a process is busy on one CPU; wait before that until others are quiet."""
    end = time.monotonic() + WAIT
    while measure_cpu_use(0.5) > QUIET and time.monotonic() < end:
        pass
    with keep_busy(cpu):
        return cpu, check_node("light")


@contextmanager
def keep_busy(cpu: int) -> Iterator[None]:
    """Have a process use a CPU all the time."""
    begin = lambda: os.sched_setaffinity(0, {cpu})  # noqa: E731
    process = subprocess.Popen([sys.executable, "-c", HOG], preexec_fn=begin)  # noqa: PLW1509
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure_cpu_use(seconds: float) -> float:
    """The share of all CPUs' time that is used."""
    before = read_times()
    time.sleep(seconds)
    after = read_times()
    passed = sum(after) - sum(before)
    idle = after[3] + after[4] - before[3] - before[4]
    return 1 - idle / max(1, passed)


def read_times() -> Sequence[int]:
    """The first line of /proc/stat."""
    with Path("/proc/stat").open() as file:
        return [int(word) for word in file.readline().split()[1:9]]


def print_healthy(runs: Sequence[Checked]) -> None:
    """Print what healthy runs found, and how their values vary."""
    loads = [one.load for one in runs]
    quiet = [one for one in runs if one.load <= QUIET]
    print(f"{len(runs)} healthy runs, others used {min(loads):.0%} to {max(loads):.0%} of the CPUs before")
    for name, group in (("all", runs), (f"of them at {QUIET:.0%} at most", quiet)):
        told = [one for one in group if one.slow]
        print(f"- {name}: {len(group)} runs, {len(told)} with a finding about measured work")
    for one in runs:
        for finding in one.slow:
            print(f"  {finding.finding.level}, load {one.load:.0%}: {finding.finding.what}")
            print(f"    {json.dumps({key: round(value, 4) for key, value in one.values.items()})}")
    for name in runs[0].values:
        values = [one.values[name] for one in quiet if name in one.values]
        if values:
            print(f"- {name}: {min(values):.3g} to {max(values):.3g}, median {statistics.median(values):.3g}")


def print_hogs(runs: Sequence[tuple[int, Checked]]) -> None:
    """Print in how many runs the busy CPU, and no other, was found."""
    found = [names_cpu(cpu, one) for cpu, one in runs]
    print(f"a busy process on a CPU: found {sum(found)} of {len(found)}")
    for (cpu, one), is_found in zip(runs, found, strict=True):
        told = "; ".join(each.finding.what for each in one.slow) or "nothing"
        print(f"  {'found' if is_found else 'MISSED'} on CPU {cpu}, load {one.load:.0%}: {told}")


def names_cpu(cpu: int, checked: Checked) -> bool:
    """Whether this CPU's matrix product is the one that was found slow."""
    return [one.finding.what.partition(":")[0] for one in checked.slow if "matrix" in one.finding.what] == [
        f"CPU {cpu}"
    ]
