"""Parameters by a config.json against the modules that transformers makes of it, small and on no device."""

import json
from typing import Any

import pytest

from launcher.fit.counts import count_model_parameters
from launcher.fit.hf import FAMILIES, parse_model_config

SMALL = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 128, "intermediate_size": 96}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED: dict[str, object] = {"num_key_value_heads": 2}
EXPERTS: dict[str, object] = {
    **GROUPED,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
LATENT: dict[str, object] = {"n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"num_experts_per_tok": 2, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
NEW_FALCON: dict[str, object] = {"new_decoder_architecture": True, "num_kv_heads": 2}
CASES: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("llama", {**GROUPED, "tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"head_dim": 32}),
    ("mistral", GROUPED),
    ("ministral", {**GROUPED, "head_dim": 16}),
    ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("granite", {}),
    ("phi3", {}),
    ("qwen2", GROUPED),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    ("qwen3", GROUPED),
    ("qwen3", {**GROUPED, "head_dim": 16}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    ("smollm3", GROUPED),
    ("gemma", {"num_key_value_heads": 1}),
    ("gemma2", GROUPED),
    ("gemma3_text", GROUPED),
    ("deepseek_v2", {**LATENT, "n_shared_experts": 2, "q_lora_rank": 24}),
    ("deepseek_v2", {**LATENT, "n_shared_experts": 2, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "n_shared_experts": 1, "q_lora_rank": 24}),
    ("gpt2", {"n_positions": 128}),
    ("gpt_bigcode", {"n_positions": 128}),
    ("gpt_bigcode", {"n_positions": 128, "multi_query": False}),
    ("gpt_neox", {}),
    ("starcoder2", GROUPED),
    ("stablelm", {"num_key_value_heads": 4}),
    ("stablelm", {"num_key_value_heads": 4, "use_qkv_bias": True}),
    ("stablelm", {"num_key_value_heads": 4, "use_parallel_residual": True}),
    ("falcon", {}),
    ("falcon", NEW_FALCON),
    ("falcon", {**NEW_FALCON, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"parallel_attn": False}),
    ("falcon", {"bias": True}),
    ("falcon", {"multi_query": False}),
]


@pytest.mark.parametrize(("kind", "more"), CASES)
def test_a_model_of_transformers_has_as_many(kind: str, more: dict[str, object]) -> None:
    left_out = ("max_position_embeddings", "intermediate_size") if kind in ("gpt2", "gpt_bigcode") else ()
    import torch

    transformers: Any = pytest.importorskip("transformers")
    small = {key: value for key, value in SMALL.items() if key not in left_out}
    config = transformers.AutoConfig.for_model(kind, **small, **more)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    # DeepSeek's correction of the load is a buffer here, and a tensor of the published files.
    total += sum(buffer.numel() for name, buffer in model.named_buffers() if "correction" in name)
    for text in (config.to_json_string(use_diff=False), json.dumps(config.to_diff_dict())):
        assert count_model_parameters(parse_model_config(text, kind)) == total


def test_every_family_is_tried() -> None:
    assert set(FAMILIES) - {kind for kind, _ in CASES} == {"kimi_k2"}, "DeepSeek-V3 by another name"
