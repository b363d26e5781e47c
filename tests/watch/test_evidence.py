"""Evidence of real processes: stacks by the signal, of children, and what torch's server says."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.watch import evidence, kernel_state, rank_activity, rank_answers, stacks
from launcher.watch.evidence import WatchedRank, gather_node, gather_ranks
from launcher.watch.heartbeats import read_heartbeat
from launcher.watch.kernel_state import look_at_process
from launcher.watch.verdict import judge
from launcher.watch.watch_model import Frame, GpuSample, Heartbeat, NodeEvidence, RankEvidence
from tests.inprocess.watched import make_watched_environ
from tests.seam import clean_environ

BEGIN = """
import ctypes, faulthandler, os, re, signal, sys, threading, time
file = open("rank-0.stack", "a")
faulthandler.register(signal.SIGRTMIN + 8, file=file, all_threads=True, chain=False)

def ready():
    print("ready", flush=True)
"""
"""What the hook does for stacks in a program that uses torch."""
HANGS = {
    "sleep": ("ready(); time.sleep(600)", "sleeps"),
    "gil": (
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start();"
        " threading.Thread(target=threading.Event().wait, daemon=True).start();"
        " ready(); print(ctypes.PyDLL(None).sleep(600), flush=True)",
        "sleeps",
    ),
    "regex": ("ready(); re.match(r'(a+)+$', 'a' * 60 + 'b')", "computes"),
    "loop": ("ready()\n    while True: pass", "computes"),
    "lock": ("lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()", "waits for a lock"),
    "join": (
        "thread = threading.Thread(target=time.sleep, args=(600,), daemon=True); thread.start();"
        " ready(); thread.join()",
        "waits for a lock",
    ),
    "pipe": ("ready(); os.read(os.pipe()[0], 1)", "reads from a pipe"),
    "fifo": ("os.mkfifo('fifo'); ready(); open('fifo')", "opens a FIFO that nobody has opened"),
    "child": ("ready(); os.system('sleep 600')", "waits for another process"),
}


@contextmanager
def start(
    code: str, folder: Path, begin: str = BEGIN, stdin: int | None = None
) -> Generator["subprocess.Popen[str]"]:
    """Start a program, and wait until it is `ready`; it and its children are killed in the end."""
    (folder / "program.py").write_text(f"{begin}\ndef hang():\n    {code}\n\nhang()\n")
    process = subprocess.Popen(
        [sys.executable, str(folder / "program.py")],
        cwd=folder,
        env=clean_environ(),
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def await_state(pid: int, is_there: Callable[[kernel_state.KernelLook], bool]) -> None:
    """Wait until the kernel says something of a process."""
    for _ in range(500):
        if is_there(look_at_process(pid)):
            return
        time.sleep(0.02)
    raise AssertionError(look_at_process(pid))


def is_asleep(look: kernel_state.KernelLook) -> bool:
    return look.process.state in "SD"


def make_heartbeat(pid: int, *, can_dump: bool = True) -> Heartbeat:
    now = time.time()
    return Heartbeat(0, 0, pid, "training", now - 60, 7, now - 40, now - 40, 0, 0.0, can_dump=can_dump)


def gather_one(folder: Path, pid: int, *, can_dump: bool = True, **more: int) -> RankEvidence:
    """The evidence of one process."""
    rank = WatchedRank(0, 0, 0, pid, "n1", **more)
    (found,) = gather_ranks(folder, [rank], {0: make_heartbeat(pid, can_dump=can_dump)})
    return found


@pytest.fixture(autouse=True)
def looks_follow_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look comes after 0.3 s."""
    monkeypatch.setattr(evidence, "BETWEEN", 0.3)


@pytest.mark.parametrize(("code", "doing"), HANGS.values(), ids=HANGS)
def test_where_a_program_stands_and_what_it_does(code: str, doing: str, tmp_path: Path) -> None:
    with start(code, tmp_path) as process:
        begin = look_at_process(process.pid).ticks
        is_there = is_asleep if doing != "computes" else lambda look: look.ticks > begin + 2
        await_state(process.pid, is_there)
        found = gather_one(tmp_path, process.pid)
        text, frame = rank_activity.describe_activity(found)
        assert process.poll() is None
    assert text.startswith(doing) and " at program.py:" in text and text.endswith(", hang")
    assert frame and frame.function == "hang" and found.process.stack_source == "faulthandler"
    assert doing == "computes" or found.process.cpu < 0.3
    assert not found.process.stack_changes or doing == "computes"
    assert found.step == 7 and 40 <= found.idle < 60 and found.step_age and found.step_age >= 40


def test_a_sleep_in_c_code_is_not_cut_short(tmp_path: Path) -> None:
    """A signal would end it; it goes to another thread."""
    with start(HANGS["gil"][0], tmp_path) as process:
        await_state(process.pid, lambda look: look.process.system_call in ("clock_nanosleep", "nanosleep"))
        for _ in range(3):
            assert stacks.request_stacks(process.pid, tmp_path / "rank-0.stack", 5.0)
        assert look_at_process(process.pid).process.system_call in ("clock_nanosleep", "nanosleep")
        assert process.poll() is None and process.stdout is not None
        assert not select.select([process.stdout], [], [], 0)[0]  # it would print what is left of its sleep


def test_all_threads_and_which_is_the_main_one(tmp_path: Path) -> None:
    with start(HANGS["join"][0], tmp_path) as process:
        await_state(process.pid, is_asleep)
        found = gather_one(tmp_path, process.pid)
    assert [stack.is_current for stack in found.process.stacks] == [False, True]
    assert found.process.stacks[0].frames[-1].function == "_bootstrap"
    assert found.process.stacks[1].frames[-1].function == "<module>"


def test_a_stopped_program_is_not_asked(tmp_path: Path) -> None:
    with start(HANGS["sleep"][0], tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        await_state(process.pid, lambda look: look.process.state == "T")
        found = gather_one(tmp_path, process.pid)
    assert found.process.state == "T" and not found.process.stacks
    assert found.notes == ("it is stopped and cannot answer",)
    assert (tmp_path / "rank-0.stack").read_bytes() == b""
    assert judge([make_node(found)], []).kind == "stopped"


VFORK = """threading.Thread(target=threading.Event().wait, daemon=True).start()
    if ctypes.PyDLL(None).vfork() == 0:
        ready(); time.sleep(600)"""
"""The parent of vfork(2) is in state D until its child ends, which runs in the parent's memory."""


def test_the_stack_of_a_main_thread_in_state_d(tmp_path: Path) -> None:
    """As with a dead network disk; another thread answers."""
    with start(VFORK, tmp_path) as process:
        await_state(process.pid, lambda look: look.process.state == "D")
        found = gather_one(tmp_path, process.pid)
    text, frame = rank_activity.describe_activity(found)
    assert (
        "(state D" in text and frame and frame.function in ("hang", "ready")
    )  # of the child, which runs in the same memory


DEFENCES = {
    "closed": ("os.closerange(3, 100); ready(); time.sleep(600)", "closed the file"),
    "reused": (
        "os.closerange(3, 100); open('own', 'w'); open('own', 'w');"
        " kept = os.open('mine', os.O_WRONLY | os.O_CREAT); ready(); time.sleep(600)",
        "closed the file",
    ),
    "default": ("faulthandler.unregister(signal.SIGRTMIN + 8); ready(); time.sleep(600)", "no handler"),
    "ignored": (
        "faulthandler.unregister(signal.SIGRTMIN + 8);"
        " signal.signal(signal.SIGRTMIN + 8, signal.SIG_IGN); ready(); time.sleep(600)",
        "no handler",
    ),
    "exec": ("ready(); os.execvp('sleep', ['sleep', '600'])", "no handler"),
}


@pytest.mark.parametrize(("code", "reason"), DEFENCES.values(), ids=DEFENCES)
def test_a_program_that_the_signal_could_harm_gets_none(code: str, reason: str, tmp_path: Path) -> None:
    with start(code, tmp_path) as process:
        await_state(process.pid, lambda look: look.process.system_call in ("clock_nanosleep", "nanosleep"))
        found = gather_one(tmp_path, process.pid)
        assert process.poll() is None
        assert not [path for path in tmp_path.glob("[mo]*") if path.stat().st_size]
    assert not found.process.stacks and any(reason in note for note in found.notes)
    assert rank_activity.describe_activity(found)[0] == "sleeps"


def test_a_program_that_becomes_another_at_the_last_moment_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its thread is awaited."""
    code = "ready(); os.read(0, 1); os.execvp('sleep', ['sleep', '600'])"
    path = tmp_path / "rank-0.stack"

    def await_program(pid: int) -> int:
        os.write(write, b"x")
        await_state(pid, lambda look: look.process.command == "sleep")
        return pid

    read, write = os.pipe()
    with start(code, tmp_path, stdin=read) as process:
        assert stacks.check_signal(process.pid, path) == ""
        monkeypatch.setattr(stacks, "await_thread", await_program)
        assert stacks.request_stacks(process.pid, path, 0.3) == ()
        assert process.poll() is None
    os.close(read)
    os.close(write)


def test_files_in_memory_do_not_grow_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stack"
    with start(HANGS["sleep"][0], tmp_path) as process:
        with path.open("ab") as file:
            file.write(b"x" * (stacks.LARGEST_DUMP + 1))
        for _ in range(2):
            assert stacks.request_stacks(process.pid, path, 5.0)
        assert 0 < path.stat().st_size < 1 << 14
    kept = tmp_path / "rank-0.trace.json"
    rank_answers.keep_trace(kept, b"x" * rank_answers.LARGEST_KEPT)
    assert kept.stat().st_size == rank_answers.LARGEST_KEPT
    rank_answers.keep_trace(kept, b"x" * (rank_answers.LARGEST_KEPT + 1))
    assert not kept.exists()


def test_a_hook_without_handler_is_not_asked(tmp_path: Path) -> None:
    with start(HANGS["sleep"][0], tmp_path) as process:
        found = gather_one(tmp_path, process.pid, can_dump=False)
    assert not found.process.stacks and (tmp_path / "rank-0.stack").read_bytes() == b""


def test_children_answer_one_after_the_other(tmp_path: Path) -> None:
    code = """
    for number in range(3):
        if not os.fork():
            (time.sleep if number else read_shard)(600)
    time.sleep(0.2); ready(); os.wait()"""
    begin = f"{BEGIN}\ndef read_shard(seconds):\n    time.sleep(seconds)\n"
    with start(code, tmp_path, begin) as process:
        await_state(process.pid, is_asleep)
        found = gather_one(tmp_path, process.pid)
    assert [len(child.stacks) for child in found.children] == [1, 1, 1]
    places = [rank_activity.find_place(child) for child in found.children]
    assert sorted(place.function for place in places if place) == ["hang", "hang", "read_shard"]
    main = rank_activity.find_main_stack(found.process)
    assert main and main.frames[0].function == "hang"


def test_a_rank_that_has_ended(tmp_path: Path) -> None:
    with start(HANGS["sleep"][0], tmp_path) as process:
        found = gather_one(tmp_path, process.pid, exit_code=0)
        assert (found.phase, found.exit_code, found.process.stacks) == ("exited", 0, ())
    assert gather_one(tmp_path, process.pid).process.state == "X"


@contextmanager
def serve_silence(path: Path) -> Iterator[None]:
    """A server that takes connections and never answers."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(8)
        yield


def test_a_server_that_does_not_answer_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    with start("ready(); time.sleep(600)", tmp_path) as process, serve_silence(tmp_path / "rank-0.sock"):
        await_state(process.pid, is_asleep)
        rank, beat = WatchedRank(0, 0, 0, process.pid, "n1"), make_heartbeat(process.pid, can_dump=False)
        (found,) = gather_ranks(tmp_path, [rank], {0: beat}, deadline=0.2)
        assert "its evidence was not complete in time" in found.notes and found.process.state == "S"
        (found,) = gather_ranks(tmp_path, [rank], {0: beat}, deadline=60)
    assert not found.answered
    assert any("no answer within" in note for note in found.notes)
    assert not any("not complete" in note for note in found.notes)


def test_activity_is_measured_before_what_may_not_answer(tmp_path: Path) -> None:
    """A rank none of whose answers comes in time; if it was not seen whole, it counts as working."""
    with start("ready(); time.sleep(600)", tmp_path) as process, serve_silence(tmp_path / "rank-0.sock"):
        await_state(process.pid, is_asleep)
        rank, beat = WatchedRank(0, 0, 0, process.pid, "n1"), make_heartbeat(process.pid, can_dump=False)
        for deadline, is_measured in ((3.0, True), (0.1, False)):
            (found,) = gather_ranks(tmp_path, [rank], {0: beat}, deadline=deadline)
            assert found.is_measured is is_measured and not found.answered
            assert rank_activity.is_working(found) is not is_measured


@pytest.mark.parametrize(
    ("code", "is_deadlocked"),
    [
        ("lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()", True),
        ("lock = threading.Lock(); lock.acquire(); ready()\n    with lock:\n        pass", True),
        (
            "lock = threading.Lock(); lock.acquire()\n"
            "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); ready()\n"
            "    with lock:\n        pass",
            False,
        ),
    ],
)
def test_a_lock_that_nobody_is_left_to_release(code: str, is_deadlocked: bool, tmp_path: Path) -> None:
    with start(code, tmp_path) as process:
        await_state(process.pid, is_asleep)
        assert rank_activity.is_deadlocked(gather_one(tmp_path, process.pid)) is is_deadlocked


def test_gpus_and_a_sampler_that_fails(tmp_path: Path) -> None:
    def fail(_: int) -> GpuSample:
        raise RuntimeError("NVML")

    with start(HANGS["sleep"][0], tmp_path) as process:
        ranks, beats = [WatchedRank(0, 3, 0, process.pid, "n1")], {0: make_heartbeat(process.pid)}
        (found,) = gather_ranks(tmp_path, ranks, beats, sample_gpu=GpuSample)
        assert found.gpu == GpuSample(3)
        (found,) = gather_ranks(tmp_path, ranks, beats, sample_gpu=fail)
        assert found.gpu is None and found.process.stacks


def make_node(*ranks: RankEvidence) -> NodeEvidence:
    return NodeEvidence("n1", 0, 1, 0.0, 0.0, ranks)


TRAIN = """
import os, torch, sys, torch.distributed as dist

def stand():
    print("ready", flush=True)
    input()

stand()
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
odd = dist.new_group([1], group_desc="odd")
dist.all_reduce(torch.ones(2))
if dist.get_rank():
    dist.all_reduce(torch.ones(2), group=odd)
    stand()
    dist.barrier()
dist.all_reduce(torch.ones(3))
"""


@contextmanager
def start_ranks(folder: Path, number: int) -> Generator[list["subprocess.Popen[str]"]]:
    """Ranks with the hook, that wait for a line on stdin where they `stand`."""
    (folder / "train.py").write_text(TRAIN)
    ranks = []
    for rank in range(number):
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(folder / "train.py"), str(folder / "store")],
                env=make_watched_environ(folder, **names),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def tell(process: "subprocess.Popen[str]", *, waits: bool = False) -> None:
    """Have a rank go on, or wait until it stands."""
    assert process.stdin and process.stdout
    if waits:
        assert process.stdout.readline() == "ready\n"
    else:
        process.stdin.write("\n")
        process.stdin.flush()


def gather_until(
    folder: Path, ranks: list["subprocess.Popen[str]"], is_there: Callable[[RankEvidence], bool]
) -> NodeEvidence:
    """The node's evidence, as soon as that of rank 0 is as it is to be."""
    entries = [WatchedRank(number, number, 0, rank.pid, "n1") for number, rank in enumerate(ranks)]
    for _ in range(60):
        found = {number: read_heartbeat(folder / f"rank-{number}.beat") for number in range(len(ranks))}
        beats = {number: beat for number, beat in found.items() if beat}
        node = gather_node(folder, entries, beats, host="n1", node_rank=0, number=1)
        if is_there(node.ranks[0]):
            return node
    raise AssertionError(node)


def test_ranks_that_wait_for_each_other_in_torch(tmp_path: Path) -> None:
    """Before the process group, before a collective, and in different ones; the hook is the real one."""
    with start_ranks(tmp_path, 2) as (first, second):
        for rank in (first, second):
            tell(rank, waits=True)
        tell(first)
        node = gather_until(tmp_path, [first, second], lambda rank: rank.phase == "joining")
        verdict = judge([node], [])
        assert (verdict.kind, verdict.ranks, verdict.operation) == ("absent", (1,), "init_process_group")
        assert verdict.frame == Frame(str(tmp_path / "train.py"), 6, "stand")

        tell(second)
        tell(second, waits=True)
        node = gather_until(tmp_path, [first, second], is_pending)
        assert [(group.name, group.last_enqueued) for group in node.ranks[1].groups] == [
            ("default group", 1),
            ("odd", 1),
        ]
        verdict = judge([node], [])
        sentence = (
            "rank 1 on n1 has not joined all_reduce #2 of the default group, in which 1 rank waits: it "
        )
        assert verdict.sentence == f"{sentence}reads from a pipe at train.py:6, stand"
        assert node.ranks[0].answered and (tmp_path / "rank-0.trace.json").stat().st_size

        tell(second)
        gather_until(tmp_path, [second], is_pending)
        verdict = judge([gather_until(tmp_path, [first, second], is_pending)], [])
        assert verdict.kind == "mismatch" and "barrier" in verdict.sentence
        assert "[3] Float" in verdict.sentence and verdict.sequence == 2


def is_pending(rank: RankEvidence) -> bool:
    return any(group.is_pending for group in rank.groups)
