"""The dimensions of a model from the config.json of a Hugging Face model.

Names of fields and defaults are those of transformers' configuration classes (huggingface/transformers,
src/transformers/models/*/configuration_*.py); a file leaves out what equals its class's default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.codec import DecodeError, parse_json
from launcher.errors import UsageError
from launcher.fit.training import Experts, LatentAttention, ModelDimensions

LARGEST = 1 << 27
"""No dimension of a model is larger: contexts of 10,485,760 and vocabularies of 262,208 are published."""
SHOWN = 60
"""Characters of a value in an error."""
MAX_TEXT = 1 << 20
"""Characters of a config.json at most: the largest have some ten thousand."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` has without saying so in its file."""

    norm: str = "rmsnorm"
    mlp: str = "swiglu"
    position: str = "rope"
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    norms_per_layer: int = 2
    norm_bias: bool | None = None
    head_width: int | None = None
    """Default of `head_dim`; None is hidden_size over heads."""
    inner: str = "intermediate_size"
    """The field of the width inside the MLP; of others than `intermediate_size` 4 hidden sizes is the
    default."""
    experts: bool = False
    latent: bool = False
    """Multi-head latent attention."""
    router_bias: bool = False


GEMMA = Family(tied=True, head_width=256)
DEEPSEEK = Family(experts=True, latent=True)
GPT = Family("layernorm", "gelu", "learned", bias=True, tied=True, inner="n_inner")
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "ministral": Family(),
    "mixtral": Family(experts=True),
    "granite": Family(),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=True, experts=True),
    "qwen3": Family(qk_norm=True, head_width=128),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "smollm3": Family(tied=True),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, norms_per_layer=4),
    "gemma3_text": replace(GEMMA, norms_per_layer=4, qk_norm=True),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": replace(DEEPSEEK, router_bias=True),
    "kimi_k2": replace(DEEPSEEK, router_bias=True),
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": Family("layernorm", "gelu", bias=True),
    "starcoder2": Family("layernorm", "gelu", bias=True, tied=True),
    "stablelm": Family("layernorm", norm_bias=True),
    "falcon": Family("layernorm", "gelu", tied=True, norm_bias=True, inner="ffn_hidden_size"),
}
"""By `model_type`."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a JSON object, by any of their names; raises UsageError for what cannot be used."""

    values: Mapping[str, object]
    file: str
    """For errors."""

    def find(self, *names: str) -> tuple[str, object]:
        """Return the first of some names that is there, and its value; null counts as absent."""
        found = ((name, self.values[name]) for name in names if self.values.get(name) is not None)
        return next(found, (names[0], None))

    def has(self, name: str) -> bool:
        """Tell whether a field is there."""
        return self.values.get(name) is not None

    def fail(self, name: str, problem: str, fix: str) -> UsageError:
        """Make the error of a field."""
        return UsageError(f"{self.file}: {name} {problem}: {fix}")

    def count(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """Read a whole number; raises UsageError if there is none and no default, or it cannot be."""
        name, value = self.find(*names)
        if value is None and default is not None:
            return default
        fix = f"a whole number of at least {least}"
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
        name, value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"is {_show(value)}", "give true or false")
        return value

    def items(self, name: str) -> Sequence[object]:
        """Read a list; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.fail(name, f"is {_show(value)}, no list", "give a list of layers, or leave it out")
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


def _read_dimensions(fields: _Fields, kind: str, family: Family, name: str) -> ModelDimensions:
    """Read all dimensions by their names in any family; raises UsageError if they do not make a model."""
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    heads = fields.count("num_attention_heads", "n_head")
    attention_bias = fields.flag("attention_bias", "use_qkv_bias", default=family.qkv_bias)
    out_bias = fields.flag("attention_bias")
    has_bias = (out_bias and fields.flag("mlp_bias")) or fields.flag("bias", "use_bias", default=family.bias)
    vocab_size, layers = fields.count("vocab_size"), fields.count("num_hidden_layers", "n_layer")
    is_shared = kind == "gpt_bigcode" or (kind == "falcon" and not fields.flag("new_decoder_architecture"))
    if is_shared:  # one head of keys for all queries
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    else:
        kv_heads = fields.count("num_key_value_heads", "num_kv_heads", default=heads)
    width = family.head_width or max(1, hidden // heads)
    if (
        not family.head_width
        and hidden % heads
        and not fields.has("head_dim")
        and not fields.has("kv_lora_rank")
    ):
        problem = f"is {hidden}, not divisible by {heads} heads"
        raise fields.fail("hidden_size", problem, "change one, or give head_dim")
    head_width = fields.count("head_dim", default=width)
    default = None if family.inner == "intermediate_size" else 4 * hidden
    intermediate_size = fields.count(family.inner, default=default)
    # A table of learned positions has as many rows as the context, so it has to be known.
    context = None if family.position == "learned" else 2048
    max_seq_len = fields.count("max_position_embeddings", "n_positions", "n_ctx", default=context)
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    experts, latent = _read_experts(fields, kind, family), None
    if family.latent:
        latent = LatentAttention(
            query_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
            kv_rank=fields.count("kv_lora_rank"),
            rope_width=fields.count("qk_rope_head_dim"),
            plain_width=fields.count("qk_nope_head_dim"),
            value_width=fields.count("v_head_dim"),
        )
        kv_heads, head_width = heads, latent.plain_width + latent.rope_width
    norms = _read_norms(fields, kind, family)
    if heads % kv_heads:
        problem = f"is {kv_heads}, which does not divide the {heads} heads"
        raise fields.fail("num_key_value_heads", problem, "give a divisor")
    if experts is not None and experts.dense_layers > layers:
        problem = f"is {experts.dense_layers}, of {layers} layers"
        raise fields.fail("first_k_dense_replace", problem, "give at most as many")
    return ModelDimensions(
        *(name, vocab_size, layers, hidden, heads, kv_heads, head_width, intermediate_size, max_seq_len),
        norm=family.norm,
        mlp=family.mlp,
        position=family.position,
        bias=has_bias,
        qkv_bias=attention_bias and not has_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=tied,
        experts=experts,
        latent_attention=latent,
        out_bias=out_bias and not has_bias,
        norm_bias=family.norm_bias,
        norms_per_layer=norms,
    )


def _read_norms(fields: _Fields, kind: str, family: Family) -> int:
    """Read the norms of a layer: attention and MLP side by side can share one."""
    if kind == "stablelm" and fields.flag("use_parallel_residual"):
        return 1
    if kind != "falcon" or not fields.flag("parallel_attn", default=True):
        return family.norms_per_layer
    is_new = fields.flag("new_decoder_architecture")
    return fields.count("num_ln_in_parallel_attn", default=2) if is_new else 1


def _read_experts(fields: _Fields, kind: str, family: Family) -> Experts | None:
    """Read a mixture of experts; None if the family has none, or the file of DeepSeek-V2 none of its
    experts.
    """
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    if not family.experts or (kind == "deepseek_v2" and fields.find(*counts)[1] is None):
        return None
    count = fields.count(*counts)
    width = fields.count("moe_intermediate_size", *(("intermediate_size",) if kind == "mixtral" else ()))
    per_token = fields.count("num_experts_per_tok", "num_experts_per_token")
    if per_token > count:
        raise fields.fail("num_experts_per_tok", f"is {per_token} of {count} experts", "give at most as many")
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if (step := fields.count(name, default=1)) != 1:
            raise fields.fail(name, f"is {step}", "only mixtures in every layer but the first are known")
    dense = fields.count("first_k_dense_replace", least=0, default=0) + len(fields.items("mlp_only_layers"))
    if kind == "qwen2_moe":  # one expert for all tokens, as wide as several routed ones
        total = fields.count("shared_expert_intermediate_size", least=0, default=0)
        if total % width:
            name, fix = (
                "shared_expert_intermediate_size",
                f"give a multiple of moe_intermediate_size ({width})",
            )
            raise fields.fail(name, f"is {total}", fix)
        shared = total // width
    else:
        shared = fields.count("n_shared_experts", least=0, default=0)
    return Experts(count, per_token, width, shared, dense, kind == "qwen2_moe", family.router_bias)
