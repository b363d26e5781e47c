"""Run directories: one for each run, closed to others, and whole files alone."""

import json
import multiprocessing
import os
import stat
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from launcher import files
from launcher.config.run_path import choose_id
from launcher.launch.agent import open_agent
from launcher.runs.manifest import read_own_manifest
from launcher.runs.node_records import refuse_node, write_node
from launcher.runs.rank_logs import read_tail
from launcher.runs.run_directory import (
    RunIdTakenError,
    create_run_dir,
    list_logs,
    open_run_dir,
    write_json,
    write_private,
)
from tests.strangers import STRANGER, give_away, open_folder, run_as

NOW = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
ID = "20310203-040506"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_runs_of_the_same_second_have_their_own(tmp_path: Path) -> None:
    runs = [create_run_dir(choose_id(tmp_path / "runs/name", NOW)) for _ in range(3)]
    assert [run.id for run in runs] == ["20310203-040506", "20310203-040506-2", "20310203-040506-3"]
    assert all(run.path.is_absolute() and run.first_attempt == 0 for run in runs)
    with pytest.raises(RunIdTakenError):
        create_run_dir(runs[0].path)


def create(folder: str) -> str:
    """Choose a path and make it, as often as another process is faster."""
    while True:
        try:
            return create_run_dir(choose_id(Path(folder, "name"), NOW)).id
        except RunIdTakenError:
            continue


def test_runs_that_start_at_once_have_their_own(tmp_path: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(8) as pool:
        ids = pool.map(create, [str(tmp_path / "new/runs")] * 80, chunksize=1)
    assert len(set(ids)) == 80
    assert len(list((tmp_path / "new/runs/name").iterdir())) == 80


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_all_of_a_run_is_its_owners_alone(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run = create_run_dir(tmp_path / "runs/name" / ID)
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
        create_run_dir(tmp_path / "file/name" / ID)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(OSError, match="No space left"):
        create_run_dir(tmp_path / "runs/name" / ID)
    assert not list((tmp_path / "runs/name").iterdir())


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_private(path, "first")
    written: list[str] = []

    def refuse(draft: str, _: str, **__: int) -> None:
        written.append((tmp_path / draft).read_text())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
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


def list_below(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*")}


@pytest.mark.parametrize("link", ["logs", "logs/0", "logs/agent-box.log", "logs/slurm-12.out"])
def test_links_where_logs_are_to_be_are_refused(tmp_path: Path, link: str) -> None:
    """Those in an archive are the user's own; what they lead to is written to all the same."""
    (tmp_path / "away").mkdir()
    path = tmp_path / "run" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "away")
    with pytest.raises(OSError, match="a symbolic link, which a run directory cannot have") as caught:
        open_run_dir(tmp_path / "run", None)
    assert caught.value.filename == str(path)
    assert list_below(tmp_path / "away") == set()


def test_links_in_a_run_directory_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "away").write_text("away")
    run = open_run_dir(tmp_path / "run", None)
    (run.path / "manifest.json").symlink_to(tmp_path / "away")
    write_json(run.manifest_path, {})
    assert (tmp_path / "away").read_text() == "away" and run.manifest_path.read_text() == "{}\n"
    (run.path / "x").symlink_to(tmp_path / "away")
    write_private(run.path / "x", "new")
    assert (tmp_path / "away").read_text() == "away" and (run.path / "x").read_text() == "new"
    (run.path / "logs/7").symlink_to(tmp_path)
    with pytest.raises(OSError, match="a symbolic link"):
        write_node(run.path, 7, refuse_node("box", 0, 1, "", 0.0))
    (run.path / "logs/0").mkdir()
    (run.path / "logs/0/rank-0.out").symlink_to(tmp_path / "away")
    assert read_tail(run.rank_log(0, 0, "out"), 3) == [] and list_logs(run.path) == ["0"]


def test_links_of_ones_own_lead_to_where_the_runs_are(tmp_path: Path) -> None:
    (tmp_path / "scratch/llama").mkdir(parents=True)
    (tmp_path / "runs").symlink_to("scratch")
    (tmp_path / "scratch/llama7b").symlink_to("llama")
    run = create_run_dir(tmp_path / "runs/llama7b" / ID)
    assert run.path == tmp_path / "runs/llama7b/20310203-040506"
    write_json(run.manifest_path, {})
    assert (tmp_path / "scratch/llama/20310203-040506/manifest.json").is_file()
    (tmp_path / "best").symlink_to(run.path)
    assert open_run_dir(tmp_path / "best", None).path == tmp_path / "best"


@pytest.mark.parametrize("planted", ["runs", "runs/name"])
def test_links_of_others_are_refused(tmp_path: Path, planted: str) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / planted).parent.mkdir(exist_ok=True)
    (tmp_path / planted).symlink_to(tmp_path / "away")
    give_away(tmp_path / planted)
    with pytest.raises(PermissionError, match=r"a symbolic link of .*65534") as caught:
        create_run_dir(tmp_path / "runs/name" / ID)
    assert caught.value.filename == str(tmp_path / planted)
    with pytest.raises(PermissionError, match="a symbolic link of"):
        open_run_dir(tmp_path / planted, None)
    assert list_below(tmp_path / "away") == set()


@pytest.mark.parametrize("inner", ["", "logs", "logs/0"])
def test_directories_of_others_are_refused(tmp_path: Path, inner: str) -> None:
    (tmp_path / "runs/name" / inner).mkdir(parents=True)
    give_away(tmp_path / "runs/name" / inner)
    (tmp_path / "runs/name").chmod(0o777)
    if not inner:
        with pytest.raises(PermissionError, match=r"it belongs to .*65534"):
            create_run_dir(tmp_path / "runs/name" / ID)
    with pytest.raises(PermissionError, match=r"it belongs to .*65534"):
        write_node(open_run_dir(tmp_path / "runs/name", 0).path, 0, refuse_node("box", 0, 1, "", 0.0))


def test_anothers_log_is_not_written_to(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "run", None)
    run.agent_log("box").write_text("")
    give_away(run.agent_log("box"))
    with pytest.raises(PermissionError, match="it belongs to"):
        open_agent(["true"], {}, run.agent_log("box"), None, ())


def make_runs(folder: Path, uid: int) -> list[str]:
    run = create_run_dir(folder / f"of-{uid}" / ID)
    write_json(run.manifest_path, {})
    return [open_run_dir(run.path, None).path.name, str(read_own_manifest(run.path))]


def test_an_ordinary_user_has_runs_where_others_have_theirs() -> None:
    """In a directory like /tmp, whose owner is root."""
    with open_folder() as folder:
        (folder / "runs").mkdir()
        (folder / "runs").chmod(0o1777)
        for uid in (STRANGER, STRANGER - 1):
            assert run_as(uid, partial(make_runs, folder / "runs", uid)) == ["20310203-040506", "{}"]
        path = folder / f"runs/of-{STRANGER - 1}/20310203-040506"
        with pytest.raises(PermissionError):
            run_as(STRANGER, partial(open_run_dir, path, None))


def test_a_filesystem_that_shows_all_as_anothers_is_known_by_what_is_made_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with root_squash and all_squash, and EFS by its access points."""
    run = open_run_dir(tmp_path / "run", None)
    write_json(run.manifest_path, {"a": 1})
    give_away(run.path)
    with pytest.raises(PermissionError):
        read_own_manifest(run.path)
    monkeypatch.setattr(files, "find_shown_uid", lambda _: STRANGER)
    assert read_own_manifest(run.path) == {"a": 1}
    assert open_run_dir(run.path, None).path == run.path


def test_runs_are_made_where_a_user_may_not_list() -> None:
    """As in a /home or a drop box of mode 0711 or 1733."""
    with open_folder() as folder:
        (folder / "runs").mkdir()
        (folder / "runs").chmod(0o1733)
        found = run_as(STRANGER, partial(make_runs, folder / "runs", STRANGER))
    assert found == ["20310203-040506", "{}"]


def test_a_file_that_cannot_be_written_is_named_itself(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "run", None)
    (run.path / "x").mkdir()
    with pytest.raises(OSError, match="directory") as caught:
        write_private(run.path / "x", "new")
    assert caught.value.filename == str(run.path / "x")
    assert list_below(run.path) == {"x", "logs"}
