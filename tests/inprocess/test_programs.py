"""Programs in ranks with the hook: they start, run and end as without it, and so does what they start."""

import gc
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipapp
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import launcher
from tests.inprocess.hooked import FOLDER, PROGRAMS, QUICK, ROOT, run_code, run_program
from tests.rank.start_shim import run_shim, write_plan
from tests.seam import PATIENCE, clean_environ, find_run, start

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
        (tmp_path / name).write_text(PROGRAMS["tell"])
    (tmp_path / "launcher" / "__init__.py").write_text("")
    zipapp.create_archive(tmp_path / "launcher", tmp_path / "app.pyz")
    ways = (["program.py"], ["launcher.py"], ["launcher/__main__.py"], ["-m", "launcher", "word"])
    for words in (*ways, ["-c", PROGRAMS["tell"], "-I"], ["app.pyz"]):
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
    code = f"{PROGRAMS['steps']}\nprint([n for n in range(1, 6) if collect()])"
    done = run_program([sys.executable, "-c", code], tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout == "[3, 5]\n"


def test_a_virtual_environments_own_sitecustomize(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "sitecustomize.py").write_text("print('of the environment')")
    done = assert_same([str(tmp_path / "venv/bin/python"), "-c", PROGRAMS["tell"]], tmp_path)
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
    assert_same([python, "-W", "error", "-c", PROGRAMS["tell"]], tmp_path, PYTHONPATH=str(tmp_path / "own"))
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


@pytest.mark.slow
def test_children_are_as_without_us(tmp_path: Path) -> None:
    """What a child is to find is told by an interpreter that has nothing of ours."""
    child = f"{PROGRAMS['look']}\nprint(json.dumps(look()))"
    code = f"{PROGRAMS['look']}\nTELL = {child!r}\n{PROGRAMS['children']}"
    without, found = run_code(child, tmp_path, None), run_code(code, tmp_path)
    assert isinstance(found, list)
    children, child_hooked, own, own_hooked = found
    assert children == dict.fromkeys(
        ["fork", "forked", "loader fork", "loader spawn", "spawn", "python"], without
    )
    assert not child_hooked, "nothing of ours is loaded in what is started again"
    assert own[2] > 1000 and own_hooked, "the rank itself has the policy"


@pytest.mark.slow
def test_ranks_on_one_core_end_after_their_last_collective(tmp_path: Path) -> None:
    """Without gloo's threads being waited for, one cycle in five never ends, or aborts at the end."""
    (tmp_path / "program.py").write_text(PROGRAMS["gloo"])
    words = ["nproc_per_node=2", "watch.enabled=false", "gc=default", "--", "program.py"]
    with start(tmp_path, *words) as started:
        assert started.wait(240) == 0, started.read()
    folder = find_run(tmp_path) / "logs" / "0"
    for rank in range(2):
        assert (folder / f"rank-{rank}.out").read_text() == "done\n"
        assert "terminate called" not in (folder / f"rank-{rank}.err").read_text()


QUIETED = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "LAUNCH_LOADER_DEFAULT": "1",
    "LAUNCH_NUM_WORKERS": "2",
}
FRAMEWORKS = tomllib.loads((Path(__file__).parents[1] / "data" / "frameworks.toml").read_text())["program"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FRAMEWORKS, ids=lambda case: case["package"])
def test_a_frameworks_steps_are_counted_and_its_loaders_have_their_workers(
    case: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip(case["package"], reason=f"{case['package']} is not installed")
    (tmp_path / "program.py").write_text(case["code"])
    done = run_program(
        [sys.executable, "program.py"], tmp_path, "synchronized,warmup=3,every=5,log", **QUIETED
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == [f"12 {case['workers']}"], done.stdout
    assert re.findall(r"^launch: rank 0: step (\d+): ", done.stderr, re.MULTILINE) == ["3", "5", "10"]


PACKAGE = Path(launcher.__file__).parent


def test_outside_of_launch_and_with_odd_variables_everything_has_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LAUNCH_NUM_WORKERS", "LAUNCH_RANK_PLAN", "LAUNCH_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert launcher.num_workers() == 2
    assert launcher.num_workers(5) == launcher.num_workers(default=5) == 5
    assert launcher.rank_plan() is None
    assert launcher.run_dir() is None
    assert (launcher.collect(), launcher.collect(now=True), gc.isenabled()) == (False, False, True)
    for text, number in {"0": 0, "12": 12, "": 7, "-1": 7, "many": 7, "²": 7}.items():
        monkeypatch.setenv("LAUNCH_NUM_WORKERS", text)
        assert launcher.num_workers(7) == number, text
    for text in ("", "{", "[]", "3"):
        monkeypatch.setenv("LAUNCH_RANK_PLAN", text)
        assert launcher.rank_plan() is None, text


def test_the_package_is_as_cheap_as_it_was_and_typed() -> None:
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); before = set(sys.modules)\n"
    code += "import launcher; print(sorted(set(sys.modules) - before - {'os', 'posixpath', 'stat'}))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == "['launcher']\n"
    assert (PACKAGE / "py.typed").is_file()
