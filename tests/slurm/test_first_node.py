"""The first node's guard, and signals while a job is requeued; SLURM's commands are made up."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.config.settings import Settings
from launcher.runs.run_directory import open_run_dir
from launcher.slurm import lost_nodes
from launcher.slurm.commands import exclude_nodes
from launcher.slurm.job_request import JobRequest, write_job_request
from tests.cli.make_runs import read_manifest
from tests.seam import clean_environ

GUARD = """
import sys
from launcher.slurm import lost_nodes
lost_nodes.SILENCE = lost_nodes.RETRY = 0.5
sys.exit(lost_nodes.main())
"""
COMMANDS = {
    "sinfo": "printf 'n0|down*\\nn1|idle\\n'",
    "squeue": "echo '7|RUNNING|main|2|n[0-1]|N/A|0|0|N/A|N/A|1:00|None|'",
    "scontrol": """case "$*" in
requeue*)
    echo >> tries
    [ -e back ] && exit
    echo 'Unable to contact slurm controller (connect failure)' >&2
    exit 1 ;;
*) printf 'NodeName=n0 NodeAddr=127.0.0.1 Port=1\\nNodeName=n1 NodeAddr=127.0.0.1 Port=%s\\n' "$N1_PORT" ;;
esac""",
    "scancel": """echo >> tries
[ -e back ] && exit
echo 'Unable to contact slurm controller (connect failure)' >&2
exit 1""",
}


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "LAUNCH_ATTEMPT": "0"}
    return {**clean_environ(), **job, "PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.mark.parametrize(("requeues", "state"), [(10, "requeued"), (0, "failed")])
def test_a_guard_that_has_begun_ends_the_attempt_even_if_the_first_node_returns(
    environ: dict[str, str], tmp_path: Path, requeues: int, state: str
) -> None:
    """It puts the job back into the queue, or cancels it, once slurmctld answers.

    The first node, which is lost, may have begun to end the attempt.
    """
    config = Settings()
    config.cluster.requeue.node_failure = requeues
    run = open_run_dir(tmp_path / "run", None)
    write_job_request(JobRequest(config, {}, ("x",), ("launch", "x"), "/", 2, 3), run.path)
    started = {"started": datetime.now(UTC).isoformat(), "hosts": ["n0", "n1"], "attempt": 0, "earlier": []}
    manifest = {**started, "outcome": {"state": "running"}, "slurm": {"job_id": "7"}}
    run.manifest_path.write_text(json.dumps(manifest))
    (run.path / "logs/0").mkdir(parents=True, exist_ok=True)
    if state == "failed":
        (run.path / "logs/0/ended-by-0").symlink_to("n0")
    slurmd = socket.create_server(("127.0.0.1", 0))
    environ["N1_PORT"] = str(slurmd.getsockname()[1])
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(run.path), "n0"],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with closing(slurmd), guard:
        assert guard.stdin
        stop = threading.Timer(90, guard.kill)
        stop.start()
        while guard.poll() is None and not (tmp_path / "tries").exists():
            time.sleep(0.05)
        assert str(max((run.path / "logs/0").glob("ended-by-*")).readlink()) == "n1"
        guard.stdin.write(b"!")  # the first node has come back, and ends
        guard.stdin.flush()
        time.sleep(1.0)
        (tmp_path / "back").touch()
        _, said = guard.communicate()
        stop.cancel()
    tries = (tmp_path / "tries").read_text().count("\n")
    assert (guard.returncode, tries > 1) == (0, True), said
    outcome = read_manifest(run.path)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["lost"]) == (state, "node_failure", ["n0"])


@pytest.mark.parametrize(("state", "is_lost"), [("allocated", False), ("allocated*", True)])
def test_a_node_that_this_one_alone_cannot_reach_is_not_lost(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, *, is_lost: bool
) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\nprintf 'n0|{state}\\nn1|idle\\n'\n")
    for name in ("UNREACHABLE_FOR", "STEADY"):
        monkeypatch.setattr(lost_nodes, name, 0.2)
    monkeypatch.setattr("os.environ", {**environ, "N1_PORT": "1"})
    guard = lost_nodes.Guard("n0", "n1", heard=time.monotonic() - 60)
    assert bool(guard.find_evidence()) is is_lost


def test_a_slow_slurm_delays_signals_for_a_limited_time(tmp_path: Path) -> None:
    """Each answer comes in time, and all of them together do not."""
    sinfo = "case $* in *--nodes=*) echo n9;; *) echo n0 n1 n2 n9;; esac"
    answers = {"squeue": "echo 'n9||main'", "sinfo": sinfo, "scontrol": "true"}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/given\nsleep 0.6\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = exclude_nodes("7", ["n0"], 1, environ, patience=1.0)
    assert told.startswith("n0 not excluded (")
    assert "scontrol" not in (tmp_path / "given").read_text()
    assert exclude_nodes("7", ["n0"], 1, environ, patience=60) == ""
    assert (tmp_path / "given").read_text().endswith("scontrol\n")
