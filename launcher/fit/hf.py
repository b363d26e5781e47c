"""The dimensions of a model from the config.json of a Hugging Face model.

Names of fields and defaults are those of transformers' configuration classes (huggingface/transformers,
src/transformers/models/*/configuration_*.py); a file leaves out what equals its class's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.codec import DecodeError, parse_json
from launcher.errors import UsageError
from launcher.fit.training import Experts, LatentAttention, ModelDimensions

LARGEST = 1 << 27
"""No dimension of a model is larger: contexts of 10,485,760 and vocabularies of 262,208 are published."""
SHOWN = 60
"""Characters of a value in an error."""
MAX_TEXT = 1 << 20
"""Characters of a config.json at most: the largest have some ten thousand."""
GEMMA = {"tied_embeddings": True, "head_width": 256}
LAYERNORM = {"norm": "layernorm", "mlp": "gelu"}
GPT = {**LAYERNORM, "position": "learned", "bias": True, "tied_embeddings": True, "inner": "n_inner"}
DEEPSEEK_V3 = {"experts": True, "latent": True, "router_bias": True}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in ("llama", "mistral", "ministral", "granite", "phi3")},
    "mixtral": {"experts": True},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True, "experts": True},
    "qwen3": {"qk_norm": True, "head_width": 128},
    "qwen3_moe": {"qk_norm": True, "experts": True},
    "smollm3": {"tied_embeddings": True},
    "gemma": GEMMA,
    "gemma2": {**GEMMA, "norms_per_layer": 4},
    "gemma3_text": {**GEMMA, "norms_per_layer": 4, "qk_norm": True},
    "deepseek_v2": {"experts": True, "latent": True},
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {**LAYERNORM, "bias": True},
    "starcoder2": {**LAYERNORM, "bias": True, "tied_embeddings": True},
    "stablelm": {"norm": "layernorm", "norm_bias": True},
    "falcon": {**LAYERNORM, "tied_embeddings": True, "norm_bias": True, "inner": "ffn_hidden_size"},
}
"""What a `model_type` has without saying so in its file, by fields of ModelDimensions; `inner` is the field
of the width inside the MLP, whose default is 4 hidden sizes if it is not `intermediate_size`."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a JSON object, by any of their names; raises UsageError for what cannot be used."""

    values: Mapping[str, object]
    file: str
    """For errors."""

    def has(self, *names: str) -> bool:
        """Tell whether one of some fields is there; null counts as absent."""
        return any(self.values.get(name) is not None for name in names)

    def fail(self, name: str, problem: str, fix: str) -> UsageError:
        """Make the error of a field."""
        return UsageError(f"{self.file}: {name} {problem}: {fix}")

    def count(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """Read a whole number; raises UsageError if there is none and no default, or it cannot be."""
        name = next(filter(self.has, names), names[0])
        value, fix = self.values.get(name), f"a whole number of at least {least}"
        if value is None and default is not None:
            return default
        if value is None:
            raise self.fail(" or ".join(names), "is missing", f"add it, {fix}")
        # A width of 4096.0 is a mistake of whoever wrote the file, but true is not 1 either.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(name, f"is {_show(value)}, no whole number", f"give one of at least {least}")
        if not least <= value <= LARGEST:
            raise self.fail(name, f"is {_show(value)}", f"give {fix} and at most {LARGEST}")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        """Read true or false."""
        name = next(filter(self.has, names), names[0])
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(name, f"is {_show(value)}", "give true or false")
        return value


def parse_model_config(text: str, name: str) -> ModelDimensions:
    """Read the dimensions of a model from a config.json; `name` is the file's, for errors, and the model's.

    Raises UsageError that names the field and the fix. Of a model of text and images it is the text's part.
    A bias in the MLP alone is not counted.
    """
    file = _show(name)[1:-1]
    if len(text) > MAX_TEXT:
        raise UsageError(f"{file} has more than {MAX_TEXT} characters: name a model's config.json")
    try:
        values = parse_json(text)
    except DecodeError as error:
        raise UsageError(f"{file} is no JSON ({error}): name a model's config.json") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file} has no JSON object at its top: name a model's config.json")
    inner = values.get("text_config")
    fields = _Fields(inner if isinstance(inner, dict) and "hidden_size" not in values else values, file)
    kind = fields.values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        problem = "is missing" if kind is None else f"is {_show(kind)}, which is not known"
        raise fields.fail("model_type", problem, f"use the one whose layers it has, of {known}")
    return _read_dimensions(fields, str(kind), family, name)


def _show(value: object) -> str:
    """Write a value of unknown origin, short and in printable characters."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _read_dimensions(fields: _Fields, kind: str, family: Mapping[str, Any], name: str) -> ModelDimensions:
    """Read all dimensions by their names in any family; raises UsageError if they do not make a model."""
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    heads = fields.count("num_attention_heads", "n_head")
    of_input = fields.flag("attention_bias", "use_qkv_bias", default=family.get("qkv_bias", False))
    out_bias = fields.flag("attention_bias")
    has_bias = (out_bias and fields.flag("mlp_bias")) or fields.flag(
        "bias", "use_bias", default=family.get("bias", False)
    )
    vocab_size, layers = fields.count("vocab_size"), fields.count("num_hidden_layers", "n_layer")
    is_new = fields.flag("new_decoder_architecture") if kind == "falcon" else False
    if kind == "gpt_bigcode" or (kind == "falcon" and not is_new):  # one head of keys for all queries
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    else:
        kv_heads = fields.count("num_key_value_heads", "num_kv_heads", default=heads)
    if "head_width" not in family and hidden % heads and not fields.has("head_dim", "kv_lora_rank"):
        problem = f"is {hidden}, not divisible by {heads} heads"
        raise fields.fail("hidden_size", problem, "change one, or give head_dim")
    head_width = fields.count("head_dim", default=family.get("head_width") or max(1, hidden // heads))
    width = family.get("inner", "intermediate_size")
    intermediate_size = fields.count(width, default=4 * hidden if "inner" in family else None)
    # A table of learned positions has as many rows as the context, so it has to be known.
    context = None if "position" in family else 2048
    max_seq_len = fields.count("max_position_embeddings", "n_positions", "n_ctx", default=context)
    tied = fields.flag("tie_word_embeddings", default=family.get("tied_embeddings", False))
    experts, latent = _read_experts(fields, kind) if "experts" in family else None, None
    if "latent" in family:
        latent = LatentAttention(
            query_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
            kv_rank=fields.count("kv_lora_rank"),
            rope_width=fields.count("qk_rope_head_dim"),
            plain_width=fields.count("qk_nope_head_dim"),
            value_width=fields.count("v_head_dim"),
        )
        kv_heads, head_width = heads, latent.plain_width + latent.rope_width
    norms = family.get("norms_per_layer", 2)  # attention and MLP side by side can share one
    if kind == "stablelm" and fields.flag("use_parallel_residual"):
        norms = 1
    elif kind == "falcon" and fields.flag("parallel_attn", default=True):
        norms = fields.count("num_ln_in_parallel_attn", default=2) if is_new else 1
    if heads % kv_heads:
        problem = f"is {kv_heads}, which does not divide the {heads} heads"
        raise fields.fail("num_key_value_heads", problem, "give a divisor")
    if experts is not None and experts.dense_layers > layers:
        problem = f"is {experts.dense_layers}, of {layers} layers"
        raise fields.fail("first_k_dense_replace", problem, "give at most as many")
    return ModelDimensions(
        *(name, vocab_size, layers, hidden, heads, kv_heads, head_width, intermediate_size, max_seq_len),
        **{
            each: family[each]
            for each in ("norm", "mlp", "position", "qk_norm", "norm_bias")
            if each in family
        },
        bias=has_bias,
        qkv_bias=of_input and not has_bias,
        tied_embeddings=tied,
        experts=experts,
        latent_attention=latent,
        out_bias=out_bias and not has_bias,
        norms_per_layer=norms,
    )


def _read_experts(fields: _Fields, kind: str) -> Experts | None:
    """Read a mixture of experts; None if the file of DeepSeek-V2 has none."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    if kind == "deepseek_v2" and not fields.has(*counts):
        return None
    count = fields.count(*counts)
    width = fields.count("moe_intermediate_size", *(("intermediate_size",) if kind == "mixtral" else ()))
    per_token = fields.count("num_experts_per_tok", "num_experts_per_token")
    if per_token > count:
        raise fields.fail("num_experts_per_tok", f"is {per_token} of {count} experts", "give at most as many")
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if (step := fields.count(name, default=1)) != 1:
            raise fields.fail(name, f"is {step}", "only mixtures in every layer but the first are known")
    plain = fields.values["mlp_only_layers"] if fields.has("mlp_only_layers") else []
    if not isinstance(plain, list):
        problem = f"is {_show(plain)}, no list"
        raise fields.fail("mlp_only_layers", problem, "give a list of layers, or leave it out")
    dense = fields.count("first_k_dense_replace", least=0, default=0) + len(plain)
    is_wide = kind == "qwen2_moe"
    if is_wide:  # one expert for all tokens, as wide as several routed ones
        name = "shared_expert_intermediate_size"
        total = fields.count(name, least=0, default=0)
        if total % width:
            raise fields.fail(name, f"is {total}", f"give a multiple of moe_intermediate_size ({width})")
        shared = total // width
    else:
        shared = fields.count("n_shared_experts", least=0, default=0)
    return Experts(count, per_token, width, shared, dense, is_wide, "router_bias" in FAMILIES[kind])
