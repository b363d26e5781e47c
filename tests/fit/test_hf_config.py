"""Dimensions from a config.json: published files, and whatever else is written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.fit.counts import count_active_parameters, count_model_parameters
from launcher.fit.hf import FAMILIES, MAX_TEXT, parse_model_config
from tests.fuzzing import scalars, texts

Fields = dict[str, object]


def write_shape(kind: str, *sizes: int, **others: object) -> Fields:
    """A config.json by the names that most families use."""
    names = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    known = dict(zip(names, sizes, strict=True))
    return {"model_type": kind, **known, "max_position_embeddings": 4096, **others}


GPT2: Fields = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 1600, "n_head": 25, "n_layer": 48}
GPT2 |= {"n_positions": 1024, "n_ctx": 1024}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2_LITE = {"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
V2_LITE |= {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, **LATENT}
V3 = {"q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
V3 |= {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, **LATENT, "num_key_value_heads": 128}
QWEN_MOE = {"num_experts": 60, "moe_intermediate_size": 1408, "num_experts_per_tok": 4}
QWEN_MOE |= {"shared_expert_intermediate_size": 5632, "num_key_value_heads": 16}
QWEN3_MOE = {"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
QWEN3_MOE |= {"num_key_value_heads": 4, "head_dim": 128}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 8}
PUBLISHED = [
    # (config.json of the model on huggingface.co, total of its safetensors' parameters as shown there)
    ("gpt2-xl", GPT2, 1_557_611_200),
    ("Llama-3.1-8B", write_shape("llama", 128256, 32, 4096, 32, 14336, num_key_value_heads=8), 8_030_261_248),
    (
        "Llama-3.1-405B",
        write_shape("llama", 128256, 126, 16384, 128, 53248, num_key_value_heads=8),
        405_853_388_800,
    ),
    (
        "Mistral-Nemo",
        write_shape("mistral", 131072, 40, 5120, 32, 14336, num_key_value_heads=8, head_dim=128),
        12_247_782_400,
    ),
    (
        "Mixtral-8x22B",
        write_shape(
            *("mixtral", 32768, 56, 6144, 48, 16384),
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        140_630_071_296,
    ),
    ("Qwen2-7B", write_shape("qwen2", 152064, 28, 3584, 28, 18944, num_key_value_heads=4), 7_615_616_512),
    ("Qwen3-8B", write_shape("qwen3", 151936, 36, 4096, 32, 12288, num_key_value_heads=8), 8_190_735_360),
    ("Qwen3-30B-A3B", write_shape("qwen3_moe", 151936, 48, 2048, 32, 6144, **QWEN3_MOE), 30_532_122_624),
    ("Qwen1.5-MoE-A2.7B", write_shape("qwen2_moe", 151936, 24, 2048, 16, 5632, **QWEN_MOE), 14_315_784_192),
    ("gemma-7b", write_shape("gemma", 256000, 28, 3072, 16, 24576, head_dim=256), 8_537_680_896),
    ("gemma-2-9b", write_shape("gemma2", 256000, 42, 3584, 16, 14336, num_key_value_heads=8), 9_241_705_984),
    ("Phi-3-mini-4k", write_shape("phi3", 32064, 32, 3072, 32, 8192), 3_821_079_552),
    ("gpt-neox-20b", write_shape("gpt_neox", 50432, 44, 6144, 64, 24576), 20_554_567_680),
    ("falcon-7b", write_shape("falcon", 65024, 32, 4544, 71, 0, multi_query=True), 6_921_720_704),
    ("falcon-40b", write_shape("falcon", 65024, 60, 8192, 128, 0, **FALCON_40B), 41_303_293_952),
    (
        "starcoder2-7b",
        write_shape("starcoder2", 49152, 32, 4608, 36, 18432, num_key_value_heads=4),
        7_173_923_840,
    ),
    ("DeepSeek-V2-Lite", write_shape("deepseek_v2", 102400, 27, 2048, 16, 10944, **V2_LITE), 15_706_484_224),
    ("DeepSeek-V3", write_shape("deepseek_v3", 129280, 61, 7168, 128, 18432, **V3), 671_026_419_200),
]


@pytest.mark.parametrize(("name", "fields", "total"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_published_models_have_their_parameters(name: str, fields: Fields, total: int) -> None:
    assert count_model_parameters(parse_model_config(json.dumps(fields), name)) == total


def test_active_parameters_of_a_file() -> None:
    model = parse_model_config(json.dumps(dict(PUBLISHED[7][1])), "Qwen3-30B-A3B")
    assert count_active_parameters(model) == pytest.approx(3.35e9, rel=0.01)


def test_the_texts_part_of_a_model_of_images() -> None:
    text = dict(PUBLISHED[1][1])
    outer = {"model_type": "llava", "vision_config": {"hidden_size": 1024}, "text_config": text}
    assert parse_model_config(json.dumps(outer), "x") == parse_model_config(json.dumps(text), "x")


LLAMA = write_shape("llama", 32000, 2, 64, 4, 128)
MIXTURE = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("no JSON", "config.json")),
        ("[1]", ("no JSON object",)),
        ("{" * 100000, ("no JSON",)),
        ("[" * 100000, ("no JSON",)),
        ('{"hidden_size": NaN}', ("no JSON", "NaN")),
        (" " * (MAX_TEXT + 1), ("more than",)),
        ("{}", ("model_type is missing", "llama")),
        (json.dumps({**LLAMA, "model_type": "bert\x1b[2J\n"}), ("'bert\\x1b[2J\\n'", "not known", "llama")),
        (json.dumps({**LLAMA, "model_type": ["llama"]}), ("model_type is list",)),
        (json.dumps({"model_type": "llama"}), ("hidden_size or n_embd", "is missing", "add it")),
        (json.dumps({**LLAMA, "vocab_size": None}), ("vocab_size is missing",)),
        (json.dumps({**LLAMA, "hidden_size": "4096"}), ("hidden_size is '4096', no whole number",)),
        (json.dumps({**LLAMA, "hidden_size": 4096.0}), ("hidden_size is 4096.0",)),
        (json.dumps({**LLAMA, "hidden_size": True}), ("hidden_size is True",)),
        (json.dumps({**LLAMA, "num_hidden_layers": 0}), ("num_hidden_layers is 0", "at least 1")),
        (json.dumps({**LLAMA, "num_hidden_layers": -3}), ("num_hidden_layers is -3",)),
        (json.dumps({**LLAMA, "vocab_size": 10**40}), ("vocab_size is 1000", "at most")),
        (json.dumps({**LLAMA, "num_key_value_heads": 3}), ("num_key_value_heads is 3", "4 heads")),
        (json.dumps({**LLAMA, "hidden_size": 66}), ("hidden_size is 66", "head_dim")),
        (
            json.dumps({**LLAMA, "tie_word_embeddings": "no"}),
            ("tie_word_embeddings is 'no'", "true or false"),
        ),
        (json.dumps({**LLAMA, "model_type": "mixtral"}), ("num_local_experts",)),
        (json.dumps({**MIXTURE, "num_experts_per_tok": 9}), ("num_experts_per_tok is 9 of 8",)),
        (json.dumps({**MIXTURE, "decoder_sparse_step": 2}), ("decoder_sparse_step is 2",)),
        (json.dumps({**MIXTURE, "mlp_only_layers": 5}), ("mlp_only_layers is 5", "no list")),
        (json.dumps({**MIXTURE, "first_k_dense_replace": 5}), ("first_k_dense_replace is 5, of 2",)),
        (json.dumps({**LLAMA, "model_type": "deepseek_v3"}), ("n_routed_experts",)),
        (json.dumps({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "vocab_size": 9}), ("n_layer",)),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_field_and_fix(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_model_config(text, "own/config.json")
    message = str(caught.value)
    assert message.startswith("own/config.json") and "\n" not in message and message.isprintable()
    assert len(message) < 600
    for part in parts:
        assert part in message


NAMES = sorted({name for _, fields, _ in PUBLISHED for name in fields} | {"text_config", "mlp_only_layers"})
values = scalars | st.integers(0, 64) | st.lists(scalars, max_size=2) | st.dictionaries(texts, scalars)


@given(
    base=st.sampled_from([row[1] for row in PUBLISHED]),
    kind=st.sampled_from([*sorted(FAMILIES), "bert"]),
    changes=st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
    gone=st.sets(st.sampled_from(NAMES), max_size=2),
    name=texts,
)
def test_any_file_is_read_or_refused(
    base: Fields, kind: str, changes: Fields, gone: set[str], name: str
) -> None:
    fields = {key: value for key, value in {**base, "model_type": kind, **changes}.items() if key not in gone}
    try:
        model = parse_model_config(json.dumps(fields), name)
    except UsageError as error:
        assert str(error).isprintable()
    else:
        assert 0 < count_active_parameters(model) <= count_model_parameters(model) < 1 << 100


@given(
    text=texts | st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)).map(str)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_model_config(text, "config.json")
