"""Starts of ranks that go wrong, or are interrupted: it is told, and nothing is left; and read-ahead."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.launch.warm.read_ahead import read_ahead
from tests.seam import Started, clean_environ, find_processes, start, wait_for, write_script

DIRECT = ("agent=direct", "nproc_per_node=2", "logs.console=none")
PROGRAM = """
import os, pathlib, sys, time
def use():
    import torch
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def is_forked():
    "Tell whether torch was there before this program asked for it."
    return "torch" in sys.modules
def tell(word):
    path = pathlib.Path(f"{word}-{rank}")
    path.with_suffix(".draft").write_text(f"{start} {is_forked()}")
    path.with_suffix(".draft").rename(path)
def await_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""
"""Begin of a program that may import torch, as far as its text tells, and does not."""
QUICK_TORCH = """
import random, types
version, default_generator = types.SimpleNamespace(cuda=None, hip=None), random.Random()
def set_num_threads(number): ...
"""
"""What a fork needs of torch."""


@contextlib.contextmanager
def start_job(folder: Path, code: str, *settings: str, **variables: str) -> Iterator[Started]:
    """Start two ranks of a program; whatever comes of it, no process and no temporary file is left.

    Torch is one that is imported at once, as are all modules in `site`.
    """
    (folder / "program.py").write_text(PROGRAM + code)
    temporary, site = folder / "temporary", folder / "site"
    temporary.mkdir()
    site.mkdir(exist_ok=True)
    (site / "torch.py").write_text(QUICK_TORCH)
    variables = {"TMPDIR": str(temporary), "PYTHONPATH": str(site), **variables}
    with start(folder, *DIRECT, *settings, "--", "program.py", **variables) as started:
        yield started
        assert started.process.poll() is not None
        wait_for(
            lambda: not started.survivors(), "the end of all", 10, lambda: str(started.survivors_words())
        )
    assert not list(temporary.iterdir())


@contextlib.contextmanager
def start_importing(folder: Path) -> Iterator[Started]:
    """Start two ranks whose warm process is at an import that does not end."""
    (folder / "site").mkdir()
    (folder / "site/slow.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(60)")
    with start_job(folder, "tell('ran')", "start.preload=[slow]") as started:
        wait_for((folder / "importing").exists, "the import", tell=started.read)
        yield started


def read_words(folder: Path, word: str) -> list[str]:
    """What the ranks have told."""
    return [(folder / f"{word}-{rank}").read_text() for rank in range(2)]


def find_warm(started: Started) -> list[int]:
    """The PID of a start's warm process."""
    return [pid for pid in find_processes(started.mark) if "launch-warm" in read_output(pid)]


def read_output(pid: int) -> str:
    """Return the name of what a process prints to."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    return ""


def test_a_preload_that_cannot_be_leaves_ranks_that_are_executed(tmp_path: Path) -> None:
    with start_job(tmp_path, "tell('ran')", "start.preload=[odd]") as started:
        assert started.wait() == 0, started.read()
        assert started.read().count("not forked from a process with torch") == 1, started.read()
        assert "No module named" in started.read()
    assert read_words(tmp_path, "ran") == ["0 False"] * 2


def test_a_program_that_cannot_be_forked_though_it_is_to_be_is_told_of(tmp_path: Path) -> None:
    write_script(tmp_path / "program.sh", ": > ran-$RANK")
    with start(tmp_path, *DIRECT, "start.preload=[json]", "--", "./program.sh") as started:
        assert started.wait() == 0, started.read()
        line = "not forked from a process with torch: ./program.sh is no Python program"
        assert started.read().count(line) == 1, started.read()
    assert {path.name for path in tmp_path.glob("ran-*")} == {"ran-0", "ran-1"}


def test_a_sitecustomize_of_the_users_runs_in_each_rank_and_may_start_threads(tmp_path: Path) -> None:
    """It is for the rank, with the rank's variables; the interpreter's start is over once it has run."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, threading, time\nos.environ['SEEN'] = os.environ.get('RANK', 'none')\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    code = """
import threading
assert os.environ["SEEN"] == rank
assert threading.active_count() == 2
tell("ran")
"""
    with start_job(tmp_path, code) as started:
        assert started.wait() == 0, started.read()
    assert len(read_words(tmp_path, "ran")) == 2


def test_the_warm_process_is_killed_before_it_is_ready(tmp_path: Path) -> None:
    with start_importing(tmp_path) as started:
        (warm,) = find_warm(started)
        os.kill(warm, signal.SIGKILL)
        assert started.wait() == 0, started.read()
        assert "not forked from a process with torch: the warm process has ended (code -9)" in started.read()
    assert read_words(tmp_path, "ran") == ["0 False"] * 2


@pytest.mark.slow
def test_ranks_outlive_the_warm_process_and_are_executed_at_the_next_start(tmp_path: Path) -> None:
    code = """
tell(f"start-{start}")
if start == "0":
    await_file("killed")
    if rank == "1":
        sys.exit(9)
    time.sleep(60)
"""
    with start_job(tmp_path, code, "restarts=1", PYTHONPATH="") as started:  # the real torch
        for rank in range(2):
            wait_for((tmp_path / f"start-0-{rank}").exists, "the ranks", tell=started.read)
        (warm,) = find_warm(started)
        os.kill(warm, signal.SIGKILL)
        # A zombie that nobody reaps would hold up the reaping of all that comes after it.
        wait_for(lambda: not Path(f"/proc/{warm}").exists(), "its end")
        (tmp_path / "killed").touch()
        assert started.wait() == 0, started.read()
        assert started.read().count("not forked from a process with torch") == 1, started.read()
    assert read_words(tmp_path, "start-0") == ["0 True"] * 2
    assert read_words(tmp_path, "start-1") == ["1 False"] * 2


def test_a_start_after_a_change_runs_what_is_there_then(tmp_path: Path) -> None:
    """A rank changes its program."""
    code = """
tell(f"start-{start}")
if start == "0" and rank == "0":
    await_file("start-0-1")
    text = pathlib.Path("program.py").read_text()
    pathlib.Path("program.py").write_text(text.replace("tell(f\\"", "tell(f\\"new-"))
    sys.exit(9)
if start == "0":
    time.sleep(60)
"""
    with start_job(tmp_path, code, "restarts=1") as started:
        assert started.wait() == 0, started.read()
    names = sorted(path.name for path in tmp_path.glob("*-[01]-[01]"))
    assert names == ["new-start-1-0", "new-start-1-1", "start-0-0", "start-0-1"]


def interrupt(started: Started, number: int) -> None:
    started.process.send_signal(number)
    assert started.wait() == 128 + number, started.read()
    assert signal.Signals(number).name in started.read()


def test_a_signal_while_the_warm_process_imports_ends_the_start(tmp_path: Path) -> None:
    with start_importing(tmp_path) as started:
        interrupt(started, signal.SIGINT)
    assert not list(tmp_path.glob("ran-*"))


@pytest.mark.parametrize("phase", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_a_signal_ends_the_ranks_of_a_start_and_of_a_restart(phase: str, tmp_path: Path) -> None:
    code = f"""
tell(f"start-{{start}}")
if start == "{phase}":
    time.sleep(60)
await_file("start-0-0"), await_file("start-0-1")
sys.exit(9)
"""
    with start_job(tmp_path, code, "restarts=2") as started:
        for rank in range(2):
            wait_for((tmp_path / f"start-{phase}-{rank}").exists, "the ranks", tell=started.read)
        interrupt(started, signal.SIGTERM)
    assert read_words(tmp_path, f"start-{phase}") == [f"{phase} True"] * 2
    assert not (tmp_path / f"start-{int(phase) + 1}-0").exists()


LIBRARY = "torch/lib/libtorch_cpu.so"
BYTECODE = "torch/nn/__pycache__/module.cpython-311.pyc"
MIB = 1 << 20


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with files named as torch's, of which nothing is in the page cache."""
    for name, size in ((LIBRARY, 20 * MIB), (BYTECODE, 1 << 16)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(os.urandom(1 << 16) * (size >> 16))
        for _ in range(3):  # a page that another CPU has just touched stays
            drop(path)
        if is_cached(path, 0):
            pytest.skip("the kernel keeps what is written to this filesystem")
    (tmp_path / "uses.py").write_text("import torch\n")
    (tmp_path / "plain.py").write_text("print()\n")
    return tmp_path


def drop(path: Path) -> None:
    """Write a file to its disk, and have the kernel forget it."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path, offset: int) -> bool:
    """Ask by a read that does not wait."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def test_files_are_read_if_they_are_not_cached(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads what a look that does not wait has asked for, so each look comes last."""
    environ = {**clean_environ(), "PYTHONPATH": f"relative:{packages}"}
    library, bytecode = packages / LIBRARY, packages / BYTECODE

    def read(mode: str, name: str, python: str = sys.executable) -> None:
        before = {*threading.enumerate()}
        read_ahead(mode, (python, str(packages / name)), environ)
        wait_for(lambda: {*threading.enumerate()} <= before, "the end of reading")

    drop(library)
    read("off", "uses.py")
    read("auto", "plain.py")
    assert not is_cached(library, 15 * MIB)
    read("auto", "uses.py")
    assert all(is_cached(library, at) for at in (0, 9 * MIB, 20 * MIB - 1)) and is_cached(bytecode, 0)
    drop(bytecode)
    read("auto", "uses.py")  # the library is there
    assert not is_cached(bytecode, 0)
    drop(bytecode)
    read("on", "plain.py")
    assert is_cached(bytecode, 0)
    drop(library)
    with library.open("rb") as file:  # its first page is there, the rest is not
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(1)
    read("auto", "uses.py")
    assert is_cached(library, 20 * MIB - 1)
    (packages / "python").symlink_to(sys.executable)
    drop(library)
    read("auto", "uses.py", str(packages / "python"))  # of another environment
    assert not is_cached(library, 20 * MIB - 1)
    environ = clean_environ()
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])  # beside the usual places, as in containers
    drop(library)
    read("auto", "uses.py")
    assert is_cached(library, 20 * MIB - 1)
