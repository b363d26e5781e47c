"""The manifest: attempts, and the sources that a run was made from."""

import hashlib
import json
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from launcher.runs.manifest import describe_start, stamp_time
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import RunDir
from tests.seam import QUICK_AGENT, Result, run_outside

SECRET = "hunter2-hunter2"
TOKEN = "ghp_AbCdEfGh12345678AbCdEfGh12345678AbCd"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git work tree with one commit."""
    assert shutil.which("git"), "git is needed"
    for name, value in (("NAME", "a"), ("EMAIL", "a@b")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_the_commit_and_whether_the_tree_is_dirty(repository: Path) -> None:
    commit = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert describe_sources(repository)["git"] == {"commit": commit.stdout.strip(), "dirty": False}
    (repository / "untracked").write_text("")
    assert describe_sources(repository)["git"] == {"commit": commit.stdout.strip(), "dirty": False}
    (repository / "file").write_text("2")
    assert describe_sources(repository)["git"] == {"commit": commit.stdout.strip(), "dirty": True}


def test_outside_a_work_tree_or_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_sources(tmp_path)["git"] == {"commit": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_sources(tmp_path)["git"] == {"commit": None, "dirty": None}


def test_versions(tmp_path: Path) -> None:
    from importlib.metadata import version

    packages = describe_sources(tmp_path)["packages"]
    assert isinstance(packages, dict)
    assert packages["torch"] == version("torch") and packages["launch"] == version("launch-ranks")


def test_the_start(here: Path) -> None:
    run = RunDir(here / "runs/name/id")
    start = describe_start(run, ["launch", f"env.HF_TOKEN={SECRET}", "--", "x"], {"model": "tiny"})
    assert (start["id"], start["name"], start["directory"]) == ("id", "name", str(here))
    assert start["command"] == ["launch", "env.HF_TOKEN=***", "--", "x"]
    assert (start["choices"], start["ended"], start["outcome"]) == (
        {"model": "tiny"},
        None,
        {"state": "running"},
    )
    assert json.dumps(start)


def test_times_have_a_zone() -> None:
    from datetime import datetime

    assert datetime.fromisoformat(stamp_time()).utcoffset() is not None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder and the end of a real run with secrets of every kind, with umask 0."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "conf/binding").mkdir(parents=True)
    (folder / "conf/binding/exclusive.yaml").write_text("policy: none\n")
    words = [
        f"env.HF_TOKEN={SECRET}",
        f"+program.api_key={SECRET}",
        f"+program.nested={{password: {SECRET}}}",
        "nproc_per_node=1",
        "env.PLAIN=seen",
        "env.OUT=${run_dir}/out",
        "--",
        "/bin/sh",
        "-c",
        'echo "$OUT"; printf "%s\\n" "$@" | sha256sum',
        "sh",
        "--api-key",
        SECRET,
        f"--password={SECRET}",
        f"https://me:{SECRET}@host",
        *("-p", SECRET, "--port", "8080", TOKEN, f"--url=https://host/?a={TOKEN}"),
    ]
    return folder, run_outside(words, folder, {"WANDB_API_KEY": SECRET, "PYTHONPATH": QUICK_AGENT}, umask=0)


def test_no_secret_is_below_the_run_directory(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    assert result.code == 0, result.err
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    assert {"manifest.json", "config.yaml", "rank-0.applied.json", "rank-0.out"} <= {
        path.name for path in files
    }
    for secret in (SECRET, TOKEN):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert secret not in result.out + result.err
    (config,) = (path for path in files if path.name == "config.yaml")
    tree = yaml.safe_load(config.read_text())
    assert tree["env"] == {"HF_TOKEN": "***", "PLAIN": "seen", "OUT": f"{config.parent}/out"}


def test_the_program_has_its_arguments_as_they_were_given(finished: tuple[Path, Result]) -> None:
    words = ["--api-key", SECRET, f"--password={SECRET}", f"https://me:{SECRET}@host"]
    words += ["-p", SECRET, "--port", "8080", TOKEN, f"--url=https://host/?a={TOKEN}"]
    assert hashlib.sha256("".join(f"{word}\n" for word in words).encode()).hexdigest() in finished[1].out


def test_a_variable_that_refers_to_the_run_directory_has_it(finished: tuple[Path, Result]) -> None:
    (run,) = (finished[0] / "runs").glob("*/*")
    assert f"{run}/out" in finished[1].out


def test_the_output_says_which_configuration_was_used(finished: tuple[Path, Result]) -> None:
    assert "launch: configuration from conf/binding/exclusive.yaml" in finished[1].err


def test_all_of_a_run_is_closed_to_others(finished: tuple[Path, Result]) -> None:
    (run,) = (finished[0] / "runs").glob("*/*")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (run, *run.rglob("*"))}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in modes}


def test_the_manifest_of_a_run(finished: tuple[Path, Result]) -> None:
    (run,) = (finished[0] / "runs").glob("*/*")
    manifest = json.loads((run / "manifest.json").read_text())
    assert run.parent.name == manifest["name"] == "sh"
    assert manifest["outcome"]["state"] == "succeeded" and manifest["outcome"]["exit_code"] == 0
    assert manifest["command"][:2] == ["launch", "env.HF_TOKEN=***"]
    assert manifest["started"] < manifest["ended"]
    assert manifest["git"] == {"commit": None, "dirty": None}
    assert len(manifest["hosts"]) == 1
