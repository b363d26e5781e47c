"""Times optimizer steps with torch's hooks for them in place and taken out, in turn; writes microseconds."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks as hooks,
)  # all that is registered for every one

WARMUP = 100
"""Steps before anything is timed: a policy's own warm-up is over."""


def make_optimizers() -> dict[str, torch.optim.Optimizer]:
    """The cheapest step there is, and one over many tensors; gradients in place."""
    few, many = ([torch.nn.Parameter(torch.zeros(8)) for _ in range(count)] for count in (1, 100))
    for parameter in (*few, *many):
        parameter.grad = torch.ones(8)
    return {"SGD, 1 tensor": torch.optim.SGD(few, lr=1e-3), "AdamW, 100 tensors": torch.optim.AdamW(many)}


def time_steps(optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Microseconds of a step."""
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    return 1e6 * (time.perf_counter() - start) / steps


def time_pairs(optimizer: torch.optim.Optimizer, steps: int, pairs: int) -> list[tuple[float, float]]:
    """Microseconds of a step, (without, with) the hooks, blocks of steps in turn."""
    time_steps(optimizer, WARMUP)
    kept, times = dict(hooks), []
    for _ in range(pairs):
        hooks.clear()
        without = time_steps(optimizer, steps)
        hooks.update(kept)
        times.append((without, time_steps(optimizer, steps)))
    return times


def main() -> None:
    """Time the optimizers, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="in a block")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("report", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    times = {
        name: time_pairs(optimizer, words.steps, words.pairs) for name, optimizer in make_optimizers().items()
    }
    words.report.write_text(json.dumps({"hooks": len(hooks), "times": times}))


if __name__ == "__main__":
    main()
