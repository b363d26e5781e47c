"""Settings of the bundled program whose memory is estimated and tracked."""

from dataclasses import dataclass
from typing import Any

from launcher.fit.fit_model import Device, FitRequest, ModelDimensions, ParallelLayout, TrainingSettings

H100 = Device("NVIDIA H100 80GB HBM3", 81559)


@dataclass(frozen=True, slots=True)
class FitCase:
    """One setting of the grid."""

    model: str
    parallel: str
    """`none`, `ddp` or `fsdp`."""
    world_size: int
    batch: int
    seq_len: int
    bf16: bool = True
    checkpointing: str = "none"
    optimizer: str = "adamw"
    accumulation: int = 1

    @property
    def label(self) -> str:
        """The row's name in the table."""
        words = [
            self.model,
            self.parallel + (f" over {self.world_size}" if self.world_size > 1 else ""),
            f"{self.batch} x {self.seq_len}",
            "bf16" if self.bf16 else "fp32",
        ]
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [self.optimizer] if self.optimizer != "adamw" else []
        words += [f"{self.accumulation} micro-steps"] if self.accumulation > 1 else []
        return ", ".join(words)


def make_llama(name: str, layers: int, hidden: int, inner: int, **more: Any) -> ModelDimensions:
    """Make dimensions of LLaMA's architecture, with heads 128 wide if nothing else is given."""
    heads = more.pop("heads", hidden // 128)
    dimensions = {"vocab_size": 32000, "kv_heads": heads, "max_seq_len": 4096} | more
    return ModelDimensions(
        name=name,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        head_width=hidden // heads,
        intermediate_size=inner,
        **dimensions,
    )


MODELS = {
    model.name: model
    for model in (
        ModelDimensions(
            "gpt2",
            50257,
            12,
            768,
            12,
            12,
            64,
            3072,
            1024,
            norm="layernorm",
            mlp="gelu",
            position="learned",
            bias=True,
            tied_embeddings=True,
        ),
        make_llama("small", 4, 512, 1408, vocab_size=8000, heads=8, kv_heads=4),
        make_llama("llama350m", 24, 1024, 2816, heads=16),
        make_llama("llama1b", 16, 2048, 8192, vocab_size=128256, heads=32, kv_heads=8, tied_embeddings=True),
        make_llama("llama7b", 32, 4096, 11008),
        make_llama("llama3_8b", 32, 4096, 14336, vocab_size=128256, kv_heads=8),
        make_llama("llama13b", 40, 5120, 13824),
        make_llama("llama70b", 80, 8192, 28672, kv_heads=8),
    )
}

GRID = (
    FitCase("gpt2", "none", 1, 8, 1024),
    FitCase("gpt2", "ddp", 8, 32, 1024),
    FitCase("gpt2", "ddp", 8, 32, 1024, checkpointing="full"),
    FitCase("gpt2", "none", 1, 8, 1024, bf16=False),
    FitCase("gpt2", "fsdp", 8, 16, 1024),
    FitCase("llama350m", "none", 1, 4, 2048),
    FitCase("llama350m", "none", 1, 1, 512),
    FitCase("llama350m", "ddp", 8, 4, 2048),
    FitCase("llama350m", "ddp", 8, 8, 2048, checkpointing="full"),
    FitCase("llama350m", "ddp", 8, 2, 2048, bf16=False),
    FitCase("llama350m", "ddp", 8, 4, 2048, bf16=False, checkpointing="full"),
    FitCase("llama350m", "none", 1, 1, 1024, accumulation=4),
    FitCase("llama350m", "ddp", 8, 4, 2048, accumulation=2),
    FitCase("llama350m", "fsdp", 8, 4, 2048, accumulation=2),
    FitCase("llama350m", "ddp", 8, 4, 2048, optimizer="sgd"),
    FitCase("llama350m", "none", 1, 1, 1024, optimizer="muon"),
    FitCase("llama350m", "fsdp", 8, 8, 2048, bf16=False),
    FitCase("llama1b", "none", 1, 1, 2048),
    FitCase("llama1b", "ddp", 8, 2, 4096, checkpointing="full"),
    FitCase("llama1b", "fsdp", 8, 4, 2048),
    FitCase("llama1b", "fsdp", 16, 4, 4096, checkpointing="full"),
    FitCase("llama1b", "ddp", 8, 1, 2048, bf16=False),
    FitCase("llama7b", "ddp", 8, 1, 2048, checkpointing="full"),
    FitCase("llama7b", "fsdp", 8, 1, 2048),
    FitCase("llama7b", "fsdp", 64, 2, 4096),
    FitCase("llama7b", "fsdp", 64, 8, 4096, checkpointing="full"),
    FitCase("llama7b", "fsdp", 16, 1, 4096, optimizer="sgd"),
    FitCase("llama3_8b", "fsdp", 32, 1, 8192, checkpointing="full"),
    FitCase("llama3_8b", "fsdp", 64, 1, 4096),
    FitCase("llama13b", "fsdp", 32, 1, 4096),
    FitCase("llama13b", "fsdp", 32, 4, 4096, checkpointing="full"),
    FitCase("llama70b", "fsdp", 256, 1, 4096, checkpointing="full"),
    FitCase("gpt2", "ddp", 8, 32, 1024, checkpointing="selective"),
    FitCase("llama350m", "fsdp", 8, 8, 2048, checkpointing="selective"),
    FitCase("llama350m", "ddp", 8, 4, 2048, bf16=False, checkpointing="selective"),
    FitCase("llama7b", "fsdp", 32, 4, 4096, checkpointing="selective"),
    FitCase("llama7b", "fsdp", 8, 6, 2048, checkpointing="selective", accumulation=4),
    FitCase("llama3_8b", "fsdp", 8, 1, 8192, checkpointing="selective"),
    FitCase("llama3_8b", "fsdp", 8, 1, 8192),
)
FEW = (
    FitCase("small", "ddp", 8, 8, 512),
    FitCase("small", "none", 1, 1, 128),
    FitCase("small", "fsdp", 4, 8, 512, checkpointing="full"),
    FitCase("small", "fsdp", 4, 8, 512, checkpointing="selective", accumulation=2),
)
"""A few that an ordinary test can afford."""


def make_request(case: FitCase) -> FitRequest:
    """Make what is asked of the estimate."""
    sharded = case.parallel == "fsdp"
    settings = TrainingSettings(
        framework="fsdp" if sharded else "ddp",
        precision="mixed" if case.bf16 else "fp32",
        optimizer=case.optimizer,
        checkpointing=case.checkpointing,
        micro_batch=case.batch,
        accumulation=case.accumulation,
        seq_len=case.seq_len,
        autocast=case.bf16 and not sharded,
        bundled=True,
    )
    layout = ParallelLayout(dp=case.world_size, zero=3 if sharded else 0)
    return FitRequest(MODELS[case.model], layout, settings, H100, min(8, case.world_size))
