"""A program whose DataLoader's samples leave cyclic garbage; it trains a little first, as programs do.

Writes the resident memory of its workers in MB.
"""

import argparse
import gc
import json
import multiprocessing
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

NODES = 250
"""Nodes of a sample's tree, about 110 KB."""
STEPS = 60
"""Optimizer steps before the DataLoader starts its workers: after any policy's warm-up."""
WORKERS = 2

Node = dict[str, object]


def parse_sample(number: int) -> list[Node]:
    """A tree of nodes that know their parents: garbage for the collector alone once it is dropped."""
    root: Node = {"children": [], "number": number}
    nodes: list[Node] = [{"parent": root, "number": part, "text": bytes(64)} for part in range(NODES)]
    root["children"] = nodes
    return nodes


class Trees(Dataset[torch.Tensor]):
    """Samples that are parsed when they are asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([len(parse_sample(number))])


def train() -> None:
    """Train a little."""
    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    for _ in range(STEPS):
        parameter.square().sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        optimizer.zero_grad()


def read_memory(pid: int, name: str) -> float:
    """A process's `VmRSS` or `VmHWM` (its highest) in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024e-6 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Train, load, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000, help="for each worker")
    parser.add_argument("--disable-gc", action="store_true", help="gc.disable() at the start, as programs do")
    parser.add_argument("report", type=Path)
    words = parser.parse_args()
    if words.disable_gc:
        gc.disable()
    train()
    trees = Trees(WORKERS * words.samples)
    # They persist, so that they are still there to be looked at when all samples have come.
    loader = DataLoader(trees, batch_size=16, num_workers=WORKERS, persistent_workers=True)
    seen = sum(len(batch) for batch in loader)
    workers = [child.pid for child in multiprocessing.active_children() if child.pid]
    memory = {name: [read_memory(pid, name) for pid in workers] for name in ("VmHWM", "VmRSS")}
    words.report.write_text(json.dumps({"samples": seen, **memory}))


if __name__ == "__main__":
    main()
