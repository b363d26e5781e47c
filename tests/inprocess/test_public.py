"""What `launcher` offers to programs: under `launch`, and where nothing of it is there."""

import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from tests.seam import clean_environ, run_outside

PACKAGE = Path(launcher.__file__).parent


def test_outside_of_launch_everything_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAUNCH_NUM_WORKERS", "LAUNCH_RANK_PLAN", "LAUNCH_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert launcher.num_workers() == 2
    assert launcher.num_workers(5) == launcher.num_workers(default=5) == 5
    assert launcher.rank_plan() is None
    assert launcher.run_dir() is None
    assert (launcher.collect(), launcher.collect(now=True)) == (False, False)


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("12", 12), ("", 7), ("-1", 7), ("many", 7), ("²", 7)]
)
def test_the_number_is_the_variables(monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> None:
    monkeypatch.setenv("LAUNCH_NUM_WORKERS", text)
    assert launcher.num_workers(7) == number


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_plan_that_is_none_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LAUNCH_RANK_PLAN", text)
    assert launcher.rank_plan() is None


def test_the_package_is_as_cheap_as_it_was_and_typed() -> None:
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); before = set(sys.modules)\n"
    code += "import launcher; print(sorted(set(sys.modules) - before - {'os', 'posixpath', 'stat'}))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "['launcher']\n"
    assert (PACKAGE / "py.typed").is_file()


HANDED = """
import json, os, sys
import launcher
from torch.utils.data import DataLoader
ways = [os.environ["LAUNCH_NUM_WORKERS"], sys.argv[1], launcher.num_workers(9)]
ways.append(DataLoader([1, 2]).num_workers)
print("WAYS", json.dumps([int(way) for way in ways]), flush=True)
print(sys.argv[2], os.environ["LAUNCH_RUN_DIR"], launcher.run_dir(), os.environ["LAUNCH_RUN_ID"], flush=True)
"""


@pytest.mark.usefixtures("quick_agent")
def test_the_number_and_the_run_directory_are_handed_over_in_all_ways(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HANDED)
    words = ["nproc_per_node=2", "dataloader.default=true", "dataloader=none", "env.LAUNCH_NUM_WORKERS=1"]
    words += ["--", str(program), "{num_workers}", "{run_dir}"]
    done = run_outside(words, tmp_path, timeout=240)
    assert done.code == 0, done.err
    logs = sorted((tmp_path / "runs").glob("*/*/logs/0/rank-*.out"))
    run = logs[0].parents[2]
    told = f"WAYS {[1] * 4}\n{run} {run} {run} {run.name}\n"
    assert [log.read_text() for log in logs] == [told] * 2
