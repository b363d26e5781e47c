"""From which sources a run was made: the git commit, and the versions of packages."""

import os
import subprocess
from pathlib import Path

DISTRIBUTION = "launch-ranks"
"""What pip calls this project; it is recorded as `launch`."""
PACKAGES = {"launch": DISTRIBUTION} | {
    name: name for name in ("torch", "numpy", "hydra-core", "nvidia-ml-py")
}
"""Packages whose versions are recorded, each with its distribution."""
QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
"""Variables with which git writes nothing, fetches nothing and asks nothing. A repository of another user is
refused by git itself (`safe.directory`)."""


def describe_sources(directory: Path) -> dict[str, object]:
    """Return the git commit, whether the work tree is dirty, and package versions, for the manifest."""
    commit = ask_git(directory, "rev-parse", "HEAD")
    words = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    dirty = ask_git(directory, *words) if commit else None
    return {
        "git": {"commit": commit, "dirty": None if dirty is None else bool(dirty)},
        "packages": {name: found for name, dist in PACKAGES.items() if (found := find_version(dist))},
    }


def ask_git(directory: Path, *arguments: str) -> str | None:
    """Return git's answer; None outside a work tree, without git, or after 5 seconds."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            env={**os.environ, **QUIET},
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
