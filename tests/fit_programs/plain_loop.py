"""A loop with a DataLoader, autocast, clipping, a printed loss and a checkpoint after each step."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LAYERS, BATCH = 512, 4, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_alike() -> list[torch.Tensor]:
    """What is made like another tensor is on the GPU, or on `meta`, where it takes no memory."""
    with torch.device("meta"):
        row = nn.Linear(8, 8)
    row.to_empty(device=torch.cuda.current_device())
    held = [torch.empty(1 << 20, device="meta").new_empty(1 << 20) for _ in range(1000)]
    assert {one.device.type for one in held} == {"meta"}
    first = torch.ones(2, 8).new_tensor([1.0] * 8, device=0)
    tables = [first.new_zeros(4, 8, device=0), torch.ones_like(first, device="cuda"), first.new_tensor([1.0])]
    assert {one.device for one in (first, *tables)} == {torch.device("cuda", 0)}
    sum(row(first * one).sum() for one in tables).backward()
    return held


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 10)).to(device)
    if "--compile" in sys.argv:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)
    data = TensorDataset(torch.randn(256, WIDTH), torch.randint(0, 10, (256,)))
    for x, y in DataLoader(data, BATCH, shuffle=True, num_workers=2, persistent_workers=True, timeout=60):
        x, y = x.to(device, non_blocking=True), y.to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(x), y, x.new_tensor([1.0] * 10))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):
            raise RuntimeError("the loss is not finite")
        print(f"loss {loss.item():.3f} norm {norm:.3f}")
        torch.save(model.state_dict(), "checkpoint.pt")


held = make_alike()
main()
