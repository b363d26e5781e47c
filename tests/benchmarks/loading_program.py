"""Trains while it waits for data, in the style of the ml-engineering book's DataLoader benchmark.

Samples take 5 ms each, batches of 60 so 0.3 s, and a step computes for 0.12 s. Not changed for the launcher:
its DataLoader says nothing of workers. It prints steps per second and the share of its time that it waited.

    python loading_program.py STEPS WARMUP
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLE, BATCH, COMPUTE = 0.005, 60, 0.12


class Slow(Dataset[torch.Tensor]):
    """Samples that come from a slow place."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE)
        return torch.full((16,), float(index % 7))


def train(steps: int, warmup: int) -> None:
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Slow(), batch_size=BATCH)
    batches = iter(loader)
    waited = begin = 0.0
    for step in range(steps + warmup):
        if step == warmup:
            waited, begin = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        optimizer.zero_grad()
        model(batch).mean().backward()
        time.sleep(COMPUTE)
        optimizer.step()
    total = time.perf_counter() - begin
    print(f"measured {loader.num_workers} {steps / total} {waited / total}", flush=True)


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]))
