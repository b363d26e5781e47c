"""The paths of a job that have to answer on every node."""

import os
from pathlib import Path

from launcher.config.schema import LaunchConfig
from launcher.preflight.preflight_request import NeededPath


def list_needed_paths(config: LaunchConfig, run_path: Path, directory: Path) -> tuple[NeededPath, ...]:
    """Return them, each once; the node adds those of its own environment (its temporary directory)."""
    paths = [
        NeededPath(str(run_path.absolute()), "run directory"),
        NeededPath(str(directory), "working directory"),
        *(
            NeededPath(os.path.join(directory, os.path.expanduser(path)), "data")  # noqa: PTH111, PTH118 - as they are given
            for path in config.preflight.paths
        ),
    ]
    return tuple({each.path: each for each in reversed(paths)}.values())[::-1]
