"""Models: dimensions from a config.json, their parameters and operations; GPUs, and speeds on them.

tests/data/model_configs.json has files of models on huggingface.co with the total of their safetensors'
parameters as shown there, and small ones of each family, for transformers to make.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import fields as list_fields
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.training import read_dimensions
from launcher.errors import UsageError
from launcher.fit.choice import assess
from launcher.fit.counts import count_active_parameters, count_model_parameters, count_token_flops
from launcher.fit.gpus import GPU_TYPES, find_gpu
from launcher.fit.hf import FAMILIES
from launcher.fit.training import ModelDimensions
from launcher.programs.options import parse_config
from tests.fit.made_requests import DATA, LLAMA7B, MODELS, TABLES, ask, change
from tests.fuzzing import WORDS, scalars, texts
from tests.seam import Result

PRESETS = Path(__file__).parents[2] / "conf/model"
DENSE = ("tiny", "gpt2", "llama1b", "llama7b", "llama13b", "llama3_8b", "llama70b", "mistral7b")
CONFIGS: dict[str, Any] = json.loads((DATA / "model_configs.json").read_text())
PUBLISHED = {row["name"]: row["config"] for row in CONFIGS["published"]}


def read(folder: Path, text: str) -> ModelDimensions:
    """The dimensions of a config.json."""
    (folder / "config.json").write_text(text)
    model = read_dimensions({"config": str(folder / "config.json")})
    assert model is not None
    return model


def test_published_models_have_their_parameters(tmp_path: Path) -> None:
    for row in CONFIGS["published"]:
        model = read(tmp_path, json.dumps(row["config"]))
        assert count_model_parameters(model) == row["parameters"], row["name"]
        outer = {"model_type": "llava", "vision_config": {"hidden_size": 1024}, "text_config": row["config"]}
        if "hidden_size" in row["config"]:  # the text's part of a model of images
            assert read(tmp_path, json.dumps(outer)) == model
        if row["name"] == "Qwen3-30B-A3B":
            assert count_active_parameters(model) == pytest.approx(3.35e9, rel=0.01)


def test_models_of_transformers_have_as_many(tmp_path: Path) -> None:
    """Small ones of each family, on no device."""
    import torch

    transformers: Any = pytest.importorskip("transformers")
    for kind, more in CONFIGS["families"]:
        left_out = ("max_position_embeddings", "intermediate_size") if kind == "gpt2" else ()
        small = {key: value for key, value in CONFIGS["small"].items() if key not in left_out}
        config = transformers.AutoConfig.for_model(kind, **small, **more)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        total = sum(parameter.numel() for parameter in model.parameters())
        # DeepSeek's correction of the load is a buffer here, and a tensor of the published files.
        total += sum(buffer.numel() for name, buffer in model.named_buffers() if "correction" in name)
        for text in (config.to_json_string(use_diff=False), json.dumps(config.to_diff_dict())):
            assert count_model_parameters(read(tmp_path, text)) == total, (kind, more)


def test_a_file_that_cannot_be_used_is_named_with_field_and_fix(tmp_path: Path) -> None:
    for written, message in [
        *CONFIGS["errors"],
        ["{" * 100000, "no JSON"],
        [" " * (1 << 21), "cannot be read"],
    ]:
        text = written
        if isinstance(written, dict):
            text = json.dumps({**CONFIGS["bases"].get(written.pop("base", ""), {}), **written})
        with pytest.raises(UsageError, match=f"^model.config=.*/config.json: .*{message}") as caught:
            read(tmp_path, text)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 700


NAMES = sorted(
    {name for config in PUBLISHED.values() for name in config} | {"text_config", "mlp_only_layers"}
)
values = scalars | st.integers(0, 64) | st.lists(scalars, max_size=2) | st.dictionaries(texts, scalars)


@given(
    base=st.sampled_from([*PUBLISHED.values()]),
    kind=st.sampled_from([*sorted(FAMILIES), "bert"]),
    changes=st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
    gone=st.sets(st.sampled_from(NAMES), max_size=2),
)
def test_any_file_is_read_or_refused(
    base: dict[str, object], kind: str, changes: dict[str, object], gone: set[str]
) -> None:
    fields = {key: value for key, value in {**base, "model_type": kind, **changes}.items() if key not in gone}
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = read(Path(folder), json.dumps(fields))
    except UsageError as error:
        assert str(error).isprintable()
    else:
        assert 0 < count_active_parameters(model) <= count_model_parameters(model) < 1 << 160


def read_preset(name: str) -> dict[str, Any]:
    section: dict[str, Any] = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    section.pop("global_batch", None)  # the launcher's
    return section


def configure(preset: dict[str, Any]) -> Any:
    """The bundled program's configuration of a preset."""
    return replace(parse_config([]).model, **preset)


def convert(config: Any, **more: Any) -> ModelDimensions:
    names = [field.name for field in list_fields(LLAMA7B) if hasattr(config, field.name)]
    return ask({**{name: getattr(config, name) for name in names}, **more}).model


def test_the_bundled_programs_modules_count_the_same() -> None:
    import torch

    from launcher.programs.transformer import Transformer, count_flops

    dense = [configure(read_preset(name)) for name in DENSE]
    odd = [
        replace(dense[0], norm=norm, bias=bias, head_dim=width, position="learned", mlp="gelu")
        for norm, bias, width in product(("layernorm", "rmsnorm"), (False, True), (None, 64))
    ]
    for config in (*dense, *odd):
        with torch.device("meta"):
            module = Transformer(config)
        model, parameters = convert(config), sum(one.numel() for one in module.parameters())
        assert count_model_parameters(model) == count_active_parameters(model) == parameters
        for seq_len in (1, 64, 4096):
            assert count_token_flops(model, seq_len) == count_flops(module, seq_len)
            again = count_token_flops(model, seq_len, "full", early_stop=True)
            assert again == count_flops(module, seq_len, recompute=True)


MIXTURES = {
    # arXiv:2401.04088: 47B parameters, 13B active; exact by the tensors of mistralai/Mixtral-8x7B-v0.1.
    "mixtral8x7b": (46_702_792_704, 12_879_925_248),
    # arXiv:2412.19437: 671B parameters, 37B active. README_WEIGHTS.md of deepseek-ai/DeepSeek-V3 counts
    # 36.6B active without the embedding, as here: 37,552,297,472 - 926,679,040. The total holds 58 * 256
    # numbers that correct the routers' load and have no gradient.
    "deepseek_v3": (671_026_419_200, 37_552_297_472),
}


def test_mixtures_have_their_published_parameters(launch: Callable[..., Result], here: Path) -> None:
    for name, published in MIXTURES.items():
        preset = read_preset(name)
        parts = {key: preset.pop(key, None) for key in ("experts", "latent_attention")}
        model = convert(configure(preset), **parts)
        assert (count_model_parameters(model), count_active_parameters(model)) == published
    # The bundled program does not train it.
    launch(f"model={name}").assert_error(2, f"model={name}", "mixture of experts", "`launch plan`", "llama7b")
    assert not list(here.iterdir())
    (here / "train.py").write_text("")
    assert launch(f"+model={name}", "dry_run=true", "--", "train.py").code == 0
    assert launch("plan", f"+model={name}").code == 0


def test_operations_of_a_token() -> None:
    """What is computed again counts for HFU; of a mixture the active experts alone."""
    model, mixtral = MODELS["LLaMA 7B"], MODELS["Mixtral 8x7B"]
    plain, selective, full = (count_token_flops(model, 2048, kind) for kind in ("none", "selective", "full"))
    assert selective - plain == 4 * 32 * 2048 * 4096
    assert 1.30 < full / plain < 4 / 3
    assert count_token_flops(mixtral, 1) < 6 * count_active_parameters(mixtral)
    assert count_token_flops(mixtral, 4096) / 6 == pytest.approx(12.88e9 + 2 * 32 * 4096 * 4096, rel=0.02)


# Speed against published runs, and by hand; GPUs by the driver's names and by short ones.


def estimate(model: str, gpus: int, gpu: str | dict[str, Any], seq_len: int, **more: Any) -> Any:
    """The speed of FSDP over GPUs whose memory is not known."""
    top: dict[str, Any] = {key: more.pop(key) for key in ("step_seconds", "tokens") if key in more}
    device = {"name": gpu, "memory_mib": 0} if isinstance(gpu, str) else gpu
    settings = {"framework": "fsdp", "seq_len": seq_len, **more.pop("settings", {}), **more}
    request = ask(model, layout={"dp": gpus, "zero": 3}, settings=settings, device=device)
    context = max(request.model.max_seq_len, seq_len)
    return assess(change(request, {**top, "model": {"max_seq_len": context}})).speed


@pytest.mark.parametrize("row", TABLES["hours"], ids=lambda row: row[-1])
def test_published_gpu_hours_are_in_the_range(row: tuple[str, int, str, int, float, float, str]) -> None:
    name, gpus, gpu, seq_len, tokens, hours, _ = row
    found = estimate(name, gpus, gpu, seq_len, tokens=tokens)
    assert found.gpu_hours is not None and found.total_seconds is not None
    assert found.gpu_hours[0] <= hours <= found.gpu_hours[1]
    assert found.total_seconds[0] <= hours * 3600 / gpus <= found.total_seconds[1]


def test_deepseek_v3_in_fp8() -> None:
    found = estimate("DeepSeek-V3", 2048, "H800", 4096, tokens=14.8e12, precision="fp8")
    assert found.gpu_hours is not None and found.gpu_hours[0] <= 2_664_000 <= found.gpu_hours[1]
    assert found.active_parameters < 0.06 * found.parameters


@pytest.mark.parametrize("row", TABLES["mfu"], ids=lambda row: f"{row[0]} {row[1]}")
def test_a_measured_step_has_the_published_mfu(
    row: tuple[str, str, int, str, float, float, float, str],
) -> None:
    name, gpu, seq_len, checkpointing, rate, mfu, tolerance, _ = row
    before = estimate(name, 64, gpu, seq_len, checkpointing=checkpointing)
    found = estimate(name, 64, gpu, seq_len, checkpointing=checkpointing, step_seconds=seq_len / rate)
    assert found.mfu is not None and found.hfu is not None and before.mfu is not None
    assert found.mfu[0] == found.mfu[1] == pytest.approx(mfu, abs=tolerance)
    assert before.mfu[0] < mfu < before.mfu[1]
    more = {"none": 1.0, "selective": 1.1, "full": 4 / 3}[checkpointing]
    assert found.mfu[0] <= found.hfu[0] <= found.mfu[0] * more + 1e-9


def test_the_gpt_models_of_korthikanti_et_al() -> None:
    """Table 5 of arXiv:2205.05198: 175B on 64 A100, batch 64, 13.75 s: 51.4% MFU, 52.8% HFU (selective)."""
    settings = {"framework": "megatron", "checkpointing": "selective", "accumulation": 64}
    layout, device = {"tp": 8, "pp": 8, "virtual_stages": 3}, {"name": "A100", "memory_mib": 0}
    request = ask("GPT-3 175B", layout=layout, settings=settings, device=device, step_seconds=13.75)
    found = assess(request).speed
    assert found.mfu is not None and found.hfu is not None
    assert found.mfu[0] == pytest.approx(0.514, abs=0.01) and found.hfu[0] == pytest.approx(0.528, abs=0.01)


def test_a_step_by_hand() -> None:
    settings = {"framework": "fsdp", "micro_batch": 2, "accumulation": 4, "seq_len": 4096}
    request = ask(layout={"tp": 2, "dp": 8, "zero": 3}, settings=settings, step_seconds=2.0, tokens=1e9)
    found = assess(request).speed
    assert found.tokens_per_step == 2 * 4 * 8 * 4096
    assert found.flops_per_step == count_token_flops(LLAMA7B, 4096) * found.tokens_per_step
    each = found.flops_per_step / 2.0 / 16 / 1e12
    assert found.tflops == (each, each) and found.mfu == pytest.approx((each / 989, each / 989))
    assert found.total_seconds is not None and found.gpu_hours is not None
    assert found.total_seconds[0] == pytest.approx(1e9 / found.tokens_per_step * 2)
    assert found.gpu_hours[0] == pytest.approx(found.total_seconds[0] * 16 / 3600)


def test_nothing_is_claimed_of_an_unknown_device() -> None:
    for device in ({"name": "CPU", "memory_mib": 0, "kind": "cpu"}, {"name": "unknown", "memory_mib": 0}):
        found = estimate("llama7b", 8, device, 2048, tokens=1e9)
        assert (found.peak_tflops, found.step_seconds, found.mfu, found.hfu, found.gpu_hours) == (None,) * 5
        measured = estimate("llama7b", 8, device, 2048, tokens=1e9, step_seconds=1.0)
        assert measured.tflops and measured.gpu_hours and measured.mfu is None
    found = estimate("llama7b", 8, "A100", 2048, precision="fp32")
    assert (found.peak_tflops, found.step_seconds) == (19.5, None)


def test_a_gpu_is_found_by_its_names_and_what_is_not_in_the_table_is_not_guessed() -> None:
    for short, names in TABLES["gpus"].items():
        for name in names:
            found = find_gpu(name)
            assert found is not None and found.name == short
            assert found.memory_mib == next(gpu.memory_mib for gpu in GPU_TYPES if gpu.name == short)
    assert [name for name in TABLES["unknown_gpus"] if find_gpu(name)] == []


def test_a_size_in_the_name_counts() -> None:
    found = find_gpu("NVIDIA A100-SXM-64GB")
    assert found is not None and (found.memory_mib, found.bf16) == (65536, 312)
    assert find_gpu(f"A100 {'9' * 5000}GB") == find_gpu("A100-0GB") == find_gpu("A100")


def test_rows_are_found_by_their_own_names_and_are_plausible() -> None:
    for gpu in GPU_TYPES:
        assert find_gpu(gpu.name.upper().replace(" ", "-")) == gpu
        assert gpu.fp32 <= (gpu.tf32 or gpu.fp32) < gpu.bf16 < (gpu.fp8 or 1e9)
        assert 8 * 1024 <= gpu.memory_mib < 300 * 1024 and gpu.nvlink_domain >= 1 and gpu.source
        assert [gpu.find_precision_peak(name) > 0 for name in WORDS["fit.precision"]] == [True] * 4
        assert (7, 0) <= gpu.capability <= (12, 0)


@given(
    st.lists(
        texts
        | st.sampled_from([word for names in TABLES["gpus"].values() for word in " ".join(names).split()])
    ).map(" ".join)
)
def test_any_name_is_found_or_not(name: str) -> None:
    found = find_gpu(name)
    assert found is None or found.memory_mib > 0
