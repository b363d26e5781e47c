"""The dimensions of a model from the config.json of a Hugging Face model.

Names of fields and defaults are those of transformers' configuration classes (huggingface/transformers,
src/transformers/models/*/configuration_*.py); a file leaves out what equals its class's default.
"""

import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launcher.codec import DecodeError, parse_json
from launcher.errors import UsageError
from launcher.fit.training import Experts, LatentAttention, ModelDimensions

SHOWN = 60
"""Characters of a value in an error."""
FAMILIES: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("families.toml").read_text(encoding="utf-8")
)
"""What a `model_type` has without saying so in its file."""


def _read(values: Mapping[str, object], names: str, default: int | None = None, *, least: int = 1) -> Any:  # noqa: ANN401 - of the default's type
    """Read the first that there is of some fields: true or false if the default is, else a whole number.

    Raises UsageError for what it cannot be, and if there is none and no default.
    """
    name = next((name for name in names.split() if name in values), "")
    value, is_flag = values.get(name, default), isinstance(default, bool)
    if isinstance(value, bool) is is_flag and isinstance(value, int) and (is_flag or value >= least):
        return value
    wanted = "true or false" if is_flag else f"a whole number of at least {least}"
    if not name:
        raise UsageError(f"{' or '.join(names.split())} is missing: add it, {wanted}")
    raise UsageError(f"{name} is {_show(value)}: give {wanted}")


def _show(value: object) -> str:
    """Write a value of unknown origin, short and in printable characters."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def parse_model_config(text: str, name: str) -> ModelDimensions:
    """Read the dimensions of a model, whose name is given, from a config.json; they are not checked.

    Raises UsageError that names the field and the fix. Of a model of text and images it is the text's part.
    A bias in the MLP alone is not counted.
    """
    try:
        data = parse_json(text)
    except DecodeError as error:
        raise UsageError(f"it is no JSON ({error}): name a model's config.json") from None
    if not isinstance(data, dict):
        raise UsageError("it has no JSON object at its top: name a model's config.json")
    inner = data.get("text_config")
    data = inner if isinstance(inner, dict) and "hidden_size" not in data else data
    values = {key: value for key, value in data.items() if value is not None}
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known, problem = ", ".join(sorted(FAMILIES)), f"is {_show(kind)}, which is not known"
        raise UsageError(f"model_type {problem}: use the one whose layers it has, of {known}")
    read, default = partial(_read, values), family.get
    hidden, heads = read("hidden_size n_embd"), read("num_attention_heads n_head")
    out_bias = read("attention_bias", False)
    bias = (out_bias and read("mlp_bias", False)) or read("use_bias", default("bias", False))
    if hidden % heads and not family.keys() & {"head_width", "latent"} and "head_dim" not in values:
        raise UsageError(f"hidden_size is {hidden}, not divisible by {heads} heads: give head_dim")
    kv_heads, latent = read("num_key_value_heads", heads), None
    head_width = read("head_dim", default("head_width", max(1, hidden // heads)))
    if "latent" in family:
        latent = LatentAttention(
            query_rank=read("q_lora_rank") if "q_lora_rank" in values else None,
            kv_rank=read("kv_lora_rank"),
            rope_width=read("qk_rope_head_dim"),
            plain_width=read("qk_nope_head_dim"),
            value_width=read("v_head_dim"),
        )
        kv_heads, head_width = heads, latent.plain_width + latent.rope_width
    # A table of learned positions has as many rows as the context, so it has to be known.
    is_learned = "position" in family
    same = ("norm", "mlp", "position", "qk_norm", "norms_per_layer")
    return ModelDimensions(
        name=name,
        vocab_size=read("vocab_size"),
        layers=read("num_hidden_layers n_layer"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        intermediate_size=read("intermediate_size n_inner", 4 * hidden if is_learned else None),
        max_seq_len=read("max_position_embeddings n_positions n_ctx", None if is_learned else 2048),
        bias=bias,
        qkv_bias=read("attention_bias", default("qkv_bias", False)) and not bias,
        tied_embeddings=read("tie_word_embeddings", default("tied_embeddings", False)),
        experts=_read_experts(values, str(kind)) if "experts" in family else None,
        latent_attention=latent,
        out_bias=out_bias and not bias,
        **{each: family[each] for each in same if each in family},
    )


def _read_experts(values: Mapping[str, object], kind: str) -> Experts | None:
    """Read a mixture of experts, in every layer but the first; None if the file of DeepSeek-V2 has none."""
    read, counts = partial(_read, values), "num_local_experts num_experts n_routed_experts"
    if kind == "deepseek_v2" and not values.keys() & {*counts.split()}:
        return None
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if (step := read(name, 1)) != 1:
            raise UsageError(f"{name} is {_show(step)}: only mixtures in every layer but the first are known")
    plain = values.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise UsageError(f"mlp_only_layers is {_show(plain)}: give a list of layers, or leave it out")
    width = read("moe_intermediate_size" + " intermediate_size" * (kind == "mixtral"))
    is_wide = kind == "qwen2_moe"  # one expert for all tokens, as wide as several routed ones
    shared = read("n_shared_experts", 0, least=0)
    if is_wide:
        shared, rest = divmod(read("shared_expert_intermediate_size", 0, least=0), width)
        if rest:
            what = "shared_expert_intermediate_size is no multiple of moe_intermediate_size"
            raise UsageError(f"{what} ({width}): give one")
    return Experts(
        count=read(counts),
        per_token=read("num_experts_per_tok num_experts_per_token"),
        intermediate_size=width,
        shared=shared,
        dense_layers=read("first_k_dense_replace", 0, least=0) + len(plain),
        shared_gate=is_wide,
        router_bias="router_bias" in FAMILIES[kind],
    )
