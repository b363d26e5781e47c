"""How a training is split and set up: `parallel`, `fit`, and the bundled program's options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from launcher.config.model_dimensions import LARGEST_NUMBER
from launcher.config.settings import FitConfig, ParallelConfig, Settings
from launcher.errors import UsageError
from launcher.fit.counts import count_model_parameters
from launcher.fit.training import (
    Free,
    Lora,
    ModelDimensions,
    ParallelLayout,
    TrainingSettings,
    find_framework,
    solve_batch,
)

AUTO = "auto"
MAX_DEFAULT_SEQ_LEN = 4096
"""As in launcher.programs.options."""
PROGRAM_WORDS = {
    "parallel": (AUTO, "ddp", "fsdp"),
    "activation_checkpointing": (AUTO, "none", "selective", "full"),
}
"""As in launcher.programs.options, and what is chosen."""
TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kM]?)(tokens)?")
"""Of `program.global_batch`."""
FEWEST_PARAMETERS = 100_000_000
"""Of a model whose preset's usual global batch counts; gpt2, the smallest with one, has 124 million."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a job and what each computes on."""

    count: int
    has_bf16: bool
    has_half: bool
    """It computes in bf16, or in fp16 as a V100 does."""
    expandable_segments: bool


def describe_bundled(
    config: Settings, model: ModelDimensions, ranks: Ranks
) -> tuple[ParallelLayout, TrainingSettings]:
    """Return the bundled program's layout and settings, with `fit` and `parallel` over its options.

    What is free (`find_free`) has any value.
    """
    options, fit, parallel = config.program, config.fit, config.parallel
    if can_choose_parallel(parallel):
        asked = read_program_word(options, "parallel")
        parallel = replace(parallel, framework="ddp" if asked == AUTO else asked)
    precision = "mixed" if computes_bf16(options, ranks) else "fp32"
    fit = replace(
        fit,
        precision=choose(fit.precision, precision),
        checkpointing=choose(fit.checkpointing, read_program_word(options, "activation_checkpointing")),
        micro_batch=choose(fit.micro_batch, read_program_option(options, "batch_size")),
        accumulation=choose(
            fit.accumulation, AUTO if fit.global_batch else read_program_option(options, "grad_accumulation")
        ),
        seq_len=choose(fit.seq_len, choose(read_program_option(options, "seq_len"), choose_seq_len(model))),
    )
    layout, settings = describe_training_settings(fit, parallel, model, ranks)
    autocast = settings.precision == "mixed" and settings.framework == "ddp"
    return layout, replace(settings, autocast=autocast)


def can_choose_parallel(parallel: ParallelConfig) -> bool:
    """Tell whether a layout is data parallelism of whatever kind."""
    return (
        parallel.zero == AUTO
        and parallel.framework == AUTO
        and parallel.tp == parallel.pp == parallel.cp == parallel.ep == 1
    )


def find_free(config: Settings, model: ModelDimensions, seq_len: int, ranks: int) -> Free:
    """Return what of the bundled program may be chosen, for as many ranks; raises UsageError.

    The usual global batch of a preset is for its size: a model that has been made small has none.
    """
    options, fit = config.program, config.fit
    micro_batch = choose(fit.micro_batch, read_program_option(options, "batch_size"))
    accumulation = choose(fit.accumulation, read_program_option(options, "grad_accumulation"))
    asked = options.get("global_batch")
    usual = config.model.get("global_batch") if count_model_parameters(model) >= FEWEST_PARAMETERS else None
    sequences = fit.global_batch or read_global_batch(usual if asked in (None, AUTO) else asked, seq_len)
    if AUTO not in (micro_batch, accumulation) and asked not in (None, AUTO):
        product = micro_batch * accumulation * ranks
        if product != sequences:
            raise UsageError(
                f"program.global_batch={asked} is {sequences} sequences, and program.batch_size={micro_batch}"
                f" * program.grad_accumulation={accumulation} on {ranks} ranks is {product}: leave one out"
            )
    return Free(
        micro_batch=micro_batch == AUTO,
        accumulation=accumulation == AUTO,
        checkpointing=choose(fit.checkpointing, read_program_word(options, "activation_checkpointing"))
        == AUTO,
        parallel=can_choose_parallel(config.parallel) and read_program_word(options, "parallel") == AUTO,
        sequences=sequences,
    )


def read_global_batch(value: object, seq_len: int) -> int | None:
    """Return the sequences of `program.global_batch`, as 256 or 4Mtokens; raises UsageError."""
    if value is None or value == AUTO:
        return None
    found = TOKENS.fullmatch(str(value))
    if found and float(found[1]) > 0:
        number = float(found[1]) * {"": 1, "k": 1 << 10, "M": 1 << 20}[found[2] or ""]
        sequences = round(number / seq_len) if found[3] else number
        if sequences == int(sequences) <= LARGEST_NUMBER:
            return max(1, int(sequences))
    raise UsageError(
        f"program.global_batch={value}: give sequences, such as 256, or tokens, such as 512ktokens or"
        " 4Mtokens (k is 1024, M 1024 * 1024)"
    )


def computes_bf16(options: Mapping[str, object], ranks: Ranks) -> bool:
    """Tell whether the bundled program computes in bf16."""
    asked = options.get("dtype", AUTO)
    return asked == "bf16" or (asked != "fp32" and ranks.has_bf16)


def describe_training_settings(
    fit: FitConfig, parallel: ParallelConfig, model: ModelDimensions, ranks: Ranks
) -> tuple[ParallelLayout, TrainingSettings]:
    """Return the layout and settings that `fit` and `parallel` give; raises UsageError."""
    layout = ParallelLayout(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=choose(parallel.dp, max(1, ranks.count // (parallel.tp * parallel.pp * parallel.cp))),
        cp=parallel.cp,
        ep=parallel.ep,
        zero=choose_zero(parallel),
        shard_size=parallel.shard_size,
        sequence_parallel=parallel.sequence_parallel,
        virtual_stages=parallel.virtual_stages,
    )
    micro_batch, accumulation = choose_batch(fit, layout.dp)
    return layout, TrainingSettings(
        framework=choose_framework(parallel, layout),
        precision=choose(fit.precision, "mixed" if ranks.has_half else "fp32"),
        optimizer=fit.optimizer,
        checkpointing=choose(fit.checkpointing, "none"),
        offload=fit.offload,
        micro_batch=micro_batch,
        accumulation=accumulation,
        seq_len=choose(fit.seq_len, choose_seq_len(model)),
        flash_attention=fit.flash_attention,
        expandable_segments=ranks.expandable_segments,
        loss=fit.loss,
        compile=choose(fit.compile, None),
        optimizer_fused=choose(fit.optimizer_fused, None),
        gradients=fit.gradients,
        lora=Lora(fit.lora.rank, tuple(fit.lora.targets)) if fit.lora.rank else None,
        quantization=fit.quantization,
        optimizer_in_backward=fit.optimizer_in_backward,
        activation_offload=fit.activation_offload,
        recompute_modules=tuple(fit.recompute_modules),
    )


def choose_zero(parallel: ParallelConfig) -> int:
    """Return what is sharded, 0 to 3; `auto` is what the framework is used for."""
    if parallel.zero == AUTO:
        return {"fsdp": 3, "zero": 1}.get(parallel.framework, 0)
    return 3 if parallel.zero == "fsdp" else int(parallel.zero)


def choose_framework(parallel: ParallelConfig, layout: ParallelLayout) -> str:
    """Return who holds the states; `auto` is what such a layout is most used with."""
    return find_framework(layout) if parallel.framework == AUTO else parallel.framework


def choose_batch(fit: FitConfig, dp: int) -> tuple[int, int]:
    """Return (sequences of a micro-step, micro-steps), solved from `fit.global_batch` if that is set."""
    micro_batch, accumulation = choose(fit.micro_batch, None), choose(fit.accumulation, None)
    return solve_batch(micro_batch, dp, accumulation, fit.global_batch)


def choose_seq_len(model: ModelDimensions) -> int:
    """Return the sequence length if nothing sets it."""
    return min(model.max_seq_len, MAX_DEFAULT_SEQ_LEN)


def choose(value: Any, default: T) -> T:  # noqa: ANN401 - the schema's keys that may be `auto`
    """Return a setting, or what `auto` stands for."""
    chosen: T = default if value == AUTO else value
    return chosen


def read_program_word(options: Mapping[str, object], name: str) -> str:
    """Return a word of the program's options, or `auto`; raises UsageError for what it would refuse."""
    value = options.get(name)
    words = PROGRAM_WORDS[name]
    if isinstance(value, bool) and name == "activation_checkpointing":
        value = "full" if value else "none"
    if value is None or value in words:
        return AUTO if value is None else str(value)
    raise UsageError(f"program.{name}={value}: choose from {', '.join(words)}")


def read_program_option(options: Mapping[str, object], name: str) -> Any:  # noqa: ANN401 - a number or `auto`
    """Return a number of the program's options, or `auto`; raises UsageError for what it would refuse."""
    value = options.get(name)
    if value is None or value == AUTO:
        return AUTO
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_NUMBER:
        raise UsageError(f"program.{name}={value}: give a number of at least 1 and at most {LARGEST_NUMBER}")
    return value


def list_fixed(fit: FitConfig, parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the keys of `fit` and `parallel` that describe the training and are set."""
    usual_fit, usual_parallel = FitConfig(), ParallelConfig()
    about_training = (
        *("precision", "optimizer", "checkpointing", "offload", "micro_batch", "accumulation"),
        *("global_batch", "seq_len", "flash_attention", "loss", "compile", "optimizer_fused", "gradients"),
        *("lora", "quantization", "optimizer_in_backward", "activation_offload", "recompute_modules"),
    )
    found = [f"fit.{name}" for name in about_training if getattr(fit, name) != getattr(usual_fit, name)]
    names = ("tp", "pp", "dp", "cp", "ep", "zero", "framework", "shard_size", "sequence_parallel")
    found += [
        f"parallel.{name}"
        for name in (*names, "virtual_stages")
        if getattr(parallel, name) != getattr(usual_parallel, name)
    ]
    return tuple(found)
