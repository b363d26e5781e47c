"""The options of the training program: a dataclass for each section, an option for each field."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, get_args, get_type_hints

MAX_DEFAULT_SEQ_LEN = 4096
"""Longest sequence that is trained on unless --seq-len says more; published contexts can be far longer."""
RECOMPUTED = ("none", "selective", "full")
"""Of a block's activations, from none to all; `selective` is all but matrix products and attention."""


class OptionError(ValueError):
    """An option, a file or a directory cannot be used: one line with the values and the fix."""


def option(default: Any, text: str, *choices: str, least: float | None = None) -> Any:  # noqa: ANN401
    """Declare a dataclass field that is also a command-line option, with its help and the values it takes."""
    return field(default=default, metadata={"help": text, "choices": choices or None, "least": least})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer; the switches cover LLaMA and GPT-2."""

    name: str = option("tiny", "name, for people")
    vocab_size: int = option(256, "tokens; the data are bytes, so at least 256", least=256)
    layers: int = option(4, "transformer blocks", least=1)
    hidden_size: int = option(128, "width of the residual stream", least=1)
    heads: int = option(4, "query heads", least=1)
    kv_heads: int = option(2, "key and value heads; fewer than heads is grouped-query attention", least=1)
    head_dim: int | None = option(None, "width of a head; hidden_size / heads if not given", least=1)
    intermediate_size: int = option(384, "width inside the MLP", least=1)
    max_seq_len: int = option(128, "longest context; rows of the table if position is learned", least=1)
    norm: str = option("rmsnorm", "normalisation", "rmsnorm", "layernorm")
    norm_eps: float = option(1e-5, "added to the variance")
    mlp: str = option("swiglu", "feed-forward layer", "swiglu", "gelu")
    position: str = option("rope", "how positions enter", "rope", "learned")
    rope_theta: float = option(10000.0, "base of the rotary frequencies")
    bias: bool = option(False, "biases in linear layers and norms")
    tied_embeddings: bool = option(True, "the output layer is the input embedding")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.heads


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The text to train on."""

    path: str | None = option(None, "file or directory to train on, as bytes; Python's library if none")
    val_fraction: float = option(
        0.01, "share of the sequences that is held out for validation; 0 for none", least=0
    )


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train."""

    steps: int = option(150, "optimizer steps in all", least=1)
    seq_len: int | None = option(
        None, f"tokens of a sequence; model.max_seq_len, at most {MAX_DEFAULT_SEQ_LEN}", least=1
    )
    batch_size: int = option(8, "sequences for each rank and micro-step", least=1)
    grad_accumulation: int = option(1, "micro-steps for each optimizer step", least=1)
    global_batch: int | None = option(
        None,
        "sequences of an optimizer step: then grad_accumulation is what comes nearest on all ranks",
        least=1,
    )
    lr: float | None = option(None, "peak learning rate; 3e-4 * sqrt(4096 / hidden_size) if none", least=0)
    min_lr_ratio: float = option(0.1, "share of the learning rate that the cosine ends on", least=0)
    warmup_steps: int = option(20, "steps of linear warm-up", least=0)
    weight_decay: float = option(0.1, "AdamW's, for matrices only", least=0)
    clip_grad: float = option(1.0, "largest norm of the gradient; 0 for no clipping", least=0)
    seed: int = option(0, "of the weights and of the order of the data", least=0)
    device: str = option("auto", "where to compute", "auto", "cpu", "cuda")
    dtype: str = option("auto", "of the computation; weights stay fp32", "auto", "bf16", "fp32")
    parallel: str = option("ddp", "how the ranks work together: fsdp shards what ddp copies", "ddp", "fsdp")
    activation_checkpointing: str = option(
        "none",
        "what backward computes again: full is all of a block, selective all but products and attention",
        *RECOMPUTED,
    )
    compile: bool = option(False, "torch.compile each block")
    num_workers: int | None = option(
        None, "DataLoader workers for each rank; at most 2 of the CPUs if none", least=0
    )
    log_every: int = option(10, "steps between log lines", least=1)
    eval_batches: int = option(8, "batches of each rank in the validation at the end; 0 for none", least=0)
    checkpoint_dir: str | None = option(None, "directory of the checkpoints; the newest is resumed from")
    checkpoint_every: int = option(100, "steps between checkpoints; 0 for one at the end only", least=0)
    peak_tflops: float | None = option(None, "dense bf16 peak, for MFU; the published one if none", least=0)


@dataclass(frozen=True, slots=True)
class Config:
    """All options."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig

    @property
    def seq_len(self) -> int:
        """Tokens of a training sequence."""
        return self.train.seq_len or min(self.model.max_seq_len, MAX_DEFAULT_SEQ_LEN)

    @property
    def lr(self) -> float:
        """Peak learning rate: near the published 6e-4 (GPT-2), 3e-4 (LLaMA 7B) and 1.5e-4 (Llama 2 70B)."""
        usual = 3e-4 * (4096 / self.model.hidden_size) ** 0.5
        return usual if self.train.lr is None else self.train.lr

    @property
    def workers(self) -> int:
        """DataLoader workers of a rank."""
        wanted = self.train.num_workers
        return min(2, len(os.sched_getaffinity(0))) if wanted is None else wanted


_SECTIONS = {"model.": ModelConfig, "data.": DataConfig, "": TrainConfig}
"""By the beginning of their options' names: `--model.kv_heads`, `--data.path`, `--batch-size`."""


def parse_config(argv: Sequence[str] | None = None) -> Config:
    """Read the command line; a mistake in it ends the program with one line and status 2."""

    class OneLineParser(argparse.ArgumentParser):
        """Its errors are one line, since each rank of a job prints them."""

        def error(self, message: str) -> NoReturn:
            self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    what = "Train a LLaMA-architecture language model on text, by itself or under torchrun."
    with_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = OneLineParser("train", description=what, allow_abbrev=False, formatter_class=with_defaults)
    for prefix, section in reversed(_SECTIONS.items()):
        group, hints = parser.add_argument_group(prefix.rstrip(".") or "training"), get_type_hints(section)
        for item in fields(section):
            kind = (get_args(hints[item.name]) or (hints[item.name],))[0]  # of `int | None`: int
            settings: dict[str, Any] = {"type": kind, "choices": item.metadata["choices"]}
            if kind is bool:
                settings = {"action": argparse.BooleanOptionalAction}
            settings |= {"default": item.default, "help": item.metadata["help"]}
            name = f"--{prefix}{item.name}" if prefix else f"--{item.name.replace('_', '-')}"
            group.add_argument(name, dest=prefix + item.name, **settings)
    given, sections = vars(parser.parse_args(argv)), []
    for prefix, section in _SECTIONS.items():
        values = {item.name: given[prefix + item.name] for item in fields(section)}
        sections.append(section(**values))
        for item in fields(section):
            value, least = values[item.name], item.metadata["least"]
            if None not in (value, least) and not value >= least:  # nan is no number to compare
                parser.error(f"{prefix}{item.name}={value} must be at least {least}")
    config = Config(*sections)
    model = config.model
    if model.heads % model.kv_heads:
        parser.error(f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}")
    if model.head_dim is None and model.hidden_size % model.heads:
        parser.error(f"model.hidden_size={model.hidden_size} is not divisible by model.heads={model.heads}")
    if model.position == "rope" and model.head_width % 2:
        parser.error(f"rotary embeddings need an even width of a head, not {model.head_width}")
    if config.seq_len > model.max_seq_len:
        parser.error(f"seq_len={config.seq_len} is above model.max_seq_len={model.max_seq_len}")
    return config
