"""Running programs whose hook keeps a heartbeat."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import clean_environ
from tests.inprocess.hooked import FOLDER, ROOT


def make_environ(folder: Path, rank: int = 0, **variables: str) -> dict[str, str]:
    """Return what the shim gives to a rank that is watched."""
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "1", "LAUNCH_WATCH": str(folder)}
    path = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
    return {**clean_environ(), **ours, **path, "OMP_NUM_THREADS": "1", **variables}


def start_watched(
    code: str, folder: Path, environ: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Start a program with a heartbeat in a folder; its input and output are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environ or make_environ(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
