"""Completion of the verbs that take runs."""

from pathlib import Path

import pytest

from tests.cli import test_completion
from tests.cli.make_runs import make_run
from tests.cli.test_completion import ask, complete_in_bash
from tests.seam import list_loaded

binaries = test_completion.binaries


@pytest.fixture
def runs(here: Path) -> Path:
    make_run(here / "runs", "llama", "20260801-120000", slurm={"job_id": "12_3"})
    make_run(here / "runs", "llama", "20260801-120001", "running", slurm={"job_id": "14"})
    make_run(here / "runs", "evil$(touch x)", "20260801-120002")
    make_run(here / "other", "gpt", "20260801-120003")
    return here


def test_runs_the_newest_first_then_jobs(runs: Path) -> None:
    names = ["llama/20260801-120001", "llama/20260801-120000"]
    assert ask("launch status ") == ["format=", "runs_dir=", *names, "14", "12_3"]
    assert ask("launch logs ll") == names
    assert ask("launch status 1") == ["14", "12_3"]
    assert ask("launch cancel ") == ["yes=true", "runs_dir=", "llama/20260801-120001", "14"]
    assert ask("launch cancel llama/20260801-120001 l") == []
    assert ask("launch logs -f rank=0 lo") == ["logs.tail="]
    assert {"-f", "--config-dir"} <= set(ask("launch logs -"))
    assert ask("launch status -- ") == []


def test_runs_of_another_folder_and_of_the_users_configuration(runs: Path) -> None:
    assert ask("launch status runs_dir=other g") == ["gpt/20260801-120003"]
    (runs / "conf").mkdir()
    (runs / "conf/launch.yaml").write_text("defaults: [launch_schema, _self_]\nruns_dir: other\n")
    assert ask("launch status g") == ["gpt/20260801-120003"]
    (runs / "conf/launch.yaml").write_text("a: [1\n")
    assert ask("launch status g") == []


def test_no_runs_yet(here: Path) -> None:
    assert ask("launch status ") == ["format=", "runs_dir="]


def test_it_is_quick_since_nothing_heavy_is_loaded(runs: Path) -> None:
    loaded = list_loaded(["-sc", "query=bash"], runs, COMP_LINE="launch status l")
    assert "launcher.cli.completion" in loaded
    assert not {"hydra", "omegaconf", "rich", "torch", "submitit"} & loaded


def test_in_a_real_bash(binaries: Path, runs: Path) -> None:
    lines = ["launch status llama/20260801-12000", "launch logs -f ", "launch cancel 1"]
    names, logs, jobs = complete_in_bash(binaries, runs, *lines)
    assert names == ["llama/20260801-120001", "llama/20260801-120000"]
    assert {"rank=", *names} <= set(logs)
    assert jobs == ["14"]
