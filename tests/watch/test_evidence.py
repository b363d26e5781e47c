"""Evidence of real processes: stacks by the signal, of children, what torch's server says, and the kernel."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.codec import convert
from launcher.watch.evidence import gather_node
from launcher.watch.flight_recorder import CollectiveReader
from launcher.watch.hang import Pause, decide
from launcher.watch.model import Heartbeat, NodeEvidence, NodeReport, Rank
from launcher.watch.ranks import read_heartbeat
from launcher.watch.stragglers import StragglerFinder
from tests.inprocess.hooked import list_heartbeats, make_watched_environ
from tests.seam import PATIENCE, clean_environ, wait_for
from tests.watch.simulated_ranks import HEALTHY

TABLES = tomllib.loads(Path(__file__).with_name("hangs.toml").read_text())
PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
BEGIN = """
import ctypes, faulthandler, os, re, signal, sys, threading, time
file = open("rank-0.stack", "a")
faulthandler.register(signal.SIGRTMIN + 8, file=file, all_threads=True, chain=False)

def ready():
    print("ready", flush=True)

def read_shard(seconds):
    time.sleep(seconds)
"""
"""What the hook does for stacks in a program that uses torch."""
SLEEP = "ready(); time.sleep(600)"


@contextmanager
def start(code: str, folder: Path, stdin: int | None = None) -> Generator["subprocess.Popen[str]"]:
    """Start a program, and wait until it is `ready`; it and its children are killed in the end."""
    body = textwrap.indent(code.strip(), "    ")
    (folder / "program.py").write_text(f"{BEGIN}\ndef hang():\n{body}\n\nhang()\n")
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


def await_sleep(pid: int, *states: str) -> None:
    """Wait until a process sleeps, or is in one of these states, and has not only waited for the GIL."""
    process, seen = psutil.Process(pid), list[tuple[str, int]]()

    def rests() -> bool:
        seen.append((process.status(), process.num_ctx_switches().voluntary))
        return seen[-1][0] in (states or (psutil.STATUS_SLEEPING,)) and seen[-4:] == seen[-1:] * 4

    wait_for(rests, "its sleep")


def make_heartbeat(pid: int, *, can_dump: bool = True) -> Heartbeat:
    now = time.time()
    return Heartbeat(0, 0, pid, "training", now - 60, 7, now - 40, now - 40, 0, 0.0, can_dump=can_dump)


def gather_one(
    folder: Path, pid: int, *, can_dump: bool = True, exit_code: int | None = None, **options: Any
) -> Any:
    """The evidence of one process, which has done nothing for 30 s."""
    beat = make_heartbeat(pid, can_dump=can_dump)
    who: dict[str, Any] = {
        "rank": 0,
        "local_rank": 3,
        "pid": pid,
        "attempt": 0,
        "phase": "training",
        "idle": 0.0,
        "quiet": 30.0,
    }
    who["gpu"] = {"index": 3}
    rank = convert(Rank, {**who, "step": beat.step, "step_age": 40.0, "exit_code": exit_code})
    node = gather_node(folder, [rank], {0: beat}, host="n1", node_rank=0, number=1, **options)
    return node.ranks[0]


def judge(*nodes: Any, idle: float = 30.0) -> Any:
    """What follows, if nobody has been active for `idle` seconds."""
    evidence = [
        one if isinstance(one, NodeEvidence) else NodeEvidence("n1", 0, 1, 0.0, 0.0, (one,)) for one in nodes
    ]
    return decide(evidence, (), Pause(20.0, idle, {0: idle}, 0.0, "auto"))


@pytest.mark.parametrize("case", TABLES["hang"], ids=lambda case: case["name"])
def test_where_a_program_stands_and_what_it_does(case: dict[str, Any], tmp_path: Path) -> None:
    doing = case["doing"]
    with start(case["code"], tmp_path) as process:
        if doing == "computes":
            begin = psutil.Process(process.pid).cpu_times().user
            wait_for(lambda: psutil.Process(process.pid).cpu_times().user > begin + 0.02, "its work")
        else:
            await_sleep(process.pid)
        found = gather_one(tmp_path, process.pid)
        verdict = judge(found).verdict
        assert process.poll() is None and process.stdout is not None
        # A signal would end a sleep in C code, which would print what is left of it.
        assert not select.select([process.stdout], [], [], 0)[0]
    text, frame = verdict.sentence, verdict.frame
    assert f": it {doing}" in text and " at program.py:" in text and text.endswith(", hang")
    assert frame and frame.function == "hang" and found.process.stacks
    assert found.step == 7 and 40 <= found.idle < 60 and found.step_age and found.step_age >= 40
    assert verdict.is_final is case.get("deadlocked", False)
    if threads := case.get("threads"):
        assert [stack.is_current for stack in found.process.stacks] == [False, True]
        assert [stack.frames[-1].function for stack in found.process.stacks] == threads


def test_evidence_of_one_that_sleeps_is_stopped_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stack"
    with start(SLEEP, tmp_path) as process:
        await_sleep(process.pid)
        found = gather_one(tmp_path, process.pid, can_dump=False)  # a hook without handler is not asked
        assert not found.process.stacks and path.read_bytes() == b""
        found = gather_one(tmp_path, process.pid, exit_code=0)
        assert (found.exit_code, found.process.stacks) == (0, ())
        with path.open("ab") as file:  # files in memory do not grow without bound
            file.write(b"x" * (1 << 20 | 1))
        found = gather_one(tmp_path, process.pid)
        assert found.gpu.index == 3 and found.process.stacks
        size = path.stat().st_size
        assert 0 < size < 1 << 14
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "its stop")
        found = gather_one(tmp_path, process.pid)
        assert found.process.state == "T" and not found.process.stacks
        assert found.notes == ("it is stopped and cannot answer",) and path.stat().st_size == size
        assert judge(found).verdict.kind == "stopped"
    assert gather_one(tmp_path, process.pid).process.state == "X"


def test_the_stack_of_a_main_thread_in_state_d(tmp_path: Path) -> None:
    """As with a dead network disk; another thread answers, here with the frames of the child."""
    with start(PROGRAMS["vfork"], tmp_path) as process:
        await_sleep(process.pid, psutil.STATUS_DISK_SLEEP)
        verdict = judge(gather_one(tmp_path, process.pid)).verdict
    frame = verdict.frame
    assert "(state D" in verdict.sentence and frame and frame.function in ("hang", "ready")


@pytest.mark.parametrize("case", TABLES["defence"], ids=lambda case: case["name"])
def test_a_program_that_the_signal_could_harm_gets_none(case: dict[str, str], tmp_path: Path) -> None:
    with start(case["code"], tmp_path) as process:
        await_sleep(process.pid)
        found = gather_one(tmp_path, process.pid)
        assert process.poll() is None
        assert not [path for path in tmp_path.glob("[mo]*") if path.stat().st_size]
    assert not found.process.stacks and any(case["reason"] in note for note in found.notes)
    assert judge(found).verdict.sentence == "rank 0 on n1 makes no step: it sleeps"


def test_children_answer_one_after_the_other(tmp_path: Path) -> None:
    with start(PROGRAMS["children"], tmp_path) as process:
        await_sleep(process.pid)
        found = gather_one(tmp_path, process.pid)
    assert [len(child.stacks) for child in found.children] == [1, 1, 1]
    places = [child.stacks[0].frames[0].function for child in found.children]
    assert sorted(places) == ["hang", "hang", "read_shard"]
    main = found.process.main_stack
    assert main and main.frames[0].function == "hang"


DUMP = """\
noise of a child
Thread 0x00007f1 (most recent call first):
  <no Python frame>

Current thread 0x00007f2 [worker] (most recent call first):
  Garbage-collecting
  File "/a dir/x, line 3 in y.py", line 12 in <lambda>
  File "<string>", line ??? in f
"""


def test_a_dump_that_was_cut_off_after_a_hundred_threads_lacks_the_main_one(tmp_path: Path) -> None:
    """The oldest, which comes last."""
    main = '\nThread 0x00007f3 (most recent call first):\n  File "main.py", line 1 in <module>\n'
    (tmp_path / "whole").write_text(DUMP + main)
    (tmp_path / "cut").write_text(f"{DUMP}{main}\n...\n")
    with start(PROGRAMS["dump"], tmp_path) as process:
        await_sleep(process.pid)
        whole, cut = (gather_one(tmp_path, process.pid).process.stacks for _ in range(2))
    assert [one.thread for one in whole] == ["0x00007f1", "worker", "0x00007f3"]
    assert [[one.is_current for one in stacks] for stacks in (whole, cut)] == [
        [False, False, True],
        [False, True, False],
    ]
    frames = [(one.file, one.line, one.function) for one in whole[1].frames]
    assert frames == [("/a dir/x, line 3 in y.py", 12, "<lambda>"), ("<string>", 0, "f")]


@contextmanager
def serve_silence(path: Path) -> Iterator[None]:
    """A server that takes connections and never answers."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(8)
        yield


def test_a_server_that_does_not_answer_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    with start(SLEEP, tmp_path) as process, serve_silence(tmp_path / "rank-0.sock"):
        await_sleep(process.pid)
        for deadline in (0.1, 60.0):
            found = gather_one(tmp_path, process.pid, can_dump=False, deadline=deadline)
            assert not found.answered and found.process.state == "S"
            waited = re.search(r"no answer within (\S+) s", " ".join(found.notes))
            if "its evidence was not complete in time" in found.notes:
                assert deadline == 0.1
            else:  # the server's time ends with that of all
                assert waited and float(waited[1]) <= deadline
            assert judge(found, idle=300.0).word == "hang"
    assert waited


@contextmanager
def start_ranks(folder: Path, number: int) -> Generator[list["subprocess.Popen[str]"]]:
    """Ranks with the hook, that wait for a line on stdin where they `stand`."""
    (folder / "train.py").write_text(PROGRAMS["train"])
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
    folder: Path, ranks: list["subprocess.Popen[str]"], is_there: Callable[[Any], bool]
) -> NodeEvidence:
    """The node's evidence, as soon as that of rank 0 is as it is to be."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = {number: read_heartbeat(folder / f"rank-{number}.beat") for number in range(len(ranks))}
        beats = {number: beat for number, beat in found.items() if beat}
        states = [
            Rank(
                number, number, rank.pid, 0, beats[number].phase if number in beats else "unwatched", 0, None
            )
            for number, rank in enumerate(ranks)
        ]
        node = gather_node(folder, states, beats, host="n1", node_rank=0, number=1)
        if is_there(node.ranks[0]):
            return node
    raise AssertionError(node)


def is_pending(rank: Any) -> bool:
    return any(group.pending for group in rank.groups)


def test_ranks_that_wait_for_each_other_in_torch(tmp_path: Path) -> None:
    """Before the process group, before a collective, and in different ones; the hook is the real one."""
    with start_ranks(tmp_path, 2) as (first, second):
        for rank in (first, second):
            tell(rank, waits=True)
        tell(first)
        node = gather_until(tmp_path, [first, second], lambda rank: rank.phase == "joining")
        verdict = judge(node).verdict
        assert (verdict.kind, verdict.ranks, verdict.operation) == ("absent", (1,), "init_process_group")
        frame = verdict.frame
        assert frame and (frame.file, frame.line, frame.function) == (str(tmp_path / "train.py"), 6, "stand")

        tell(second)
        tell(second, waits=True)
        check_recorder(tmp_path)
        node = gather_until(tmp_path, [first, second], is_pending)
        assert [(group.name, group.last_enqueued) for group in node.ranks[1].groups] == [
            ("default group", 30),
            ("odd", 1),
        ]
        verdict = judge(node).verdict
        sentence = (
            "rank 1 on n1 has not joined all_reduce #31 of the default group, in which 1 rank waits: it "
        )
        assert verdict.sentence == f"{sentence}reads from a pipe at train.py:6, stand"
        assert node.ranks[0].answered

        tell(second)
        gather_until(tmp_path, [second], is_pending)
        verdict = judge(gather_until(tmp_path, [first, second], is_pending)).verdict
        assert verdict.kind == "mismatch" and "barrier" in verdict.sentence
        assert "[3] Float" in verdict.sentence and verdict.sequence == 31


def check_recorder(folder: Path) -> None:
    """The flight recorders show who came late to the steps so far: rank 1, by 0.12 s."""
    reader, beats = CollectiveReader(folder, 2), list_heartbeats(folder)
    reader.fetch(beats)
    assert {times.measure for times in reader.found} == {"enqueued"} and reader.cost > 0
    ranks = [{**HEALTHY, "rank": beat.rank, "step": beat.step} for beat in beats]
    fixed = {"node_rank": 0, "nodes": 1, "attempt": 0, "time": 1.0, "number": 1, "interval": 5.0}
    report = convert(NodeReport, {**fixed, "host": "n1", "ranks": ranks})
    finder = StragglerFinder()
    finder.update([replace(report, collectives=reader.found)])
    assert finder.waits[0] > 0.2 and finder.waits[0] > 2 * finder.waits[1]
