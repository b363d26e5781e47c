"""Samples of real processes, and of a node as written-out files have it."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from launcher.files import read_stat
from launcher.inprocess.launch_inprocess import heartbeat
from launcher.watch.procfs import Sample, Sampler
from launcher.watch.ranks import read_heartbeat
from tests.seam import wait_for

BUSY = "while True: pass"
WITH_CHILD = f"""
import subprocess, sys, threading
held = bytearray(64 << 20)
held[::4096] = b"x" * len(held[::4096])
start = lambda: subprocess.Popen([sys.executable, "-c", {BUSY!r}])
thread = threading.Thread(target=lambda: print(start().pid, flush=True) or threading.Event().wait())
thread.start()
"""


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


def sample_until(
    sampler: Sampler, pids: list[int], is_enough: Callable[[Sample], object], still: Sequence[int] = ()
) -> None:
    """Sample each half second: where others take the cores, what a process does may not be seen in one."""
    samples: list[Sample] = []

    def look() -> object:
        time.sleep(0.5)
        samples.append(sampler.sample(pids, still))
        return is_enough(samples[-1])

    wait_for(look, "a sample", tell=lambda: str(samples[-1]))


def test_a_ranks_children_count_as_its_own() -> None:
    """The child was started by another thread than the main one, and runs on a core with somebody else."""
    cpu = min(os.sched_getaffinity(0))
    with running(WITH_CHILD, cpu) as rank, running(BUSY, cpu) as other:
        assert rank.stdout
        child = int(rank.stdout.readline())
        sampler = Sampler()
        sampler.sample([rank.pid])

        def is_seen(sample: Sample) -> bool:
            found = sample.ranks[rank.pid]
            neighbours = {neighbour.pid: neighbour for neighbour in found.neighbours}
            assert not {rank.pid, child} & neighbours.keys()
            if other.pid not in neighbours:
                return False
            neighbour = neighbours[other.pid]
            assert neighbour.name.startswith("python") and found.rss and found.rss > 64 << 20
            used = (found.cpu or 0, neighbour.share)
            return 0.05 < min(used) <= max(used) < 1.1 and (found.run_delay or 0) > 0.05

        sample_until(sampler, [rank.pid], is_seen)


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
            tree = sampler._trees[rank.pid]  # the PID is another process's by now
            tree[rank.pid] = replace(tree[rank.pid], start=0)
    gone = [rank.pid, 0, -1, 1 << 30]
    assert {one.rss for one in sampler.sample(gone).ranks.values()} == {None}


def test_what_moves_bytes_does_not_rest_nor_what_was_not_seen_whole() -> None:
    reads = "while True: file.read(1 << 16); time.sleep(0.02)"
    ready = "import time; file = open('/dev/zero', 'rb'); print('ready', flush=True)"
    with running(f"{ready}; time.sleep(99)") as idle, running(f"{ready}\n{reads}") as busy:
        for rank in (idle, busy):
            assert rank.stdout and rank.stdout.readline() == "ready\n"
        sampler, pids = Sampler(), [idle.pid, busy.pid]
        assert not sampler.sample(pids, pids).resting
        sample_until(sampler, pids, lambda sample: sample.resting == {idle.pid}, pids)
        assert not sampler.sample(pids).resting


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_what_moves_bytes_by_recv_alone_does_not_rest(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {address}: {error}")
    begin = f"import os, socket, time; client = socket.create_connection({server.getsockname()[:2]})"
    child = "if not os.fork(): time.sleep(99)"  # which has the connection too, and does not count twice
    reads = "print('ready', flush=True)\nwhile client.recv(1 << 16): pass"
    with server, running(f"{begin}\n{child}\n{reads}") as rank:
        connection, _ = server.accept()
        assert rank.stdout and rank.stdout.readline() == "ready\n"
        with connection:
            sampler, pids = Sampler(), [rank.pid]
            assert not sampler.sample(pids, pids).resting

            def rests_after(size: int, sample: Sample) -> bool:
                connection.sendall(bytes(size))  # before the next sample
                return bool(sample.resting)

            for size in (0, 3000):
                connection.sendall(bytes(size))
                sample_until(sampler, pids, partial(rests_after, size), pids)
            connection.sendall(bytes(1 << 20))
            assert not sampler.sample(pids, pids).resting


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


PSI = "some avg10={} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1"


def test_pressure(tmp_path: Path) -> None:
    pressure = {"memory": PSI.format("50.00"), "io": PSI.format("12.50"), "cpu": "nonsense"}
    write(tmp_path, {f"proc/pressure/{name}": text for name, text in pressure.items()})
    node = Sampler(root=str(tmp_path)).sample([]).node
    assert (node.memory_pressure, node.cpu_pressure, node.io_pressure) == (0.5, None, 0.125)


@pytest.mark.parametrize(
    ("line", "unit"), [("throttled_time", 10**9), ("throttled_usec", 10**6)], ids=["v1", "v2"]
)
def test_the_strictest_quota_of_a_rank(tmp_path: Path, line: str, unit: int) -> None:
    """A rank's own cgroup is held back more than the one above it, which holds another rank too."""
    mine, other = os.getpid(), os.getppid()
    folders = {mine: ["cg/job/rank", "cg/job", "cg"], other: ["cg/job", "cg"]}
    sampler = Sampler(folders.__getitem__, str(tmp_path))
    for seconds in (1000, 2000):
        write(
            tmp_path,
            {
                "cg/job/rank/cpu.stat": f"nr_throttled 4\n{line} {unit * seconds}",
                "cg/job/cpu.stat": f"nr_throttled 4\n{line} {unit * seconds // 4}",
            },
        )
        ranks = sampler.sample([mine, other]).ranks
        time.sleep(0.1)
    strict, loose = ranks[mine].throttled, ranks[other].throttled
    assert strict and loose and strict == pytest.approx(4 * loose) and strict > 1


# The reader of heartbeats, with files that the hook's own code writes, and with what is none


@pytest.fixture
def beat(tmp_path: Path) -> heartbeat.Heartbeat:
    """A heartbeat of this process."""
    made = heartbeat.Heartbeat(str(tmp_path), 3, 1, 1)
    made.phase_since = monotonic()
    made.map_file()
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-3.beat"


def test_what_is_written_is_read(beat: heartbeat.Heartbeat, path: Path) -> None:
    before = time.time()
    found = read_heartbeat(path)
    assert found is not None
    assert (found.rank, found.local_rank, found.pid) == (3, 1, os.getpid())
    assert (found.phase, found.step, found.step_time, found.can_dump) == ("starting", 0, 0, False)
    assert before - 1 < found.phase_since <= found.activity_time < time.time() + 1
    assert (found.durations, found.step_ends, found.notes) == ((), (), ())
    for text in ("no server: ü", "no room"):
        beat.try_or_tell(text, partial(os.close, -1))
    for step in range(1, 4):
        beat.end_step(step)
    beat.set_phase(heartbeat.LOADING)
    found = read_heartbeat(path)
    assert found is not None
    why = "OSError: [Errno 9] Bad file descriptor"
    assert (found.phase, found.step, found.notes) == (
        "loading",
        3,
        (f"no server: ü: {why}", f"no room: {why}"),
    )
    assert len(found.durations) == len(found.step_ends) == 2, "nobody knows when the first step began"
    assert found.step_ends[1] == pytest.approx(found.step_time, abs=1e-6)
    assert found.step_ends[1] - found.step_ends[0] == pytest.approx(found.durations[1], abs=1e-6)
    assert found.phase_since >= found.step_time


def test_time_that_is_no_part_of_steps_is_left_out(beat: heartbeat.Heartbeat, path: Path) -> None:
    beat.end_step(1)
    for phase in (heartbeat.SAVING, heartbeat.EVALUATING):
        beat.set_base(phase)
        beat.set_phase(heartbeat.LOADING)
        beat.phase_since -= 50
        beat.set_phase(beat.base)
        beat.phase_since -= 50
    beat.set_base(heartbeat.TRAINING)
    beat.set_phase(heartbeat.COMPILING)
    beat.phase_since -= 50
    beat.set_phase(heartbeat.LOADING)
    beat.last_end -= 250 + 30
    beat.phase_since -= 30
    beat.set_phase(heartbeat.TRAINING)
    beat.end_step(2)
    found = read_heartbeat(path)
    assert found is not None and len(found.durations) == 1
    assert found.durations[0] == pytest.approx(30, abs=10), "the wait for data counts"


NOBODYS = [
    ("magic", 0),
    ("layout", 1),
    ("pid", 1),
    ("pid", -1),
    ("pid", 1 << 62),
    ("start_time", 1),
    ("start_stack", 4096),
]


def test_a_step_that_ends_an_evaluation_has_no_known_begin(beat: heartbeat.Heartbeat, path: Path) -> None:
    beat.end_step(1)
    beat.note_mode(is_training=False)
    assert beat.begin_loading()
    beat.end_loading(object())
    beat.end_step(2)
    beat.end_step(3)
    found = read_heartbeat(path)
    assert found is not None
    assert (found.phase, found.step, len(found.durations)) == ("training", 3, 1)


def test_what_no_live_rank_writes_is_none(beat: heartbeat.Heartbeat, path: Path, tmp_path: Path) -> None:
    whole = bytes(beat.file)
    for name, value in NOBODYS:
        setattr(beat.file, name, value)
        assert read_heartbeat(path) is None, (name, value)
        ctypes.memmove(ctypes.addressof(beat.file), whole, len(whole))
    for number, data in enumerate((b"", whole[:-1], whole + b"x", os.urandom(len(whole)))):
        (tmp_path / f"rank-1{number}.beat").write_bytes(data)
    (tmp_path / "rank-20.beat").mkdir()
    os.mkfifo(tmp_path / "rank-21.beat")
    (tmp_path / "rank-22.beat").symlink_to(path)
    (tmp_path / "rank-x.beat").write_bytes(whole)
    found = list(filter(None, map(read_heartbeat, tmp_path.iterdir())))
    assert [one.rank for one in found] == [3, 3]  # one by its link
    assert read_heartbeat(tmp_path / "none") is None
    if os.geteuid() == 0:  # who alone can give a file to another user
        os.chown(path, 12345, 12345)
        assert read_heartbeat(path) is None


def test_the_last_256_steps_are_read_whatever_the_counts_and_clocks_say(
    beat: heartbeat.Heartbeat, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 1001):
        beat.end_step(step)
    for jump in (0.0, -1e6, 1e6):
        now = time.time() + jump
        monkeypatch.setattr(time, "time", lambda now=now: now)
        found = read_heartbeat(path)
        monkeypatch.undo()
        assert found is not None and found.step == 1000 and 0 <= now - found.step_time < 60
        assert len(found.durations) == len(found.step_ends) == 256
        assert list(found.step_ends) == sorted(found.step_ends) and min(found.durations) >= 0


def test_what_is_read_between_two_writes_is_sound(beat: heartbeat.Heartbeat, path: Path) -> None:
    """A process steps all the time, without a pause."""
    child = os.fork()
    if not child:
        beat.file.pid = os.getpid()
        beat.file.start_time = int(read_stat("self")[1][22 - 3])
        for step in range(1, 1 << 40):
            beat.end_step(step)
    try:
        deadline, last, reads = monotonic() + 60, 0, 0
        while reads < 100 and monotonic() < deadline:
            found = read_heartbeat(path)
            if found is None or found.pid != child:
                continue
            reads += 1
            assert found.step >= last
            last = found.step
            assert found.step_ends == tuple(sorted(found.step_ends))
            assert all(0 <= duration < 60 for duration in found.durations)
            assert len(found.step_ends) == 256 or found.step < 1000
        assert (reads, found is not None and found.step > 300) == (100, True)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
