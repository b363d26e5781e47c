"""Two ranks of a real job: they collect at the same steps, whatever garbage each of them makes."""

import re
from pathlib import Path

import pytest

from tests.seam import find_run, start

PROGRAM = """
import gc
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(32):
    for _ in range(3000 * dist.get_rank()):
        node = []
        node.append(node)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
print("done", flush=True)
"""


@pytest.mark.usefixtures("quick_agent")
def test_ranks_collect_at_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["nproc_per_node=2", "gc.warmup=4", "gc.every=10", "gc.log=true", "--", "program.py"]
    with start(tmp_path, *words) as started:
        assert started.wait(240) == 0, started.read()
    folder = find_run(tmp_path) / "logs" / "0"
    for rank in range(2):
        assert (folder / f"rank-{rank}.out").read_text() == "done\n"
        text = (folder / f"rank-{rank}.err").read_text()
        found = re.findall(rf"^launch: rank {rank}: step (\d+): ", text, re.MULTILINE)
        assert found == ["4", "10", "20", "30"], text
