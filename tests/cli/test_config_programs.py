"""A configuration in the working directory that brings what is run: it is named before that runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.seam import Launch, clean_environ, run_outside
from tests.strangers import give_away

PRIMARY = "defaults: [launch_defaults, _self_]\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "words", "told"),
    [
        ("program/train.yaml", "command: [sh, -c, 'exit 3']\n", [], "has this run: sh -c 'exit 3'"),
        ("launch.yaml", f"{PRIMARY}program: {{command: [sh, -c, x]}}\n", [], "has this run: sh -c x"),
        ("launch.yaml", f"{PRIMARY}program: {{command: [sh, --token, x]}}\n", [], "sh --token '***'"),
        ("launch.yaml", f'{PRIMARY}program: {{command: [sh, "\\x1b[2J"]}}\n', [], r"sh $'\x1b[2J'"),
        ("launch.yaml", f"{PRIMARY}env: {{LD_PRELOAD: ./x.so}}\n", ["--", "true"], "LD_PRELOAD=./x.so"),
        ("launch.yaml", f"{PRIMARY}env: {{from_file: x.env}}\n", ["--", "true"], "PYTHONPATH=evil"),
        ("launch.yaml", f"{PRIMARY}nproc_per_node: 1\n", [], ""),
        ("launch.yaml", f"{PRIMARY}program: {{command: [sh, x]}}\n", ["--", "true"], ""),
        ("launch.yaml", PRIMARY, ["program.command=[sh,x]"], ""),
        ("launch.yaml", PRIMARY, ["env.LD_PRELOAD=./x.so", "--", "true"], ""),
        ("launch.yaml", PRIMARY, ["env.from_file=x.env", "--", "true"], ""),
        (
            "cluster/site.yaml",
            "kind: slurm\nsetup: [./evil]\n",
            ["cluster=site", "--", "true"],
            "cluster.setup: ./evil",
        ),
        (
            "cluster/site.yaml",
            "kind: slurm\nsrun: {task-prolog: ./evil}\n",
            ["cluster=site", "--", "true"],
            "cluster.srun.task-prolog: ./evil",
        ),
        (
            "cluster/site.yaml",
            "kind: slurm\nsrun: {task_prolog: ./evil}\n",
            ["cluster=site", "cluster.srun.task_prolog=mine", "--", "true"],
            "",
        ),
        (
            "cluster/site.yaml",
            "kind: slurm\ncontainer: {image: evil.sqsh}\n",
            ["cluster=site", "--", "true"],
            "cluster.container.image: evil.sqsh",
        ),
        ("launch.yaml", f"{PRIMARY}env: {{BASH_ENV: ./x.sh}}\n", ["--", "true"], "BASH_ENV=./x.sh"),
    ],
)
def test_it_is_named(
    launch: Launch, here: Path, name: str, *, text: str, words: list[str], told: str
) -> None:
    write(here / "x.env", "PYTHONPATH=evil\n")
    write(here / "conf" / name, text)
    result = launch("dry_run=true", *words)
    assert f"launch: configuration from conf/{name}\n" in result.err, result
    assert told in result.err and ("has this run" in result.err) == bool(told), result.err


def test_what_a_sweeper_calls_is_named_before_it_is(here: Path) -> None:
    text = f"""{PRIMARY.replace("_self_", "override /hydra/sweeper: optuna, _self_")}
hydra:
  sweeper:
    sampler: {{_target_: subprocess.getoutput, seed: 1}}
"""
    write(here / "conf/launch.yaml", text)
    done = run_outside(["-m", "--", "true"], here)
    named = "launch: hydra/sweeper=optuna calls hydra.sweeper.sampler: subprocess.getoutput\n"
    assert named in done.err and "launch: configuration from conf/launch.yaml\n" in done.err, done.err
    assert done.err.index(named) < done.err.index("the trials of hydra/sweeper=optuna go to")


def run_installed(here: Path, *words: str) -> str:
    """Run `launch` as its entry point does, the working directory not on its path; return what it says."""
    command = [sys.executable, "-P", "-m", "launcher", *words]
    with (here / "said").open("w+b") as said:
        done = subprocess.run(command, cwd=here, env=clean_environ(), stdout=said, stderr=said, check=False)
        said.seek(0)
        text = said.read().decode()
    assert done.returncode == 0, text
    return text


def test_it_is_named_before_it_runs(here: Path) -> None:
    write(here / "conf/program/train.yaml", "command: [sh, -c, 'cat said > seen']\n")
    run_installed(here, "nproc_per_node=1")
    assert "conf/program/train.yaml has this run: sh -c 'cat said > seen'" in (here / "seen").read_text()


def test_a_folder_of_the_launchers_name_does_not_take_the_bundled_programs_place(here: Path) -> None:
    write(here / "launcher/__init__.py", "raise SystemExit('planted')\n")
    assert " -P -m launcher.programs.train " in run_installed(here, "dry_run=true")
    assert "planted" not in run_installed(here, "nproc_per_node=1", "program.steps=1", "model.layers=1")


def test_whose_a_configuration_is(launch: Launch, here: Path) -> None:
    write(here / "conf/launch_defaults.yaml", "defaults: [launch_schema]\nnproc_per_node: 1\n")
    assert "launch: configuration from conf/launch_defaults.yaml\n" in launch("plan").err
    give_away(here / "conf/launch_defaults.yaml")
    said = launch("plan").err
    assert "configuration from conf/launch_defaults.yaml (of " in said and "65534" in said
