"""Programs and surroundings that could trip the hook: what they print and how they end is as without it."""

import os
import shutil
import signal
import subprocess
import sys
import zipapp
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.inprocess.hooked import FOLDER, QUICK, ROOT, STEPS, run_program
from tests.rank.start_shim import run_shim, write_plan
from tests.seam import clean_environ

TELL = """
import os, sys
print(__name__, globals().get("__file__"), sys.argv, sys.orig_argv if hasattr(sys, "orig_argv") else "")
print(sys.path, os.environ.get("PYTHONPATH"), "sitecustomize" in sys.modules, sys.flags)
def fail():
    raise KeyError("as it is")
fail()
"""
VERSIONS = ("3.9", "3.10", "3.12", "3.13", "3.14")


def assert_same(words: Sequence[str], cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Assert that a command line does the same with the hook and without it; return how it ended."""
    without, done = run_program(words, cwd, None, **variables), run_program(words, cwd, **variables)
    assert (done.stdout, done.stderr) == (without.stdout, without.stderr)
    assert done.returncode == without.returncode
    return done


def test_ways_to_start_a_program(tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    for name in ("program.py", "launcher.py", "launcher/__main__.py"):
        (tmp_path / name).write_text(TELL)
    (tmp_path / "launcher" / "__init__.py").write_text("")
    zipapp.create_archive(tmp_path / "launcher", tmp_path / "app.pyz")
    ways = (["program.py"], ["launcher.py"], ["launcher/__main__.py"], ["-m", "launcher", "word"])
    for words in (*ways, ["-c", TELL, "-I"], ["app.pyz"]):
        done = assert_same([sys.executable, *words], tmp_path)
        assert (done.returncode, "KeyError: 'as it is'" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("import no_such_module", "no_such_module"),
        ("syntax error", "SyntaxError"),
        ("import os; print('mine', os.environ.get('PYTHONPATH'))", ""),
        ("import gc; gc.disable()", ""),
    ],
)
def test_the_users_own_sitecustomize(own: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(own)
    code = (
        "import gc, sys; print(gc.isenabled(), getattr(sys.modules.get('sitecustomize'), '__file__', None))"
    )
    done = assert_same([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(tmp_path / "own"))
    assert says in done.stderr


def test_a_sitecustomize_that_raises_does_not_drop_the_policy(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('boom')")
    code = f"{STEPS}\nprint([n for n in range(1, 6) if collect()])"
    done = run_program([sys.executable, "-c", code], tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout == "[3, 5]\n"


def test_a_virtual_environments_own_sitecustomize(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "sitecustomize.py").write_text("print('of the environment')")
    done = assert_same([str(tmp_path / "venv/bin/python"), "-c", TELL], tmp_path)
    assert done.stdout.startswith("of the environment\n")


@pytest.mark.parametrize(
    "entries", ["", ":", "relative", ":/a:", b"/\xff\xfe", "/a:FOLDER:/b", "FOLDER:FOLDER"]
)
def test_odd_entries_of_pythonpath(entries: "str | bytes", tmp_path: Path) -> None:
    text = os.fsdecode(entries)
    code = "import os, sys; print(ascii((sys.path, os.environ.get('PYTHONPATH') or None)))"
    words = [sys.executable, "-c", code]
    plan = str(write_plan(tmp_path, "0"))

    def run(path: str, policy: str) -> str:
        done = run_shim(*words, LAUNCH_PLAN=plan, LAUNCH_GC=policy, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    without = ":".join(entry for entry in text.split(":") if entry != "FOLDER")
    assert run(text.replace("FOLDER", str(FOLDER)), QUICK) == run(without, "default")


@pytest.mark.parametrize("deed", ["sys.meta_path.clear()", "del sys.meta_path", "sys.meta_path = None"])
def test_a_program_without_finders(deed: str, tmp_path: Path) -> None:
    code = f"import sys; {deed}\ntry:\n    import csv\nexcept BaseException as error:\n    print(repr(error))"
    done = assert_same([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0 and "Error" in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_other_versions_of_python(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('mine')")
    assert_same([python, "-W", "error", "-c", TELL], tmp_path, PYTHONPATH=str(tmp_path / "own"))
    code = """
import gc, sys
collect = sys.modules["launch_inprocess.garbage_collection"].end_step
node = [[]]
node.append(node)
oldest = gc.get_threshold()[2]
live = [[] for _ in range(50 * gc.get_threshold()[0] * gc.get_threshold()[1])]
seen = [n for n in range(1, 12) if collect()]
print(seen, gc.get_freeze_count() > 1000, gc.collect() >= 0, gc.get_threshold()[2] > oldest)
"""
    done = run_program([python, "-W", "error", "-c", code], tmp_path)
    assert (done.stdout, done.stderr) == ("[3, 5, 10] True True True\n", "")


def find_python(version: str) -> "str | None":
    """An interpreter that runs: a shim of pyenv's may be for a version that is not chosen."""
    folders = os.environ["PATH"].split(os.pathsep)
    folders += [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin")]
    for folder in folders:
        path = shutil.which(f"python{version}", path=folder)
        if path and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode:
            return path
    return None


HANDLERS = (
    ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7),
    ("signal.signal(signal.SIGTERM, lambda *_: json.loads('}'))", 1),
    ("def handle(*_):\n    raise TimeoutError('stop')\nsignal.signal(signal.SIGTERM, handle)", 1),
    ("pass", -signal.SIGTERM),
)


@pytest.mark.parametrize(
    ("handler", "policy", "call"),
    [
        (0, "disabled,every=1", "collect()"),
        (0, QUICK, "gc.collect()"),
        (1, QUICK, "collect(now=True)"),
        (2, "disabled,every=1", "collect()"),
        (2, QUICK, "gc.collect()"),
        (3, QUICK, "collect(now=True)"),
    ],
)
def test_a_signal_in_a_collection(handler: int, policy: str, call: str, tmp_path: Path) -> None:
    """Nearly all of the program's time is spent in collections; its handler runs, and ends it."""
    action, expected = HANDLERS[handler]
    code = f"{STEPS}\nimport signal\n{action}\nlive = [[] for _ in range(500_000)]\n"
    code += f"collect(), collect(), collect()\nprint('now', flush=True)\nwhile True:\n    {call}\n"
    environ = {**clean_environ(), "LAUNCH_GC": policy, "PYTHONPATH": f"{FOLDER}:{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        assert program.stdout.readline() == "now\n"
        program.send_signal(signal.SIGTERM)
        try:
            code_found = program.wait(timeout=60)
        finally:
            program.kill()
        said = program.stderr.read()
    assert code_found == expected, said
    assert "Exception ignored" not in said
    assert ("Traceback" in said) == (code_found == 1)
