"""Watching of jobs on several nodes: who is told of a hang, what is kept of it, and what follows."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import Run, submit

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def read_shard(step):
    if step == 30 and rank == int(sys.argv[1]):
        time.sleep(1000)
    time.sleep(0.1)


for step in range(10_000):
    read_shard(step)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}/10000", flush=True)
"""
TWO = ("nodes=2", "nproc_per_node=1", "watch.interval=1", "watch.hang_seconds=5")


def start(sandbox: Sandbox, folder: Path, sleeper: int, *words: str) -> Run:
    """Submit a job whose rank `sleeper` sleeps in its 31st step; -1 for none."""
    (folder / "program.py").write_text(PROGRAM)
    return submit(sandbox, folder, *TWO, *words, "--", "program.py", str(sleeper))


def find_node(run: Run, host: str) -> list[psutil.Process]:
    """The processes of ours on a node, the batch script's aside."""
    found = run.find_processes().items()
    pids = [pid for pid, words in found if "-m launcher.slurm.task" in words and "srun" not in words]
    tasks = [task for task in map(psutil.Process, pids) if task.environ().get("SLURMD_NODENAME") == host]
    assert tasks
    return [process for task in tasks for process in (task, *task.children(recursive=True))]


def test_a_hang_on_the_second_node_stops_the_job_as_a_class_of_its_own(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    run = start(sandbox, tmp_path, 1, "watch.on_hang=stop", "cluster.requeue.hang=1")
    assert run.await_end(240) == "failed"
    first, last = run.manifest["earlier"][-1], run.manifest
    assert run.causes == ["hang", "hang"] and run.outcome["exit_code"] == 124
    assert first["outcome"]["state"] == "requeued"
    sentence = last["hangs"][0]["verdict"]["sentence"]
    assert "rank 1 on n1 has not joined all_reduce" in sentence and "read_shard" in sentence
    assert sentence in run.outcome["reason"]
    assert [one["hangs"][0]["number"] for one in (first, last)] == [1, 2]
    for number in (1, 2):
        folder = run.path / f"hang-{number}"
        assert {path.name for path in folder.iterdir()} >= {"verdict.json", "evidence-n0.json"}
        assert "read_shard" in (folder / "stacks-n1-rank-1.txt").read_text()
    assert "hang 2 after step 30, " in run.read_console() and sentence in run.read_console()


def test_a_node_that_is_stopped_is_named_by_the_other(sandbox: Sandbox, tmp_path: Path) -> None:
    run = start(sandbox, tmp_path, -1, "watch.on_hang=report")
    run.wait_for(lambda: "step 30/" in run.read_rank(), "steps")
    processes = find_node(run, "n0")
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        run.wait_for((run.path / "hang-1/verdict.json").exists, "a verdict")
        run.wait_for(lambda: "hang 1 after step" in run.read_console(), "word of it")
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    hang = json.loads((run.path / "hang-1/verdict.json").read_text())
    assert hang["verdict"]["kind"] == "silent" and hang["verdict"]["hosts"] == ["n0"]
    run.wait_for(lambda: "hang 1 is over" in run.read_console(), "word that it is over")
    sandbox.run("scancel", run.job_id)
    assert run.await_end() == "stopped"
    assert run.manifest["hangs"][0]["recovered"]


EARLY = """
import os, sys, time

if os.environ["RANK"] == sys.argv[1] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(0)
import torch.distributed as dist

dist.init_process_group("gloo")
"""


@pytest.mark.parametrize(("action", "rank"), [("stop", 0), ("restart", 1)])
def test_a_node_whose_only_rank_has_ended_before_its_peers_have_joined(
    action: str, rank: int, sandbox: Sandbox, tmp_path: Path
) -> None:
    """Its task may have ended before it has reported anything; it holds the others up all the same."""
    (tmp_path / "early.py").write_text(EARLY)
    policy = (f"watch.on_hang={action}", "cluster.requeue.hang=0")
    run = submit(sandbox, tmp_path, *TWO, *policy, "--", "early.py", str(rank))
    sentence = f"rank {rank} on n{rank} has ended with exit code 0, and 1 rank waits in init_process_group"
    assert run.await_end() == ("failed" if action == "stop" else "succeeded")
    assert sentence in run.read_console()
    assert run.causes == (["hang"] if action == "stop" else [None])
    assert run.outcome["exit_code"] == (124 if action == "stop" else 0)
    assert ("all ranks start again (restart 1 of 3)" in run.read_console()) == (action == "restart")
