"""Accelerate with a vision transformer as torchvision writes it, compiled."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, LAYERS = 384, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, 0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.token, self.positions = (
            nn.Parameter(torch.zeros(1, 1, WIDTH)),
            nn.Parameter(torch.empty(1, 197, WIDTH).normal_(std=0.02)),
        )
        self.layers, self.head = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.Linear(WIDTH, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.layers(x)[:, 0])


accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = Vit()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
data = DataLoader(TensorDataset(torch.randn(128, 3, 224, 224), torch.randint(1000, (128,))), 8, shuffle=True)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
if "compile" in sys.argv:
    model = torch.compile(model)
for x, y in data:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    total = accelerator.gather(loss).mean().item()
    print(total)
