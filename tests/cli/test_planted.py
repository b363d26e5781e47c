"""Run directories and manifests that somebody else has planted: nothing of the user's is ended by them."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.runs.run_process import hold_directory, identify_process
from tests.cli.make_runs import make_run
from tests.seam import Launch
from tests.strangers import give_away


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this user's that is no business of `launch`."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    alive = process.poll() is None
    process.kill()
    process.wait()
    assert alive, "it was killed"


def plant(runs: Path, victim: "subprocess.Popen[bytes]", name: str = "tiny") -> Path:
    return make_run(runs, name, state="running", process=identify_process(victim.pid))


def test_a_manifest_of_another_user_ends_nothing(
    here: Path, launch: Launch, victim: "subprocess.Popen[bytes]"
) -> None:
    path = give_away(plant(here / "runs", victim))
    result = launch("cancel", "tiny", "yes=true")
    result.assert_error(3, "tiny/20260801-120000 is left alone", "it belongs to", "65534")
    os.lchown(path, os.geteuid(), os.getegid())
    launch("cancel", "tiny", "yes=true").assert_error(3, "manifest.json: it belongs to")


def test_a_job_that_another_user_names_is_not_cancelled(
    here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.cli import runs

    monkeypatch.setattr(runs, "run_slurm", lambda *_: pytest.fail("scancel"))
    give_away(make_run(here / "runs", state="submitted", slurm={"job_id": "12"}))
    launch("cancel", "tiny", "yes=true").assert_error(3, "is left alone", "it belongs to")


@pytest.mark.parametrize("link", ["runs/tiny", "runs/tiny/20260801-120000"])
def test_a_link_of_another_user_does_not_lead_to_a_run(here: Path, launch: Launch, link: str) -> None:
    away = make_run(here / "away", state="running", process=identify_process(os.getpid()))
    hold_directory(away)
    (here / link).parent.mkdir(parents=True)
    (here / link).symlink_to(away if link.endswith("0") else away.parent)
    give_away(here / link)
    result = launch("cancel", "tiny/20260801-120000", "yes=true")
    result.assert_error(3, "is left alone", "a symbolic link of", "65534")
    launch("status", "tiny").assert_error(2, "no run 'tiny'")


def test_a_manifest_that_is_a_link_is_not_read(here: Path, launch: Launch) -> None:
    path = make_run(here / "runs", state="running", process=identify_process(os.getpid()))
    hold_directory(path)
    other = make_run(here / "runs", "other")
    (other / "manifest.json").unlink()
    (other / "manifest.json").symlink_to(path / "manifest.json")
    launch("cancel", "other", "yes=true").assert_error(3, "cannot be read")


def test_the_process_is_a_launch_of_that_run(
    here: Path, launch: Launch, victim: "subprocess.Popen[bytes]"
) -> None:
    """Files that came out of an archive are this user's own, whatever they say."""
    plant(here / "runs", victim)
    launch("cancel", "tiny", "yes=true").assert_error(
        3, f"left alone: process {victim.pid} is not the launch of this run"
    )
    path = make_run(here / "runs", "other", state="running", process=identify_process(os.getpid()))
    hold_directory(path)
    make_run(here / "runs", "copy", state="running", process=identify_process(os.getpid()))
    launch("cancel", "copy", "yes=true").assert_error(3, "is not the launch of this run")
    assert json.loads((path / "manifest.json").read_text())["outcome"] == {"state": "running"}


def test_nothing_is_cancelled_where_one_of_several_is_left_alone(
    here: Path, launch: Launch, victim: "subprocess.Popen[bytes]"
) -> None:
    own = make_run(here / "runs", "own", state="running", process=identify_process(victim.pid))
    plant(here / "runs", victim, "planted")
    held = subprocess.Popen(["sleep", "1000"], cwd=own, stdin=os.open(own, os.O_RDONLY))
    manifest = json.loads((own / "manifest.json").read_text())
    manifest["process"] = identify_process(held.pid)
    (own / "manifest.json").write_text(json.dumps(manifest))
    launch("cancel", "own", "planted", "yes=true").assert_error(3, "planted/20260801-120000 is left alone")
    assert held.poll() is None
    result = launch("cancel", "own", "yes=true")
    assert (result.code, held.wait(20)) == (0, -15), result.err


def test_a_link_of_ones_own_is_followed_to_where_the_runs_are(here: Path, launch: Launch) -> None:
    make_run(here / "scratch")
    (here / "runs").symlink_to("scratch")
    assert "tiny/20260801-120000 succeeded" in " ".join(launch("status", "tiny").out.split())
    assert "has ended already" in launch("cancel", "tiny", "yes=true").err
