"""Nodes that are lost, and the spare ones of the allocation that take their places, on a real SLURM."""

import re
from pathlib import Path

import pytest

from tests.seam import write_program
from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import Run, submit

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, steps = dist.get_rank(), int(sys.argv[1])
saved = os.path.join(os.environ["LAUNCH_RUN_DIR"], "checkpoints", "last")
os.makedirs(os.path.dirname(saved), exist_ok=True)
begin = int(open(saved).read()) if os.path.exists(saved) else 0
where = os.environ['SLURMD_NODENAME']
print(f"begins after step {begin} on {where} of {os.environ['WORLD_SIZE']}", flush=True)
for step in range(begin + 1, steps + 1):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    if rank == 0:
        print(f"step {step}/{steps} at {time.time():.3f}", flush=True)
        if step % 10 == 0:
            with open(saved + ".tmp", "w") as file:
                file.write(str(step))
            os.replace(saved + ".tmp", saved)
    time.sleep(0.05)
"""


def start(sandbox: Sandbox, tmp_path: Path, *words: str, steps: int = 400) -> Run:
    program = write_program(tmp_path, TRAINING)
    return submit(sandbox, tmp_path, "nproc_per_node=1", *words, "--", program, str(steps))


def await_line(run: Run, words: str, rank: int = 0, timeout: float = 90) -> None:
    run.wait_for(lambda: words in run.read_rank(rank), words, timeout)


def test_a_node_that_dies_is_replaced(sandbox: Sandbox, tmp_path: Path) -> None:
    run = start(sandbox, tmp_path, "nodes=2", "cluster.spares=1")
    await_line(run, "step 25/")
    first, lost = run.manifest["hosts"]
    (spare,) = run.manifest["spares"]
    sandbox.break_it("kill", lost)
    try:
        assert run.await_end() == "succeeded"
        console = run.read_console()
        (one,) = run.manifest["replacements"]
        assert (one["lost"], one["spare"]) == (lost, spare), console
        assert run.manifest["hosts"] == [first, spare] and run.manifest["spares"] == []
        assert run.causes == [None] and run.manifest["slurm"]["restarts"] == 0
        assert f"launch: node {lost} is lost: its SLURM daemon cannot be reached" in console
        assert f"launch: spare node {spare} takes the place of {lost}\n" in console
        assert f"on {spare} of 2" in run.read_rank(1)
        assert re.search(r"begins after step [1-9]\d*0 ", run.read_rank(0))
        status = sandbox.launch("status", run.path.name, cwd=tmp_path)
        assert f"{spare} in the place of {lost}" in status.out, status
    finally:
        sandbox.break_it("start", lost)


def test_two_nodes_are_lost_and_one_is_spare(sandbox: Sandbox, tmp_path: Path) -> None:
    """The second loss ends the attempt: the job is requeued, and asks for as many nodes as before."""
    run = start(sandbox, tmp_path, "nodes=2", "cluster.spares=1", steps=300)
    await_line(run, "step 15/")
    first, lost = run.manifest["hosts"]
    (spare,) = run.manifest["spares"]
    sandbox.break_it("kill", lost)
    killed = [lost]
    try:
        await_line(run, f"on {spare} of 2", rank=1)
        await_line(run, "step 45/")
        sandbox.break_it("kill", spare)
        killed.append(spare)
        run.wait_for(lambda: run.outcome["state"] == "requeued", "the requeue", 90)
        sandbox.break_it("start", lost)
        killed.remove(lost)
        assert run.await_end() == "succeeded"
    finally:
        for host in killed:
            sandbox.break_it("start", host)
        # Until it is restarted, SLURM 22.05 counts the GPUs of lost nodes as used: later tests need them.
        sandbox.break_it("restart-controller")
    # SLURM 22.05 may give the next attempt no GPUs, and gives them to the one after it.
    assert run.causes in (["node_failure", None], ["node_failure", "node_failure", None])
    before = run.manifest["earlier"][0]
    assert [one["lost"] for one in before["replacements"]] == [lost]
    assert (before["outcome"]["lost"], before["hosts"]) == ([spare], [first, spare])
    assert len([*run.manifest["hosts"], *run.manifest["spares"]]) == 3


def test_a_sick_spare_node_is_told_of_and_not_used(sandbox: Sandbox, tmp_path: Path, data: Path) -> None:
    run = start(sandbox, tmp_path, "nodes=2", "cluster.spares=1", "cluster.exclude=n3", steps=100)
    assert run.await_end() == "succeeded"
    assert data.exists() and "/dev/shm has 8 MiB" in run.manifest["sick_spares"]["n2"]
    assert run.manifest["spares"] == [] and run.manifest["hosts"] == ["n0", "n1"]
    assert "launch: warning: spare node n2 is sick, and is not used: " in run.read_console()
