"""Speed against published runs, and by hand; GPUs by the driver's names and by short ones."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.fit.advice import SpeedEstimate
from launcher.fit.choice import assess
from launcher.fit.counts import count_token_flops
from launcher.fit.gpus import GPU_TYPES, find_gpu
from tests.fit.made_requests import LLAMA7B, TABLES, ask
from tests.fuzzing import WORDS, texts


def estimate(model: str, gpus: int, gpu: str | dict[str, Any], seq_len: int, **more: Any) -> SpeedEstimate:
    """The speed of FSDP over GPUs whose memory is not known."""
    top = {key: more.pop(key) for key in ("step_seconds", "tokens") if key in more}
    device = {"name": gpu, "memory_mib": 0} if isinstance(gpu, str) else gpu
    settings = {"framework": "fsdp", "seq_len": seq_len, **more.pop("settings", {}), **more}
    request = ask(model, layout={"dp": gpus, "zero": 3}, settings=settings, device=device)
    context = max(request.model.max_seq_len, seq_len)
    return assess(replace(request, model=replace(request.model, max_seq_len=context), **top)).speed


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
        assert (7, 0) <= gpu.capability <= (10, 0)


@given(
    st.lists(
        texts
        | st.sampled_from([word for names in TABLES["gpus"].values() for word in " ".join(names).split()])
    ).map(" ".join)
)
def test_any_name_is_found_or_not(name: str) -> None:
    found = find_gpu(name)
    assert found is None or found.memory_mib > 0
