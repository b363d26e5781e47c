"""Ends of programs that use gloo: none waits, with the GIL, for a thread of gloo's that wants it."""

from pathlib import Path

import pytest

from tests.seam import find_run, start

PROGRAM = """
import os, sys
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpus[int(os.environ["LOCAL_RANK"]) % len(cpus)]})  # as where each rank has one core
import torch, torch.distributed as dist

def train(cycle):
    dist.init_process_group(
        "gloo", init_method=f"file://{os.getcwd()}/store-{cycle}", rank=int(os.environ["RANK"]), world_size=2
    )
    for thread in os.listdir("/proc/self/task"):
        if "gloo_runloop" in open(f"/proc/self/task/{thread}/comm").read():
            os.setpriority(os.PRIO_PROCESS, int(thread), 10)  # what the main thread does next comes first
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(torch.ones(1))
    return model

def train_and_destroy(cycle):
    model = train(cycle)
    dist.destroy_process_group()

for cycle in range(20):
    train_and_destroy(cycle)
model = train("last")
print("done", flush=True)
"""


@pytest.mark.slow
def test_ranks_on_one_core_end_after_their_last_collective(tmp_path: Path) -> None:
    """Without gloo's threads being waited for, one cycle in five never ends, or aborts at the end."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["nproc_per_node=2", "watch.enabled=false", "gc=default", "--", "program.py"]
    with start(tmp_path, *words) as started:
        assert started.wait(240) == 0, started.read()
    folder = find_run(tmp_path) / "logs" / "0"
    for rank in range(2):
        assert (folder / f"rank-{rank}.out").read_text() == "done\n"
        assert "terminate called" not in (folder / f"rank-{rank}.err").read_text()
