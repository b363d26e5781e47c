"""Heartbeats of ranks with and without torch, whatever their programs do to themselves."""

import os
import signal
from pathlib import Path

import pytest

from launcher.watch.evidence import check_signal, request_stacks
from launcher.watch.flight_recorder import post_handler
from tests.inprocess.hooked import check_table, is_mapped, run_code, start_program

BEGIN = """
import atexit, json, os, resource, signal, sys, time, warnings
from pathlib import Path
import launcher
from launcher.watch.evidence import STACK_SIGNAL
from launcher.watch.ranks import read_heartbeat
from launcher.watch.procfs import has_open

def show(value):
    print(json.dumps(value), flush=True)

def begin(name=None, **variables):
    "Start the hook of rank 0, with its heartbeat in a folder of that name."
    global folder
    folder = Path(name or f"beats-{os.getpid()}").resolve()
    folder.mkdir(exist_ok=True)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LAUNCH_WATCH": str(folder)}
    os.environ.update({**rank, **variables})
    launch_inprocess.start(os.environ)

def path():
    return folder / "rank-0.beat"

def look():
    beat = read_heartbeat(path())
    return [beat.phase, beat.step, len(beat.durations), beat.can_dump, [*beat.notes]]

def in_child(action, **named):
    child = os.fork()
    if not child:
        action(**named)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.mark.timeout(600)
def test_what_heartbeats_tell(tmp_path: Path) -> None:
    check_table("heartbeat.toml", tmp_path, BEGIN)


def test_a_program_without_torch_and_steps_leaves_nothing(tmp_path: Path) -> None:
    code = """
import json, os, sys
loaded = [name for name in ("mmap", "faulthandler", "ctypes", "signal", "torch") if name in sys.modules]
tasks = os.listdir("/proc/self/task")
print(json.dumps([loaded, len(tasks), "LAUNCH_WATCH" in os.environ, os.listdir("beats")]))
"""
    (tmp_path / "beats").mkdir()
    watched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LAUNCH_WATCH": str(tmp_path / "beats")}
    assert run_code(code, tmp_path, "default", **watched) == [[], 1, False, []]


def test_a_program_that_becomes_another_has_none(tmp_path: Path) -> None:
    code = """
launcher.step()
wait()
os.execv(sys.executable, [sys.executable, "-c", "print('again', flush=True); input()"])
"""
    with start_program(code, tmp_path) as program:
        program.wait()
        assert program.read() is not None
        assert is_mapped(program.path, program.pid)
        assert check_signal(program.pid, program.path.with_suffix(".stack")) == ""
        program.go_on()
        assert program.wait() == "again"
        assert program.read() is None
        assert not is_mapped(program.path, program.pid)
        assert "no handler" in check_signal(program.pid, program.path.with_suffix(".stack"))
        program.go_on()
        assert program.finish() == (0, "", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_another_root_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    code = """
launcher.step()
os.chroot("root")
os.chdir("/")
launcher.step()
wait()
"""
    with start_program(code, tmp_path) as program:
        program.wait()
        assert program.read_now().step == 2
        assert is_mapped(program.path, program.pid)
        assert request_stacks(program.pid, program.path.with_suffix(".stack"), 20)


def test_stacks_come_while_c_code_holds_the_gil_and_sleeps_go_on(tmp_path: Path) -> None:
    code = """
import ctypes
getchar = ctypes.PyDLL(None).getchar
launcher.step()
def hold():
    print("ready", flush=True)
    getchar()
def rest():
    begin = time.monotonic()
    print("ready", flush=True)
    time.sleep(3)
    print(time.monotonic() - begin >= 3, flush=True)
rest()
hold()
"""
    with start_program(code, tmp_path) as program:
        path = program.path.with_suffix(".stack")
        for function in ("rest", "hold"):
            assert program.wait() == "ready"
            (stack,) = request_stacks(program.pid, path, 20)
            assert [frame.function for frame in stack.frames] == [function, "<module>"]
            if function == "rest":
                assert program.wait() == "True"
        program.go_on()
        assert program.finish() == (0, "", "")


LATE = """
import torch, torch.distributed as dist
wait()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=2)
"""


def test_a_rank_that_waits_for_the_others_answers(tmp_path: Path) -> None:
    """It ends of a signal as it would, and torch's server is not heard of."""
    with start_program(LATE, tmp_path, WORLD_SIZE="2") as program:
        program.wait()
        assert program.read_now().phase == "starting"
        server = program.path.with_suffix(".sock")
        assert not server.exists()
        program.go_on()
        while program.read_now().phase != "joining":
            assert program.process.poll() is None
        assert program.read_now().notes == ()
        assert post_handler(server, 60, "ping") == b"pong"
        program.process.send_signal(signal.SIGTERM)
        assert program.finish() == (-signal.SIGTERM, "", "")
