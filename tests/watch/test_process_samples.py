"""Samples of real processes, and of a node as written-out files have it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.probe.limits import list_cgroups
from launcher.probe.sysfs import Tree
from launcher.watch.model import NodeSample, RankSample
from launcher.watch.samples import Groups, NodeReader, Sample, Sampler, list_growth

BUSY = "while True: pass"
WITH_CHILD = f"""
import subprocess, sys, threading
held = bytearray(64 << 20)
held[::4096] = b"x" * len(held[::4096])
start = lambda: subprocess.Popen([sys.executable, "-c", {BUSY!r}])
thread = threading.Thread(target=lambda: print(start().pid, flush=True) or threading.Event().wait())
thread.start()
"""
LONG = 30.0


@contextmanager
def running(code: str, cpu: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python process in a group of its own, which is killed at the end, on one CPU if that is given."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code if cpu is None else f"import os; os.sched_setaffinity(0, {{{cpu}}})\n{code}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def sample_until(sampler: Sampler, pids: list[int], is_enough: Callable[[Sample], bool]) -> Sample:
    end = time.monotonic() + LONG
    while not is_enough(sample := sampler.sample(pids)):
        assert time.monotonic() < end, sample
        time.sleep(0.1)
    return sample


def test_a_ranks_children_count_as_its_own() -> None:
    """The child was started by another thread than the main one, and runs on a core with somebody else."""
    cpu = min(os.sched_getaffinity(0))
    with running(WITH_CHILD, cpu) as rank, running(BUSY, cpu) as other:
        assert rank.stdout
        child = int(rank.stdout.readline())
        sampler = Sampler()
        sampler.sample([rank.pid])
        time.sleep(0.5)
        found = sample_until(
            sampler, [rank.pid], lambda s: any(n.pid == other.pid for n in s.ranks[rank.pid].neighbours)
        ).ranks[rank.pid]
        assert found.cpu and 0.05 < found.cpu < 1.1
        assert found.run_delay and found.run_delay > 0.05
        assert found.rss and found.rss > 64 << 20
        assert not {rank.pid, child} & {neighbour.pid for neighbour in found.neighbours}
        (neighbour,) = (n for n in found.neighbours if n.pid == other.pid)
        assert neighbour.name.startswith("python") and 0.05 < neighbour.share < 1.1


def test_cpu_of_a_child_that_has_ended_counts_once() -> None:
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.3: pass'])\n"
        "print('done', flush=True)\nimport time\ntime.sleep(99)"
    )
    with running(code) as rank:
        sampler = Sampler()
        start = time.monotonic()
        sampler.sample([rank.pid])
        assert rank.stdout and rank.stdout.readline() == "done\n"
        found = sampler.sample([rank.pid]).ranks[rank.pid]
        elapsed = time.monotonic() - start
        assert found.cpu is not None and 0.25 < found.cpu * elapsed < 2


def test_first_samples_know_memory_alone_and_those_of_nobody_are_empty() -> None:
    with running(f"print('ready', flush=True)\n{BUSY}") as rank:
        assert rank.stdout and rank.stdout.readline() == "ready\n"
        sampler = Sampler()
        for _ in range(2):
            found = sampler.sample([rank.pid]).ranks[rank.pid]
            assert found.rss and found.rss > 1 << 20
            assert (found.cpu, found.run_delay, found.major_faults) == (None, None, None)
            sampler._before[rank.pid].start -= 1  # the PID is another process's by now
    gone = [rank.pid, 0, -1, 1 << 30]
    assert sampler.sample(gone).ranks == dict.fromkeys(gone, RankSample())
    assert list_growth({1: 50, 2: 7, 3: 5}, {1: 20, 2: 9, 4: 100}) == [30, 7, 5], "a counter was reset"


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_networks_are_rdma_devices_and_physical_interfaces_or_all(tmp_path: Path) -> None:
    ib, efa, net = (
        f"sys/class/{name}" for name in ("infiniband/mlx5_0/ports/1", "infiniband/efa_0/ports/1", "net")
    )
    files: dict[str, object] = {
        f"{ib}/counters/port_rcv_data": 1000,
        f"{ib}/counters/port_xmit_data": 500,
        f"{efa}/hw_counters/rx_bytes": 10,
        f"{efa}/hw_counters/tx_bytes": 20,
    }
    for name in ("eth0", "docker0", "lo"):
        files |= {f"{net}/{name}/statistics/{word}_bytes": 100 for word in ("rx", "tx")}
    write(tmp_path, files)
    container, node = NodeReader(None, str(tmp_path)), NodeReader(None, str(tmp_path))
    container.sample([], 0)
    (tmp_path / net / "eth0/device").mkdir()
    assert node.sample([], 0) == (NodeSample(), {})
    grown = {name: int(str(value)) + 1000 for name, value in files.items()}
    write(tmp_path, {**grown, f"{net}/eth0/statistics/rx_bytes": 1})
    # Counters that were reset are no negative rate.
    rates = [("efa_0", 1000.0), ("mlx5_0", 4000.0), ("eth0", 450.5)]
    assert list(node.sample([], 2)[0].nic_rates) == rates
    names = [name for name, _ in container.sample([], 2)[0].nic_rates]
    assert names == ["efa_0", "mlx5_0", "docker0", "eth0"]
    write(tmp_path, files)
    assert {rate for _, rate in node.sample([], 2)[0].nic_rates} == {0.0}
    (tmp_path / ib / "counters/port_rcv_data").unlink()
    assert [name for name, _ in node.sample([], 2)[0].nic_rates] == ["efa_0", "eth0"]


PSI = "some avg10={} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1"


def test_pressure_is_the_jobs_own_if_its_cgroup_tells(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/pressure/memory": PSI.format("50.00"),
            "proc/pressure/io": PSI.format("12.50"),
            "proc/pressure/cpu": "nonsense",
            "sys/fs/cgroup/job/memory.pressure": PSI.format("3.00"),
        },
    )
    folders = ("sys/fs/cgroup/job/step", "sys/fs/cgroup/job")
    found, _ = NodeReader(lambda _: {"cpu": (2, folders)}, str(tmp_path)).sample([1], 1)
    assert (found.memory_pressure, found.io_pressure, found.cpu_pressure) == (0.03, 0.125, None)


@pytest.mark.parametrize(
    ("version", "line", "unit"),
    [(1, "throttled_time", 10**9), (2, "throttled_usec", 10**6)],
    ids=["v1", "v2"],
)
def test_the_strictest_quota_of_a_rank_and_of_the_job(
    tmp_path: Path, version: int, line: str, unit: int
) -> None:
    """The rank's own cgroup is held back more than the job's, in which another rank is too."""
    mine, other = os.getpid(), os.getppid()
    folders = {mine: ["cg/job/rank", "cg/job", "cg"], other: ["cg/job", "cg"]}
    reader = NodeReader(lambda pid: {"cpu": (version, folders[pid])}, str(tmp_path))
    for seconds in (1, 2):
        write(
            tmp_path,
            {
                "cg/job/rank/cpu.stat": f"nr_throttled 4\n{line} {unit * seconds}",
                "cg/job/cpu.stat": f"nr_throttled 4\n{line} {unit * seconds // 4}",
            },
        )
        node, ranks = reader.sample([mine, other], 2)
    assert (ranks, node.throttled) == ({mine: 0.5, other: 0.125}, 0.125)


def test_the_probes_cgroups_of_a_process_are_what_the_sampler_reads() -> None:
    with running("import time; time.sleep(99)") as rank:
        folders: list[str] = []

        def find(pid: int) -> Mapping[str, Groups]:
            found = list_cgroups(Tree(), ("cpu",), pid)
            folders.extend(found["cpu"][1] if "cpu" in found else ())
            return found

        sampler = Sampler(find)
        for _ in range(2):
            found = sampler.sample([rank.pid])
            time.sleep(0.01)
        has_counts = any(Path("/", folder, "cpu.stat").exists() for folder in folders)
        assert (found.ranks[rank.pid].throttled is not None) == has_counts
        assert found.ranks[rank.pid].throttled == found.node.throttled
