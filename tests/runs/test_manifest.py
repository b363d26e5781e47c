"""The manifest: the sources that a run was made from, and what is masked (`secrets.toml`)."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.runs.provenance import describe_sources
from launcher.runs.secrets import mask_tree, mask_variables, mask_words
from tests.cli.make_runs import read_manifest
from tests.seam import QUICK_AGENT, Result, run_outside, wait_for

SECRET = "hunter2-hunter2"
TOKEN = "ghp_AbCdEfGh12345678AbCdEfGh12345678AbCd"
PROGRAM_WORDS = (
    *("--api-key", SECRET, f"--password={SECRET}", f"https://me:{SECRET}@host"),
    *("-p", SECRET, "--port", "8080", TOKEN, f"--url=https://host/?a={TOKEN}"),
)


def test_versions(tmp_path: Path) -> None:
    from importlib.metadata import version

    packages = describe_sources(tmp_path)["packages"]
    assert isinstance(packages, dict)
    assert packages["torch"] == version("torch") and packages["launch"] == version("launch-ranks")


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
        *PROGRAM_WORDS,
    ]
    return folder, run_outside(words, folder, {"WANDB_API_KEY": SECRET, "PYTHONPATH": QUICK_AGENT}, umask=0)


def test_no_secret_is_below_the_run_directory_which_is_closed_to_others(
    finished: tuple[Path, Result],
) -> None:
    folder, result = finished
    assert result.code == 0, result.err
    (run,) = (folder / "runs").glob("*/*")
    paths = [run, *run.rglob("*")]
    assert {"manifest.json", "config.yaml", "rank-0.applied.json", "rank-0.out"} <= {p.name for p in paths}
    assert [
        path for path in paths if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)
    ] == []
    for secret in (SECRET, TOKEN):
        assert [path for path in paths if path.is_file() and secret.encode() in path.read_bytes()] == []
        assert secret not in result.out + result.err
    tree = yaml.safe_load((run / "config.yaml").read_text())
    assert tree["env"] == {"HF_TOKEN": "***", "PLAIN": "seen", "OUT": f"{run}/out"}
    assert "launch: configuration from conf/binding/exclusive.yaml" in result.err


def test_the_program_has_its_words_and_variables_and_the_manifest_tells_of_the_run(
    finished: tuple[Path, Result],
) -> None:
    folder, result = finished
    assert hashlib.sha256("".join(f"{word}\n" for word in PROGRAM_WORDS).encode()).hexdigest() in result.out
    (run,) = (folder / "runs").glob("*/*")
    assert f"{run}/out" in result.out
    manifest = read_manifest(run)
    assert run.parent.name == manifest["name"] == "sh"
    assert manifest["outcome"]["state"] == "succeeded" and manifest["outcome"]["exit_code"] == 0
    assert manifest["command"][:2] == ["launch", "env.HF_TOKEN=***"]
    assert datetime.fromisoformat(manifest["started"]).utcoffset() is not None
    assert manifest["started"] < manifest["ended"] and manifest["directory"] == str(folder)
    assert manifest["git"] == {"commit": None, "dirty": None}
    assert len(manifest["hosts"]) == 1


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


def test_the_commit_and_whether_the_tree_is_dirty(
    repo: Path, git: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_sources(repo)["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (repo / "untracked").write_text("")
    assert tell(repo) is False
    (repo / "file").write_text("2")
    assert tell(repo) is True
    assert describe_sources(tmp_path)["git"] == {"commit": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_sources(repo)["git"] == {"commit": None, "dirty": None}


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


# Secrets


TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("secrets.toml").read_text())
MASK = "***"
LETTERS = "AbCdEfGh12345678" * 5
TOKENS: dict[str, str] = {
    issuer: re.sub(r"\{(\d+)\}", lambda found: LETTERS[: int(found[1])], form)
    for issuer, form in TABLE["tokens"].items()
}


def test_names_and_words() -> None:
    assert {*mask_variables(dict.fromkeys(TABLE["names"], "a")).values()} == {MASK}
    assert {*mask_variables(dict.fromkeys(TABLE["plain_names"], "a")).values()} == {"a"}
    for given, *shown in TABLE["masked"]:
        assert mask_words(given) == (shown[0] if shown else given)
    assert [mask_words([word])[0] for word in TABLE["plain_words"]] == TABLE["plain_words"]


def test_tokens_are_known_by_their_form_wherever_they_stand() -> None:
    for issuer, token in TOKENS.items():
        for frame in TABLE["frames"]:
            (masked,) = mask_words([frame.format(token)])
            assert MASK in masked and token[8:] not in masked, (issuer, masked)
            assert mask_tree({"a": [{"b": frame.format(token)}]}) == {"a": [{"b": masked}]}
            assert mask_variables({"A": frame.format(token)}) == {"A": masked}


def test_trees_and_the_command_lines_in_them() -> None:
    program = {"tokenizer": "t", "max_tokens": 5, "auth": True, "api_key": None}
    tree = {
        "env": {"HF_TOKEN": "abc", "A": "b"},
        "program": {**program, "password": 123, "url": "ftp://u:p@h"},
        "secrets": {"deep": {"er": "abc"}, "list": ["abc", 1]},
        "command": ["train.py", "--token", "abc", "--n", 3, "--password", 1234, "-p", "hunter2", "-p", 8080],
        "many": [{"token": "abc"}, 3],
    }
    assert mask_tree(tree) == {
        "env": {"HF_TOKEN": MASK, "A": "b"},
        "program": {**program, "password": MASK, "url": f"ftp://{MASK}@h"},
        "secrets": {"deep": {"er": MASK}, "list": [MASK, MASK]},
        "command": ["train.py", "--token", MASK, "--n", 3, "--password", MASK, "-p", MASK, "-p", 8080],
        "many": [{"token": MASK}, 3],
    }
    assert tree["command"][2] == "abc"  # type: ignore[index]


def test_long_words_take_no_time() -> None:
    for part in TABLE["slow"]:
        start = time.process_time()
        mask_words([part * (300_000 // len(part))])
        assert time.process_time() - start < 2, part
