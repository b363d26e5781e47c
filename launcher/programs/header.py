"""What a run says of itself before its first step."""

from launcher.programs.compute_setup import Place
from launcher.programs.corpus import describe_origin
from launcher.programs.data import Text
from launcher.programs.dimensions import ModelConfig, count_parameters
from launcher.programs.process_group import name_device
from launcher.programs.training_config import Config


def describe(config: Config, text: Text, place: Place, resumed: str) -> str:
    """Describe the run, a line for each subject."""
    lines = (
        f"model   {describe_model(config.model)}",
        f"data    {describe_text(config, text)}",
        f"device  {name_device(place.device)}, {describe_place(config, place)}",
        f"batch   {describe_batch(config, place.ranks.world_size)}",
        f"peak    {place.peak.tflops:.4g} TFLOPS a rank, {place.peak.origin}{describe_recompute(config)}",
        f"start   {resumed}",
    )
    return "\n".join(lines)


def describe_model(model: ModelConfig) -> str:
    """Name the model, its parameters and dimensions."""
    return (
        f"{model.name}: {count_parameters(model):,} parameters, {model.layers} layers, "
        f"hidden {model.hidden_size}, {model.heads} heads ({model.kv_heads} kv), {model.vocab_size} tokens"
    )


def describe_text(config: Config, text: Text) -> str:
    """Name the text and its size."""
    origin, split = describe_origin(config.data.path), text.split
    return (
        f"{origin}: {text.windows.size:,} bytes, {split.training:,} sequences of {config.seq_len}, "
        f"{split.validation:,} more held out"
    )


def describe_place(config: Config, place: Place) -> str:
    """Name the ranks and how they work together."""
    ranks = f"{place.ranks.world_size} rank" + "s" * (place.ranks.world_size > 1)
    spread = "" if place.spread.parallel == "none" else f" {place.spread.parallel} over {place.backend},"
    dtype = "bf16" if place.spread.bf16 else "fp32"
    return f"{ranks},{spread} {dtype}, {config.workers} DataLoader workers a rank"


def describe_batch(config: Config, world_size: int) -> str:
    """Name the tokens of an optimizer step, and their factors."""
    train = config.train
    tokens = config.seq_len * train.batch_size * train.grad_accumulation * world_size
    factors = f"{train.batch_size} sequences x {config.seq_len} x {world_size} ranks"
    return f"{tokens:,} tokens per step: {factors} x {train.grad_accumulation} micro-steps"


def describe_recompute(config: Config) -> str:
    """Say that tflops and mfu differ where activations are recomputed."""
    return "; tflops count recomputation, mfu does not" if config.train.activation_checkpointing else ""
