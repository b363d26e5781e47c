"""The dimensions of the model that is named: by the group `model`, or by a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import fields

from launcher.codec import DecodeError, convert
from launcher.errors import UsageError
from launcher.files import read_input
from launcher.fit.training import Experts, LatentAttention, ModelDimensions

LARGEST_CONFIG = 1 << 20
"""Bytes of a config.json; published ones have a few KiB."""
LARGEST_NUMBER = 10**9
"""Of a dimension: none is near it, and products of several stay within what a float can hold."""
LARGEST_LAYERS = 10_000
"""The deepest published models have some hundred."""
REQUIRED = ("vocab_size", "layers", "hidden_size", "heads", "intermediate_size", "max_seq_len")
WORDS = {"norm": ("rmsnorm", "layernorm"), "mlp": ("swiglu", "gelu"), "position": ("rope", "learned")}


def read_dimensions(section: Mapping[str, object]) -> ModelDimensions | None:
    """Return the dimensions that the section `model` gives, by itself or by the file that `config` names.

    None if it has none of the dimensions. Raises UsageError for a file that cannot be read or lacks a field,
    and for dimensions that make no model.
    """
    path = section.get("config")
    if path is not None:
        return read_model_config(str(path))
    if not any(name in section for name in REQUIRED):
        return None
    return check_dimensions(parse_section(section))


def read_model_config(path: str) -> ModelDimensions:
    """Read a Hugging Face config.json, relative to the working directory; raises UsageError."""
    from launcher.fit.hf import parse_model_config

    try:
        text = read_input(path, LARGEST_CONFIG).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model.config={path} cannot be read ({getattr(error, 'strerror', '') or error}): give the path"
            " of a model's config.json from here"
        ) from None
    try:
        return check_dimensions(parse_model_config(text, path))
    except UsageError as error:
        raise UsageError(f"model.config={path}: {error}") from None


def parse_section(section: Mapping[str, object]) -> ModelDimensions:
    """Read the section of a preset, whose other keys are the program's own; raises UsageError."""
    given = {key: value for key, value in section.items() if value is not None}
    if missing := [name for name in REQUIRED if name not in given]:
        raise UsageError(
            f"model has no {', '.join(missing)}: choose a preset such as model=llama7b, or set it"
        )
    heads, hidden = given["heads"], given["hidden_size"]
    width = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else 1
    derived = {"kv_heads": heads, "head_width": width}
    renamed = {"head_width": given["head_dim"]} if "head_dim" in given else {}
    try:
        return convert(ModelDimensions, {**derived, **given, **renamed, "name": str(given.get("name"))}, 0)
    except DecodeError as error:
        raise UsageError(f"model.{error}") from None


def check_dimensions(model: ModelDimensions) -> ModelDimensions:
    """Return dimensions that make a model; raises UsageError for others."""
    for name in (*REQUIRED, "kv_heads", "head_width"):
        most = LARGEST_LAYERS if name == "layers" else LARGEST_NUMBER
        check_number(f"model.{name}", getattr(model, name), most)
    for name, choices in WORDS.items():
        if getattr(model, name) not in choices:
            raise UsageError(f"model.{name}={getattr(model, name)}: choose from {', '.join(choices)}")
    if model.latent_attention is None and model.heads % model.kv_heads:
        raise UsageError(f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}")
    if model.latent_attention is not None:
        check_parts("model.latent_attention", model.latent_attention)
    if model.experts is not None:
        check_experts(model.experts, model.layers)
    return model


def check_experts(experts: Experts, layers: int) -> None:
    """Refuse a mixture that no layer can be."""
    for name in ("count", "per_token", "intermediate_size"):
        check_number(f"model.experts.{name}", getattr(experts, name))
    check_parts("model.experts", experts)
    if experts.per_token > experts.count:
        raise UsageError(
            f"model.experts.per_token={experts.per_token} is more than model.experts.count={experts.count}"
        )
    if experts.dense_layers > layers:
        raise UsageError(
            f"model.experts.dense_layers={experts.dense_layers} is more than model.layers={layers}"
        )


def check_parts(key: str, part: Experts | LatentAttention) -> None:
    """Refuse a number that is too large."""
    for item in fields(part):
        if (getattr(part, item.name) or 0) > LARGEST_NUMBER:
            raise UsageError(f"{key}.{item.name}: give a number of at most {LARGEST_NUMBER}")


def check_number(key: str, value: int, most: int = LARGEST_NUMBER) -> None:
    """Refuse a dimension that is none."""
    if not 1 <= value <= most:
        shown = value if abs(value) < LARGEST_NUMBER**2 else "(too large)"
        raise UsageError(f"{key}={shown}: give a number of at least 1 and at most {most}")
