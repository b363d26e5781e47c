"""What a configuration says of a training: the sections `parallel` and `fit`.

A `Training` has the same values, each `auto` replaced by what it comes to.
"""
# ruff: noqa: RUF009 - `setting` makes a field

from dataclasses import dataclass, field
from typing import Any

from launcher.fields import one_of, setting

ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""A layer's matrices by the names of Hugging Face's models; GELU has no gate_proj."""
ALL_LINEAR = "all-linear"
BLOCK_PARTS = (
    *("core_attn", "attention", "layernorm", "mla_up_proj"),
    *("mlp", "moe", "moe_act", "shared_experts"),
)
"""Modules that can be computed again."""
ASKING = ("check", "gpu", "gpu_memory_gib", "tokens", "step_seconds", "grid", "timeout")
"""Keys of `fit` that ask about a training and do not describe it."""
LARGEST_COUNT = 10**6
"""GPUs in a group: ten times those of the largest machines."""
LARGEST_BATCH = 10**9
"""Sequences, and tokens of a sequence."""
LARGEST_AMOUNT = 1e20
"""Tokens in all, GiB, and seconds."""


@dataclass
class ParallelConfig:
    """How the program splits its work over the GPUs: a description that changes nothing.

    `auto`: as the bundled program's options say; for another program, zero is 0.
    """

    tp: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """GPUs that share a layer (tensor parallelism)."""
    pp: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """Pipeline stages."""
    dp: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_COUNT, words=("auto",))
    """Data-parallel replicas; `auto`: the GPUs over tp, pp and cp."""
    cp: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """GPUs that share a sequence (context parallelism)."""
    ep: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """GPUs that share the experts."""
    zero: Any = setting("auto", choices=("auto", "fsdp", "0", "1", "2", "3"))
    """What replicas shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 (or `fsdp`) weights too."""
    framework: str = one_of("auto", "ddp", "fsdp", "zero", "megatron")
    """`zero` is DeepSpeed."""
    shard_size: int | None = setting(None, minimum=1, maximum=LARGEST_COUNT)
    """GPUs over which states are sharded; null: all replicas."""
    sequence_parallel: bool = True
    """With tp: activations between matrices are split along the sequence."""
    virtual_stages: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """Model chunks of each pipeline stage (interleaved schedule)."""

    @property
    def world_size(self) -> int:
        """GPUs of the job."""
        return int(self.tp * self.pp * self.dp * self.cp)

    @property
    def replicas(self) -> int:
        """GPUs among which data parallelism may shard states, and the sequences are split."""
        return int(self.dp * self.cp)


@dataclass
class LoraConfig:
    """Low-rank adapters, trained in place of the model; alpha changes no memory."""

    rank: int | None = setting(None, minimum=1, maximum=1 << 16)
    """null: no adapters."""
    targets: list[str] = setting(
        [ALL_LINEAR], choices=(ALL_LINEAR, *ATTENTION_MATRICES, *MLP_MATRICES, "lm_head")
    )
    """`all-linear` is all but lm_head."""

    @property
    def matrices(self) -> frozenset[str]:
        """The targets by name."""
        every = ATTENTION_MATRICES + MLP_MATRICES if ALL_LINEAR in self.targets else ()
        return frozenset({*every, *self.targets} - {ALL_LINEAR})


@dataclass
class FitConfig:
    """What is assumed of the training, to tell its memory and speed.

    `auto`: as the bundled program's options say.
    """

    check: str = one_of("error", "warn", "off")
    """If a job of the bundled program cannot fit; others are never refused."""
    precision: str = one_of("auto", "fp32", "bf16", "mixed", "fp8")
    """`mixed` is bf16 with fp32 weights."""
    optimizer: str = one_of("adamw", "adamw8bit", "adafactor", "lion", "sgd", "muon")
    checkpointing: str = one_of("auto", "none", "selective", "full")
    """Activation checkpointing."""
    offload: str = one_of("none", "optimizer", "parameters")
    """What is in CPU memory; `parameters`: the optimizer too."""
    micro_batch: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_BATCH, words=("auto",))
    """Sequences in a replica's micro-step."""
    accumulation: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_BATCH, words=("auto",))
    """Micro-steps of an optimizer step; `auto`: from global_batch, else 1."""
    global_batch: int | None = setting(None, minimum=1, maximum=LARGEST_BATCH)
    """Sequences of an optimizer step: micro_batch * dp * accumulation."""
    seq_len: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_BATCH, words=("auto",))
    """Tokens of a sequence; `auto`: the program's, else max_seq_len, at most 4096."""
    flash_attention: bool = True
    loss: str = one_of("auto", "plain", "compiled", "chunked", "fused")
    """`plain`: all logits at once, with fp32 copies; `compiled`: without; `chunked`; `fused`: Liger's or cut
    cross-entropy; `auto`: unknown."""
    compile: Any = setting("auto", choices=("auto", "true", "false"))
    """torch.compile; `auto`: unknown."""
    optimizer_fused: Any = setting("auto", choices=("auto", "true", "false"))
    """The optimizer's `fused=True`."""
    gradients: str = one_of("auto", "fp32", "bf16")
    """`bf16` as in Megatron Bridge; `auto`: the framework's."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    quantization: str = one_of("none", "nf4", "int8")
    """Of weights that LoRA freezes: 4 bits (QLoRA), or 8 (LLM.int8)."""
    optimizer_in_backward: bool = False
    """The backward pass applies and frees each gradient."""
    activation_offload: bool = False
    """Activations are in CPU memory until the backward pass."""
    recompute_modules: list[str] = setting([], choices=BLOCK_PARTS)
    """What checkpointing=selective computes again, in Megatron Core's words; []: the framework's default."""
    gpu: str | None = setting(None, pattern=r".*\S.*", give="a name such as H100, or leave it out")
    """A GPU's name (`H100`, `A100-40GB`), in place of the machine's."""
    gpu_memory_gib: float | None = setting(None, above=0, maximum=LARGEST_AMOUNT)
    """In place of the machine's."""
    tokens: float | None = setting(None, above=0, maximum=LARGEST_AMOUNT)
    """Tokens in all, for time and GPU-hours."""
    step_seconds: float | None = setting(None, above=0, maximum=LARGEST_AMOUNT)
    """Measured, for TFLOPS, MFU and HFU."""
    grid: bool = False
    """`launch plan` shows micro-batches by checkpointing by sharding."""
    timeout: float = setting(600.0, above=0)
    """Seconds for a program in `launch fit`."""

    @property
    def width(self) -> int:
        """Bytes of a number in the computation."""
        return 4 if self.precision == "fp32" else 2
