"""Parameters of the presets against published counts, and operations against torch's counter."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launcher.programs.options import ModelConfig, TrainConfig
from launcher.programs.transformer import Transformer, count_flops

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


def test_modules_have_the_published_numbers_of_parameters() -> None:
    for name, published in PUBLISHED.items():
        config = load_preset(name)
        with torch.device("meta"):
            model = Transformer(config)
        assert config.name == name
        assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_defaults_of_the_program_are_the_shipped_configuration() -> None:
    assert load_preset("tiny") == ModelConfig()
    shipped = OmegaConf.to_container(OmegaConf.load(CONF / "program" / "train.yaml"), resolve=False)
    assert isinstance(shipped, dict)
    told = {key: value for key, value in shipped.items() if key not in ("command", "sections")}
    assert set(told) == {field.name for field in fields(TrainConfig)}
    given = {"num_workers", "checkpoint_dir"} | {key for key, value in told.items() if value == "auto"}
    assert {k: v for k, v in told.items() if k not in given} == {
        field.name: field.default for field in fields(TrainConfig) if field.name not in given
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_operations_agree_with_torchs_counter(recompute: str, tied: bool, position: str) -> None:
    config = replace(load_preset("tiny"), tied_embeddings=tied, position=position)
    model = Transformer(config, recompute=recompute)
    tokens = torch.randint(0, 256, (2, 64))
    # The fused kernels count otherwise, or not at all: only the plain products are comparable.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    expected = count_flops(model, 64, recompute=recompute == "full") * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
