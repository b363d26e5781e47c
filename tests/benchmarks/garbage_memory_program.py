"""A training program for the benchmark of memory under collection policies; it knows nothing of the launcher.

Each micro-step makes a tensor in a dictionary that refers to itself, so that only the collector frees it. It
then makes many small containers, which fill the youngest generation: the tensor outlives its collection.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

WARMUP = 30
"""Steps that are not timed: those before a policy of the launcher's begins."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-steps", type=int, default=4, help="of each step")
    parser.add_argument("--evaluate", type=int, default=0, help="batches after the last step")
    parser.add_argument("--containers", type=int, default=2000, help="alive in each micro-step")
    parser.add_argument("--mb", type=int, default=8, help="size of each micro-step's tensor")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are")
    parser.add_argument("report", type=Path, help="JSON file to write")
    return parser.parse_args()


def run_batch(model: torch.nn.Module, arguments: argparse.Namespace) -> torch.Tensor:
    """Make a micro-step's garbage, and return its loss."""
    activations: dict[str, object] = {"tensor": torch.ones(arguments.mb * 250_000, device=arguments.device)}
    activations["self"] = activations
    alive = [[number] for number in range(arguments.containers)]
    batch = torch.ones(16, 64, device=arguments.device)
    loss: torch.Tensor = model(batch).square().mean() + 0 * len(alive)
    return loss


def train(arguments: argparse.Namespace) -> list[float]:
    """Train, then evaluate; returns the seconds of each step."""
    cuda = arguments.device == "cuda"
    model = torch.nn.Linear(64, 64, device=arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        for _ in range(arguments.micro_steps):
            run_batch(model, arguments).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    with torch.no_grad():
        for _ in range(arguments.evaluate):
            run_batch(model, arguments)
    return seconds


def read_gpu() -> dict[str, float]:
    """The most that tensors had of the GPU, and that the allocator held for them, in MB."""
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(("allocated_mb", "reserved_mb"), (peak / 1e6 for peak in peaks), strict=True))


def main() -> None:
    """Train, and report."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    seconds = train(arguments)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024e-6 for line in status if line.startswith("VmHWM:"))
    report = {"peak_mb": peak, "median_ms": 1e3 * statistics.median(seconds[WARMUP:])}
    report |= read_gpu() if arguments.device == "cuda" else {}
    arguments.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
