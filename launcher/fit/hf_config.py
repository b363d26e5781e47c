"""The dimensions of a model from the config.json of a Hugging Face model.

Names of fields and defaults are those of transformers' configuration classes (huggingface/transformers,
src/transformers/models/*/configuration_*.py); a file leaves out what equals its class's default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.codec import DecodeError, parse_json
from launcher.errors import UsageError
from launcher.fit.fit_model import Experts, LatentAttention, ModelDimensions

LARGEST = 1 << 27
"""No dimension of a model is larger: contexts of 10,485,760 and vocabularies of 262,208 are published."""
SHOWN = 60
"""Characters of a value in an error."""


def show_field(value: object) -> str:
    """Write a value of unknown origin, short and in printable characters."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of a JSON object, by any of their names; raises UsageError for what cannot be used."""

    values: Mapping[str, object]
    file: str
    """For errors."""

    def find(self, names: Sequence[str]) -> tuple[str, object]:
        """Return the first of some names that is there, and its value; null counts as absent."""
        found = ((name, self.values[name]) for name in names if self.values.get(name) is not None)
        return next(found, (names[0], None))

    def fail(self, name: str, problem: str, fix: str) -> UsageError:
        """Make the error of a field."""
        return UsageError(f"{self.file}: {name} {problem}: {fix}")

    def read_count(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """Read a whole number; raises UsageError if there is none and no default, or it cannot be."""
        name, value = self.find(names)
        if value is None and default is not None:
            return default
        if value is None:
            shown = " or ".join(names)
            raise self.fail(shown, "is missing", f"add it, a whole number of at least {least}")
        # A width of 4096.0 is a mistake of whoever wrote the file, but true is not 1 either.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(name, f"is {show_field(value)}, no whole number", f"give one of at least {least}")
        if not least <= value <= LARGEST:
            raise self.fail(
                name,
                f"is {show_field(value)}",
                f"give a whole number of at least {least} and at most {LARGEST}",
            )
        return value

    def read_flag(self, *names: str, default: bool) -> bool:
        """Read true or false."""
        name, value = self.find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"is {show_field(value)}", "give true or false")
        return value

    def read_list(self, name: str) -> Sequence[object]:
        """Read a list; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.fail(
                name, f"is {show_field(value)}, no list", "give a list of layers, or leave it out"
            )
        return value


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
    router_bias: bool = False


GEMMA = Family(tied=True, head_width=256)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "ministral": Family(),
    "mixtral": Family(),
    "granite": Family(),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_width=128),
    "qwen3_moe": Family(qk_norm=True),
    "smollm3": Family(tied=True),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, norms_per_layer=4),
    "gemma3_text": replace(GEMMA, norms_per_layer=4, qk_norm=True),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(router_bias=True),
    "kimi_k2": Family(router_bias=True),
    "gpt2": Family("layernorm", "gelu", "learned", bias=True, tied=True),
    "gpt_bigcode": Family("layernorm", "gelu", "learned", bias=True, tied=True),
    "gpt_neox": Family("layernorm", "gelu", bias=True),
    "starcoder2": Family("layernorm", "gelu", bias=True, tied=True),
    "stablelm": Family("layernorm", norm_bias=True),
    "falcon": Family("layernorm", "gelu", tied=True, norm_bias=True),
}
"""By `model_type`."""


def parse_model_config(text: str, name: str) -> ModelDimensions:
    """Read the dimensions of a model from a config.json; `name` is the file's, for errors, and the model's.

    Raises UsageError that names the field and the fix. Of a model of text and images it is the text's part.
    A bias in the MLP alone is not counted.
    """
    fields = read_fields(text, name)
    kind = fields.values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        problem = "is missing" if kind is None else f"is {show_field(kind)}, which is not known"
        raise fields.fail("model_type", problem, f"use the one whose layers it has, of {known}")
    return check_config_dimensions(fields, read_config_dimensions(fields, str(kind), family, name))


def read_fields(text: str, name: str) -> ConfigFields:
    """Parse the text of a config.json, or its part on text; raises UsageError."""
    file = show_field(name)[1:-1]
    if len(text) > MAX_TEXT:
        raise UsageError(f"{file} has more than {MAX_TEXT} characters: name a model's config.json")
    try:
        found = parse_json(text)
    except DecodeError as error:
        raise UsageError(f"{file} is no JSON ({error}): name a model's config.json") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file} has no JSON object at its top: name a model's config.json")
    inner = found.get("text_config")
    return ConfigFields(inner if isinstance(inner, dict) and "hidden_size" not in found else found, file)


def read_config_dimensions(fields: ConfigFields, kind: str, family: Family, name: str) -> ModelDimensions:
    """Read all dimensions by their names in any family."""
    hidden = fields.read_count("hidden_size", "n_embd", "d_model")
    heads = fields.read_count("num_attention_heads", "n_head")
    attention_bias = fields.read_flag("attention_bias", "use_qkv_bias", default=family.qkv_bias)
    has_bias = read_bias(fields, family)
    model = ModelDimensions(
        name=name,
        vocab_size=fields.read_count("vocab_size"),
        layers=fields.read_count("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=read_kv_heads(fields, kind, heads),
        head_width=read_head_width(fields, hidden, heads, family.head_width),
        intermediate_size=read_inner_width(fields, kind, hidden),
        max_seq_len=read_context(fields, family),
        norm=family.norm,
        mlp=family.mlp,
        position=family.position,
        bias=has_bias,
        qkv_bias=attention_bias and not has_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=fields.read_flag("tie_word_embeddings", default=family.tied),
        experts=read_experts(fields, kind, family),
        latent_attention=read_latent_attention(fields, kind),
        out_bias=fields.read_flag("attention_bias", default=False) and not has_bias,
        norm_bias=family.norm_bias,
        norms_per_layer=read_norms(fields, kind, family),
    )
    if model.latent_attention is not None:
        latent = model.latent_attention
        model = replace(model, kv_heads=heads, head_width=latent.plain_width + latent.rope_width)
    return model


def read_bias(fields: ConfigFields, family: Family) -> bool:
    """Tell whether all linear layers have biases."""
    both = fields.read_flag("attention_bias", default=False) and fields.read_flag("mlp_bias", default=False)
    return both or fields.read_flag("bias", "use_bias", default=family.bias)


def read_kv_heads(fields: ConfigFields, kind: str, heads: int) -> int:
    """Read the heads of keys and values: as many as queries have if nothing is said."""
    if kind == "falcon" and not fields.read_flag("new_decoder_architecture", default=False):
        return 1 if fields.read_flag("multi_query", default=True) else heads
    if kind == "gpt_bigcode":
        return 1 if fields.read_flag("multi_query", default=True) else heads
    return fields.read_count("num_key_value_heads", "num_kv_heads", default=heads)


def read_head_width(fields: ConfigFields, hidden: int, heads: int, default: int | None) -> int:
    """Read the width of a head; raises UsageError if it can't be told."""
    if default is None and fields.find(["head_dim"])[1] is None:
        if hidden % heads and fields.find(["kv_lora_rank"])[1] is None:
            raise fields.fail(
                "hidden_size", f"is {hidden}, not divisible by {heads} heads", "change one, or give head_dim"
            )
        default = max(1, hidden // heads)
    return fields.read_count("head_dim", default=default)


def read_inner_width(fields: ConfigFields, kind: str, hidden: int) -> int:
    """Read the width inside the MLP: four times the hidden size in GPT-2's and Falcon's family."""
    if kind == "falcon":
        return fields.read_count("ffn_hidden_size", default=4 * hidden)
    if kind in ("gpt2", "gpt_bigcode"):
        return fields.read_count("n_inner", default=4 * hidden)
    return fields.read_count("intermediate_size")


def read_context(fields: ConfigFields, family: Family) -> int:
    """Read the longest context; a table of learned positions has as many rows, so it has to be known."""
    default = None if family.position == "learned" else 2048
    return fields.read_count("max_position_embeddings", "n_positions", "n_ctx", default=default)


def read_norms(fields: ConfigFields, kind: str, family: Family) -> int:
    """Read the norms of a layer: attention and MLP side by side can share one."""
    if kind == "stablelm" and fields.read_flag("use_parallel_residual", default=False):
        return 1
    if kind != "falcon" or not fields.read_flag("parallel_attn", default=True):
        return family.norms_per_layer
    is_new = fields.read_flag("new_decoder_architecture", default=False)
    return fields.read_count("num_ln_in_parallel_attn", default=2) if is_new else 1


def read_experts(fields: ConfigFields, kind: str, family: Family) -> Experts | None:
    """Read a mixture of experts; None if the family has none, or the file none of its experts."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    is_mixture = kind in ("mixtral", "qwen2_moe", "qwen3_moe") or family.router_bias
    if not is_mixture and fields.find(counts)[1] is None:
        return None
    if kind not in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"):
        return None
    count = fields.read_count(*counts)
    width = fields.read_count("moe_intermediate_size", *(("intermediate_size",) if kind == "mixtral" else ()))
    per_token = fields.read_count("num_experts_per_tok", "num_experts_per_token")
    if per_token > count:
        raise fields.fail("num_experts_per_tok", f"is {per_token} of {count} experts", "give at most as many")
    refuse_sparse_steps(fields)
    dense = fields.read_count("first_k_dense_replace", least=0, default=0)
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=width,
        shared=read_shared(fields, kind, width),
        dense_layers=dense + len(fields.read_list("mlp_only_layers")),
        shared_gate=kind == "qwen2_moe",
        router_bias=family.router_bias,
    )


def refuse_sparse_steps(fields: ConfigFields) -> None:
    """Refuse mixtures in every second layer or so."""
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if (step := fields.read_count(name, default=1)) != 1:
            raise fields.fail(name, f"is {step}", "only mixtures in every layer but the first are known")


def read_shared(fields: ConfigFields, kind: str, width: int) -> int:
    """Read how many experts every token passes, each as wide as a routed one."""
    if kind != "qwen2_moe":
        return fields.read_count("n_shared_experts", least=0, default=0)
    shared = fields.read_count("shared_expert_intermediate_size", least=0, default=0)
    if shared % width:
        name = "shared_expert_intermediate_size"
        raise fields.fail(name, f"is {shared}", f"give a multiple of moe_intermediate_size ({width})")
    return shared // width


def read_latent_attention(fields: ConfigFields, kind: str) -> LatentAttention | None:
    """Read multi-head latent attention, DeepSeek's."""
    if kind not in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        return None
    compressed = fields.find(["q_lora_rank"])[1] is not None
    return LatentAttention(
        query_rank=fields.read_count("q_lora_rank") if compressed else None,
        kv_rank=fields.read_count("kv_lora_rank"),
        rope_width=fields.read_count("qk_rope_head_dim"),
        plain_width=fields.read_count("qk_nope_head_dim"),
        value_width=fields.read_count("v_head_dim"),
    )


def check_config_dimensions(fields: ConfigFields, model: ModelDimensions) -> ModelDimensions:
    """Raise UsageError if the dimensions do not make a model; else return it."""
    if model.heads % model.kv_heads:
        raise fields.fail(
            "num_key_value_heads",
            f"is {model.kv_heads}, which does not divide the {model.heads} heads",
            "give a divisor",
        )
    if model.experts is not None and model.experts.dense_layers > model.layers:
        dense = model.experts.dense_layers
        raise fields.fail(
            "first_k_dense_replace", f"is {dense}, of {model.layers} layers", "give at most as many"
        )
    return model
