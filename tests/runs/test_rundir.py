"""Run directories: one for each run, closed to others, and whole files alone."""

import json
import multiprocessing
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.runs.rundir import create_run_dir, open_run_dir, write_json, write_private

NOW = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_runs_of_the_same_second_have_their_own(tmp_path: Path) -> None:
    runs = [create_run_dir(tmp_path / "runs", "name", NOW) for _ in range(3)]
    assert [run.id for run in runs] == ["20310203-040506", "20310203-040506-2", "20310203-040506-3"]
    assert all(run.path.is_absolute() and run.first_attempt == 0 for run in runs)


def create(folder: str) -> str:
    return create_run_dir(Path(folder), "name", NOW).id


def test_runs_that_start_at_once_have_their_own(tmp_path: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(8) as pool:
        ids = pool.map(create, [str(tmp_path / "new/runs")] * 80, chunksize=1)
    assert len(set(ids)) == 80
    assert len(list((tmp_path / "new/runs/name").iterdir())) == 80


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_all_of_a_run_is_its_owners_alone(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run = create_run_dir(tmp_path / "runs", "name", NOW)
        write_json(run.path / "manifest.json", {})
        opened = open_run_dir(tmp_path / "opened", None)
    finally:
        os.umask(before)
    assert [mode(path) for path in (run.path, run.path / "logs", run.path.parent, opened.path)] == [0o700] * 4
    assert mode(run.path / "manifest.json") == 0o600


def test_an_opened_directory_of_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    assert mode(open_run_dir(tmp_path / "run", None).path) == 0o700


def test_a_later_start_goes_on_counting(tmp_path: Path) -> None:
    for attempt in ("0", "1", "10", "notes"):
        (tmp_path / "run/logs" / attempt).mkdir(parents=True)
    assert open_run_dir(tmp_path / "run", None).first_attempt == 11
    assert open_run_dir(tmp_path / "run", 3).first_attempt == 0
    assert open_run_dir(tmp_path / "new", None).first_attempt == 0


def test_what_cannot_be_made_is_an_oserror_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        create_run_dir(tmp_path / "file", "name", NOW)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(OSError, match="No space left"):
        create_run_dir(tmp_path / "runs", "name", NOW)
    assert not list((tmp_path / "runs/name").iterdir())


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_private(path, "first")
    written: list[str] = []

    def refuse(self: Path, target: Path) -> None:
        written.append(self.read_text())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="No space left"):
            write_private(path, "second")
    assert written == ["second"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] and path.read_text() == "first"
    write_private(path, "third")
    assert path.read_text() == "third" and mode(path) == 0o600


def test_text_that_is_no_text_is_written_as_the_bytes_it_was(tmp_path: Path) -> None:
    write_private(tmp_path / "file", os.fsdecode(b"\xff"))
    assert (tmp_path / "file").read_bytes() == b"\xff"
    write_json(tmp_path / "json", {"é": os.fsdecode(b"\xff")})
    assert json.loads((tmp_path / "json").read_text()) == {"é": "\udcff"}


def test_paths(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path, None)
    found = [run.plan_path("h"), run.agent_log("h"), run.rank_log(3, 1, "err")]
    assert [str(path.relative_to(run.path)) for path in found] == [
        "plan-h.json",
        "logs/agent-h.log",
        "logs/1/rank-3.err",
    ]
