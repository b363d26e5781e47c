"""From which sources a run was made: the git commit, and the versions of packages."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DISTRIBUTION = "launch-ranks"
"""What pip calls this project; it is recorded as `launch`."""
PACKAGES = {"launch": DISTRIBUTION} | {
    name: name for name in ("torch", "numpy", "hydra-core", "nvidia-ml-py")
}
"""Packages whose versions are recorded, each with its distribution."""
HARMLESS = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}")
"""Settings over a repository's own, which name programs that git runs when it looks at a work tree."""
QUIET = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_TERMINAL_PROMPT": "0",
}
"""Variables with which git writes nothing (an index that is written has a hook), and fetches nothing: a clone
that lacks objects (`promisor remotes` of git-config(1)) fetches them by programs that its settings name."""
FILTER = re.compile(r"(?i)filter\..*\.(?:clean|process|required)", re.DOTALL)
"""Settings whose programs git runs on a file to compare it (gitattributes(5))."""


def describe_sources(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the git commit, whether the work tree is dirty, and package versions, for the manifest.

    No program is run that the repository names, which may be anybody's.
    """
    commit = ask_git(directory, (), "rev-parse", "HEAD")
    filters = list_filters(directory) if commit else None
    dirty = None
    if filters is not None:
        # Submodules have settings of their own: their commits are compared, their files are not.
        words = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        dirty = ask_git(directory, filters, *words)
    return {
        "git": {"commit": commit, "dirty": None if dirty is None else bool(dirty)},
        "packages": {name: found for name, dist in PACKAGES.items() if (found := find_version(dist))},
    }


def list_filters(directory: Path) -> list[str] | None:
    """Return the settings that switch off a repository's own filters; None if that cannot be done.

    The user's, such as those of Git LFS, stay. git 2.26 and later tell whose a setting is.
    """
    told = ask_git(directory, (), "config", "--list", "--null", "--name-only", "--show-scope")
    if told is None:
        return None
    words = told.split("\0")
    names = [
        name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in ("local", "worktree")
    ]
    own = {name.rpartition(".")[0] for name in names if FILTER.fullmatch(name)}
    if any("=" in name for name in own):  # `-c` ends a name there
        return None
    return [f"{name}.{key}" for name in own for key in ("clean=", "process=", "required=false")]


def ask_git(directory: Path, settings: Sequence[str], *arguments: str) -> str | None:
    """Return git's answer; None outside a work tree, without git, or after 5 seconds."""
    options = [word for setting in (*HARMLESS, *settings) for word in ("-c", setting)]
    command = ["git", "-C", str(directory), *options, *arguments]
    environ = {**os.environ, **QUIET}
    try:
        done = subprocess.run(
            command,
            env=environ,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_version(package: str) -> str | None:
    """Return an installed package's version."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
