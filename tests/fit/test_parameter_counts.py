"""Parameters and operations against published counts, and against the bundled program's own."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from launcher.fit.counts import (
    LayerRun,
    count_active_parameters,
    count_model_parameters,
    count_stage,
    count_token_flops,
)
from launcher.fit.training import (
    Device,
    Experts,
    LatentAttention,
    ModelDimensions,
    ParallelLayout,
    Training,
    TrainingSettings,
)
from launcher.programs.options import ModelConfig
from tests.seam import Result

PRESETS = Path(__file__).parents[2] / "conf/model"
DENSE = ("tiny", "gpt2", "llama1b", "llama7b", "llama13b", "llama3_8b", "llama70b", "mistral7b")


def read_preset(name: str) -> ModelConfig:
    section = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    section.pop("global_batch", None)  # the launcher's
    return ModelConfig(**section)


def convert(config: ModelConfig) -> ModelDimensions:
    return ModelDimensions(
        name=config.name,
        vocab_size=config.vocab_size,
        layers=config.layers,
        hidden_size=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        intermediate_size=config.intermediate_size,
        max_seq_len=config.max_seq_len,
        norm=config.norm,
        mlp=config.mlp,
        position=config.position,
        bias=config.bias,
        tied_embeddings=config.tied_embeddings,
    )


def read_mixture(name: str) -> ModelDimensions:
    """A preset with experts."""
    preset = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    preset.pop("global_batch", None)
    experts, latent = Experts(**preset.pop("experts")), preset.pop("latent_attention", None)
    dense = convert(ModelConfig(**preset))
    return replace(dense, experts=experts, latent_attention=LatentAttention(**latent) if latent else None)


def test_the_bundled_programs_modules_count_the_same() -> None:
    import torch

    from launcher.programs.transformer import Transformer, count_flops

    odd = [
        replace(read_preset("tiny"), norm=norm, bias=bias, head_dim=width, position="learned", mlp="gelu")
        for norm, bias, width in product(("layernorm", "rmsnorm"), (False, True), (None, 64))
    ]
    for config in [*map(read_preset, DENSE), *odd]:
        with torch.device("meta"):
            module = Transformer(config)
        model, parameters = convert(config), sum(one.numel() for one in module.parameters())
        assert count_model_parameters(model) == count_active_parameters(model) == parameters
        for seq_len in (1, 64, 4096):
            assert count_token_flops(model, seq_len) == count_flops(module, seq_len)
            again = count_token_flops(model, seq_len, "full", early_stop=True)
            assert again == count_flops(module, seq_len, recompute=True)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        # arXiv:2401.04088: 47B parameters, 13B active; exact by the tensors of mistralai/Mixtral-8x7B-v0.1.
        (read_mixture("mixtral8x7b"), 46_702_792_704, 12_879_925_248),
        # arXiv:2412.19437: 671B parameters, 37B active. README_WEIGHTS.md of deepseek-ai/DeepSeek-V3 counts
        # 36.6B active without the embedding, as here: 37,552,297,472 - 926,679,040. The total holds 58 * 256
        # numbers that correct the routers' load and have no gradient.
        (read_mixture("deepseek_v3"), 671_026_419_200, 37_552_297_472),
    ],
    ids=lambda value: value.name if isinstance(value, ModelDimensions) else str(value),
)
def test_mixtures_have_their_published_parameters(model: ModelDimensions, total: int, active: int) -> None:
    assert (count_model_parameters(model), count_active_parameters(model)) == (total, active)


def test_the_parts_of_a_mixture_by_kind() -> None:
    model = read_mixture("deepseek_v3")
    whole = Training(model, ParallelLayout(), TrainingSettings(), Device("H100", 81559), 1)
    found = count_stage(whole, 0, model.layers, 0)
    attention, norms, expert = 187_107_328, 2 * 7168, 3 * 7168 * 2048
    assert found.layers == (
        LayerRun(3, False, attention + norms + 3 * 7168 * 18432, 0),
        LayerRun(58, True, attention + norms + expert + 256 * 7168 + 256, 256 * expert),
    )
    assert (found.tables, found.norm) == (2 * 129280 * 7168, 7168)


def test_what_is_computed_again_is_counted_for_hfu() -> None:
    model = convert(read_preset("llama7b"))
    plain, selective, full = (count_token_flops(model, 2048, kind) for kind in ("none", "selective", "full"))
    assert selective - plain == 4 * 32 * 2048 * 4096
    assert 1.30 < full / plain < 4 / 3


@pytest.mark.parametrize("name", ["mixtral8x7b", "deepseek_v3"])
def test_the_bundled_program_does_not_train_a_mixture(
    launch: Callable[..., Result], here: Path, name: str
) -> None:
    launch(f"model={name}").assert_error(2, f"model={name}", "mixture of experts", "`launch plan`", "llama7b")
    assert not list(here.iterdir())
    (here / "train.py").write_text("")
    assert launch(f"+model={name}", "dry_run=true", "--", "train.py").code == 0
    assert launch("plan", f"+model={name}").code == 0


def test_active_experts_alone_multiply_a_token() -> None:
    mixtral = read_mixture("mixtral8x7b")
    assert count_token_flops(mixtral, 1) < 6 * count_active_parameters(mixtral)
    assert count_token_flops(mixtral, 4096) / 6 == pytest.approx(12.88e9 + 2 * 32 * 4096 * 4096, rel=0.02)
