"""Bad plans, ranks and settings: a warning, and the program runs as it would have without the shim."""

import os
from pathlib import Path

import pytest

from tests.rank.start_shim import ALLOWED, ECHO, assert_ran, run_shim, write_plan
from tests.seam import drop_powers


def test_a_plan_file_that_is_a_directory(tmp_path: Path) -> None:
    assert_ran(run_shim(*ECHO, LAUNCH_PLAN=str(tmp_path)), "no regular file")


def test_a_plan_file_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan")
    assert_ran(run_shim(*ECHO, LAUNCH_PLAN=str(tmp_path / "plan")), "no regular file")


def test_a_plan_file_that_never_ends() -> None:
    assert_ran(run_shim(*ECHO, LAUNCH_PLAN="/dev/zero"), "no regular file")


def test_a_plan_file_of_a_gigabyte(tmp_path: Path) -> None:
    with (tmp_path / "plan").open("wb") as file:
        file.truncate(1 << 30)
    assert_ran(run_shim(*ECHO, LAUNCH_PLAN=str(tmp_path / "plan")), "more than 64 MiB")


def test_a_plan_file_that_cannot_be_read(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "0")
    plan.chmod(0)
    assert_ran(run_shim(*ECHO, LAUNCH_PLAN=str(plan), preexec=drop_powers), "Permission denied")


def test_a_plan_file_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    whole = write_plan(tmp_path, str(ALLOWED[0])).read_bytes()
    for length in range(0, len(whole), 29):
        (tmp_path / "cut").write_bytes(whole[:length])
        assert_ran(run_shim(*ECHO, LAUNCH_PLAN=str(tmp_path / "cut")), "cannot be read")


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"[" * 100_000, b'{"ranks": ' * 50_000, b"\0" * 99],
    ids=("utf", "deep", "deeper", "nul"),
)
def test_a_plan_file_of_garbage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan").write_bytes(content)
    assert_ran(run_shim(*ECHO, LAUNCH_PLAN=str(tmp_path / "plan")), "cannot be read")


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A": "x\0y"}, {"A\0": "x"}], ids=repr)
def test_a_plan_with_variables_that_no_program_can_have(tmp_path: Path, env: dict[str, str]) -> None:
    assert_ran(
        run_shim(*ECHO, LAUNCH_PLAN=str(write_plan(tmp_path, "0", env=env))), "no environment can hold"
    )


def test_a_plan_of_another_machine(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "2000-2007", nodes="900")
    done = run_shim(*ECHO, LAUNCH_PLAN=str(plan))
    assert_ran(done, "CPUs 2000-2007 were refused", lines=3)
    assert "memory policy preferred of node 900 was refused" in done.stderr


def test_a_plan_without_cpus_or_with_an_unknown_policy(tmp_path: Path) -> None:
    memory = {"policy": "nearest", "nodes": "0"}
    done = run_shim(*ECHO, LAUNCH_PLAN=str(write_plan(tmp_path, "", memory=memory)))
    assert_ran(done, "CPUs (none) were refused", lines=3)
    assert "memory policy nearest of node 0 was refused" in done.stderr


@pytest.mark.parametrize("text", ["-1", "99", "abc", "", "1.0", " 1", "\N{SUPERSCRIPT TWO}", "9" * 5000])
@pytest.mark.parametrize("size", ["2", "-1", "abc", ""])
def test_a_local_rank_of_any_kind(text: str, size: str) -> None:
    done = run_shim(*ECHO, LOCAL_RANK=text, LOCAL_WORLD_SIZE=size)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.startswith("launch-rank: ")
    assert "Traceback" not in done.stderr
    if text == "99" and size == "2":
        assert "the plan made here has 2 ranks, none of them local rank 99" in done.stderr


@pytest.mark.parametrize("binding", ["fast", "NUMA", "numa "])
def test_an_unknown_policy(binding: str) -> None:
    assert_ran(
        run_shim(*ECHO, LAUNCH_BINDING=binding), f"binding={binding} is unknown: use one of exclusive, numa"
    )
    assert run_shim(*ECHO, LAUNCH_BINDING=binding, LAUNCH_STRICT="1").returncode == 3


def test_a_failure_leaves_a_number_where_the_program_wants_one(tmp_path: Path) -> None:
    words = ("echo", "{num_workers}", "--n={num_workers}")
    assert run_shim(*words, LAUNCH_PLAN=str(tmp_path)).stdout == "2 --n=2\n"
    assert run_shim(*words, LAUNCH_PLAN=str(tmp_path), LAUNCH_NUM_WORKERS="7").stdout == "7 --n=7\n"


def test_what_is_not_a_program(tmp_path: Path) -> None:
    done = run_shim("--local_rank=3", "python", "train.py")
    assert done.returncode == 2
    assert "give deepspeed --no_local_rank" in done.stderr
    assert run_shim("-x").returncode == 2
    assert run_shim().returncode == 2


def test_the_line_is_one_line_and_short(tmp_path: Path) -> None:
    env = {"A": "x" * 5000, "B": "two\nlines\x1b[31m", "C": "0"}
    gpu = {"index": 3, "uuid": "GPU-" + "a" * 36, "pci": "0000:47:00.0"}
    done = run_shim(*ECHO, LAUNCH_PLAN=str(write_plan(tmp_path, str(ALLOWED[0]), env=env, gpu=gpu)))
    assert_ran(done, ", gpu 3 0000:47:00.0, workers 3, A=xxx")
    assert "B=two\\nlines\\x1b[31m, C=0\n" in done.stderr
    assert len(done.stderr) < 250
