"""git in a work tree whose settings name programs: none of them is run, and what can be told is told."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.runs.provenance import describe_sources
from tests.seam import wait_for


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A program that leaves a mark."""
    path = tmp_path / "evil.sh"
    path.write_text(f"#!/bin/sh\necho ran >> '{tmp_path}/mark'\ncat\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    assert shutil.which("git"), "git is needed"
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")

    def run(*words: str, at: Path = tmp_path / "repo") -> str:
        at.mkdir(exist_ok=True)
        command = ["git", "-c", "protocol.file.allow=always", "-C", str(at), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return run


@pytest.fixture
def repo(tmp_path: Path, git: Callable[..., str]) -> Path:
    """A work tree whose file has been touched, so that git has to look into it."""
    git("init", "-q")
    path = tmp_path / "repo"
    (path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    os.utime(path / "file", (1, 1))
    return path


def assert_runs(repo: Path, mark: Path) -> None:
    """Assert that git by itself would run the program; it may wait for an answer that never comes."""
    process = subprocess.Popen(
        ["git", "-C", repo, "status"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    wait_for(lambda: mark.exists() or process.poll() is not None, "the end of git")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert mark.exists()


def tell(repo: Path) -> object:
    found = describe_sources(repo)["git"]
    assert isinstance(found, dict) and found["commit"]
    return found["dirty"]


@pytest.mark.parametrize("key", ["core.fsmonitor", "filter.e.clean", "filter.e.process", "filter.e.x.clean"])
def test_no_program_of_the_repositorys_own_settings_is_run(
    tmp_path: Path, git: Callable[..., str], repo: Path, evil: Path, key: str
) -> None:
    name = key.removeprefix("filter.").rpartition(".")[0]
    (repo / ".git/info/attributes").write_text(f"file filter={name}\n")
    git("config", key, str(evil))
    git("config", f"filter.{name}.required", "true")
    assert tell(repo) is False
    assert not (tmp_path / "mark").exists()
    (repo / "file").write_text("2")
    assert tell(repo) is True
    assert not (tmp_path / "mark").exists()
    assert_runs(repo, tmp_path / "mark")


def test_a_filter_that_cannot_be_switched_off(
    tmp_path: Path, git: Callable[..., str], repo: Path, evil: Path
) -> None:
    (repo / ".git/info/attributes").write_text("file filter=a=b\n")
    git("config", "filter.a=b.clean", str(evil))
    assert tell(repo) is None
    assert not (tmp_path / "mark").exists()


def test_the_users_own_filters_stay(tmp_path: Path, git: Callable[..., str]) -> None:
    """As those of Git LFS: without them, a file that was only touched would count as changed."""
    git("config", "--global", "filter.up.clean", "tr a-z A-Z")
    git("init", "-q")
    (tmp_path / "repo/.gitattributes").write_text("file filter=up\n")
    (tmp_path / "repo/file").write_text("text")
    git("add", ".")
    git("commit", "-qm", "first")
    os.utime(tmp_path / "repo/file", (1, 1))
    assert tell(tmp_path / "repo") is False


def test_no_hook_is_run_and_the_index_stays(
    tmp_path: Path, git: Callable[..., str], repo: Path, evil: Path
) -> None:
    for name in ("post-index-change", "fsmonitor-watchman", "post-checkout"):
        shutil.copy(evil, repo / ".git/hooks" / name)
    before = (repo / ".git/index").read_bytes()
    assert tell(repo) is False
    assert (repo / ".git/index").read_bytes() == before
    assert not (tmp_path / "mark").exists()


def test_submodules_have_settings_of_their_own(
    tmp_path: Path, git: Callable[..., str], repo: Path, evil: Path
) -> None:
    git("init", "-q", at=tmp_path / "other")
    (tmp_path / "other/file").write_text("1")
    git("add", "file", at=tmp_path / "other")
    git("commit", "-qm", "first", at=tmp_path / "other")
    git("submodule", "add", "-q", str(tmp_path / "other"), "sub")
    git("commit", "-qm", "second")
    git("config", "core.fsmonitor", str(evil), at=repo / "sub")
    os.utime(repo / "sub/file", (1, 1))
    assert tell(repo) is False
    assert not (tmp_path / "mark").exists()


def test_a_partial_clone_fetches_nothing(
    tmp_path: Path, git: Callable[..., str], repo: Path, evil: Path
) -> None:
    """git would fetch the tree that is missing by the program that the remote is said to have."""
    tree = git("rev-parse", "HEAD^{tree}")
    git("config", "remote.origin.url", str(repo))
    git("config", "remote.origin.promisor", "true")
    git("config", "remote.origin.uploadpack", str(evil))
    git("config", "core.repositoryformatversion", "1")
    git("config", "extensions.partialClone", "origin")
    (repo / ".git/objects" / tree[:2] / tree[2:]).unlink()
    (repo / ".git/index").unlink()
    assert tell(repo) is None
    assert not (tmp_path / "mark").exists()
    assert_runs(repo, tmp_path / "mark")
