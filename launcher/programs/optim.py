"""AdamW and its learning rate."""

import math

import torch
from torch import nn

from launcher.programs.training_config import TrainConfig


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Make a fused AdamW that decays matrices, not norms and biases; the betas are LLaMA's."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(config: TrainConfig, peak: float, step: int) -> float:
    """Give the rate of a step, counted from 1: linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    way = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, way))) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
