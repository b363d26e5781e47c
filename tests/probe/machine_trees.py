"""Machines as trees of files: a small one to be spoilt, and where trees are written."""

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.plan.lab_machines import Data, fsroot

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
STATUS = "proc/self/status"
GPUS = "proc/driver/nvidia/gpus"
PCI = "sys/bus/pci/devices"

SEVERAL = re.compile(r"\{(\d+)-(\d+)\}")
RICH: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/rich_machines.json").read_text())
ROOM = 1 << 30
"""Bytes that the largest tree needs and some to spare: each of its 40,000 files takes a page."""
SMALL: Data = {
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


def find_path(device: Data) -> tuple[str, ...]:
    """The PCI path that the lab's writer gives a device, without the device itself."""
    domain, bus = device["bdf"].split(":")[:2]
    switch = device.get("switch")
    port = f"{domain}:{bus}:1f.7" if switch is None else f"{domain}:{switch}:00.0"
    return f"pci{domain}:{switch or bus}", port


def write_small(root: Path, **changes: Any) -> Path:
    """Write the small machine below root, with other values for some of its keys."""
    fsroot.materialize({**copy.deepcopy(SMALL), **changes}, root)
    return root


Content = str | bytes | Mapping[str, Any]
"""A file's text, to which a newline is added, or bytes; or one of `link` (a target), `folder`, `pipe`, `raw`
(a text as it is), `hex` (bytes) and `repeat` (texts and how often each)."""


def put(root: Path, path: str, content: Content) -> None:
    """Write one file, or what else there may be."""
    here = root / path
    here.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        content = f"{content}\n".encode()
    if isinstance(content, bytes):
        here.write_bytes(content)
        return
    ((kind, value),) = content.items()
    match kind:
        case "link":
            here.symlink_to(value)
        case "folder":
            here.mkdir()
        case "pipe":
            os.mkfifo(here)
        case "hex":
            here.write_bytes(bytes.fromhex(value))
        case "repeat":
            here.write_text("".join(text * count for text, count in value))
        case _:
            here.write_text(value)


def link(root: Path, path: str, target: str) -> None:
    """Make a link to a path below root, relative as the kernel's are."""
    here = root / path
    here.parent.mkdir(parents=True, exist_ok=True)
    here.symlink_to(os.path.relpath(root / target, here.parent))


def write_device(root: Path, path: str, **files: str) -> str:
    """Write a PCI device below sys/devices, known to the bus by its address; its path."""
    real = f"sys/devices/{path}"
    for name, content in files.items():
        put(root, f"{real}/{name}", content)
    (root / real).mkdir(parents=True, exist_ok=True)
    link(root, f"{PCI}/{path.rpartition('/')[2]}", real)
    return real


def expand(files: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each of `cpu{0-3}/…`."""
    for path, content in files.items():
        found = SEVERAL.search(path)
        for number in range(int(found[1]), int(found[2]) + 1) if found else ("",):
            yield SEVERAL.sub(str(number), path), content


def write_rich(root: Path, vendor: str) -> Path:
    """Write the small machine with all that the probe reads: NVIDIA's GPUs and cgroups 2, or AMD's, cgroups 1
    and hybrid cores.
    """
    write_small(root, **({"gpus": []} if vendor == "amd" else {}))
    for part in (RICH["both"], RICH[vendor]):
        for path, content in expand(part["files"]):
            put(root, path, content)
        for path, target in part["links"].items():
            link(root, path, target)
    return root


@contextmanager
def spoilt(root: Path, edits: Mapping[str, Content | None]) -> Iterator[Path]:
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
                made.append(next(top for top in (*reversed(here.parents), here) if not os.path.lexists(top)))
                put(root, path, content)
        yield root
    finally:
        for top in made:
            shutil.rmtree(top) if top.is_dir() and not top.is_symlink() else top.unlink(missing_ok=True)
        for before in kept:
            before.rename(str(before).removesuffix(".kept"))


@contextmanager
def short_lived() -> Iterator[Path]:
    """A folder that goes at once, in memory as sysfs is: a disk takes seconds for 10,000 files.

    On disk where /dev/shm has no room: some containers have 64 MB of it.
    """
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= ROOM
    with TemporaryDirectory(dir=memory if roomy else None) as folder:
        yield Path(folder)
