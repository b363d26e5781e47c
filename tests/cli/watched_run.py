"""The run directory of a job that is watched, as its nodes write it: what `launch watch` shows."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.cli.make_runs import make_run, write_log

SENTENCE = (
    "rank 5 on n1 has not joined all_reduce #1042 of the default group, in which 7 ranks wait: it sleeps at"
    " data.py:88, read_shard"
)
HERE = {"file": "data.py", "line": 88, "function": "read_shard"}
STRAGGLER = {
    **{"rank": 5, "host": "n1", "excess": 0.18, "cause": "gpu_clock", "first_step": 100, "last_step": 200},
    "detail": "its GPU runs at 1410 of 1980 MHz: sw_thermal_slowdown",
    "time": 1e9,
}
JOB: dict[str, Any] = {
    **{"time": 1e9, "host": "n0", "attempt": 0, "state": "running", "step": 120, "step_age": 0.2, "p50": 0.4},
    "nodes": 2,
}
HANGING: dict[str, Any] = {
    **JOB,
    "state": "hanging",
    "hangs": [
        {
            **{"number": 1, "time": 1e9, "stalled_since": 1e9 - 24, "step": 120},
            "verdict": {
                **{"kind": "absent", "sentence": SENTENCE, "ranks": [5], "hosts": ["n1"], "waiting": 7},
                **{"group": "default group", "operation": "all_reduce", "sequence": 1042, "frame": HERE},
            },
        }
    ],
}
GPU: dict[str, Any] = {
    **{"utilization": 0.97, "sm_activity": 0.81, "memory_used": 61 << 30, "memory_total": 80 << 30},
    **{"power": 612.0, "power_limit": 700.0, "temperature": 64.0, "sm_clock": 1980, "max_sm_clock": 1980},
    **{"pcie_width": 16, "max_pcie_width": 16},
}
RANK: dict[str, Any] = {
    **{"attempt": 0, "phase": "training", "step": 120, "step_age": 0.2, "p50": 0.4, "p99": 0.52},
    **{"data_share": 0.02, "wait_share": 0.22, "cpu": 3.8, "run_delay": 0.01, "rss": 2 << 30},
}
STACK: dict[str, Any] = {
    **{"thread": "MainThread", "is_current": True},
    "frames": [HERE, {"file": "train.py", "line": 31, "function": "main"}],
}


def identify_this_process() -> dict[str, object]:
    """What a manifest says of the `launch` that runs a job."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "namespace": Path("/proc/self/ns/pid").readlink().name,
    }


def make_rank(rank: int, local_rank: int, **more: Any) -> dict[str, Any]:
    """A rank; number 5 waits least for the others, and its GPU is hot."""
    gpu: dict[str, Any] = {**GPU, "index": local_rank}
    if rank == 5:
        more = {"wait_share": 0.03, **more}
        gpu |= {"temperature": 88.0, "sm_clock": 1410, "event_reasons": ["sw_thermal_slowdown"]}
    names = {"rank": rank, "local_rank": local_rank, "pid": 4000 + rank}
    return {**RANK, **names, "gpu": gpu, **more}


def make_report(node: int, nodes: int = 2, size: int = 4, **more: Any) -> dict[str, Any]:
    """A node's report of just now."""
    report = {
        **{"host": f"n{node}", "node_rank": node, "nodes": nodes, "attempt": 0, "time": time.time()},
        **{
            "number": 7,
            "interval": 5.0,
            "limit": 20.0,
            "nic_rates": [["mlx5_0", 2.5e10], ["mlx5_1", 1.5e10]],
        },
        "ranks": [make_rank(node * size + local, local) for local in range(size)],
    }
    return {**report, **more}


def write_watch(path: Path, value: dict[str, Any], name: str = "") -> None:
    """Write a node's report, or another file of `watch/`."""
    (path / "watch").mkdir(exist_ok=True)
    (path / "watch" / (name or f"node-{value['host']}.json")).write_text(json.dumps(value))


def make_watched_run(runs_dir: Path, nodes: int = 2, ranks: int = 4) -> Path:
    """A run directory with reports, which lives as long as this process."""
    path = make_run(runs_dir, "train", state="running", process=identify_this_process())
    for node in range(nodes):
        write_watch(path, make_report(node, nodes, ranks))
    write_watch(path, {**JOB, "nodes": nodes, "stragglers": [STRAGGLER]}, "job.json")
    process: dict[str, Any] = {
        "pid": 4005,
        "state": "S",
        "wait_channel": "hrtimer_nanosleep",
        "system_call": "clock_nanosleep",
    }
    process |= {"stacks": [STACK], "stack_source": "faulthandler"}
    names = {"rank": 5, "local_rank": 1, "host": "n1", "pid": 4005, "phase": "training", "step": 120}
    rank = {**names, "step_age": 24.0, "idle": 24.0, "process": process}
    evidence = {"host": "n1", "node_rank": 1, "number": 1, "time": 1e9, "seconds": 1.5, "ranks": [rank]}
    write_watch(path, evidence, "evidence-n1.json")
    write_log(path, 0, "step 119/400 loss 2.5\nstep 120/400 loss 2.412\n")
    write_log(path, 5, "reading shard 17\n")
    return path
