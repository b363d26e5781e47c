"""`manifest.json`: what was run, from which sources, where, when and by which process, and how it ended."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from errno import EPERM
from pathlib import Path
from typing import Any

from launcher.files import ON_THE_WAY, open_directory, open_own, read_file, read_stat
from launcher.runs.run_directory import RunDir, write_json
from launcher.runs.secrets import mask_words

MOST_BYTES = 16 << 20
"""Of a manifest: one of hundreds of attempts has less, and what JSON makes of as much takes half a GiB."""
OPEN = ("submitted", "running", "requeued")
"""States of an outcome after which more is to come."""
CLOSED = ("succeeded", "failed", "stopped")
"""States after which no attempt follows."""
OF_START = ("hangs", "stragglers", "preflight", "node_order", "spares", "replacements")
"""What one start alone has, if it has it."""
OF_ATTEMPT = ("command", "started", "ended", "hosts", "attempt", "slurm", "outcome", *OF_START)
"""What is kept of a start when the next one begins, if it has it."""
JOB = re.compile(r"\d+(?:_\d+)?")
"""A job of SLURM's: `12`, `12_3`."""


def describe_start(run: RunDir, command: Sequence[str], choices: Mapping[str, str]) -> dict[str, object]:
    """Return the manifest's part that is known at the start; secrets in the command are masked."""
    found = read_manifest(run.path, run.manifest_path.name)
    earlier = [*take_list(found, "earlier"), {key: found[key] for key in OF_ATTEMPT if key in found}]
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
        "earlier": earlier if "earlier" in found else [],
    }


def stamp_time() -> str:
    """Return the time now in ISO 8601, with the zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def read_time(text: object) -> float | None:
    """Return a time of a manifest or of SLURM in seconds since the epoch; None if the text is no time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def read_manifest(path: Path, name: str = "manifest.json") -> dict[str, Any]:
    """Read the manifest of a run directory; empty if it cannot be read."""
    try:
        return parse_manifest(read_file(path / name, MOST_BYTES))
    except OSError:
        return {}


def read_own_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run directory, to act upon: what it names is signalled, or cancelled.

    Raises PermissionError if the directory or the manifest is another user's, or a link of such a one on
    the way from `runs_dir` leads there.
    """
    try:
        with open_directory(path.parent, flags=ON_THE_WAY) as above, open_own(path.name, at=above) as at:
            return parse_manifest(read_file("manifest.json", MOST_BYTES, at=at, own=True))
    except PermissionError:
        raise
    except OSError:
        return {}


def parse_manifest(data: bytes) -> dict[str, Any]:
    """Return a manifest's values; empty for what is none."""
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_job(manifest: Mapping[str, object]) -> str | None:
    """Return the number of the SLURM job that a manifest names; None if there is none."""
    job_id = str(take_dict(manifest, "slurm").get("job_id"))
    return job_id if JOB.fullmatch(job_id) else None


def take_dict(mapping: Mapping[str, object], key: str) -> dict[str, Any]:
    """Return a dictionary in a manifest; empty if there is none."""
    found = mapping.get(key)
    return found if isinstance(found, dict) else {}


def take_list(mapping: Mapping[str, object], key: str) -> list[object]:
    """Return a list in a manifest; empty if there is none."""
    found = mapping.get(key)
    return found if isinstance(found, list) else []


def take_earlier(manifest: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the attempts before a manifest's last one, oldest first."""
    return [entry for entry in take_list(manifest, "earlier") if isinstance(entry, dict)]


def write_manifest(run: RunDir, manifest: Mapping[str, object]) -> None:
    """Write the manifest; raises OSError."""
    write_json(run.manifest_path, manifest)


START_FIELD = 22
"""Field of /proc/PID/stat with the start in clock ticks since boot (proc(5))."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")


def identify_process(pid: int) -> dict[str, object]:
    """Return what tells a process of this host from all others, for the manifest; empty without /proc."""
    try:
        return {"host": os.uname().nodename, "pid": pid, "start": read_start(pid), **identify_place()}
    except OSError:
        return {}


def identify_place() -> dict[str, object]:
    """Return which kernel, since which boot, and whose PIDs (a container has its own); raises OSError."""
    return {"boot": BOOT.read_text(encoding="ascii").strip(), "namespace": str(NAMESPACE.readlink())}


def read_start(pid: int) -> int:
    """Return when a process started; raises OSError if there is none, or if it is a zombie."""
    _, fields = read_stat(pid)
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[START_FIELD - 3])


def check_process(record: Mapping[str, object]) -> bool | None:
    """Tell whether a process that was identified so is alive; None if that cannot be seen here."""
    try:
        place = identify_place()
        if record.get("host") != os.uname().nodename:
            return None
        if record.get("boot") != place["boot"]:
            return False  # none of the processes before a boot is left
        if record.get("namespace") != place["namespace"]:
            return None
        return read_start(int(str(record["pid"]))) == record.get("start")
    except OSError:
        return False
    except (KeyError, ValueError):
        return None


def open_process(record: Mapping[str, object], path: Path) -> int:
    """Return a pidfd of the `launch` of a run, whose manifest identifies it so.

    Raises ProcessLookupError if it is gone, and PermissionError for a process that is another user's, or
    is not this run's: the record alone could name any process. The checks come after the opening: from then
    on, the descriptor stands for this very process.
    """
    pid = int(str(record["pid"]))
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise ProcessLookupError(f"process {pid}: {error.strerror}") from None
    try:
        if not check_process(record):
            raise ProcessLookupError(f"process {pid} is another one, or has ended")
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            raise PermissionError(EPERM, f"process {pid} is another user's")
        if not _holds_directory(pid, path):
            raise PermissionError(EPERM, f"process {pid} is not the launch of this run")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _holds_directory(pid: int, path: Path) -> bool:
    """Tell whether a process has a directory open, as a `launch` has that of its run; raises OSError."""
    try:
        entries = [*Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    for entry in entries:
        with suppress(OSError):  # closed meanwhile
            if entry.samefile(path):
                return True
    return False
