"""What others have planted where a rank reads and writes: the program runs, and nothing of theirs counts."""

import os
from pathlib import Path

import pytest

from tests.rank.start_shim import ALLOWED, ECHO, assert_ran, run_shim, write_plan
from tests.strangers import give_away


def test_a_plan_of_another_user_is_not_heard(tmp_path: Path) -> None:
    """The variables in it would be the program's: LD_PRELOAD, PYTHONPATH."""
    plan = write_plan(tmp_path, str(ALLOWED[0]), env={"LD_PRELOAD": "/planted.so"})
    give_away(plan)
    done = run_shim("sh", "-c", 'echo "ran$LD_PRELOAD"', LAUNCH_PLAN=str(plan))
    assert_ran(done, "it belongs to")
    assert run_shim(*ECHO, LAUNCH_PLAN=str(plan), LAUNCH_STRICT="1").returncode == 3


@pytest.mark.parametrize("link", ["logs", "logs/0", "logs/0/rank-0.out"])
def test_logs_do_not_go_where_links_lead(tmp_path: Path, link: str) -> None:
    away = tmp_path / "away"
    away.touch() if link.endswith("out") else away.mkdir()
    path = tmp_path / "run" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(away)
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    done = run_shim(*ECHO, LAUNCH_PLAN=str(plan), LAUNCH_RECORD_DIR=str(tmp_path / "run"))
    assert_ran(done, "rank 0 has no log files", lines=2)
    assert not away.stat().st_size if away.is_file() else not list(away.iterdir())
    assert (tmp_path / "run/rank-0.applied.json").is_file()


def test_a_run_directory_of_another_user_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    give_away(tmp_path / "run")
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    done = run_shim(*ECHO, LAUNCH_PLAN=str(plan), LAUNCH_RECORD_DIR=str(tmp_path / "run"))
    assert_ran(done, "it belongs to", lines=3)
    assert not list((tmp_path / "run").iterdir())


def test_a_log_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "logs/0").mkdir(parents=True)
    os.mkfifo(tmp_path / "logs/0/rank-0.out")
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    done = run_shim(*ECHO, LAUNCH_PLAN=str(plan), LAUNCH_RECORD_DIR=str(tmp_path))
    assert_ran(done, "rank 0 has no log files", lines=2)


def test_logs_block_as_files_do(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    code = "import os; print(os.get_blocking(1), os.get_blocking(2))"
    done = run_shim("python3", "-c", code, LAUNCH_PLAN=str(plan), LAUNCH_RECORD_DIR=str(tmp_path))
    assert done.returncode == 0
    assert (tmp_path / "logs/0/rank-0.out").read_text() == "True True\n"
