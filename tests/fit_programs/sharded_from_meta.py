"""FSDP2's recipe for large models: made on meta, sharded, emptied onto the GPU, and only then initialized."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, LAYERS, VOCABULARY = 512, 4, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2048), nn.Linear(2048, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))

    def reset(self) -> None:
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.up.weight, 0.0, 0.02)
        nn.init.xavier_uniform_(self.down.weight)
        nn.init.zeros_(self.up.bias)
        self.down.bias.data.zero_()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.zeros(1024, WIDTH), persistent=False)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
with torch.device("meta"):
    model = Model()
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
with torch.no_grad():
    for layer in model.layers:
        layer.reset()
    model.embedding.weight.normal_(0, 0.02)
    nn.init.normal_(model.head.weight, std=0.02)
    torch.nn.init.constant_(model.positions, 0.1)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(3):
    tokens = torch.randint(VOCABULARY, (4, 1025)).cuda()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), norm.full_tensor().item())
dist.destroy_process_group()
