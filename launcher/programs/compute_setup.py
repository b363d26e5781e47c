"""Where and how a run computes (device, process group, DDP or FSDP, precision, peak), and its description."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from launcher.programs.corpus import describe_origin
from launcher.programs.data import TrainingText
from launcher.programs.dimensions import ModelConfig, count_parameters
from launcher.programs.metrics import Peak, choose_peak
from launcher.programs.parallel import Parallelism, has_bf16
from launcher.programs.process_group import (
    Ranks,
    choose_device,
    init_process_group,
    name_device,
    read_torchrun_variables,
)
from launcher.programs.training_config import RECOMPUTED, Config


@dataclass(frozen=True, slots=True)
class ComputeSetup:
    """What was found and chosen."""

    ranks: Ranks
    device: torch.device
    backend: str
    """`nccl` or `gloo`."""
    parallelism: Parallelism
    peak: Peak | None
    """None on a CPU, unless it is given: then there is no MFU."""


def set_up(config: Config) -> tuple[Config, ComputeSetup]:
    """Choose the device, join the other ranks, and agree with them on the settings; raises OptionError."""
    ranks = read_torchrun_variables()
    device = choose_device(config.train.device, ranks)
    backend = init_process_group(device, ranks)
    config = agree(config, device, ranks)
    kind = "none" if config.train.parallel == "ddp" and ranks.world_size == 1 else config.train.parallel
    parallelism = Parallelism(kind, config.train.dtype == "bf16")
    # After joining, so that ranks that share cores measure at the same time.
    peak = choose_peak(config.train.peak_tflops, device, parallelism.dtype)
    return config, ComputeSetup(ranks, device, backend, parallelism, peak)


def agree(config: Config, device: torch.device, ranks: Ranks) -> Config:
    """Take of each setting that all ranks must share the one that needs least memory, and settle the type.

    Nodes of several kinds may each have been given what fits there.
    """
    train = config.train
    dtype = train.dtype
    if dtype == "auto":
        dtype = "bf16" if has_bf16(device) else "fp32"
    own = (train.batch_size, train.grad_accumulation, train.activation_checkpointing, train.parallel, dtype)
    found = [own] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(found, own)
    batches = {(batch, steps) for batch, steps, *_ in found}
    batch_size, grad_accumulation = min(batches)
    settled: dict[str, Any] = {
        "batch_size": batch_size,
        "grad_accumulation": grad_accumulation,
        "activation_checkpointing": max((one[2] for one in found), key=RECOMPUTED.index),
        "parallel": max(one[3] for one in found),
        "dtype": max(one[4] for one in found),  # each GPU computes in fp32
    }
    if ranks.rank == 0 and len(set(found)) > 1:
        options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settled.items())
        print(f"train: ranks were started with different settings, all take {options}", flush=True)
    return replace(config, train=replace(train, **settled))


def describe_training(config: Config, text: TrainingText, setup: ComputeSetup, resumed: str) -> str:
    """Describe the run, a line for each subject."""
    peak = setup.peak
    lines = (
        f"model   {describe_model(config.model)}",
        f"data    {describe_text(config, text)}",
        f"device  {name_device(setup.device)}, {describe_ranks(config, setup)}",
        f"batch   {describe_batch(config, setup.ranks.world_size)}",
        *(
            [f"peak    {peak.tflops:.4g} TFLOPS a rank, {peak.origin}{describe_recompute(config)}"]
            if peak
            else []
        ),
        f"start   {resumed}",
    )
    return "\n".join(lines)


def describe_model(model: ModelConfig) -> str:
    """Name the model, its parameters and dimensions."""
    return (
        f"{model.name}: {count_parameters(model):,} parameters, {model.layers} layers, "
        f"hidden {model.hidden_size}, {model.heads} heads ({model.kv_heads} kv), {model.vocab_size} tokens"
    )


def describe_text(config: Config, text: TrainingText) -> str:
    """Name the text and its size."""
    origin, split = describe_origin(config.data.path), text.split
    return (
        f"{origin}: {text.windows.size:,} bytes, {split.training:,} sequences of {config.seq_len}, "
        f"{split.validation:,} more held out"
    )


def describe_ranks(config: Config, setup: ComputeSetup) -> str:
    """Name the ranks and how they work together."""
    ranks = f"{setup.ranks.world_size} rank" + "s" * (setup.ranks.world_size > 1)
    parallelism = (
        "" if setup.parallelism.kind == "none" else f" {setup.parallelism.kind} over {setup.backend},"
    )
    dtype = "bf16" if setup.parallelism.bf16 else "fp32"
    return f"{ranks},{parallelism} {dtype}, {config.workers} DataLoader workers a rank"


def describe_batch(config: Config, world_size: int) -> str:
    """Name the tokens of an optimizer step, and their factors."""
    train = config.train
    tokens = config.seq_len * train.batch_size * train.grad_accumulation * world_size
    factors = f"{train.batch_size} sequences x {config.seq_len} x {world_size} ranks"
    return f"{tokens:,} tokens per step: {factors} x {train.grad_accumulation} micro-steps"


def describe_recompute(config: Config) -> str:
    """Say that tflops and mfu differ if activations are recomputed."""
    return (
        "; tflops count recomputation, mfu does not"
        if config.train.activation_checkpointing == "full"
        else ""
    )
