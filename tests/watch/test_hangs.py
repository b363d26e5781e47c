"""A real hang under `launch`: torchrun's ranks, gloo, a verdict on the console and in the run directory."""

import json
from pathlib import Path

from launcher.watch.run_files import hang_path, read_job_state
from tests.seam import find_run, start, wait_for, write_program

PROGRAM = """
import time
import torch
import torch.distributed as dist

def read_shard():
    time.sleep(600)  # the hang

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 3 and dist.get_rank() == 1:
        read_shard()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_the_console_names_the_rank_the_collective_and_the_line(tmp_path: Path) -> None:
    program = write_program(tmp_path, PROGRAM)
    line = 1 + PROGRAM[: PROGRAM.index("# the hang")].count("\n")
    words = ("nproc_per_node=2", "watch.hang_seconds=6", "binding=none", "name=hang", "--", program)
    with start(tmp_path, *words) as job:
        wait_for(lambda: "has not joined" in job.read(), "the verdict", 90, job.read)
        (told,) = (text for text in job.read().splitlines() if "has not joined" in text)
        path = find_run(tmp_path)
        wait_for(lambda: (state := read_job_state(path)) and state.hangs, "the job's state", 30)
        state = read_job_state(path)
    assert state is not None and state.state == "hanging"
    (hang,) = state.hangs
    verdict = hang.verdict
    assert (verdict.kind, verdict.ranks, verdict.waiting, hang.step) == ("absent", (1,), 1, 3)
    assert (verdict.group, verdict.operation) == ("default group", "all_reduce")
    assert verdict.frame is not None
    assert (verdict.frame.file, verdict.frame.line, verdict.frame.function) == (program, line, "read_shard")
    assert verdict.sentence in told and f"it sleeps at program.py:{line}, read_shard" in told
    folder = hang_path(path, 1)
    assert json.loads((folder / "verdict.json").read_text())["verdict"]["ranks"] == [1]
    stacks = [file.read_text() for file in folder.iterdir() if file.suffix == ".txt"]
    assert any("read_shard" in text for text in stacks)


MISMATCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1000 if dist.get_rank() else 3))
"""


def test_a_mismatch_that_gloo_ends_itself_is_named(tmp_path: Path) -> None:
    words = ("nproc_per_node=2", "binding=none", "--", write_program(tmp_path, MISMATCH))
    with start(tmp_path, *words) as job:
        assert job.wait(120), job.read()
        (told,) = (text for text in job.read().splitlines() if " failed first: " in text)
    assert "SIGABRT (signal 6), ranks have called different collectives as one, or one with" in told
    assert "bytes where " in told and "CUDA" not in told
