"""Starting the shim as launchers do, and hearing from the program what the kernel gave it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SHIM = Path(__file__).parents[2] / "launcher" / "rank" / "__main__.py"
COMMAND = (sys.executable, "-I", "-S", str(SHIM))
TELL = """
import json, os, sys
from launcher.rank.affinity import get_mempolicy
policy, nodes = get_mempolicy()
print(json.dumps({"cpus": sorted(os.sched_getaffinity(0)), "policy": policy, "nodes": sorted(nodes),
                  "argv": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ)}))
"""
ECHO = ("echo", "ran")
ALLOWED = sorted(os.sched_getaffinity(0))


def write_plan(folder: Path, cpus: str, nodes: str = "0", **extra: object) -> Path:
    rank = {
        "local_rank": 0,
        "gpu": None,
        "cpus": cpus,
        "worker_cpus": cpus,
        "memory": {"policy": "preferred", "nodes": nodes},
        "num_workers": 3,
        "env": {"OMP_NUM_THREADS": "5"},
        **extra,
    }
    path = folder / "plan.json"
    path.write_text(json.dumps({"schema": 1, "machine": {}, "ranks": [rank], "warnings": []}))
    return path


def run_shim(
    *words: str, preexec: Callable[[], None] | None = None, wrap: Sequence[str] = (), **variables: str
) -> "subprocess.CompletedProcess[str]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LAUNCH_", "OMP_"))}
    environ = {**kept, "PYTHONPATH": str(SHIM.parents[2]), "LOCAL_RANK": "0", **variables}
    return subprocess.run(
        [*wrap, *COMMAND, *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=preexec,
        check=False,
    )


def tell(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def run_words(
    words: list[str], variables: dict[str, str], cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": os.environ["PATH"], "LOCAL_RANK": "0", **variables}
    return subprocess.run(
        words, env=environ, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
