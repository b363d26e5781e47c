"""Blocks with attention, computed again in the backward pass: `… [fsdp]` wraps them as FSDP2's recipes do."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 512, 8, 4, 4, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.up(self.norm(x)).chunk(3, -1)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


sharded, recompute = "fsdp" in sys.argv, "plain" not in sys.argv
if sharded:
    dist.init_process_group("nccl")
    model = Model(recompute=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(layer), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
else:
    model = Model(recompute=recompute).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    with torch.autocast("cuda", torch.bfloat16, enabled=not sharded):
        loss = model(torch.randn(BATCH, LENGTH, WIDTH, device="cuda")).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
