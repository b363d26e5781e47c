"""Machines as trees of files: the lab's twelve, and a small one to be spoilt."""

import copy
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LAB = Path(__file__).parents[1] / "lab"
MACHINES = sorted(path.stem for path in (LAB / "machines").glob("*.json"))
CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
STATUS = "proc/self/status"
GPUS = "proc/driver/nvidia/gpus"
PCI = "sys/bus/pci/devices"

SMALL: dict[str, Any] = {
    "name": "small",
    "numa": [
        {"id": 0, "package": 0, "cpus": "0-1,8-9"},
        {"id": 1, "package": 0, "cpus": "2-3,10-11"},
        {"id": 2, "package": 1, "cpus": "4-5,12-13"},
        {"id": 3, "package": 1, "cpus": "6-7,14-15"},
    ],
    "threads": {"offset": 8},
    "gpus": [
        {"bdf": "0000:07:00.0", "numa": 1, "model": "NVIDIA A100-SXM4-40GB"},
        {"bdf": "0000:47:00.0", "numa": 3, "model": "NVIDIA A100-SXM4-40GB"},
    ],
}
"""Two packages of two NUMA nodes, each with two cores of two threads; a GPU in each package."""


def load_fsroot() -> Any:
    """The lab's writer of trees, which is no package."""
    spec = importlib.util.spec_from_file_location("fsroot", LAB / "fsroot.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FSROOT = load_fsroot()


def describe(name: str) -> dict[str, Any]:
    """A lab machine's description."""
    description: dict[str, Any] = json.loads((LAB / "machines" / f"{name}.json").read_text())
    return description


def write_small(root: Path, **changes: Any) -> Path:
    """Write the small machine below root, with other values for some of its keys."""
    FSROOT.materialize({**copy.deepcopy(SMALL), **changes}, root)
    return root


def put(root: Path, path: str, content: str | bytes) -> None:
    """Write one file."""
    here = root / path
    here.parent.mkdir(parents=True, exist_ok=True)
    here.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


@contextmanager
def spoilt(root: Path, edits: Mapping[str, str | bytes | None]) -> Iterator[Path]:
    """A tree with other contents for a while; None takes away a file, a link or a directory.

    A tree has a thousand files, so one serves many tests.
    """
    made, kept = [], []
    try:
        for path, content in edits.items():
            here = root / path
            if os.path.lexists(here):
                kept.append(here.rename(f"{here}.kept"))
            if content is not None:
                made.append(next(top for top in (*reversed(here.parents), here) if not top.exists()))
                put(root, path, content)
        yield root
    finally:
        for top in made:
            shutil.rmtree(top) if top.is_dir() else top.unlink(missing_ok=True)
        for before in kept:
            before.rename(str(before).removesuffix(".kept"))


@contextmanager
def short_lived() -> Iterator[Path]:
    """A folder that goes at once, in /dev/shm where there is one: a disk takes seconds for 10,000 files."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)
