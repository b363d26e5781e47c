"""A training program for the straggler benchmark, started by torchrun; it knows nothing of the launcher.

Each rank holds an index of many small objects. Each step it reads a batch of samples into a queue, drops the
oldest, trains, and averages the gradients with the others. The further the rank, the more samples it reads
(documents have different lengths); some refer to themselves, and are garbage that only the collector finds.
"""

import argparse
import collections
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

WIDTH, ROWS = 256, 64
"""Of the model, and of its batch."""
TEXT = 400
"""Bytes of a sample's text."""

Sample = dict[str, object]


class Clock:
    """When each all_reduce was done, and how often the collector ran."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.collections = [0, 0, 0]
        gc.callbacks.append(self.observe)

    def observe(self, phase: str, info: dict[str, int]) -> None:
        """Count collections; it only looks, as profilers do."""
        if phase == "stop":
            self.collections[info["generation"]] += 1

    def mark(self) -> None:
        """Note an all_reduce's end."""
        self.marks.append(time.perf_counter())


def read_sample(number: int, *, cyclic: bool = False) -> Sample:
    """One sample, two objects for the collector; a cyclic one refers to itself."""
    spans: list[object] = [number, number + 1]
    sample: Sample = {"number": number, "spans": spans, "text": bytes(TEXT)}
    if cyclic:
        spans.append(sample)
    return sample


def parse_words() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--objects", type=int, default=2_000_000, help="live objects in each rank")
    parser.add_argument(
        "--samples", type=int, default=2500, help="read by rank 0 each step, N+1 times by rank N"
    )
    parser.add_argument("--cyclic", type=int, default=16, help="one sample in so many is cyclic")
    parser.add_argument("--queue", type=int, default=2, help="batches held")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--gc", choices=["none", "megatron", "torchtitan"], default="none")
    parser.add_argument("--every", type=int, default=50, help="steps from one collection to the next")
    parser.add_argument("--report", type=Path, required=True, help="folder for rank-N.json")
    return parser.parse_args()


def start_collections(way: str, every: int) -> Callable[[int], None]:
    """Take the collector over as others do; returns what to call after each step.

    Sources: Megatron-LM's --manual-gc (training.py), torchtitan's GarbageCollection (tools/utils.py).
    """
    if way == "none":
        return lambda _: None
    generation = 2 if way == "megatron" else 1
    gc.disable()
    gc.collect(generation)

    def collect_in_step(step: int) -> None:
        if step % every == 0:
            gc.collect(generation)

    return collect_in_step


def average_gradients(model: torch.nn.Module) -> None:
    """Average the gradients over all ranks."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def train(words: argparse.Namespace, clock: Clock) -> float:
    """Train; returns the loop's seconds, the first collection of --gc in them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    count = words.samples * (dist.get_rank() + 1)
    queue: collections.deque[list[Sample]] = collections.deque()
    dist.barrier()
    start = time.perf_counter()
    collect = start_collections(words.gc, words.every)
    for step in range(1, words.steps + 1):
        numbers = range(step * count, (step + 1) * count)
        queue.append([read_sample(number, cyclic=number % words.cyclic == 0) for number in numbers])
        if len(queue) > words.queue:
            queue.popleft()
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        clock.mark()
        optimizer.step()
        collect(step)
    dist.barrier()
    clock.mark()
    return time.perf_counter() - start


def read_memory(name: str) -> float:
    """This process's `VmRSS` or `VmHWM` (its highest) in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024e-6 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Train, and report."""
    words = parse_words()
    dist.init_process_group("gloo")
    index = [{"number": number, "spans": [number]} for number in range(words.objects // 2)]
    clock = Clock()
    seconds = train(words, clock)
    report = {
        "marks": clock.marks,
        "collections": clock.collections,
        "seconds": seconds,
        "peak_mb": read_memory("VmHWM"),
        "final_mb": read_memory("VmRSS"),
        "samples": len(index),
    }
    (words.report / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
