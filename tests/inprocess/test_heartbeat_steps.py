"""Heartbeats of programs without torch, which mark their steps themselves, whatever they do to themselves."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.watch.evidence import STACK_SIGNAL, check_signal, request_stacks
from launcher.watch.procfs import catches_signal, has_open
from tests.inprocess.hooked import PYTHON
from tests.inprocess.watched import (
    BEGIN,
    is_mapped,
    list_heartbeats,
    make_watched_environ,
    run_to_end,
    start_program,
)

STEPS = """
for _ in range(5):
    launcher.step()
"""


def test_a_program_without_torch_and_steps_leaves_nothing(tmp_path: Path) -> None:
    code = """
import json
loaded = [name for name in ("mmap", "faulthandler", "ctypes", "signal", "torch") if name in before]
tasks = len(os.listdir("/proc/self/task"))
print(json.dumps([loaded, tasks, "LAUNCH_WATCH" in os.environ, os.listdir("beats")]))
"""
    before = "import sys; before = set(sys.modules)\n"
    beats = tmp_path / "beats"
    beats.mkdir()
    done = subprocess.run(
        [*PYTHON, "-c", before + BEGIN + code],
        cwd=tmp_path,
        env=make_watched_environ(beats),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[[], 1, false, []]\n", "")


def test_steps_that_are_marked_are_seen_and_the_end_too(tmp_path: Path) -> None:
    code = f"""
import atexit
atexit.register(wait)
{STEPS}
launcher.collect()  # without a policy, it is a step, and nothing is collected
wait()
"""
    with start_program(code, tmp_path) as program:
        before = time.time()
        program.wait()
        found = program.read_now()
        assert (found.rank, found.pid, found.phase, found.step) == (0, program.pid, "training", 6)
        assert len(found.durations) == 5
        assert before - 1 < found.step_time < time.time() + 1
        assert [beat.step for beat in list_heartbeats(tmp_path / "beats")] == [6]
        program.go_on()
        program.wait()
        assert program.read_now().phase == "ended"
        program.go_on()
        assert program.finish() == (0, "", "")
        assert program.path.exists() and program.read() is None, "its process has ended"


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = f"""
launcher.step()
if os.fork():
    os.wait()
    wait()
else:
    {STEPS.strip().replace("    ", "        ")}
    launcher.collect()
    sys.exit(0)
launcher.step()
wait()
"""
    with start_program(code, tmp_path) as program:
        program.wait()
        found = program.read_now()
        assert (found.pid, found.phase, found.step) == (program.pid, "training", 1)
        program.go_on()
        program.wait()
        assert program.read_now().step == 2
        program.go_on()
        assert program.finish() == (0, "", "")


def test_what_the_rank_starts_has_no_heartbeat(tmp_path: Path) -> None:
    inner = f"import launcher\n{STEPS}"
    code = f"""
import subprocess
launcher.step()
subprocess.run([sys.executable, "-c", {inner!r}], check=True)
pid = os.posix_spawn(sys.executable, [sys.executable, "-c", {inner!r}], os.environ)
assert os.waitpid(pid, 0)[1] == 0
wait()
"""
    with start_program(code, tmp_path) as program:
        program.wait()
        assert (program.read_now().pid, program.read_now().step) == (program.pid, 1)


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
        assert not catches_signal(program.pid, STACK_SIGNAL)
        program.go_on()
        assert program.finish() == (0, "", "")


def test_closed_descriptors_are_the_programs_own_from_then_on(tmp_path: Path) -> None:
    code = """
launcher.step()
os.closerange(3, 256)
files = [open(f"own-{number}", "w") for number in range(8)]
launcher.step()
wait()
for file in files:
    file.write("all of it")
sys.files = files  # they are written at the interpreter's end
"""
    with start_program(code, tmp_path, python=(sys.executable,)) as program:
        program.wait()
        assert program.read_now().step == 2
        assert not has_open(program.pid, program.path.with_suffix(".stack"))
        program.go_on()
        assert program.finish() == (0, "", "")
    assert {path.read_text() for path in tmp_path.glob("own-*")} == {"all of it"}


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


def test_without_room_there_is_no_heartbeat_and_no_harm(tmp_path: Path) -> None:
    """A limit on files is met where a full disk is: as the blocks are reserved."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
{STEPS}
print(os.listdir("beats"))
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    assert run_to_end(code, tmp_path) == "[]\n"


def test_folders_that_take_no_file_and_variables_of_no_rank_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    (tmp_path / "closed").symlink_to("/proc/self")
    folders = [{"LAUNCH_WATCH": str(tmp_path / name)} for name in ("none", "program.py", "closed")]
    for variables in (*folders, {"RANK": ""}, {"RANK": "x"}, {"LOCAL_RANK": "-"}):
        assert run_to_end(STEPS + "print(os.listdir('beats'))", tmp_path, **variables) == "[]\n"


def test_a_signal_that_the_program_takes_is_left_to_it(tmp_path: Path) -> None:
    code = """
def take(number):
    signal.signal(number, lambda *_: print("mine", flush=True))
if "EARLY" in os.environ:
    take(signal.SIGRTMIN + 8)
launcher.step()
wait()
take(signal.SIGRTMIN + 8)
launcher.step()
wait()
"""
    with start_program(code, tmp_path) as program:
        program.wait()
        assert program.read_now().can_dump
        program.go_on()
        program.wait()
        assert not program.read_now().can_dump
    with start_program(code, tmp_path, EARLY="1") as program:
        program.wait()
        found = program.read_now()
        assert not found.can_dump
        assert found.notes == (f"no stacks by signal {STACK_SIGNAL}, which the program handles",)
        os.kill(program.pid, STACK_SIGNAL)
        assert program.wait() == "mine"


def test_the_signal_does_no_harm_once_the_interpreter_has_taken_the_handler_back(tmp_path: Path) -> None:
    """As it does at its end, perhaps between the watcher's last look and the signal."""
    code = """
import faulthandler
launcher.step()
faulthandler.unregister(signal.SIGRTMIN + 8)
os.kill(os.getpid(), signal.SIGRTMIN + 8)
"""
    assert run_to_end(code, tmp_path) == ""


def test_stacks_come_while_c_code_holds_the_gil_and_sleeps_go_on(tmp_path: Path) -> None:
    code = """
import ctypes
launcher.step()
def hold():
    print("ready", flush=True)
    ctypes.PyDLL(None).getchar()
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


def test_a_later_program_of_the_rank_has_the_file(tmp_path: Path) -> None:
    """As a shell script's second program, or a restarted rank; but not one beside a program that steps."""
    run_to_end(STEPS, tmp_path)
    with start_program("launcher.step(); wait()", tmp_path) as program:
        program.wait()
        run_to_end(STEPS, tmp_path)
        assert (program.read_now().pid, program.read_now().step) == (program.pid, 1)


def test_what_cannot_be_set_up_is_told(tmp_path: Path) -> None:
    """A version of a library that is not as expected, and a file that cannot be made."""
    for package, text in (("safetensors.torch", "save_file = 3"), ("torchdata.stateful_dataloader", "")):
        parent, name = package.split(".")
        (tmp_path / parent / name).mkdir(parents=True)
        (tmp_path / parent / "__init__.py").touch()
        (tmp_path / parent / name / "__init__.py").write_text(text)
    (tmp_path / "torchdata" / "stateful_dataloader" / "stateful_dataloader.py").touch()
    (tmp_path / "beats").mkdir()
    (tmp_path / "beats" / "rank-0.stack").mkdir()
    code = """
launcher.step()
sys.path.insert(0, ".")
import safetensors.torch, torchdata.stateful_dataloader.stateful_dataloader
assert safetensors.torch.save_file == 3
wait()
"""
    with start_program(code, tmp_path) as program:
        program.wait()
        found = program.read_now()
        assert not found.can_dump
        first, second = found.notes
        assert first.startswith("no stacks by a signal: IsADirectoryError: ")
        assert "stateful_dataloader is not watched: AttributeError: " in second
