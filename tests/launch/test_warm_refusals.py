"""Where a forked rank would not be as one by itself, as a program's text or the warm process tells."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from launcher.launch.warm import process as warm_process
from launcher.launch.warm.process import WarmProcess
from launcher.launch.warm.program import ExecNeededError, read_program
from tests.data_files import read_data
from tests.launch.warm_ranks import Ranks, find_refusal, open_ranks
from tests.seam import clean_environ

CASES = read_data("program_texts")


def open_with(folder: Path, code: str, **variables: str) -> AbstractContextManager[Ranks]:
    """Start a warm process that imports a module `faulty` with this code; without code there is none."""
    (folder / "modules").mkdir()
    if code:
        (folder / "modules" / "faulty.py").write_text(code)
    return open_ranks(folder, modules=["faulty"], PYTHONPATH=str(folder / "modules"), **variables)


@pytest.mark.parametrize("case", CASES["import"], ids=lambda case: str(case["name"]))
def test_an_import_that_does_not_go_over_a_fork(case: dict[str, str], tmp_path: Path) -> None:
    with open_with(tmp_path, case["code"]) as ranks:
        assert case["reason"] in find_refusal(ranks) and case["reason"] in find_refusal(ranks)


def test_an_import_that_has_started_a_gpus_runtime(tmp_path: Path) -> None:
    text = "import sys, types\nnative = types.SimpleNamespace(_cuda_isInBadFork=lambda: True)\n"
    text += "sys.modules['torch'] = types.SimpleNamespace(_C=native)\n"
    with open_with(tmp_path, text) as ranks:
        ended = ranks.fork("import sys\nprint('faulty' in sys.modules)")
    assert (ended.code, ended.out) == (0, "False\n")
    assert "the imports have started a GPU's runtime, which no fork can use" in ended.err


def test_a_sitecustomize_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    told = f"{tmp_path}/sitecustomize.py runs before the program, and may change what is imported"
    with open_ranks(tmp_path, modules=["json"], PYTHONPATH=str(tmp_path)) as ranks:
        assert find_refusal(ranks) == told


def test_the_warm_process_is_killed(tmp_path: Path) -> None:
    with open_ranks(tmp_path, modules=["json"]) as ranks:
        waiting = tmp_path / "waiting"
        os.mkfifo(waiting)
        ranks.write(f"open({str(waiting)!r}).read()\nprint('on')")
        pid = ranks.begin_fork()
        os.kill(ranks.warm.process.pid, signal.SIGKILL)
        assert find_refusal(ranks) == "the warm process has ended (code -9)"
        waiting.write_text("")
        assert ranks.collect(pid).out == "on\n"


def test_the_warm_process_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ranks(tmp_path, modules=["json"]) as ranks:
        assert ranks.fork("").code == 0
        os.kill(ranks.warm.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(warm_process, "FORK_TIMEOUT", 0.2)
        with pytest.raises(OSError, match="the warm process does not answer"):
            ranks.begin_fork()
        assert ranks.warm.process.returncode == -signal.SIGKILL
        assert find_refusal(ranks) == "the warm process does not answer"


@pytest.mark.parametrize("modules", ["json", "time\nimport sleeping"], ids=["serving", "importing"])
def test_it_ends_with_its_launcher(tmp_path: Path, modules: str) -> None:
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(60)")
    code = f"""
import os, sys, time
from launcher.launch.warm.process import WarmProcess
names = {["json"] if modules == "json" else ["sleeping"]!r}
environ = {{**os.environ, "PYTHONPATH": {str(tmp_path)!r}}}
warm = WarmProcess.start([sys.executable, "-c", "0"], environ, names)
print(warm.process.pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=clean_environ(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    pid = int(process.stdout.readline())
    descriptor = os.pidfd_open(pid)
    process.kill()
    process.communicate()
    assert select.select([descriptor], [], [], 20)[0]
    os.close(descriptor)


REFUSED = {
    "python -u -I": "the interpreter has the option -I",
    "python -u -i": "the interpreter has the option -i",
    "python -Ximporttime": "the interpreter has the option -Ximporttime",
    "python --version": "the interpreter has the option --version",
    "python -u -": "the program comes from stdin",
    "python -m": "the interpreter has the option -m",
    "sh -c x.py": "sh is no Python program",
    "/usr/bin/python9 x.py": "/usr/bin/python9 is another interpreter than",
    "env A=1 python x.py": "env is no Python program",
    "no-such-program": "no-such-program is no Python program",
    "bin/python x.py": "bin/python is another interpreter than",
}


@pytest.mark.parametrize(("words", "reason"), REFUSED.items(), ids=REFUSED)
def test_command_lines_of_which_no_rank_is_forked(
    words: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another environment may have the same interpreter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    argv = [sys.executable if word == "python" else word for word in words.split()]
    with pytest.raises(ExecNeededError) as caught:
        WarmProcess.start(argv, clean_environ(), ())
    assert str(caught.value).startswith(reason)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(*words: str, to_the_end: bool = False, **environ: str) -> Any:
    found = read_program([sys.executable, *words], {**os.environ, **environ}, to_the_end=to_the_end)
    assert found
    return found


@pytest.mark.parametrize("case", CASES["program"], ids=lambda case: str(case["name"]))
def test_a_script_that_uses_torch(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case["torch"]
    write_files(tmp_path / "src", case["files"])
    monkeypatch.chdir(tmp_path)
    assert read("src/x.py", "--lr", "1").uses_torch is expected
    monkeypatch.chdir(tmp_path / "src")
    assert read("-m", "x").uses_torch is expected
    assert not {"src", "x"} & sys.modules.keys()


@pytest.mark.parametrize(("text", "reason"), CASES["before"].items())
def test_what_comes_before_torch(text: str, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x.py")
    for lines, is_before in ((f"{text}\nimport torch\n", True), (f"import torch\n{text}\n", False)):
        write_files(tmp_path, {"x.py": lines})
        found = read(path).obstacle
        assert reason in found if is_before and reason else not found
        assert bool(read(path, to_the_end=True).obstacle) is bool(reason)
    write_files(tmp_path, {"x.py": "import own\nimport torch\n", "own.py": f"{text}\n"})
    assert reason.replace("x.py", "own.py") in read(path).obstacle
    write_files(tmp_path, {"own.py": f"import torch\n{text}\n"})
    assert not read(path).obstacle


def test_folders_modules_and_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(
        tmp_path, {"app/__main__.py": "import z\n", "app/__init__.py": "", "lib/z.py": "import torch\n"}
    )
    path = f"{tmp_path / 'lib'}{os.pathsep}"
    assert read("app", PYTHONPATH=path).uses_torch and read("-m", "app", PYTHONPATH=path).uses_torch
    (tmp_path / "lib/z.py").write_text("import os\n")
    assert not read("app", PYTHONPATH=path).uses_torch and not read("-m", "app", PYTHONPATH=path).uses_torch
    assert read("-m", "installed_elsewhere").uses_torch and read("missing.py").uses_torch
    assert read("-c", "import torch").uses_torch and not read("-c", "import os").uses_torch
    assert read("-c", "exec('x')").obstacle == "-c:1 runs other code"


def test_what_is_no_python_program_or_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/sh\npython train.py\n")
    assert read_program(["sh", str(tmp_path / "train.sh")], dict(os.environ)) is None
    os.mkfifo(tmp_path / "x.py")
    assert read(str(tmp_path / "x.py")).uses_torch


def test_what_is_too_large_to_look_through_is_not_taken_for_harmless(tmp_path: Path) -> None:
    """Neither does the start wait for it."""
    line = "x = 1\n"
    large = line * ((2 << 20) // len(line))
    for size in (len(large) // 2, len(large)):
        own = {"x.py": "import own, two\nimport torch\n", "own.py": large[:size], "two.py": large[:size]}
        write_files(tmp_path, own)
        found = read(str(tmp_path / "x.py"))
        assert (
            found.uses_torch
            and found.obstacle == "its files cannot be read, or are too large to look through"
        )
    write_files(tmp_path, {"own.py": "import torch\n" + line * 9, "two.py": ""})
    assert read(str(tmp_path / "x.py")).obstacle == ""
