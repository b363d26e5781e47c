"""The paths of a job that have to answer on every node."""

import os
from pathlib import Path

from launcher.config.settings import Settings
from launcher.preflight.preflight_request import NeededPath


def list_needed_paths(config: Settings, run_path: Path | None, directory: Path) -> tuple[NeededPath, ...]:
    """Return them, each once; the node adds those of its own environment (its temporary directory).

    Without a run directory it is the working directory that the job is to write to.
    """
    runs = [NeededPath(str(run_path.absolute()), "run directory")] if run_path else []
    own = [NeededPath(join_below(directory, path), "data") for path in config.preflight.paths]
    paths = [*runs, NeededPath(str(directory), "working directory"), *own]
    return tuple({each.path: each for each in reversed(paths)}.values())[::-1]


def join_below(directory: Path, path: str) -> str:
    """Return an absolute path, links and dots left as they are: nothing is looked up here."""
    return os.path.join(directory, os.path.expanduser(path))  # noqa: PTH111, PTH118 - as it is given
