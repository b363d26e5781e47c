"""A step that SLURM does not start at once: an srun that a real one cannot be made to act like at will."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from launcher.runs.node_records import NodeRecord
from tests.seam import clean_environ

FIRST_NODE = """
import os, sys
from pathlib import Path
from launcher.slurm import first_node
from launcher.text import set_up_logging
from launcher.slurm.job_request import JobRequest
from launcher.runs.run_directory import open_run_dir
from launcher.config.schema import LaunchConfig
set_up_logging()
first_node.RETRY = 0.0
request = JobRequest(LaunchConfig(), {}, ("program",), ("launch", "x"), os.getcwd(), 1, 1)
run = open_run_dir(Path("run"), None)
if len(sys.argv) > 1:
    Path("run/logs").rename("old")
    Path("run/logs").touch()
sys.exit(first_node.run_attempt(request, run, os.environ, requeues=False))
"""
SRUN = """#!/bin/sh
echo "$@" >> starts
if [ $(wc -l < starts) -le {failures} ]; then
    echo "srun: error: {complaint}" >&2
    exit 1
fi
cp record.json run/logs/0/node-n0.json
"""
SQUEUE = """#!/bin/sh
if [ {is_away} = 1 ]; then
    echo "slurm_load_jobs error: Unexpected message received" >&2
    exit 1
fi
echo 'RUNNING|0|N/A|N/A|1:00|None|'
"""
AWAY = "Unable to create step for job 7: Unexpected message received"
BUSY = "Unable to create step for job 7: Requested nodes are busy"


def run_first_node(folder: Path, failures: int, complaint: str, *words: str) -> tuple[int, str, int]:
    """An attempt whose srun fails a few times; returns exit code, stderr and the number of its starts.

    With any `words`, its logs cannot be written.
    """
    scripts = {
        "srun": SRUN.format(failures=failures, complaint=complaint),
        "squeue": SQUEUE.format(is_away=int(complaint == AWAY)),
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    record = NodeRecord("n0", 0, "succeeded", 0, None, "", None, 0, 1.0, 2.0)
    (folder / "record.json").write_text(json.dumps(asdict(record)))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_NODE, *words],
        cwd=folder,
        env={**clean_environ(), **job, "PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    starts = folder / "starts"
    return done.returncode, done.stderr, len(starts.read_text().splitlines()) if starts.exists() else 0


@pytest.mark.parametrize(("failures", "complaint"), [(1, BUSY), (4, BUSY), (12, AWAY)])
def test_a_step_is_tried_again_where_slurm_may_start_it_soon(
    tmp_path: Path, failures: int, complaint: str
) -> None:
    code, said, starts = run_first_node(tmp_path, failures, complaint)
    assert (code, starts) == (0, failures + 1), said
    assert said.count("until slurmctld answers") == (failures if complaint == AWAY else 0)


def test_logs_that_cannot_be_written_are_no_missing_srun(tmp_path: Path) -> None:
    code, said, starts = run_first_node(tmp_path, 0, BUSY, "without logs")
    assert (code, starts) == (3, 0) and "SLURM's module" not in said, said
    outcome = json.loads((tmp_path / "run/manifest.json").read_text())["outcome"]
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 3)
    assert "the step could not be started ([Errno 20] Not a directory: 'logs')" in outcome["reason"]


@pytest.mark.parametrize(("complaint", "starts"), [(BUSY, 5), ("Invalid generic resource specification", 1)])
def test_a_step_that_is_never_started(tmp_path: Path, complaint: str, starts: int) -> None:
    code, said, tried = run_first_node(tmp_path, 9, complaint)
    assert (code, tried) == (4, starts), said
    assert f"srun did not start the step (code 1): {complaint}" in said
    outcome = json.loads((tmp_path / "run/manifest.json").read_text())["outcome"]
    assert (outcome["state"], outcome["lost"]) == ("failed", [])
