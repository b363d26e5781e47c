"""What a job from the script of a dry run writes before its program starts."""

import os
from pathlib import Path

import pytest

from launcher.runs.run_directory import RunDir
from launcher.slurm.standalone_script import redirect_to_log
from tests.strangers import give_away


@pytest.mark.parametrize("planted", ["link", "pipe", "foreign", "folder"])
def test_the_output_goes_into_the_run_directory_alone(tmp_path: Path, planted: str) -> None:
    run, canary = RunDir(tmp_path / "run"), tmp_path / "canary"
    log = run.path / "logs/slurm-7.out"
    log.parent.mkdir(parents=True)
    canary.mkdir()
    if planted == "link":
        log.symlink_to(canary / "file")
    elif planted == "pipe":
        os.mkfifo(log)
    elif planted == "foreign":
        log.touch()
        give_away(log)
    else:
        log.parent.rmdir()
        log.parent.symlink_to(canary)
    before = [os.fstat(stream).st_ino for stream in (1, 2)]
    with pytest.raises(OSError):
        redirect_to_log(run, {"SLURM_JOB_ID": "7"})
    assert [os.fstat(stream).st_ino for stream in (1, 2)] == before
    assert not list(canary.iterdir())
