"""Sweeps by a plugin of Hydra's: each trial is a run, and the sweeper learns what came of it."""

import json
import signal
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.cli.make_runs import read_manifest
from tests.seam import Launch, run_outside, start, wait_for

TEXTS = tomllib.loads(Path(__file__).with_name("sweeps.toml").read_text())
OWN = ("program=mine", "nproc_per_node=1")


def write_plugin(folder: Path) -> dict[str, str]:
    """Write the plugin below a folder, and return the variables with which Hydra finds it."""
    (folder / "hydra_plugins").mkdir(parents=True)
    (folder / "hydra_plugins/halving.py").write_text(TEXTS["plugin"])
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def plugin(here: Path) -> dict[str, str]:
    """Variables with which `launch` has the sweeper `halving`; a program of the test's stands ready."""
    (here / "conf/program").mkdir(parents=True)
    (here / "conf/program/mine.yaml").write_text("command: [mine.py]\nx: 0\n")
    (here / "mine.py").write_text(TEXTS["program"])
    return write_plugin(here / "plugins")


def test_what_is_tried_follows_from_what_came_out(here: Path, plugin: dict[str, str]) -> None:
    words = ["-m", "hydra/sweeper=halving", "hydra.sweeper.batches=3", "hydra.sweeper.start=4.0", *OWN]
    done = run_outside(words, here, plugin)
    assert done.code == 0, done.err
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("halving-2")
    tried = json.loads((folder / "tried.json").read_text())
    assert tried == [[4.0, 16.0], [2.0, "trial 1 failed with exit code 7"], [1.0, 1.0]]
    states = [read_manifest(folder / str(number))["outcome"]["state"] for number in range(3)]
    assert states == ["succeeded", "failed", "succeeded"]
    assert (folder / "2/objective.txt").read_text() == "1.0", "what is the same for all is as it was written"
    assert "launch: trial 2: program.x=1.0\n" in done.err and "launch: trial 2: objective 1.0\n" in done.err


def test_a_sweeper_that_gives_up_ends_with_the_trials_exit_code(here: Path, plugin: dict[str, str]) -> None:
    words = ["hydra/sweeper=halving", "hydra.sweeper.start=2.0", "hydra.sweeper.patient=false", *OWN]
    done = run_outside(["-m", *words, "hydra.sweep.dir=here"], here, plugin)
    assert done.code == 7, done.err
    assert done.err.endswith("launch: error: trial 0 failed with exit code 7\n")
    assert "Traceback" not in done.err
    assert [path.name for path in (here / "here").iterdir()] == ["0"]


def test_optuna_by_a_file_of_the_configuration(here: Path, plugin: dict[str, str]) -> None:
    (here / "conf/experiment").mkdir()
    (here / "conf/experiment/search.yaml").write_text(TEXTS["search"])
    done = run_outside(["experiment=search", *OWN], here)
    assert done.code == 0, done.err
    found = yaml.safe_load((here / "study/optimization_results.yaml").read_text())
    written = [float((here / f"study/{number}/objective.txt").read_text()) for number in range(2)]
    assert found["best_value"] == max(written) == found["best_params"]["program.x"]
    assert f"launch: Best value: {max(written)}\n" in done.err


def test_ctrl_c_ends_the_sweep_with_the_trial(here: Path, plugin: dict[str, str]) -> None:
    quiet = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    (here / "mine.py").write_text(quiet + "print('up', flush=True)\ntime.sleep(600)\n")
    with start(here, "-m", "hydra/sweeper=halving", "hydra.sweep.dir=swept", *OWN, **plugin) as started:
        wait_for(lambda: "up" in started.read("stdout"), "the program", tell=started.read)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
        assert [path.name for path in (here / "swept").iterdir()] == ["0"]
        assert not [line for line in started.read().splitlines() if line.startswith("Traceback")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hydra/sweeper=optuna", "dry_run=true"], "dry_run=true starts none"),
        (["hydra/sweeper=optuna", "hydra.sweeper.n_trials=many"], "n_trials"),
        (["hydra/sweeper=optuna", "hydra.sweeper.direction=up"], "hydra/sweeper=optuna: "),
        (["hydra/sweeper=optuna", "program.lr=interval(0,1)", "objective=best"], "choose from loss, file"),
        (["hydra/sweeper=optuna", "program.lr=choice(1,2)", "modle=x"], "did you mean model"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    launch: Launch, here: Path, words: list[str], says: str
) -> None:
    result = launch("-m", *words, "hydra.sweep.dir=swept", "--", "true")
    assert (result.code, "Traceback" in result.err) == (2, False), result
    assert says in result.err.splitlines()[-1], result
    assert not list(here.glob("swept/*/*"))


def test_a_defect_of_a_plugin_is_one_line_unless_more_is_asked_for(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=none", "--", "true"]
    assert launch(*words).err.count("\n") < 9
    assert list(here.glob("runs/*")) == [], "a sweep without a trial leaves nothing"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    told = launch("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=up", "--", "true")
    assert (told.code, "Traceback" in told.err) == (2, True)
