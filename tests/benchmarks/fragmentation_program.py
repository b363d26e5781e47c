"""Trains on sequences of varying length, the same lengths each time; writes what the GPU's memory did."""

import argparse
import json
import random
from pathlib import Path

import torch

WIDTH, HEADS, LAYERS = 512, 8, 8
SHORTEST, LONGEST, STRIDE = 64, 1024, 32
"""Lengths of sequences, and what they are a multiple of."""


def choose_lengths(steps: int) -> list[int]:
    """Lengths of the batches' sequences: most are short, some fill the context."""
    chance = random.Random(0)
    parts = [round((LONGEST / STRIDE) * chance.random() ** 2) for _ in range(steps)]
    return [min(LONGEST, max(SHORTEST, STRIDE * part)) for part in parts]


def train(batch: int, steps: int, device: str) -> None:
    """Train; raises torch.OutOfMemoryError."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for length in choose_lengths(steps):
        loss = model(torch.randn(batch, length, WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def main() -> None:
    """Train within the cap, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, required=True, help="sequences in a batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--cap-gib", type=float, default=16.0, help="of GPU memory, which caps the batch sooner"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("report", type=Path)
    words = parser.parse_args()
    cuda = words.device == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, words.cap_gib * 2**30 / total))
    try:
        train(words.batch, words.steps, words.device)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    allocated, reserved = (
        (torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20)
        if cuda
        else (0.0, 0.0)
    )
    words.report.write_text(json.dumps({"fits": fits, "allocated_mib": allocated, "reserved_mib": reserved}))


if __name__ == "__main__":
    main()
