"""`launch tune`: real ranks, real workers, real allocations that fail."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from launcher.cli.tune import check_choice_file, describe_use, write_choice
from launcher.config.settings import Settings
from launcher.probe import limits
from tests.seam import LAUNCH, Launch, clean_environ, run_outside
from tests.tune.test_measured import ALONE, BATCHES, TRAINING, list_living


@pytest.mark.slow
@pytest.mark.usefixtures("quick_agent")
def test_two_ranks_are_tuned_and_later_runs_use_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = ["tune", "dataloader", "nproc_per_node=2", "tune.max_workers=3", "tune.steps=16", "format=json"]
    done = run_outside([*words, "--", "train.py"], tmp_path, timeout=300)
    assert done.code == 0, done
    result = json.loads(done.out)
    chosen = result["num_workers"]
    assert chosen in (2, 3) and result["complete"] and result["saved"] == "conf/dataloader/tuned.yaml"
    trials = {trial["value"]: trial for trial in result["trials"]}
    assert trials[0]["wait"] > 0.5
    assert trials[chosen]["rate"] > 1.5 * trials[0]["rate"]
    assert f"fastest with {chosen} workers" in done.err
    assert "conf/dataloader/tuned.yaml written: `launch dataloader=tuned -- train.py` uses it" in done.err
    assert list_living(tmp_path) == []
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert json.loads((run / "manifest.json").read_text())["outcome"] == {
        "state": "succeeded",
        "exit_code": 0,
    }
    plan = run_outside(["plan", "dataloader=tuned", "nproc_per_node=2", "format=json"], tmp_path)
    ranks = json.loads(plan.out)["ranks"]
    assert [rank["num_workers"] for rank in ranks] == [chosen] * 2
    assert {rank["env"]["LAUNCH_LOADER_DEFAULT"] for rank in ranks} == {"1"}
    for rank in (0, 1):  # ranks end together, without a word
        for trial in trials:
            err = (run / f"workers-{trial}/logs/0/rank-{rank}.err").read_text()
            assert "Traceback" not in err, err


@pytest.mark.slow
def test_ctrl_c_shows_what_was_measured_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = [
        "tune",
        "dataloader",
        "nproc_per_node=2",
        "tune.max_workers=3",
        "tune.steps=9999",
        "--",
        "train.py",
    ]
    with subprocess.Popen(
        [*LAUNCH, *words],
        cwd=tmp_path,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        said = []
        for line in process.stderr:
            said.append(line)
            if "steps/s" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (said, out, err)
    assert "interrupted, and no file is written: fastest with 0 workers" in err
    assert "waiting for data" in out and "chosen" in out
    assert not (tmp_path / "conf").exists()
    assert list_living(tmp_path) == []
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert json.loads((run / "manifest.json").read_text())["outcome"]["state"] == "stopped"


FAILING = "import sys\nprint('no such data', file=sys.stderr)\nsys.exit(7)\n"
WAITING = "import signal\nsignal.pause()\n"


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize(
    ("program", "words", "code", "parts"),
    [
        (ALONE, ["--", "a.py", "{'num_workers': 2}"], 2, ["error: the program sets num_workers=2 itself"]),
        (FAILING, ["--", "a.py"], 7, ["no such data", "exited with code 7"]),
        (WAITING, ["tune.timeout=3", "--", "a.py"], 2, ["not measured within tune.timeout=3 s"]),
    ],
    ids=["a fixed number", "a failure", "a program that takes too long"],
)
def test_what_cannot_be_tuned_is_told(
    tmp_path: Path, program: str, words: list[str], code: int, parts: list[str]
) -> None:
    (tmp_path / "a.py").write_text(program)
    done = run_outside(["tune", "dataloader", "nproc_per_node=1", *words], tmp_path)
    assert (done.code, done.out) == (code, "")
    assert all(part in done.err for part in parts) and "Traceback" not in done.err, done.err
    assert not (tmp_path / "conf").exists() and list_living(tmp_path) == []


def test_a_dry_run_starts_nothing(launch: Launch, here: Path) -> None:
    (here / "train.py").touch()
    done = launch("tune", "dataloader", "nproc_per_node=1", "dry_run=true", "--", "train.py")
    assert done.code == 0
    assert "would try 0 workers" in done.out and "would write conf/dataloader/tuned.yaml" in done.out
    assert "LAUNCH_NUM_WORKERS=0" in done.out and done.out.endswith("train.py\n")
    assert not (here / "runs").exists()


def test_a_file_of_the_user_s_is_kept(launch: Launch, here: Path) -> None:
    (here / "conf/dataloader").mkdir(parents=True)
    (here / "conf/dataloader/tuned.yaml").write_text("num_workers: 7\n")
    launch("tune", "dataloader").assert_error(2, "conf/dataloader/tuned.yaml", "yes=true")
    assert launch("tune", "dataloader", "yes=true", "dry_run=true").code == 0
    assert launch("tune", "dataloader", "save=conf/dataloader/other.yaml", "dry_run=true").code == 0


def test_the_file_is_an_option_and_is_replaced(launch: Launch, here: Path) -> None:
    where, target = (
        "train.py --a 'b\nnum_workers: 99\rnum_workers: 98', 2 ranks",
        "conf/dataloader/tuned.yaml",
    )
    rows = [("workers", "steps/s"), ("5", "4")]
    write_choice(target, rows, where, 5, Settings())
    check_choice_file(target, replaces=False)
    assert "train.py" in (here / target).read_text()
    plan = launch("plan", "dataloader=tuned", "format=json", "nproc_per_node=1")
    assert json.loads(plan.out)["ranks"][0]["num_workers"] == 5
    assert "`launch dataloader=x -- a.py`" in describe_use("conf/dataloader/x.yaml", " -- a.py")
    assert "put it into conf/dataloader/" in describe_use("x.txt", " -- a.py")


WORDS = ["tune", "batch", "tune.option=--batch-size", "tune.steps=12"]


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.slow
def test_the_largest_and_the_fastest_are_found_on_two_ranks(tmp_path: Path) -> None:
    """8 MiB a sequence: 16 fit into 230 MiB, and 32 do not; 8 take as long as 16."""
    (tmp_path / "train.py").write_text(BATCHES)
    program = ["--", "train.py", "--batch-size", "16", "--knee", "16", "--limit-mib", "230", "--catch"]
    done = run_outside([*WORDS, "nproc_per_node=2", "format=json", *program], tmp_path, timeout=300)
    assert done.code == 0, done
    result = json.loads(done.out)
    verdicts = {trial["value"]: trial["verdict"] for trial in result["trials"]}
    assert (verdicts[16], verdicts[32]) == ("fits", "does_not_fit")
    assert result["complete"] and result["largest_is_limit"] and result["saved"] is None
    assert result["largest"] in (16, 24) and result["largest_with_margin"] in (12, 16, 24)
    assert result["fastest"] in (12, 16, 24)
    assert result["argument"] == f"--batch-size {result['batch']}"
    by_size = {trial["value"]: trial for trial in result["trials"]}
    assert by_size[16]["memory_kib"] > 2 * 16 * 8 * 1024
    assert 0 < by_size[16]["rate"] < 2 * 16 / 0.05
    assert "can't allocate memory" in by_size[32]["reason"]
    words = f"train.py --batch-size {result['batch']} --knee 16 --limit-mib 230 --catch"
    assert f"use {result['batch']}: `launch nproc_per_node=2 -- {words}`" in done.err
    assert list_living(tmp_path) == []
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert json.loads((run / "tuning.json").read_text()) == result


@pytest.mark.usefixtures("quick_agent")
def test_a_failed_allocation_is_no_other_failure(tmp_path: Path) -> None:
    """Without a catch: the rank fails. Nothing fits, not even one sequence."""
    (tmp_path / "train.py").write_text(BATCHES)
    program = ["--", "train.py", "--batch-size=1", "--limit-mib=1"]
    done = run_outside([*WORDS, "nproc_per_node=1", *program], tmp_path)
    assert done.code == 3, done
    assert "error: --batch-size 1 does not fit (" in done.err and "can't allocate memory" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["tune.option=--batchsize", "--", "train.py"], 2, "unrecognized arguments: --batchsize 8"),
        (["--", "train.py", "--batch-size", "3", "--divides", "8"], 1, "AssertionError: the batch must"),
    ],
)
def test_another_failure_is_shown_with_its_last_lines(
    words: list[str], code: int, part: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(BATCHES)
    done = run_outside(["tune", "batch", "nproc_per_node=1", *words], tmp_path)
    assert (done.code, done.out) == (code, "")
    assert part in done.err and f"it exited with code {code}" in done.err
    assert "does not fit" not in done.err
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert json.loads((run / "manifest.json").read_text())["outcome"]["state"] == "failed"


@pytest.mark.usefixtures("quick_agent")
def test_a_trial_is_ended_before_the_machine_swaps(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all of the machine's memory had to stay free."""
    monkeypatch.setattr(limits, "LEAST_FREE", 2.0)
    monkeypatch.setattr(limits, "LEAST_FREE_KIB", 1 << 60)
    (here / "wait.py").write_text(WAITING)
    done = launch(*WORDS, "nproc_per_node=1", "--", "wait.py", "--batch-size", "1")
    assert done.code == 3
    assert "error: --batch-size 1 does not fit (the machine's memory ran out, so it was ended)" in done.err
    assert list_living(here) == [f"/proc/{os.getpid()}/cwd"]


def test_a_dry_run_of_batches_starts_nothing(launch: Launch, here: Path) -> None:
    (here / "train.py").touch()
    done = launch(*WORDS, "nproc_per_node=1", "dry_run=true", "--", "train.py")
    assert done.code == 0
    assert "would try --batch-size 8, then twice as much" in done.out
    assert done.out.endswith("train.py --batch-size 8\n")
    bundled = launch("tune", "batch", "nproc_per_node=1", "dry_run=true")
    assert "would try program.batch_size=8" in bundled.out and "--batch-size=8" in bundled.out
    launch("tune", "batch", "save=conf/program/x.yaml").assert_error(2, "writes no file")
    hydra = launch("tune", "batch", "tune.option=data.bs=", "dry_run=true", "--", "train.py", "data.bs=32")
    assert hydra.out.endswith("train.py data.bs=32\n")
    known = launch("tune", "batch", "dry_run=true", "--", "train.py", "--micro-batch-size", "2")
    assert "would try --micro-batch-size 2, then" in known.out
    assert not (here / "runs").exists() and not (here / "conf").exists()


def test_the_bundled_program_is_tuned_by_its_key(here: Path) -> None:
    kept = ["nproc_per_node=1", "model.layers=2"]
    words = [*kept, "tune.steps=12", "tune.max_batch=1", "program.batch_size=1"]
    done = run_outside(["tune", "batch", *words], here, timeout=300)
    assert done.code == 0, done
    assert "sequences/s" in done.out and "largest" in done.out and "(tune.max_batch=1)" in done.err
    assert f"use 1: `launch {' '.join(kept)} program.batch_size=1`" in done.err
