"""The run directory: made once, opened again, its files, ranks' records, and what is said of a full disk."""

import errno
import json
import multiprocessing
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher import files
from launcher.config.run_path import choose_id
from launcher.files import open_append, open_below
from launcher.runs.manifest import read_own_manifest
from launcher.runs.records import AppliedReader, NodeRecord, write_node
from launcher.runs.run_directory import (
    RunIdTakenError,
    create_run_dir,
    is_full,
    open_run_dir,
    release_space,
    reserve_space,
    write_private,
)
from tests.cli.make_runs import make_run, read_manifest
from tests.seam import QUICK_AGENT, Launch, mount_disk, run_outside
from tests.strangers import STRANGER, give_away, open_folder, run_as

NOW = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
ID = "20310203-040506"
SIZE = 256 << 10
"""Bytes that are kept free for the account."""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


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
    assert {*ids} == {ID, *(f"{ID}-{number}" for number in range(2, 81))}
    assert len(list((tmp_path / "new/runs/name").iterdir())) == 80


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
    write_private(path, os.fsdecode(b"third\xff"))
    assert path.read_bytes() == b"third\xff" and mode(path) == 0o600


def list_below(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*")}


def test_links_in_a_run_directory_are_not_followed(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "away").write_text("away")
    run = open_run_dir(tmp_path / "run", None)
    (run.path / "manifest.json").symlink_to(tmp_path / "away")
    write_private(run.manifest_path, "{}\n")
    assert (tmp_path / "away").read_text() == "away" and run.manifest_path.read_text() == "{}\n"
    (run.path / "x").symlink_to(tmp_path / "away")
    write_private(run.path / "x", "new")
    assert (tmp_path / "away").read_text() == "away" and (run.path / "x").read_text() == "new"
    (run.path / "logs/7").symlink_to(tmp_path)
    with pytest.raises(OSError, match="a symbolic link"):
        write_node(run.path, 7, NodeRecord("box", 0, "failed", 1, None, "", None, 0, 0.0, 0.0))
    (run.path / "logs/0").mkdir()
    (run.path / "logs/0/rank-0.out").symlink_to(tmp_path / "away")
    assert launch("logs", str(run.path)).out == ""
    (shown,) = json.loads(launch("status", str(run.path), "format=json").out)["runs"]
    assert shown["last_line"] == "" and shown["restarts"] == 0


@pytest.mark.parametrize(
    ("planted", "is_link", "is_anothers", "words"),
    [
        ("runs", True, True, "a symbolic link of"),
        ("runs/train", True, True, "a symbolic link of"),
        ("runs/train", False, True, "it belongs to"),
        ("run", True, True, "a symbolic link of"),
        ("run", False, True, "it belongs to"),
        ("run/logs", True, False, "a symbolic link, which a run directory cannot have"),
        ("run/logs/0", True, False, "a symbolic link, which a run directory cannot have"),
        ("run/logs/agent-box.log", True, False, "a symbolic link, which a run directory cannot have"),
        ("run/logs/slurm-12.out", True, False, "a symbolic link, which a run directory cannot have"),
    ],
)
def test_what_others_have_planted_is_refused(
    launch: Launch, here: Path, planted: str, is_link: bool, is_anothers: bool, words: str
) -> None:
    """Links in an archive are the user's own; what they lead to is written to all the same."""
    (here / "train.py").write_text("")
    (here / "away").mkdir()
    resumes = planted.startswith("run/") or planted == "run"
    if resumes and not is_link:
        make_run(here / "made").rename(here / "run")
    elif planted == "run":
        make_run(here / "made").rename(here / "away/run")
    elif resumes:
        make_run(here / "made").rename(here / "run")
        (here / "run/logs").rmdir()
    path = here / planted
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_link:
        path.symlink_to(here / ("away/run" if planted == "run" else "away"))
    else:
        path.mkdir(exist_ok=True)
    before = list_below(here / "away")
    if is_anothers:
        give_away(path)
        if not is_link:
            path.chmod(0o777)
    where = ["run_dir=run"] if resumes else []
    result = launch(*where, "nproc_per_node=1", "binding=none", "train.py")
    result.assert_error(3, str(path), words)
    assert list_below(here / "away") == before


def test_links_of_ones_own_are_followed_and_a_later_start_goes_on_counting(tmp_path: Path) -> None:
    (tmp_path / "scratch/llama").mkdir(parents=True, mode=0o755)
    (tmp_path / "runs").symlink_to("scratch")
    (tmp_path / "scratch/llama7b").symlink_to("llama")
    words = ("nproc_per_node=1", "binding=none", "--", "/bin/true")
    assert run_outside(["name=llama7b", *words], tmp_path, {"PYTHONPATH": QUICK_AGENT}).code == 0
    (run,) = (tmp_path / "scratch/llama").iterdir()
    assert [path.name for path in (run / "logs").iterdir() if path.is_dir()] == ["0"]
    for name in ("10", "notes"):
        (run / "logs" / name).mkdir()
    (tmp_path / "best").symlink_to(run)
    run.chmod(0o755)
    assert run_outside(["run_dir=best", *words], tmp_path, {"PYTHONPATH": QUICK_AGENT}).code == 0
    assert (run / "logs/11/rank-0.out").is_file() and mode(run) == 0o700
    earlier = read_manifest(run)["earlier"]
    assert [entry["outcome"]["state"] for entry in earlier] == ["succeeded"]


def test_anothers_log_is_not_written_to(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "run", None)
    run.agent_log("box").write_text("")
    give_away(run.agent_log("box"))
    with (
        open_below(run.path, "logs") as logs,
        pytest.raises(PermissionError, match="it belongs to"),
    ):
        open_append(logs, "agent-box.log")


def test_a_pipe_that_somebody_reads_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs/agent-box.log")
    reader = os.open(tmp_path / "logs/agent-box.log", os.O_RDONLY | os.O_NONBLOCK)
    tmp_path.chmod(0o700)
    with open_below(tmp_path, "logs") as logs, pytest.raises(OSError, match="no regular file"):
        open_append(logs, "agent-box.log")
    os.close(reader)


def make_runs(folder: Path, uid: int) -> list[str]:
    run = create_run_dir(folder / f"of-{uid}" / ID)
    write_private(run.manifest_path, json.dumps({"name": "a"}))
    return [open_run_dir(run.path, None).path.name, read_own_manifest(run.path).name]


def test_an_ordinary_user_has_runs_where_others_have_theirs() -> None:
    """In a directory like /tmp, whose owner is root, or one that nobody may list, as a drop box."""
    with open_folder() as folder:
        (folder / "box").mkdir()
        (folder / "box").chmod(0o1733)
        assert run_as(STRANGER, partial(make_runs, folder / "box", STRANGER)) == ["20310203-040506", "a"]
        (folder / "runs").mkdir()
        (folder / "runs").chmod(0o1777)
        for uid in (STRANGER, STRANGER - 1):
            assert run_as(uid, partial(make_runs, folder / "runs", uid)) == ["20310203-040506", "a"]
        path = folder / f"runs/of-{STRANGER - 1}/20310203-040506"
        with pytest.raises(PermissionError):
            run_as(STRANGER, partial(open_run_dir, path, None))


def test_a_filesystem_that_shows_all_as_anothers_is_known_by_what_is_made_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with root_squash and all_squash, and EFS by its access points."""
    run = open_run_dir(tmp_path / "run", None)
    write_private(run.manifest_path, '{"name": "a"}')
    give_away(run.path)
    with pytest.raises(PermissionError):
        read_own_manifest(run.path)
    monkeypatch.setattr(files, "find_shown_uid", lambda _: STRANGER)
    assert read_own_manifest(run.path).name == "a"
    assert open_run_dir(run.path, None).path == run.path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    with mount_disk(tmp_path / "disk", 1):
        yield tmp_path / "disk"


def test_a_disk_that_gets_full_leaves_room_for_the_account(disk: Path) -> None:
    run = open_run_dir(disk / "run", None)
    used = shutil.disk_usage(disk).free
    told = f"the run directory's disk is full ({run.path})"
    reserve_space(run)
    assert used - shutil.disk_usage(disk).free >= SIZE
    assert [path.name for path in run.path.iterdir()] == ["logs"]  # nothing that a SIGKILL could leave
    assert release_space(run) == "" and not is_full(run)
    reserve_space(run)
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    assert is_full(run)
    assert release_space(run) == told
    (run.path / "manifest.json").write_bytes(bytes(SIZE))
    assert sorted(path.name for path in run.path.iterdir()) == ["logs", "manifest.json"]
    reserve_space(run)  # a disk that is full from the start
    assert release_space(run) == told
    assert sorted(path.name for path in run.path.iterdir()) == ["logs", "manifest.json"]


def test_what_is_said_if_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run_dir(tmp_path / "run", None)
    reserve_space(run)
    reserve_space(run)
    assert release_space(run) == release_space(run) == ""
    assert [path.name for path in run.path.iterdir()] == ["logs"]
    (run.path / "x").mkdir()
    with pytest.raises(OSError, match="directory") as caught:
        write_private(run.path / "x", "new")
    assert caught.value.filename == str(run.path / "x")
    assert list_below(run.path) == {"x", "logs"}
    for number, words in (
        (errno.EDQUOT, "your quota on the run directory's disk is used up ({})"),
        (errno.EROFS, "the run directory cannot be written ({}: Read-only file system)"),
    ):
        with monkeypatch.context() as patch:
            error = OSError(number, os.strerror(number))
            patch.setattr("tempfile.TemporaryFile", Mock(side_effect=error))
            assert release_space(run) == words.format(run.path)
    reserve_space(run)
    shutil.rmtree(run.path)
    reserve_space(run)
    told = f"the run directory was removed during the run ({run.path})"
    assert release_space(run) == release_space(run) == told
    assert not is_full(run)


RECORD = {
    **{"rank": 4, "local_rank": 0, "attempt": 1, "pid": 77, "agent": 70, "host": "h", "cpus": "0-3"},
    **{"memory": {"policy": "preferred", "nodes": "0"}, "problems": ["p"], "more": None},
}
APPLIED = {
    **{key: value for key, value in RECORD.items() if key != "more"},
    "memory": {"policy": "preferred", "nodes": frozenset({0})},
    "problems": ("p",),
    # What the record does not tell.
    **{"gpu": "", "num_workers": None, "env": None, "time": 0},
}


def read_new(reader: AppliedReader) -> list[dict[str, object]]:
    return [asdict(record) for record in reader.read_new()]


def test_the_reader_gives_what_is_new(tmp_path: Path) -> None:
    reader = AppliedReader(tmp_path)
    path = tmp_path / "rank-4.applied.json"
    assert read_new(reader) == []
    path.write_text("{")
    (tmp_path / "rank-4.applied.json.77").write_text(json.dumps(RECORD))
    assert read_new(reader) == []
    path.write_text(json.dumps(RECORD))
    assert read_new(reader) == [APPLIED]
    assert read_new(reader) == []
    path.write_text(json.dumps({**RECORD, "attempt": 2}))
    os.utime(path, ns=(1, 1))
    assert read_new(reader) == [{**APPLIED, "attempt": 2}]
    path.unlink()
    assert read_new(reader) == []


def test_records_of_another_user_are_shown_but_not_acted_upon(tmp_path: Path) -> None:
    path = tmp_path / "rank-4.applied.json"
    path.write_text(json.dumps(RECORD))
    give_away(path)
    assert read_new(AppliedReader(tmp_path)) == []
    assert read_new(AppliedReader(tmp_path, own=False)) == [APPLIED]
