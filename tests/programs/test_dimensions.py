"""Parameters and operations against published counts, against the module, and against torch's counter."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launcher.programs.dimensions import ModelConfig, check_model, count_flops, count_parameters
from launcher.programs.options import OptionError
from launcher.programs.training_config import TrainConfig
from launcher.programs.transformer import Transformer

CONF = Path(__file__).parents[2] / "conf"
PUBLISHED = {
    "gpt2": 124_439_808,
    "llama1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama7b": 6_738_415_616,
    "llama13b": 13_015_864_320,
    "llama70b": 68_976_648_192,
    "mistral7b": 7_241_732_096,
    "tiny": 820_352,
}
MIXTURES = {"mixtral8x7b", "deepseek_v3"}
"""For the plan alone; tests/fit counts them."""


def load_preset(name: str) -> ModelConfig:
    section: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    section.pop("global_batch", None)  # the launcher's
    return ModelConfig(**section)


def test_every_preset_is_published() -> None:
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == {*PUBLISHED, *MIXTURES}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_counts_are_the_published_and_the_modules(name: str, published: int) -> None:
    config = load_preset(name)
    check_model(config)
    with torch.device("meta"):
        model = Transformer(config)
    assert config.name == name
    assert count_parameters(config) == published
    assert sum(parameter.numel() for parameter in model.parameters()) == published


@pytest.mark.parametrize("head_dim", [None, 24])
@pytest.mark.parametrize(("norm", "bias"), [("rmsnorm", True), ("layernorm", False)])
@pytest.mark.parametrize("tied", [True, False])
def test_counts_of_odd_mixtures(head_dim: int | None, norm: str, bias: bool, tied: bool) -> None:
    config = ModelConfig(head_dim=head_dim, norm=norm, bias=bias, tied_embeddings=tied, position="learned")
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_defaults_of_the_program_are_the_shipped_configuration() -> None:
    assert load_preset("tiny") == ModelConfig()
    shipped = OmegaConf.to_container(OmegaConf.load(CONF / "program" / "train.yaml"), resolve=False)
    assert isinstance(shipped, dict)
    told = {
        key: value for key, value in shipped.items() if key not in ("command", "sections", "global_batch")
    }
    assert set(told) == {field.name for field in fields(TrainConfig)}
    given = {"num_workers", "checkpoint_dir"} | {key for key, value in told.items() if value == "auto"}
    assert {k: v for k, v in told.items() if k not in given} == {
        field.name: field.default for field in fields(TrainConfig) if field.name not in given
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_operations_agree_with_torchs_counter(recompute: str, tied: bool) -> None:
    config = replace(load_preset("tiny"), tied_embeddings=tied)
    model = Transformer(config, recompute=recompute)
    tokens = torch.randint(0, 256, (2, 64))
    # The fused kernels count otherwise, or not at all: only the plain products are comparable.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    expected = count_flops(config, 64, recompute=recompute == "full") * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "model.heads=6 is not divisible by model.kv_heads=4"),
        ({"hidden_size": 130}, "model.hidden_size=130 is not divisible by model.heads=4"),
        ({"vocab_size": 255}, "model.vocab_size=255 must be at least 256"),
        ({"layers": 0}, "model.layers=0 must be at least 1"),
        ({"head_dim": 5}, "rotary embeddings need an even width"),
    ],
)
def test_wrong_dimensions(change: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_model(replace(ModelConfig(), **change))  # type: ignore[arg-type]  # values differ in type by field
