"""What watching costs with 1,000 nodes: the filesystem, the judge and the viewer."""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.watch.hang import list_stalled, make_job_view
from launcher.watch.model import GpuSample, Neighbour, NodeReport, Rank
from launcher.watch.run_files import FOLDER, Found, ReportCache, write_value
from launcher.watch.run_reader import RunReader
from tests.benchmarks.measure import print_head, print_row

NODES, RANKS, INTERVAL = 1000, 8, 5.0


def make_report(node: int, number: int) -> NodeReport:
    """A node's report in the middle of a job, with all that GPUs and the kernel tell."""
    now = time.time()
    ranks = tuple(make_rank(node * RANKS + local, local, number) for local in range(RANKS))
    return NodeReport(
        f"node{node:04}", node, NODES, 0, now, number, INTERVAL, ranks, limit=20.0,
        nic_rates=tuple((f"mlx5_{nic}", 24.123e9 + nic) for nic in range(8)),
        memory_pressure=0.0, cpu_pressure=0.0123, io_pressure=0.004,
    )  # fmt: skip


def make_rank(rank: int, local: int, number: int) -> Rank:
    """One rank of it."""
    gpu = GpuSample(
        local, 0.98, 0.71234, 71_234_567_168, 85_899_345_920, 655.251, 700.0, 61.0, 1755, 1980,
        ("sw_power_cap",), 16, 16, 0, (),
    )  # fmt: skip
    return Rank(
        rank, local, 400_000 + rank, 0, "training", 12_345 + number, 0.31234567, 0.41234567, 0.52345678,
        0.0123456789, 0.12345678, cpu=1.87654321, run_delay=0.00123456, rss=12_345_678_901, major_faults=0.4,
        throttled=0.0,
        neighbours=(Neighbour("kworker", 77, 0.06),), gpu=gpu, idle=0.31234567,
    )  # fmt: skip


def measure(work: Callable[[], object], rounds: int = 1) -> tuple[float, float]:
    """Medians of wall and CPU milliseconds of some calls."""
    found = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        found.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    walls, cpus = zip(*found, strict=True)
    return statistics.median(walls), statistics.median(cpus)


def bench_watch_scale(folder: Path, rounds: int) -> None:
    """Write what 1,000 nodes of 8 ranks write, and read it as the judge and as `launch watch` do."""
    reports = [make_report(node, 1) for node in range(NODES)]
    wall, cpu = measure(lambda: [write_value(folder, report) for report in reports])
    size = sum(path.stat().st_size for path in (folder / FOLDER).glob("node-*.json")) / NODES
    print_head(f"{NODES} nodes of {RANKS} ranks, a report each {INTERVAL:g} s", "", "ms", "CPU, ms")
    written = f"a node's report, {size / 1024:.1f} KiB, is written"
    print_row(written, f"{wall / NODES:.2f}", f"{cpu / NODES:.2f}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = measure(lambda: ReportCache(folder, own=True).read_reports(), rounds)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print_row(f"the judge reads all, {grown} MiB", round(wall), round(cpu))
    own, now, read = make_report(0, 2), time.monotonic(), ReportCache(folder).read_reports()
    found = Found(reports=read)

    def look() -> None:
        list_stalled(make_job_view(own, found, now).ranks, 20.0)

    print_row("the judge looks, once a second", *(f"{time:.1f}" for time in measure(look, rounds)))
    reader = RunReader(folder)
    print_row("`launch watch`: the first look", *map(round, measure(reader.read)))
    print_row("with nothing new", *map(round, measure(reader.read, rounds)))
    for report in reports[:: int(INTERVAL)]:
        write_value(folder, replace(report, number=2))
    print_row("with 200 new reports", *map(round, measure(reader.read)))
    rate = NODES / INTERVAL
    print(f"\nThe filesystem: {rate:.0f} files/s, {rate * size / 2**20:.2f} MiB/s, {NODES} files")
