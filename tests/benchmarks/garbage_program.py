"""A training program with cyclic garbage; it knows nothing of the launcher.

Each rank holds an index of many small objects. Each step it reads a batch of samples into a queue, drops the
oldest, trains, and averages the gradients with the others. The further the rank, the more samples it reads
(documents have different lengths); one in 16 refers to itself, and is garbage that only the collector finds.
"""

import collections
import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

WIDTH, ROWS = 256, 64
"""Of the model, and of its batch."""
OBJECTS, SAMPLES, TEXT, CYCLIC, QUEUE = 2_000_000, 2500, 400, 16, 2
"""Live objects in each rank, samples that rank 0 reads in a step, their bytes, cyclic ones, batches held."""

Sample = dict[str, object]


def read_sample(number: int) -> Sample:
    """One sample, two objects for the collector."""
    spans: list[object] = [number, number + 1]
    sample: Sample = {"number": number, "spans": spans, "text": bytes(TEXT)}
    if number % CYCLIC == 0:
        spans.append(sample)
    return sample


def main() -> None:
    """Train `STEPS` steps, and write when each all_reduce was done into `FOLDER/rank-RANK.json`."""
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    index = [{"number": number, "spans": [number]} for number in range(OBJECTS // 2)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    count = SAMPLES * (dist.get_rank() + 1)
    queue: collections.deque[list[Sample]] = collections.deque(maxlen=QUEUE)
    marks = []
    dist.barrier()
    start = time.perf_counter()
    for step in range(1, steps + 1):
        queue.append([read_sample(number) for number in range(step * count, (step + 1) * count)])
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_((part / dist.get_world_size()).view_as(gradient))
        marks.append(time.perf_counter())
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"marks": marks, "seconds": seconds, "peak_mib": peak, "samples": len(index)}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
