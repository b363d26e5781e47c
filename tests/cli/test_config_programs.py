"""A configuration in the working directory that brings what is run: it is named before that runs."""

import subprocess
import sys
from pathlib import Path

from tests.seam import Launch, clean_environ, run_outside
from tests.strangers import give_away

PRIMARY = "defaults: [launch_defaults, _self_]\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


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
