"""Where a forked rank would not be as one by itself: the reason is told, and nothing is left behind."""

import os
import select
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from launcher.launch.warm import process as warm_process
from launcher.launch.warm.process import WarmProcess
from launcher.launch.warm.program import ExecNeededError, find_python_program, split_command
from tests.launch.warm_ranks import Ranks, find_refusal, open_ranks
from tests.seam import clean_environ

REFUSED_IMPORTS = {
    "missing": ("", "`import faulty` fails: ModuleNotFoundError: No module named 'faulty'"),
    "raises": ("raise OSError('no\\nlicense')", "`import faulty` fails: OSError: no license"),
    "exits": ("raise SystemExit(3)", "`import faulty` fails: SystemExit: 3"),
    "ends": (
        "import os\nprint('bye', flush=True)\nos.write(2, b'out of memory\\n')\nos._exit(4)",
        "(code 4): out of memory",
    ),
    "starts a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "the imports have started 1 more thread",
    ),
    "starts a process": (
        "import subprocess\nsubprocess.Popen(['sleep', '3'])",
        "the imports have started a process",
    ),
    "prints": ("print('hello')", "the imports have printed something"),
}


def open_with(folder: Path, code: str, **variables: str) -> AbstractContextManager[Ranks]:
    """Start a warm process that imports a module `faulty` with this code; without code there is none."""
    (folder / "modules").mkdir()
    if code:
        (folder / "modules" / "faulty.py").write_text(code)
    return open_ranks(folder, modules=["faulty"], PYTHONPATH=str(folder / "modules"), **variables)


@pytest.mark.parametrize(("code", "reason"), REFUSED_IMPORTS.values(), ids=REFUSED_IMPORTS)
def test_an_import_that_does_not_go_over_a_fork(tmp_path: Path, code: str, reason: str) -> None:
    with open_with(tmp_path, code) as ranks:
        assert reason in find_refusal(ranks)
        assert reason in find_refusal(ranks)


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


def test_variables_that_an_import_has_set(tmp_path: Path) -> None:
    text = "import os\nos.environ['SET'] = '1'\nos.environ.pop('GONE')\n"
    with open_with(tmp_path, text, GONE="1") as ranks:
        code = "import os\nprint(os.environ.get('SET'), os.environ.get('GONE'))"
        for _ in range(2):
            ended = ranks.fork(code, NCCL_ALGO="1")
            assert (ended.out, ended.err) == ("1 None\n", "")


def test_the_warm_process_is_killed(tmp_path: Path) -> None:
    with open_ranks(tmp_path, modules=["json"]) as ranks:
        waiting = tmp_path / "waiting"
        os.mkfifo(waiting)
        ranks.write(f"open({str(waiting)!r}).read()\nprint('on')")
        pid = ranks.begin_fork()
        os.kill(ranks.warm.process.pid, signal.SIGKILL)
        assert find_refusal(ranks) == "the warm process has ended (signal 9)"
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


COMMANDS = {
    "-I": "the interpreter has the option -I",
    "-i": "the interpreter has the option -i",
    "-Ximporttime": "the interpreter has the option -Ximporttime",
    "--version": "the interpreter has the option --version",
    "-": "the program comes from stdin",
    "-m": "the interpreter has the option -m",
}


@pytest.mark.parametrize(("option", "reason"), COMMANDS.items(), ids=COMMANDS)
def test_options_of_the_interpreter(option: str, reason: str) -> None:
    with pytest.raises(ExecNeededError) as caught:
        split_command([sys.executable, "-u", option])
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["sh", "-c", "python x.py"], "sh is no Python program"),
        (["/usr/bin/python9", "x.py"], "/usr/bin/python9 is another interpreter than"),
        (["env", "A=1", sys.executable, "x.py"], "env is no Python program"),
        (["no-such-program"], "no-such-program is no Python program"),
    ],
    ids=str,
)
def test_programs_of_other_kinds(argv: list[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ExecNeededError) as caught:
        WarmProcess.start(argv, clean_environ(), (), tmp_path)
    assert str(caught.value).startswith(reason)


def test_another_environment_with_the_same_interpreter(tmp_path: Path) -> None:
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to(sys.executable)
    with pytest.raises(ExecNeededError, match="another interpreter"):
        find_python_program([str(other), "x.py"], clean_environ())
