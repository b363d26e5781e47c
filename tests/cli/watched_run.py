"""The run directory of a job that is watched, as its nodes write it: what `launch watch` shows."""

import json
import os
import time
from pathlib import Path
from typing import Any

from launcher.runs.manifest import identify_process
from tests.cli.make_runs import make_run, write_log
from tests.data_files import DATA

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
