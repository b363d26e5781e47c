"""Run directories made by hand, as `launch` leaves them."""

import json
from pathlib import Path


def make_run(
    runs_dir: Path,
    name: str = "tiny",
    stamp: str = "20260801-120000",
    state: str = "succeeded",
    **more: object,
) -> Path:
    """A run directory with a manifest; `more` is what else that holds, `outcome` what its outcome does."""
    path = runs_dir / name / stamp
    (path / "logs").mkdir(parents=True)
    outcome = {"state": state, **more.pop("outcome", {})}  # type: ignore[dict-item]  # a dictionary of JSON
    started = "2026-08-01T12:00:00.000+00:00"
    ended = "2026-08-01T12:01:30.000+00:00" if state in ("succeeded", "failed", "stopped") else None
    manifest = {
        "schema": 1,
        "id": stamp,
        "name": name,
        "command": ["launch", f"name={name}"],
        "hosts": ["box"],
    }
    manifest |= {"started": started, "ended": ended, "outcome": outcome, "earlier": [], **more}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def write_log(path: Path, rank: int, text: str, attempt: int = 0, ending: str = "out") -> Path:
    """Add to the log of a rank."""
    log = path / "logs" / str(attempt) / f"rank-{rank}.{ending}"
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as file:
        file.write(text)
    return log


def write_applied(path: Path, rank: int, host: str) -> None:
    """Let a rank have recorded itself."""
    record = {"rank": rank, "local_rank": 0, "attempt": 0, "pid": 1, "agent": 1, "host": host, "cpus": "0"}
    record |= {"memory": {"policy": "default", "nodes": ""}, "problems": []}
    (path / f"rank-{rank}.applied.json").write_text(json.dumps(record))
