"""The model: what holds whatever its weights, and the presets against published numbers."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launcher.config import training
from launcher.fit import choice, memory
from launcher.programs.options import parse_config
from launcher.programs.transformer import Transformer, count_flops, initialise

DEFAULTS: Any = parse_config([])
GPT2 = replace(DEFAULTS.model, norm="layernorm", mlp="gelu", position="learned", bias=True, kv_heads=4)
GROUPED = replace(DEFAULTS.model, heads=4, kv_heads=2, tied_embeddings=False)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More would wait for each other, on products so small."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def build(config: Any, *, recompute: str = "none") -> Transformer:
    model = Transformer(config, recompute=recompute)
    initialise(model, torch.Generator().manual_seed(7))
    return model


@pytest.mark.parametrize("config", [GROUPED, GPT2], ids=["llama", "gpt2"])
def test_later_tokens_do_not_alter_earlier_logits(config: Any) -> None:
    model, tokens = build(config), torch.randint(0, 256, (2, 24))
    changed = tokens.clone()
    changed[:, 13] = (changed[:, 13] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :13], after[:, :13])
    assert not torch.allclose(before[:, 13:], after[:, 13:])


def test_grouped_queries_equal_full_heads_with_repeated_weights() -> None:
    grouped, full = build(GROUPED), build(replace(GROUPED, kv_heads=4))
    state = grouped.state_dict()
    for name, weight in state.items():
        if ".key." in name or ".value." in name:
            state[name] = weight.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = torch.randint(0, 256, (2, 24))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_rotary_products_depend_on_the_distance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has the same queries and keys at each place of one token, but for their rotation."""
    attend, seen = F.scaled_dot_product_attention, list[torch.Tensor]()

    def note(query: torch.Tensor, key: torch.Tensor, *more: Any, **settings: Any) -> torch.Tensor:
        seen.extend((query, key))
        return attend(query, key, *more, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    model = build(replace(GROUPED, kv_heads=4))
    torch.nn.init.normal_(model.embedding.weight)
    block, tokens = model.blocks[0], torch.full((1, 64), 7)
    model(tokens)
    products = seen[0][0] @ seen[1][0].transpose(-1, -2)  # of each head, by both places
    for distance in range(-63, 64):
        each = products.diagonal(distance, -2, -1)
        torch.testing.assert_close(each, each[:, :1].expand_as(each), atol=1e-4, rtol=1e-4)
    assert not torch.isclose(products[:, 9, 4], products[:, 9, 5], atol=1e-4).any()
    normed = block.get_submodule("attention_norm")(model.embedding(tokens[:, :1]))
    query, key = (block.get_submodule(f"attention.{name}")(normed) for name in ("query", "key"))
    plain = (query * key).unflatten(-1, (4, -1)).sum(-1)[0, 0]
    torch.testing.assert_close(products[:, 0, 0], plain)


def test_order_matters_without_learned_positions() -> None:
    model, tokens = build(GROUPED), torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    logits = model(tokens)
    assert not torch.allclose(logits[0, -1], logits[1, -1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_chunks_and_recomputed_activations_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, tied: bool, recompute: str
) -> None:
    config = replace(GROUPED, tied_embeddings=tied)
    tokens = torch.randint(0, 256, (2, 25))
    plain, other = build(config), build(config, recompute=recompute)
    loss = F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    monkeypatch.setattr("launcher.programs.transformer.CHUNK", 17)
    chunked = other(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, chunked)
    torch.autograd.backward(3 * loss)
    torch.autograd.backward(3 * chunked)
    for one, same in zip(plain.parameters(), other.parameters(), strict=True):
        assert one.grad is not None and same.grad is not None
        torch.testing.assert_close(one.grad, same.grad)
    with torch.no_grad():
        torch.testing.assert_close(loss.detach(), other(tokens[:, :-1], tokens[:, 1:]))


def test_fresh_weights_follow_the_seed_and_fill_everything() -> None:
    model, again = build(GPT2), build(GPT2)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert ("bias" in name) == (one.abs().max() == 0)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    narrow = model.blocks[0].get_parameter("mlp.out.weight").std().item()
    assert narrow == pytest.approx(0.02 / 8**0.5, rel=0.05)


# Presets: parameters against published counts, operations against torch's counter

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


def load_preset(name: str) -> Any:
    section: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    section.pop("global_batch", None)  # the launcher's
    return replace(DEFAULTS.model, **section)


def test_modules_have_the_published_numbers_of_parameters() -> None:
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == {*PUBLISHED, *MIXTURES}
    for name, published in PUBLISHED.items():
        config = load_preset(name)
        with torch.device("meta"):
            model = Transformer(config)
        assert config.name == name
        assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_defaults_of_the_program_are_the_shipped_configuration_and_what_the_estimate_assumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_preset("tiny") == DEFAULTS.model
    assert parse_config(["--model.max_seq_len=131072"]).seq_len == training.MAX_DEFAULT_SEQ_LEN
    assert DEFAULTS.train.batch_size == choice.DEFAULT_BATCH
    work_out, sizes = F.log_softmax, list[int]()

    def note(logits: torch.Tensor, **settings: Any) -> torch.Tensor:
        sizes.append(len(logits))
        return work_out(logits, **settings)

    monkeypatch.setattr(F, "log_softmax", note)
    tokens = torch.zeros((memory.CHUNK // 64 + 1, 65), dtype=torch.int64)
    with torch.no_grad():
        build(DEFAULTS.model)(tokens[:, :-1], tokens[:, 1:])
    assert sizes == [memory.CHUNK, 64]
    shipped = OmegaConf.to_container(OmegaConf.load(CONF / "program" / "train.yaml"), resolve=False)
    assert isinstance(shipped, dict)
    told = {key: value for key, value in shipped.items() if key not in ("command", "sections")}
    assert set(told) == {*asdict(DEFAULTS.train)}
    given = {"num_workers", "checkpoint_dir"} | {key for key, value in told.items() if value == "auto"}
    assert {k: v for k, v in told.items() if k not in given} == {
        name: value for name, value in asdict(DEFAULTS.train).items() if name not in given
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_operations_agree_with_torchs_counter(recompute: str, tied: bool, position: str) -> None:
    config = replace(load_preset("tiny"), layers=2, tied_embeddings=tied, position=position)
    model = Transformer(config, recompute=recompute)
    tokens = torch.randint(0, 256, (2, 64))
    # The fused kernels count otherwise, or not at all: only the plain products are comparable.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    expected = count_flops(model, 64, recompute=recompute == "full") * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
