"""From which sources a run was made: the git commit, and the versions of packages."""

import subprocess
from pathlib import Path

PACKAGES = ("launch", "torch", "numpy", "hydra-core", "nvidia-ml-py")
"""Packages whose versions are recorded."""


def describe_sources(directory: Path) -> dict[str, object]:
    """Return the git commit, whether the work tree is dirty, and package versions, for the manifest."""
    commit = ask_git(directory, "rev-parse", "HEAD")
    dirty = ask_git(directory, "status", "--porcelain", "--untracked-files=no")
    return {
        "git": {"commit": commit, "dirty": None if dirty is None else bool(dirty)},
        "packages": {name: found for name in PACKAGES if (found := find_version(name))},
    }


def ask_git(directory: Path, *arguments: str) -> str | None:
    """Return git's answer; None outside a work tree, without git, or after 5 seconds."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
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
