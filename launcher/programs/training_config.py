"""The program's options and their checks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.programs.dimensions import ModelConfig, check_model
from launcher.programs.options import OneLineParser, OptionError, add_options, option, parse_options

DESCRIPTION = "Train a LLaMA-architecture language model on text, by itself or under torchrun."
MAX_DEFAULT_SEQ_LEN = 4096
"""Longest sequence that is trained on unless --seq-len says more; published contexts can be far longer."""
RECOMPUTED = ("none", "selective", "full")
"""Of a block's activations, from none to all."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The text to train on."""

    path: str | None = option(None, "file or directory to train on, as bytes; Python's library if none")
    val_fraction: float = option(0.01, "share of the sequences that is held out for validation; 0 for none")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train."""

    steps: int = option(150, "optimizer steps in all")
    seq_len: int | None = option(
        None, f"tokens of a sequence; model.max_seq_len, at most {MAX_DEFAULT_SEQ_LEN}"
    )
    batch_size: int = option(8, "sequences for each rank and micro-step")
    grad_accumulation: int = option(1, "micro-steps for each optimizer step")
    lr: float | None = option(None, "peak learning rate; 3e-4 * sqrt(4096 / hidden_size) if none")
    min_lr_ratio: float = option(0.1, "share of the learning rate that the cosine ends on")
    warmup_steps: int = option(20, "steps of linear warm-up")
    weight_decay: float = option(0.1, "AdamW's, for matrices only")
    clip_grad: float = option(1.0, "largest norm of the gradient; 0 for no clipping")
    seed: int = option(0, "of the weights and of the order of the data")
    device: str = option("auto", "where to compute", "auto", "cpu", "cuda")
    dtype: str = option("auto", "of the computation; weights stay fp32", "auto", "bf16", "fp32")
    parallel: str = option("ddp", "how the ranks work together: fsdp shards what ddp copies", "ddp", "fsdp")
    activation_checkpointing: str = option(
        "none",
        "what backward computes again: full is all of a block, selective all but products and attention",
        *RECOMPUTED,
    )
    compile: bool = option(False, "torch.compile each block")
    num_workers: int | None = option(None, "DataLoader workers for each rank; at most 2 of the CPUs if none")
    log_every: int = option(10, "steps between log lines")
    eval_batches: int = option(8, "batches of each rank in the validation at the end; 0 for none")
    checkpoint_dir: str | None = option(None, "directory of the checkpoints; the newest is resumed from")
    checkpoint_every: int = option(100, "steps between checkpoints; 0 for one at the end only")
    peak_tflops: float | None = option(None, "dense bf16 peak, for MFU; published or measured if none")


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
        return self.train.lr or 3e-4 * (4096 / self.model.hidden_size) ** 0.5

    @property
    def workers(self) -> int:
        """DataLoader workers of a rank."""
        wanted = self.train.num_workers
        return min(2, len(os.sched_getaffinity(0))) if wanted is None else wanted


MINIMUMS = {
    "steps": 1,
    "seq_len": 1,
    "batch_size": 1,
    "grad_accumulation": 1,
    "log_every": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "clip_grad": 0,
    "num_workers": 0,
    "eval_batches": 0,
    "checkpoint_every": 0,
    "seed": 0,
}
"""The least value of each option that has one."""


def check_train(config: TrainConfig) -> None:
    """Raise OptionError for a value out of range."""
    for name, minimum in MINIMUMS.items():
        value = getattr(config, name)
        if value is not None and not value >= minimum:
            raise OptionError(f"--{name.replace('_', '-')} {value} must be at least {minimum}")
    for name in ("lr", "peak_tflops"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise OptionError(f"--{name.replace('_', '-')} {value} must be above 0")
    if not 0 <= config.min_lr_ratio <= 1:
        raise OptionError(f"--min-lr-ratio {config.min_lr_ratio} must lie between 0 and 1")


def check_options(config: Config) -> None:
    """Raise OptionError for an option that is wrong by itself or beside another."""
    check_model(config.model)
    check_train(config.train)
    if not 0 <= config.data.val_fraction <= 0.5:
        raise OptionError(f"--data.val_fraction {config.data.val_fraction} must lie between 0 and 0.5")
    if config.seq_len > config.model.max_seq_len:
        raise OptionError(f"--seq-len {config.seq_len} is above model.max_seq_len={config.model.max_seq_len}")


def parse_config(argv: Sequence[str] | None = None) -> Config:
    """Read the command line; a mistake in it ends the program with one line and status 2."""
    parser = OneLineParser(prog="train", description=DESCRIPTION, allow_abbrev=False)
    add_options(parser, "training", "", TrainConfig)
    add_options(parser, "data", "data.", DataConfig)
    add_options(parser, "model (default: tiny)", "model.", ModelConfig)
    parts = (("model.", ModelConfig), ("data.", DataConfig), ("", TrainConfig))
    config = Config(*parse_options(parser, argv, *parts))
    try:
        check_options(config)
    except OptionError as error:
        parser.error(str(error))
    return config
