"""Prints, as JSON, what a rank's start has left of the GPU and the allocator, and the loss of a training."""

import json
import os
import sys
from typing import Any

WAS_IMPORTED = "torch" in sys.modules

import torch  # noqa: E402 - whether it is there before is what is asked


def train(device: str) -> float:
    """Return the last loss of ten steps from a fixed seed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(128, 64).to(device)
    for _ in range(10):
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.item())


def main() -> None:
    """Print the facts."""
    found: dict[str, Any] = {
        "was_imported": WAS_IMPORTED,
        "initialized_before": bool(torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
        "local_rank": os.environ.get("LOCAL_RANK"),
    }
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    found["loss"] = train(device).hex()
    if device != "cpu":
        found["device"] = torch.cuda.get_device_name(device)
        found["backend"] = torch.cuda.memory.get_allocator_backend()
        found["allocator"] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
