"""Trains from samples that take a while to load; with a GPU they are pinned, and copied while it works."""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLE, BATCH, WIDTH = 0.004, 16, 4096
COMPUTE = 0.03
"""Seconds of a step's work: by matrix products on a GPU, else by sleeping."""


class Slow(Dataset[torch.Tensor]):
    """Samples that come from a slow place."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE)
        return torch.full((WIDTH,), float(index % 7))


def work(cuda: bool) -> None:
    """Compute for about COMPUTE seconds."""
    if not cuda:
        time.sleep(COMPUTE)
        return
    end, matrix = time.perf_counter() + COMPUTE, torch.ones(WIDTH, WIDTH, device="cuda")
    while time.perf_counter() < end:
        matrix = torch.mm(matrix, matrix).clamp_(max=1)
        torch.cuda.synchronize()


def main() -> None:
    """Train for as many steps as the command line says."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    model = torch.nn.Linear(WIDTH, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = iter(DataLoader(Slow(), batch_size=BATCH, pin_memory=cuda))
    for _ in range(int(sys.argv[1])):
        batch = next(batches)
        assert batch.is_pinned() == cuda
        optimizer.zero_grad()
        model(batch.to(device, non_blocking=True)).mean().backward()
        work(cuda)
        optimizer.step()


if __name__ == "__main__":
    main()
