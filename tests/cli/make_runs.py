"""Run directories made by hand, as `launch` leaves them, and as the nodes of a watched job write them."""

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.data_files import DATA


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


def identify_process(pid: int) -> dict[str, object]:
    """A process as a manifest has it: its start in clock ticks since boot, and whose PIDs those are."""
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    place = {"boot": boot.read_text().strip(), "namespace": str(namespace.readlink())}
    return {"host": os.uname().nodename, "pid": pid, "start": int(start), **place}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run directory."""
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return manifest


def read_nodes(path: Path, attempt: int) -> list[dict[str, Any]]:
    """What the nodes of an attempt have left of themselves, by their numbers."""
    found = [json.loads(file.read_text()) for file in path.glob(f"logs/{attempt}/node-*.json")]
    return sorted(found, key=lambda record: record["node_rank"])


# What `launch watch` shows


PARTS: dict[str, Any] = json.loads((DATA / "watched_run.json").read_text())
JOB: dict[str, Any] = PARTS["job"]
HANGING = {**JOB, "state": "hanging", "hangs": PARTS["hangs"]}
SENTENCE: str = PARTS["hangs"][0]["verdict"]["sentence"]
GPU: dict[str, Any] = PARTS["gpu"]
RANK: dict[str, Any] = PARTS["rank"]


def make_rank(rank: int, local_rank: int, **more: Any) -> dict[str, Any]:
    """A rank; number 5 waits least for the others, and its GPU is hot."""
    gpu = {**GPU, "index": local_rank, **(PARTS["hot_gpu"] if rank == 5 else {})}
    waits = {"wait_share": 0.03} if rank == 5 else {}
    return {**RANK, "rank": rank, "local_rank": local_rank, "pid": 4000 + rank, "gpu": gpu, **waits, **more}


def make_report(node: int, nodes: int = 2, size: int = 4, **more: Any) -> dict[str, Any]:
    """A node's report of just now."""
    ranks = [make_rank(node * size + local, local) for local in range(size)]
    names = {"host": f"n{node}", "node_rank": node, "nodes": nodes, "time": time.time(), "ranks": ranks}
    return {**PARTS["report"], **names, **more}


def write_watch(path: Path, value: dict[str, Any], name: str = "") -> None:
    """Write a node's report, or another file of `watch/`."""
    (path / "watch").mkdir(exist_ok=True)
    (path / "watch" / (name or f"node-{value['host']}.json")).write_text(json.dumps(value))


def make_watched_run(runs_dir: Path, nodes: int = 2, ranks: int = 4) -> Path:
    """A run directory with reports, which lives as long as this process."""
    path = make_run(runs_dir, "train", state="running", process=identify_process(os.getpid()))
    for node in range(nodes):
        write_watch(path, make_report(node, nodes, ranks))
    write_watch(path, {**JOB, "nodes": nodes, "stragglers": [PARTS["straggler"]]}, "job.json")
    write_watch(path, PARTS["evidence"], "evidence-n1.json")
    write_log(path, 0, "step 119/400 loss 2.5\nstep 120/400 loss 2.412\n")
    write_log(path, 5, "reading shard 17\n")
    return path
