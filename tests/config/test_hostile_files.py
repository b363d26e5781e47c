"""Files that would hang whoever reads them, or never end: pipes, devices, and sweeps without an end."""

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import files
from launcher.config.sources import MOST_BYTES
from tests.seam import LAUNCH, Launch, clean_environ, run_outside


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("words", [[f"env.{name}=range(100)" for name in "ABC"], ["env.A=range(1000000000)"]])
def test_a_sweep_with_too_many_jobs(launch: Launch, words: list[str]) -> None:
    launch("-m", *words, "dry_run=true").assert_error(2, "the sweep has over 100000 jobs")


@pytest.mark.parametrize("form", ["pipe", "device"])
def test_folders_of_the_search_path_are_no_way_around(launch: Launch, here: Path, form: str) -> None:
    """Hydra finds what is in `hydra.searchpath` by itself."""
    path = here / "more/model/x.yaml"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/zero") if form == "device" else os.mkfifo(path)
    text = f"defaults: [launch_defaults, _self_]\nhydra: {{searchpath: [file://{here}/more]}}\n"
    write(here / "conf/launch.yaml", text)
    launch("plan", "model=x").assert_error(2, "no 'x' in model")


def test_a_file_that_is_too_large(launch: Launch, here: Path) -> None:
    write(here / "conf/launch.yaml", "#" * MOST_BYTES + "\n")
    launch("plan").assert_error(2, "conf/launch.yaml cannot be read (more than 512 KiB)")


def test_a_large_file_that_is_not_chosen_is_left(launch: Launch, here: Path) -> None:
    """A folder conf/ may be that of a training program, with files that are not for us."""
    write(here / "conf/vocabulary/large.yaml", "#" * MOST_BYTES + "\na: &a 1\nb: *a\n")
    result = launch("plan")
    assert result.code == 0, result.err


@pytest.mark.parametrize("name", ["launch.yaml", "model/tiny.yaml", "program/mine.yaml"])
def test_a_configuration_that_is_no_file(launch: Launch, here: Path, name: str) -> None:
    path = here / "conf" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    launch("plan").assert_error(2, f"conf/{name} is no regular file: move it away")
    assert launch("--help-all").code == 0
    path.unlink()
    path.symlink_to("/dev/zero")
    launch("status").assert_error(2, f"conf/{name} is no regular file")


@pytest.mark.parametrize("key", ["machine.snapshot", "env.from_file"])
def test_a_pipe_from_which_nothing_comes(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    os.mkfifo(here / "pipe")
    launch("plan", f"{key}=pipe").assert_error(
        2, f"{key}=pipe cannot be read (nothing came from it in 0.1 s)"
    )


def test_a_command_in_place_of_a_file(here: Path) -> None:
    """As in `env.from_file=<(pass show hf)`, whose output may come late."""
    assert run_outside(["topo", "save=node.json"], here).code == 0
    write(here / "late.sh", "sleep 0.2; echo A=1; sleep 0.2; echo B=two\n")
    words = "plan explain=true machine.snapshot=<(cat node.json) env.from_file=<(sh late.sh)"
    script = f'launch() {{ "$@"; }}; launch "$@" {words}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *LAUNCH],
        cwd=here,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "two" in done.stdout


def limit_files(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_open_files_are_an_error_and_few_are_made_more(here: Path) -> None:
    words = ["nproc_per_node=2", "--", "true"]
    run_outside(words, here, preexec_fn=limit_files(12, 12)).assert_error(
        3, "may open 12 files", "needs 32", "ulimit -Hn"
    )
    assert not (here / "runs").exists()
    done = run_outside(words, here, preexec_fn=limit_files(12, 256))
    assert done.code == 0, done.err
