"""Nodes that are lost, and the spare ones of the allocation that take their places, on a real SLURM."""

from pathlib import Path

import pytest

from tests.launch.start_launch import write_program
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
        assert f"on {spare} of 2" in run.read_rank(1) and "begins after step 20 " in run.read_rank(0)
        status = sandbox.launch("status", run.path.name, cwd=tmp_path)
        assert f"{spare} in the place of {lost}" in status.out, status
    finally:
        sandbox.break_it("start", lost)
