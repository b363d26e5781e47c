"""`launch tune dataloader`: through torchrun, on real ranks."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from launcher.cli.tune_choice import check_override, describe_use, render_override, save_override
from launcher.config.settings import DataloaderConfig
from launcher.tune.search import Trial
from tests.seam import LAUNCH, Launch, clean_environ, run_outside
from tests.tune.programs import ALONE, TRAINING
from tests.tune.test_meter import list_living


@pytest.mark.usefixtures("quick_agent")
def test_two_ranks_are_tuned_and_later_runs_use_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = ["tune", "dataloader", "nproc_per_node=2", "tune.max_workers=3", "tune.steps=16", "format=json"]
    done = run_outside([*words, "--", "train.py"], tmp_path, timeout=300)
    assert done.code == 0, done
    result = json.loads(done.out)
    chosen = result["num_workers"]
    assert chosen in (2, 3) and result["complete"] and result["saved"] == "conf/dataloader/tuned.yaml"
    trials = {trial["workers"]: trial for trial in result["trials"]}
    assert trials[0]["wait_share"] > 0.5
    assert trials[chosen]["steps_per_second"] > 1.5 * trials[0]["steps_per_second"]
    assert f"{chosen} workers chosen; conf/dataloader/tuned.yaml written" in done.err
    assert "`launch dataloader=tuned -- train.py` uses it" in done.err
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
    assert "interrupted: 0 workers is the best so far, and no file was written" in err
    assert "waiting for data" in out and "█" in out
    assert not (tmp_path / "conf").exists()
    assert list_living(tmp_path) == []
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert json.loads((run / "manifest.json").read_text())["outcome"]["state"] == "stopped"


@pytest.mark.usefixtures("quick_agent")
def test_a_fixed_number_is_told_with_its_value(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    done = run_outside(
        ["tune", "dataloader", "nproc_per_node=1", "--", "alone.py", "{'num_workers': 2}"], tmp_path
    )
    assert (done.code, done.out) == (2, "")
    assert "error: the program sets num_workers=2 itself" in done.err
    assert not (tmp_path / "conf").exists()


def test_a_failing_program_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("import sys\nprint('no such data', file=sys.stderr)\nsys.exit(7)\n")
    done = run_outside(["tune", "dataloader", "nproc_per_node=1", "--", "fail.py"], tmp_path)
    assert (done.code, done.out) == (7, "")
    assert "no such data" in done.err and "exited with code 7" in done.err
    assert "Traceback" not in done.err


@pytest.mark.usefixtures("quick_agent")
def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal\nsignal.pause()\n")
    words = ["tune", "dataloader", "nproc_per_node=1", "tune.timeout=3", "--", "wait.py"]
    done = run_outside(words, tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "not measured within tune.timeout=3 s" in done.err
    assert list_living(tmp_path) == []


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
    trials = [Trial(0, 1, 0.9, 15), Trial(5, 4, 0.1, 20, 3000), Trial(9, failure="no\nroom")]
    origin = "train.py --a 'b\nnum_workers: 99\rnum_workers: 98', 2 ranks"
    target = check_override(None, replaces=False)
    save_override(target, render_override(trials, trials[1], DataloaderConfig(), name=target, origin=origin))
    assert check_override(None, replaces=False) == target
    text = (here / target).read_text()
    assert "train.py" in text and "90%" in text
    plan = launch("plan", "dataloader=tuned", "format=json", "nproc_per_node=1")
    assert json.loads(plan.out)["ranks"][0]["num_workers"] == 5


def test_how_the_file_is_used(here: Path) -> None:
    assert "`launch dataloader=x -- a.py`" in describe_use("conf/dataloader/x.yaml", " -- a.py")
    assert "--config-dir team dataloader=x`" in describe_use("team/dataloader/x.yaml", "")
    assert "put it into conf/dataloader/" in describe_use("x.txt", "")
