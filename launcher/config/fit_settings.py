"""How a training is split and set up: `parallel`, `fit`, and the bundled program's options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from launcher.config.model_dimensions import LARGEST_NUMBER
from launcher.config.schema import FitConfig, LaunchConfig, ParallelConfig
from launcher.errors import UsageError
from launcher.fit.batch_arithmetic import solve_batch
from launcher.fit.cheapest_changes import find_framework
from launcher.fit.fit_model import ModelDimensions, ParallelLayout, TrainingSettings
from launcher.fit.parameter_counts import count_model_parameters

AUTO = "auto"
MAX_DEFAULT_SEQ_LEN = 4096
"""As in launcher.programs.training_config."""
TRAINING_BYTES, DDP_SHARE = 18, 0.6
"""`program.parallel=auto` is DDP while so many bytes a parameter are less than this share of a rank's memory,
as in launcher.programs.parallel."""
DEFAULT_BATCH = 8
"""`program.batch_size`, as in launcher.programs.training_config."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a job and what each computes on."""

    count: int
    memory_bytes: int
    """Memory of a rank, by which the bundled program chooses between DDP and FSDP."""
    has_bf16: bool
    expandable_segments: bool


def describe_bundled(
    config: LaunchConfig, model: ModelDimensions, ranks: Ranks
) -> tuple[ParallelLayout, TrainingSettings]:
    """Return the bundled program's layout and settings, with `fit` and `parallel` over its options."""
    options, fit, parallel = config.program, config.fit, config.parallel
    framework = choose_bundled_framework(options, model, ranks)
    if (
        parallel.zero == AUTO
        and parallel.framework == AUTO
        and parallel.tp == parallel.pp == parallel.cp == 1
    ):
        parallel = replace(parallel, framework=framework)
    precision = "mixed" if computes_bf16(options, ranks) else "fp32"
    recompute = options.get("activation_checkpointing") or "none"
    recompute = "full" if recompute is True else str(recompute)
    accumulation = AUTO if fit.global_batch else read_program_option(options, "grad_accumulation", 1)
    fit = replace(
        fit,
        precision=choose(fit.precision, precision),
        checkpointing=choose(fit.checkpointing, recompute),
        micro_batch=choose(fit.micro_batch, read_program_option(options, "batch_size", DEFAULT_BATCH)),
        accumulation=choose(fit.accumulation, accumulation),
        seq_len=choose(fit.seq_len, read_program_option(options, "seq_len", choose_seq_len(model))),
    )
    layout, settings = describe_training_settings(fit, parallel, model, ranks)
    autocast = settings.precision == "mixed" and settings.framework == "ddp"
    return layout, replace(settings, autocast=autocast)


def choose_bundled_framework(options: Mapping[str, object], model: ModelDimensions, ranks: Ranks) -> str:
    """Return `ddp` or `fsdp`: as asked, or DDP if the training's states fit well."""
    asked = options.get("parallel", AUTO)
    if asked in ("ddp", "fsdp"):
        return str(asked)
    states = TRAINING_BYTES * count_model_parameters(model)
    return "ddp" if states < DDP_SHARE * ranks.memory_bytes else "fsdp"


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
        precision=choose(fit.precision, "mixed" if ranks.has_bf16 else "fp32"),
        optimizer=fit.optimizer,
        checkpointing=choose(fit.checkpointing, "none"),
        offload=fit.offload,
        micro_batch=micro_batch,
        accumulation=accumulation,
        seq_len=choose(fit.seq_len, choose_seq_len(model)),
        flash_attention=fit.flash_attention,
        expandable_segments=ranks.expandable_segments,
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
    solved = solve_batch(
        micro_batch=choose(fit.micro_batch, None),
        dp=dp,
        accumulation=choose(fit.accumulation, None),
        global_batch=fit.global_batch,
    )
    return solved.micro_batch, solved.accumulation


def choose_seq_len(model: ModelDimensions) -> int:
    """Return the sequence length if nothing sets it."""
    return min(model.max_seq_len, MAX_DEFAULT_SEQ_LEN)


def choose(value: Any, default: T) -> T:  # noqa: ANN401 - the schema's keys that may be `auto`
    """Return a setting, or what `auto` stands for."""
    chosen: T = default if value == AUTO else value
    return chosen


def read_program_option(options: Mapping[str, object], name: str, default: int) -> int:
    """Return a number of the bundled program's options; raises UsageError for what it would refuse."""
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_NUMBER:
        raise UsageError(f"program.{name}={value}: give a number of at least 1 and at most {LARGEST_NUMBER}")
    return value


def list_fixed(fit: FitConfig, parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the keys of `fit` and `parallel` that describe the training and are set."""
    usual_fit, usual_parallel = FitConfig(), ParallelConfig()
    about_training = (
        *("precision", "optimizer", "checkpointing", "offload", "micro_batch", "accumulation"),
        *("global_batch", "seq_len", "flash_attention"),
    )
    found = [f"fit.{name}" for name in about_training if getattr(fit, name) != getattr(usual_fit, name)]
    names = ("tp", "pp", "dp", "cp", "ep", "zero", "framework", "shard_size", "sequence_parallel")
    found += [
        f"parallel.{name}"
        for name in (*names, "virtual_stages")
        if getattr(parallel, name) != getattr(usual_parallel, name)
    ]
    return tuple(found)
