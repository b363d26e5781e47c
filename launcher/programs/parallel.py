"""How the model is split over the ranks: DDP or FSDP2, and what follows for a training step."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from launcher.programs.training_config import Config
from launcher.programs.transformer import Transformer, initialise


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The choices for this run."""

    kind: str
    """`ddp`, `fsdp`, or `none` for one process."""
    bf16: bool

    @property
    def dtype(self) -> torch.dtype:
        """Type of the computation; weights are fp32."""
        return torch.bfloat16 if self.bf16 else torch.float32


def has_bf16(device: torch.device) -> bool:
    """Tell whether the device computes in bf16 by itself, and gains by it."""
    # CPUs with bf16 instructions lose more in autocast's conversions than they gain on small models.
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def build_model(
    config: Config, parallelism: Parallelism, device: torch.device, rank: int
) -> tuple[Transformer, nn.Module]:
    """Build the model on the device, seeded; give it bare and as it is called in training.

    Made on the meta device first, so that a model which fits no rank whole is only ever held in shards.
    """
    with torch.device("meta"):
        model = Transformer(config.model, recompute=config.train.activation_checkpointing)
    if config.train.compile:
        for block in model.blocks:
            block.compile()
    if parallelism.kind == "fsdp":
        shard_model(model, device, bf16=parallelism.bf16)
    model.to_empty(device=device)
    # Shards differ between ranks, replicas must not.
    seed = config.train.seed * 1_000_003 + (rank if parallelism.kind == "fsdp" else 0)
    initialise(model, torch.Generator(device).manual_seed(seed))
    return model, wrap_ddp(model, device) if parallelism.kind == "ddp" else model


def shard_model(model: Transformer, device: torch.device, *, bf16: bool) -> None:
    """Shard each block and the rest over all ranks (FSDP2), computing in bf16 and reducing in fp32."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - half a second, for FSDP alone
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    # DTensor's caches keep the mesh to the end: with a group of its own, the default one can end before.
    mesh = DeviceMesh.from_group(torch.distributed.new_group(), device.type)
    dtype = torch.bfloat16 if bf16 else None
    # Inputs are not cast: the rotary angles stay fp32, and the embedding makes the rest bf16.
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def wrap_ddp(model: Transformer, device: torch.device) -> nn.Module:
    """Wrap in DDP."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def autocast(parallelism: Parallelism, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Give the context of the forward pass: FSDP's own policy needs none."""
    if parallelism.bf16 and parallelism.kind != "fsdp":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def hold_gradients(module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[object]:
    """Give the context of a micro-step: DDP's gradients cross the ranks on the last one alone.

    FSDP's are reduced on each: else every rank would keep whole ones, of 26 GiB for 7 billion parameters.
    """
    no_sync = getattr(module, "no_sync", None)
    context: contextlib.AbstractContextManager[object] = (
        no_sync() if no_sync is not None and not last else contextlib.nullcontext()
    )
    return context
