"""Preflight on a real SLURM: a node that its mounts make sick is found, told, left out, or ends the job."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster.conftest import Sandbox, submit_script
from tests.slurm.cluster.jobs import Run

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

CHECKED = (
    *("cluster=slurm", "cluster.gpus_per_node=0", "nproc_per_node=1"),
    *("preflight=light", "follow=true"),
)


def make_program(tmp_path: Path) -> Path:
    """A program that says where it runs."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME"\n')
    program.chmod(0o755)
    return program


def find_run(sandbox: Sandbox, tmp_path: Path) -> Run:
    (path,) = (tmp_path / "runs").glob("*/*")
    return Run(path, sandbox)


def read_account(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.manifest["preflight"]
    return found


def test_healthy_nodes_are_told_in_a_line_and_the_job_runs(sandbox: Sandbox, tmp_path: Path) -> None:
    program = make_program(tmp_path)
    done = sandbox.launch("nodes=4", *CHECKED, "--", str(program), cwd=tmp_path)
    assert done.code == 0, done.err
    assert "preflight: light checks of 4 nodes in " in done.err and "sick" not in done.err
    run = find_run(sandbox, tmp_path)
    account = read_account(run)
    assert (account["nodes"], account["sick"], account["action"]) == (4, [], "start")
    answers = [
        json.loads(path.read_text()) for path in sorted((run.path / "preflight/0").glob("node-*.json"))
    ]
    assert [answer["host"] for answer in answers] == ["n0", "n1", "n2", "n3"]
    assert all(answer["work"] for answer in answers)


def test_a_sick_node_ends_the_job_with_3_and_is_listed(sandbox: Sandbox, tmp_path: Path, data: Path) -> None:
    program = make_program(tmp_path)
    words = ("nodes=4", *CHECKED, f"preflight.paths=[{data}]", "preflight.on_failure=stop")
    done = sandbox.launch(*words, "--", str(program), cwd=tmp_path)
    assert done.code == 3, done.err
    assert "sick: n2: " in done.err and "/dev/shm has 8 MiB" in done.err and "fix: " in done.err
    assert f"{data} (data) is missing, and is there on n0, n1, n3" in done.err and "rank 0" not in done.err
    run = find_run(sandbox, tmp_path)
    assert (run.outcome["state"], run.outcome["cause"], run.causes) == ("failed", "sick_node", ["sick_node"])
    assert "preflight" in sandbox.launch("status", "program", cwd=tmp_path).out
    rows = sandbox.launch("nodes", cwd=tmp_path).out.splitlines()
    assert rows[1].split()[:3] == ["n2", "1", "1"]


def test_an_elastic_job_goes_on_without_a_sick_node(sandbox: Sandbox, tmp_path: Path, data: Path) -> None:
    program = make_program(tmp_path)
    words = ("nodes=2:4", *CHECKED, "agent=torchrun", "preflight.on_failure=exclude", "logs.console=all")
    done = sandbox.launch(*words, f"preflight.paths=[{data}]", "--", str(program), cwd=tmp_path)
    assert done.code == 0, done.err
    assert "the job goes on without n2, on 3 nodes" in done.err
    run = find_run(sandbox, tmp_path)
    assert run.manifest["hosts"] == ["n0", "n1", "n3"] and read_account(run)["left_out"] == ["n2"]


def test_a_job_that_needs_more_nodes_is_requeued_without_the_sick_one(
    sandbox: Sandbox, tmp_path: Path, data: Path
) -> None:
    program = make_program(tmp_path)
    words = ("nodes=3", *CHECKED, "preflight.on_failure=exclude", f"preflight.paths=[{data}]")
    done = sandbox.launch(*words, "--", str(program), cwd=tmp_path)
    assert done.code == 0, done.err
    run = find_run(sandbox, tmp_path)
    assert run.causes == ["sick_node", None] and run.manifest["hosts"] == ["n0", "n1", "n3"]
    assert run.manifest["earlier"][0]["outcome"]["sick"] == ["n2"]
    assert read_account(run)["sick"] == []


def test_a_spare_node_of_an_allocation_takes_a_sick_ones_place(
    sandbox: Sandbox, tmp_path: Path, data: Path
) -> None:
    program = make_program(tmp_path)
    words = ("nodes=3", "nproc_per_node=1", "preflight=light", "preflight.on_failure=exclude")
    launch = " ".join((sys.executable, "-P", "-m", "launcher", *words, f"preflight.paths=[{data}]"))
    whole = launch.replace("nodes=3", "nodes=4")
    script = f"{launch} -- {program}; echo code $?; {whole} -- {program}; echo code $?\n"
    script += f"{sys.executable} -P -m launcher doctor preflight=light preflight.paths=[{data}]"
    job = submit_script(sandbox, tmp_path, script, "--nodes=4", "--exclusive")
    sandbox.wait(job, "COMPLETED", "FAILED", timeout=180)
    text = (tmp_path / f"{job}.out").read_text()
    assert "the job goes on n3 in place of n2, on 3 nodes" in text and "code 0" in text, text
    assert "not launch's to requeue" in text and "code 3" in text
    assert re.search("^. n2 +limits: /dev/shm has 8 MiB", text, re.MULTILINE), text
