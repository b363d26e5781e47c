"""Hydra's own settings: those that are carried out, and what is said of the others."""

import json
from pathlib import Path

import pytest

from launcher.config.compose import compose, resolve
from launcher.config.sweep import expand_sweep, read_multirun
from launcher.config.words import find_sources
from launcher.errors import UsageError
from tests.seam import Launch, run_outside


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_launcher_that_is_installed_is_refused_too(here: Path) -> None:
    write(here / "conf/hydra/launcher/mine.yaml", "_target_: hydra_plugins.x.Y\n")
    for word in ("hydra/launcher=mine", "+hydra/launcher=mine"):
        with pytest.raises(UsageError, match=r"launcher.mine.*cluster=slurm"):
            compose(find_sources(None, None, None), (word,))


def test_values_of_hydras_in_interpolations(here: Path) -> None:
    sources = find_sources(None, None, None)
    words = ["env.JOB=${hydra:job.num}", "env.OUT=${hydra:runtime.output_dir}/x", "name=a,b"]
    jobs = expand_sweep(read_multirun(sources, [*words, "env.MODEL=${hydra:runtime.choices.model}"]))
    composed = [compose(sources, job, number) for number, job in enumerate(jobs)]
    found = [resolve(each, here / str(number)).env for number, each in enumerate(composed)]
    assert [env["JOB"] for env in found] == ["0", "1"]
    assert [env["OUT"] for env in found] == [f"{here}/0/x", f"{here}/1/x"]
    assert {env["MODEL"] for env in found} == {"tiny"}


MULTIRUN = (
    "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      nproc_per_node: 1,2\n"
)


def test_a_sweep_by_hydras_mode(launch: Launch, here: Path) -> None:
    for words in (["hydra.mode=MULTIRUN", "nproc_per_node=1,2"], ["-m", "nproc_per_node=1,2"]):
        assert "launch: job 2 of 2: " in launch(*words, "dry_run=true").err
    write(here / "conf/experiment/x.yaml", MULTIRUN)
    result = launch("experiment=x", "agent=torchrun", "dry_run=true", "program.steps=7,8")
    assert result.out.count("--nproc-per-node=2") == result.out.count("--steps=8") == 2
    assert launch("experiment=x", "dry_run=true", "nproc_per_node=2").err.count("job 1 of 1") == 1
    # Neither for other verbs, nor over a flag.
    assert json.loads(launch("plan", "experiment=x", "format=json", "nproc_per_node=1").out)
    assert "job 1 of" not in launch("--run", "experiment=x", "dry_run=true").err


@pytest.mark.usefixtures("quick_agent")
def test_the_runs_of_a_sweep_are_in_hydras_sweep_directory(here: Path) -> None:
    (here / "a.py").write_text("")
    done = run_outside(
        ["-m", "hydra.sweep.dir=swept/${now:%Y}", "name=a,b", "nproc_per_node=1", "--", "a.py"], here
    )
    assert done.code == 0, done.err
    assert sorted(path.parent.name for path in here.glob("swept/*/*/manifest.json")) == ["0", "1"]
    again = run_outside(
        ["-m", "hydra.sweep.dir=swept/${now:%Y}", "name=a,b", "nproc_per_node=1", "--", "a.py"], here
    )
    again.assert_error(2, "swept/", "/0, of hydra.sweep.dir, is there already")


def test_a_glob_is_the_options_of_a_group(launch: Launch) -> None:
    result = launch("-m", "binding=glob(*,exclude=n*)", "dry_run=true")
    assert [
        line.rpartition("binding=")[2].split()[0] for line in result.err.splitlines() if "job " in line
    ] == [*("exclusive", "l3", "socket")]


def test_a_sweep_keeps_a_removal_and_an_interpolation(here: Path) -> None:
    sources = find_sources(None, None, None)
    jobs = expand_sweep(
        read_multirun(sources, ["~program.steps", "env.A=${model.name}/x", "model=tiny,gpt2"])
    )
    configs = [resolve(compose(sources, job)) for job in jobs]
    assert [config.env["A"] for config in configs] == ["tiny/x", "gpt2/x"]
    assert not any("steps" in config.program for config in configs)
