"""A node's task where there is nothing to run: it leaves a record all the same, and says nothing itself."""

import json
import subprocess
import sys
from pathlib import Path

from launcher.runs.node_records import read_nodes
from tests.seam import clean_environ


def run_task(run_dir: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    told = {"SLURMD_NODENAME": "n7", "SLURM_NODEID": "3", "LAUNCH_ATTEMPT": "2", **variables}
    return subprocess.run(
        [sys.executable, "-P", "-m", "launcher.slurm.task", str(run_dir)],
        env={**clean_environ(), **told},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_request_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    done = run_task(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    (record,) = read_nodes(tmp_path, 2)
    assert (record.host, record.node_rank, record.state, record.exit_code) == ("n7", 3, "failed", 3)
    assert "job.json cannot be read" in record.agent_said and record.failure is None


def test_a_run_directory_that_this_node_does_not_have(tmp_path: Path) -> None:
    done = run_task(tmp_path / "not here")
    assert done.returncode == 3
    assert done.stderr.startswith("launch: error: n7: ") and "Traceback" not in done.stderr
    assert "share" in done.stderr and done.stderr.count("\n") == 1


def test_a_task_loads_neither_hydra_nor_torch(tmp_path: Path) -> None:
    script = """
import launcher.slurm.node_job, launcher.slurm.first_node, sys, json
print(json.dumps(sorted(sys.modules)))"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environ(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"hydra", "omegaconf", "torch", "numpy", "rich", "submitit", "psutil"}
