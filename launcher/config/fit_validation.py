"""The checks of `parallel` and `fit`, which need no machine; they raise UsageError with what may be given."""

import math
from typing import Any

from launcher.config.settings import FitConfig, LoraConfig, ParallelConfig, Settings
from launcher.errors import UsageError

LARGEST_COUNT = 10**6
"""GPUs in a group: ten times those of the largest machines."""
LARGEST_BATCH = 10**9
"""Sequences, and tokens of a sequence."""
LARGEST_RANK = 1 << 16
LARGEST_NUMBER = 1e20
"""Tokens in all, GiB, and seconds."""
ZEROS = ("auto", "fsdp", "0", "1", "2", "3")
GROUPS = ("tp", "pp", "cp", "ep", "virtual_stages")


def check_fit_settings(config: Settings) -> None:
    """Refuse values of `parallel` and `fit` that mean nothing; raises UsageError."""
    check_parallel(config.parallel)
    check_fit(config.fit)
    check_offload(config.fit, config.parallel)


def check_parallel(parallel: ParallelConfig) -> None:
    """Refuse sizes of groups that no job can have."""
    for name in GROUPS:
        check_whole_number(f"parallel.{name}", getattr(parallel, name), LARGEST_COUNT)
    if parallel.shard_size is not None:
        check_whole_number("parallel.shard_size", parallel.shard_size, LARGEST_COUNT)
    if parallel.dp != "auto":
        check_whole_number("parallel.dp", parallel.dp, LARGEST_COUNT, auto=True)
    if isinstance(parallel.zero, bool) or str(parallel.zero) not in ZEROS:
        raise UsageError(f"parallel.zero={show(parallel.zero)}: choose from {', '.join(ZEROS)}")
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        raise UsageError(
            f"parallel.virtual_stages={parallel.virtual_stages} with parallel.pp=1: chunks are of pipeline"
            " stages, set parallel.pp, or leave it out"
        )


def check_fit(fit: FitConfig) -> None:
    """Refuse settings of a training that there are not."""
    for name in ("compile", "optimizer_fused"):
        if getattr(fit, name) not in (True, False, "auto"):
            raise UsageError(f"fit.{name}={show(getattr(fit, name))}: choose from true, false, auto")
    for name in ("micro_batch", "accumulation", "seq_len"):
        if getattr(fit, name) != "auto":
            check_whole_number(f"fit.{name}", getattr(fit, name), LARGEST_BATCH, auto=True)
    if fit.global_batch is not None:
        check_whole_number("fit.global_batch", fit.global_batch, LARGEST_BATCH)
    for name in ("gpu_memory_gib", "tokens", "step_seconds"):
        value = getattr(fit, name)
        if value is not None and not (math.isfinite(value) and 0 < value <= LARGEST_NUMBER):
            raise UsageError(f"fit.{name}={value:g}: give a number above 0, and at most {LARGEST_NUMBER:g}")
    check_adapters(fit)
    if fit.recompute_modules and fit.checkpointing != "selective":
        raise UsageError(
            f"fit.recompute_modules={show(fit.recompute_modules)} with fit.checkpointing={fit.checkpointing}:"
            " set fit.checkpointing=selective, or leave it out"
        )
    if fit.gpu is not None and not fit.gpu.strip():
        raise UsageError("fit.gpu is empty: give a name such as H100, or leave it out")


def check_adapters(fit: FitConfig) -> None:
    """Refuse adapters without a rank or a target, and quantized weights that would be trained."""
    if fit.lora.rank is not None:
        check_whole_number("fit.lora.rank", fit.lora.rank, LARGEST_RANK)
        if not fit.lora.targets:
            raise UsageError("fit.lora.targets=[] has no matrix: give some, or [all-linear]")
        return
    if fit.lora != LoraConfig():
        raise UsageError(
            f"fit.lora.targets={show(fit.lora.targets)} without fit.lora.rank: set a rank, such as"
            " fit.lora.rank=8"
        )
    if fit.quantization != "none":
        raise UsageError(
            f"fit.quantization={fit.quantization} without fit.lora.rank: quantized weights are not trained,"
            " set fit.lora.rank=8 or another rank"
        )


def check_offload(fit: FitConfig, parallel: ParallelConfig) -> None:
    """Refuse offloaded parameters of replicas, which nothing gathers for a layer."""
    if fit.offload == "parameters" and str(parallel.zero) in ("0", "1", "2"):
        raise UsageError(
            f"fit.offload=parameters with parallel.zero={parallel.zero}: weights are kept in CPU memory if"
            " they are sharded, set parallel.zero=3, or fit.offload=optimizer"
        )


def check_whole_number(key: str, value: Any, largest: int, *, auto: bool = False) -> None:  # noqa: ANN401
    """Raise UsageError for what is no whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        other = ", or auto" if auto else ""
        raise UsageError(f"{key}={show(value)}: give a number of at least 1 and at most {largest}{other}")


def show(value: object) -> str:
    """Return a value as the command line has it, long numbers cut off."""
    if isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
