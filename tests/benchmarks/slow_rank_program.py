"""A small DDP program for the straggler benchmark; it knows nothing of the launcher.

Each step sleeps and computes for fixed amounts. Once a file is there, one rank takes longer. Each rank
writes how long its own part of each step took, before any collective: a double in seconds in `own-RANK`.
"""

import argparse
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    """Samples that take some time to read, more of it once a file is there."""

    def __init__(self, length: int, extra: float, trigger: Path) -> None:
        self.length, self.extra, self.trigger = length, extra, trigger

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.extra and self.trigger.exists():
            time.sleep(self.extra)
        return torch.ones(64)


class Net(torch.nn.Module):
    """Layers that sleep and compute."""

    def __init__(self, sleep: float, compute: int, extra: float, trigger: Path) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        self.sleep, self.compute, self.extra, self.trigger = sleep, compute, extra, trigger

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Take some time, more of it once a file is there."""
        time.sleep(self.sleep)
        if self.extra and self.trigger.exists():
            time.sleep(self.extra)
        total = 0
        for number in range(self.compute):
            total += number
        found: torch.Tensor = self.layers(data)
        return found


def repeat(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Give the loader's batches without end."""
    while True:
        yield from loader


def main() -> None:
    """Train until the file that ends it is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sleep", type=float, default=0.1)
    parser.add_argument("--compute", type=int, default=0, help="rounds of a loop")
    parser.add_argument("--extra", type=float, default=0.0, help="seconds in forward on the slow rank")
    parser.add_argument("--data", type=float, default=0.0, help="seconds for a sample on the slow rank")
    parser.add_argument("--slow", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    is_slow = dist.get_rank() == options.slow
    trigger = options.folder / "slow"
    net = Net(options.sleep, options.compute, options.extra if is_slow else 0.0, trigger)
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = Samples(1 << 16, options.data if is_slow else 0.0, trigger)
    batches = repeat(DataLoader(samples, batch_size=1))
    with (options.folder / f"own-{dist.get_rank()}").open("wb", buffering=0) as own:
        for _ in range(options.steps):
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = model(next(batches)).sum()
            own.write(struct.pack("=d", time.perf_counter() - begin))
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
