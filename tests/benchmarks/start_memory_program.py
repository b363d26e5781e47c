"""`start_memory_program.py FOLDER STEPS`: imports torch, trains so many steps, and waits to be measured."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed
from torch import nn

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
if steps:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
(folder / f"ready-{os.environ['RANK']}").write_text(str(os.getpid()))
while not (folder / "done").exists():
    time.sleep(0.05)
