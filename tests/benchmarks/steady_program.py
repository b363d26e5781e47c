"""Even steps of matrix products, for what watching costs: `steady_program.py PRODUCTS STEPS FILE`.

It is started by torchrun. Each rank writes the mean and the median of its steps in milliseconds, and its CPU
seconds in them, to `FILE.RANK`.
"""

import json
import os
import resource
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

WIDTH = 192


def main() -> None:
    """Train on nothing, evenly."""
    products, steps, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.eye(WIDTH))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    marks = []
    start = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    for _ in range(steps):
        value = weight.detach()
        for _ in range(products):
            value = value @ weight.detach()
        weight.grad = value
        optimizer.step()
        marks.append(time.perf_counter())
    cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - start
    durations = [1e3 * (after - before) for before, after in pairwise(marks)]
    steps_ms = {"mean step, ms": statistics.mean(durations), "median step, ms": statistics.median(durations)}
    found = {**steps_ms, "CPU of the rank, s": cpu}
    Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
