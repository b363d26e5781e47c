"""A run directory that cannot be written any more: said in words, and room for saying it."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.runs.run_directory import (
    SIZE,
    RunDir,
    explain_missing_end,
    explain_write_error,
    find_write_error,
    is_full,
    open_run_dir,
    release_space,
    reserve_space,
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    if os.geteuid():
        pytest.skip("mounting a small filesystem needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(place: Path) -> None:
    """Leave no room on a disk."""
    with (place / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_a_disk_that_gets_full_leaves_room_for_the_account(disk: Path) -> None:
    run = open_run_dir(disk / "run", None)
    used = shutil.disk_usage(disk).free
    reserve_space(run)
    assert used - shutil.disk_usage(disk).free >= SIZE
    assert [path.name for path in run.path.iterdir()] == ["logs"]  # nothing that a SIGKILL could leave
    assert find_write_error(run) == explain_missing_end(run) == "" and not is_full(run)
    fill(disk)
    assert is_full(run)
    assert explain_missing_end(run) == f"the run directory's disk is full ({run.path})"
    assert release_space(run) == f"the run directory's disk is full ({run.path})"
    (run.path / "manifest.json").write_bytes(bytes(SIZE))
    assert sorted(path.name for path in run.path.iterdir()) == ["logs", "manifest.json"]


def test_a_disk_that_is_full_from_the_start(disk: Path) -> None:
    run = open_run_dir(disk / "run", None)
    fill(disk)
    reserve_space(run)
    assert release_space(run).startswith("the run directory's disk is full")
    assert [path.name for path in run.path.iterdir()] == ["logs"]


def test_nothing_is_left_where_all_is_well(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "run", None)
    reserve_space(run)
    reserve_space(run)
    assert release_space(run) == "" and release_space(run) == ""
    assert [path.name for path in run.path.iterdir()] == ["logs"]


def test_a_run_directory_that_is_gone(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "run", None)
    reserve_space(run)
    shutil.rmtree(run.path)
    reserve_space(run)
    told = f"the run directory was removed during the run ({run.path})"
    assert (
        release_space(run) == told
        and find_write_error(run) == explain_missing_end(run) == told
        and not is_full(run)
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EDQUOT, "your quota on the run directory's disk is used up (/r)"),
        (errno.EROFS, "the run directory cannot be written (/r: Read-only file system)"),
    ],
)
def test_other_reasons(number: int, words: str) -> None:
    assert explain_write_error(RunDir(Path("/r")), OSError(number, os.strerror(number))) == words
