"""A small DDP program for the straggler benchmark; it knows nothing of the launcher.

Each step sleeps and computes for fixed amounts. Once a file is there, one rank takes longer. Each rank
writes how long its own part of each step took, before any collective: a double in seconds in `own-RANK`.
"""

import argparse
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    """Samples that take some time to read, more of it once a file is there."""

    def __init__(self, extra: float, trigger: Path) -> None:
        self.extra, self.trigger = extra, trigger

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.extra and self.trigger.exists():
            time.sleep(self.extra)
        return torch.ones(64)


class Net(torch.nn.Module):
    """Layers that sleep and compute."""

    def __init__(self, compute: int, extra: float, trigger: Path) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        self.compute, self.extra, self.trigger = compute, extra, trigger

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Take some time, more of it once a file is there."""
        time.sleep(0.1)
        if self.extra and self.trigger.exists():
            time.sleep(self.extra)
        total = 0
        for number in range(self.compute):
            total += number
        found: torch.Tensor = self.layers(data)
        return found


def main() -> None:
    """Train until the data ends, which takes hours."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--compute", type=int, default=0, help="rounds of a loop")
    parser.add_argument("--extra", type=float, default=0.0, help="seconds in forward on the slow rank")
    parser.add_argument("--data", type=float, default=0.0, help="seconds for a sample on the slow rank")
    parser.add_argument("--slow", type=int, required=True, help="the rank that is to be slow")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    is_slow = dist.get_rank() == options.slow
    trigger = options.folder / "slow"
    net = Net(options.compute, options.extra if is_slow else 0.0, trigger)
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = Samples(options.data if is_slow else 0.0, trigger)
    with (options.folder / f"own-{dist.get_rank()}").open("wb", buffering=0) as own:
        begin = time.perf_counter()
        for batch in DataLoader(samples, batch_size=1):
            optimizer.zero_grad()
            loss = model(batch).sum()
            own.write(struct.pack("=d", time.perf_counter() - begin))
            loss.backward()
            optimizer.step()
            begin = time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
