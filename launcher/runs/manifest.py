"""`manifest.json`: what was run, from which sources, where and when, and how it ended."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from launcher.runs.rundir import RunDir, write_json
from launcher.runs.secrets import mask_words

PACKAGES = ("launch", "torch", "numpy", "hydra-core", "nvidia-ml-py")
"""Packages whose versions are recorded."""


def describe_start(run: RunDir, command: Sequence[str], choices: Mapping[str, str]) -> dict[str, object]:
    """Return the manifest's part that is known at the start; secrets in the command are masked."""
    return {
        "schema": 1,
        "id": run.id,
        "name": run.path.parent.name,
        "command": mask_words(command),
        "directory": str(Path.cwd()),
        "choices": dict(choices),
        "started": stamp_time(),
        "ended": None,
        "outcome": {"state": "running"},
        "earlier": read_earlier(run.manifest_path),
    }


def describe_sources(directory: Path) -> dict[str, object]:
    """Return the git commit, whether the work tree is dirty, and package versions."""
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


def stamp_time() -> str:
    """Return the time now in ISO 8601, with the zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def read_earlier(path: Path) -> list[object]:
    """Return the starts that a manifest tells of, oldest first; none where there is no manifest."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        last = {key: found[key] for key in ("command", "started", "ended", "outcome")}
        return [*found["earlier"], last]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_manifest(run: RunDir, manifest: Mapping[str, object]) -> None:
    """Write the manifest; raises OSError."""
    write_json(run.manifest_path, manifest)
