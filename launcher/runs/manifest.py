"""`manifest.json`: what was run, from which sources, where and when, and how it ended."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.files import ON_THE_WAY, open_directory, open_own, read_file
from launcher.runs.run_directory import RunDir, closing_descriptor, write_json
from launcher.runs.secrets import mask_words

MOST_BYTES = 16 << 20
"""Of a manifest: one of hundreds of attempts has less, and what JSON makes of as much takes half a GiB."""
OPEN = ("submitted", "running", "requeued")
"""States of an outcome after which more is to come."""
CLOSED = ("succeeded", "failed", "stopped")
"""States after which no attempt follows."""
OF_START = ("hangs", "stragglers", "preflight", "node_order", "spares", "sick_spares", "replacements")
"""What one start alone has, if it has it."""
OF_ATTEMPT = ("command", "started", "ended", "hosts", "attempt", "slurm", "outcome", *OF_START)
"""What is kept of a start when the next one begins, if it has it."""
JOB = re.compile(r"\d+(?:_\d+)?")
"""A job of SLURM's: `12`, `12_3`."""


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


def stamp_time() -> str:
    """Return the time now in ISO 8601, with the zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def read_time(text: object) -> float | None:
    """Return a time of a manifest or of SLURM in seconds since the epoch; None if the text is no time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run directory; empty if it cannot be read."""
    try:
        return parse_manifest(read_file(path / "manifest.json", MOST_BYTES))
    except OSError:
        return {}


def read_own_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run directory, to act upon: what it names is signalled, or cancelled.

    Raises PermissionError if the directory or the manifest is another user's, or a link of such a one on
    the way from `runs_dir` leads there.
    """
    try:
        with closing_descriptor(open_directory(path.parent, flags=ON_THE_WAY)) as above:
            at = open_own(path.name, at=above)
        with closing_descriptor(at):
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


def read_earlier(path: Path) -> list[object]:
    """Return the starts that a manifest tells of, oldest first; none if there is no manifest."""
    try:
        found = json.loads(read_file(path, MOST_BYTES).decode())
        return [*found["earlier"], {key: found[key] for key in OF_ATTEMPT if key in found}]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def write_manifest(run: RunDir, manifest: Mapping[str, object]) -> None:
    """Write the manifest; raises OSError."""
    write_json(run.manifest_path, manifest)
