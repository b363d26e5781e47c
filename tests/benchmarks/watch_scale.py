"""What 1,000 watched nodes cost the filesystem, the node that judges, and who looks on."""

import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from launcher.watch.job_view import describe_job_state, list_job_progress, make_job_view
from launcher.watch.metrics_log import choose_sample_interval, compact
from launcher.watch.node_reports import FOLDER, read_reports, write_report
from launcher.watch.run_reader import RunReader
from launcher.watch.shared_files import SharedView
from launcher.watch.watch_model import GpuSample, Neighbour, NodeReport, RankState

NODES, RANKS, INTERVAL = 1000, 8, 5.0
NICS = tuple((f"mlx5_{number}", 24.123e9 + number) for number in range(8))


def make_report(node: int, number: int) -> NodeReport:
    """A node's report in the middle of a job, with all that GPUs and the kernel tell."""
    now = time.time()
    ranks = tuple(make_rank(node * RANKS + local, local, number) for local in range(RANKS))
    return NodeReport(
        f"node{node:04}", node, NODES, 0, now, number, INTERVAL, ranks, limit=20.0, nic_rates=NICS,
        memory_pressure=0.0, cpu_pressure=0.0123, io_pressure=0.004, throttled=0.0,
    )  # fmt: skip


def make_rank(rank: int, local: int, number: int) -> RankState:
    """One rank of it."""
    gpu = GpuSample(
        local, 0.98, 0.71234, 71_234_567_168, 85_899_345_920, 655.251, 700.0, 61.0, 1755, 1980,
        ("sw_power_cap",), 16, 16, 0, (),
    )  # fmt: skip
    return RankState(
        rank, local, 400_000 + rank, 0, "training", 12_345 + number, 0.31234567, 0.41234567, 0.52345678,
        0.0123456789, 0.12345678, 1.87654321, 0.00123456, rss=12_345_678_901, major_faults=0.4, throttled=0.0,
        neighbours=(Neighbour("kworker", 77, 0.06),), gpu=gpu, idle=0.31234567,
    )  # fmt: skip


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def repeat(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Medians of wall and CPU seconds of some calls."""
    walls, cpus = zip(*(measure(work) for _ in range(rounds)), strict=True)
    return median(walls), median(cpus)


def bench_watch_scale(folder: Path, rounds: int) -> None:
    """Write what 1,000 nodes of 8 ranks write, and read it as the judge and as `launch watch` do."""
    reports = [make_report(node, 1) for node in range(NODES)]
    wall, cpu = measure(lambda: [write_report(folder, report) for report in reports])
    sizes = [path.stat().st_size for path in (folder / FOLDER).glob("node-*.json")]
    print(f"{NODES} nodes of {RANKS} ranks, a report each {INTERVAL:g} s")
    print(f"a node's report: {sum(sizes) / NODES / 1024:.1f} KiB, written in {wall:.2f} ms, CPU {cpu:.2f} ms")
    rate = NODES / INTERVAL
    print(f"the filesystem: {rate:.0f} files/s, {rate * sum(sizes) / NODES / 2**20:.2f} MiB/s, {NODES} files")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = repeat(lambda: read_reports(folder, own=True), rounds)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"the judge reads all: {wall * 1e3:.0f} ms, CPU {cpu * 1e3:.0f} ms, memory {grown >> 10} MiB")
    print(f"which is {cpu / INTERVAL:.1%} of a core")
    bench_judge(folder, rounds)
    bench_viewer(folder, reports, rounds)
    line = len(json.dumps(compact(reports[0]), separators=(",", ":"))) + 1
    count = sum(1 for _ in list_sample_times(86400.0))
    print(f"metrics: {line} bytes a sample, {count * line / 2**20:.1f} MiB a node in the first day")


def bench_judge(folder: Path, rounds: int) -> None:
    """What the judge does with the reports at each look, once a second."""
    own, now = make_report(0, 2), time.monotonic()
    reports = read_reports(folder)
    shared = SharedView(now, min(stored.written for stored in reports), reports=reports)

    def look() -> None:
        view = make_job_view(own, shared, now)
        describe_job_state(own, view, (), restarts=0, asks=0, notes=())
        list_job_progress(view)

    wall, _ = repeat(look, rounds)
    print(f"the judge's look: {wall * 1e3:.1f} ms, once a second")


def bench_viewer(folder: Path, reports: list[NodeReport], rounds: int) -> None:
    """What `launch watch` does once a second, when a fifth of the nodes has written since."""
    reader = RunReader(folder)
    wall, cpu = measure(reader.read)
    print(f"the viewer's first look: {wall * 1e3:.0f} ms, CPU {cpu * 1e3:.0f} ms")
    wall, cpu = repeat(reader.read, rounds)
    print(f"with nothing new: {wall * 1e3:.0f} ms, CPU {cpu * 1e3:.0f} ms")

    def look_again(number: int) -> tuple[float, float]:
        for report in reports[:: int(INTERVAL)]:
            write_report(folder, replace(report, number=number))
        return measure(reader.read)

    walls, cpus = zip(*(look_again(number) for number in range(2, 2 + rounds)), strict=True)
    print(f"with {NODES / INTERVAL:.0f} new: {median(walls) * 1e3:.0f} ms, CPU {median(cpus) * 1e3:.0f} ms")


def list_sample_times(end: float) -> list[float]:
    """When samples are taken until then, in seconds since the start."""
    times, now = [], 0.0
    while now < end:
        times.append(now)
        now += choose_sample_interval(now, 30.0)
    return times
