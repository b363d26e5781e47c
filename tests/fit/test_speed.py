"""Speed against published runs, and by hand; GPUs by the driver's names and by short ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.fit.advice import estimate_speed
from launcher.fit.counts import count_token_flops
from launcher.fit.gpus import GPU_TYPES, find_gpu
from launcher.fit.training import (
    Device,
    ModelDimensions,
    ParallelLayout,
    Training,
    TrainingSettings,
)
from tests.fit.made_requests import LLAMA7B, MODELS, TABLES
from tests.fuzzing import WORDS, texts


def make_request(
    model: ModelDimensions, gpus: int, gpu: str, seq_len: int, tokens: float | None, **settings: str
) -> Training:
    chosen = replace(TrainingSettings(framework="fsdp", seq_len=seq_len), **settings)  # type: ignore[arg-type]  # all are texts
    layout = ParallelLayout(dp=gpus, zero=3)
    return Training(model, layout, chosen, Device(gpu, 81920), 8, gpus // 8, tokens=tokens)


@pytest.mark.parametrize("row", TABLES["hours"], ids=lambda row: row[-1])
def test_published_gpu_hours_are_in_the_range(row: tuple[str, int, str, int, float, float, str]) -> None:
    name, gpus, gpu, seq_len, tokens, hours, _ = row
    found = estimate_speed(make_request(MODELS[name], gpus, gpu, seq_len, tokens))
    assert found.gpu_hours is not None and found.total_seconds is not None
    assert found.gpu_hours[0] <= hours <= found.gpu_hours[1]
    assert found.total_seconds[0] <= hours * 3600 / gpus <= found.total_seconds[1]


def test_llama_65b_takes_21_days() -> None:
    found = estimate_speed(make_request(MODELS["LLaMA 65B"], 2048, "A100", 2048, 1.4e12))
    assert found.total_seconds is not None
    assert found.total_seconds[0] <= 21 * 86400 <= found.total_seconds[1] <= 36 * 86400


def test_deepseek_v3_in_fp8() -> None:
    found = estimate_speed(make_request(MODELS["DeepSeek-V3"], 2048, "H800", 4096, 14.8e12, precision="fp8"))
    assert found.gpu_hours is not None and found.gpu_hours[0] <= 2_664_000 <= found.gpu_hours[1]
    assert found.active_parameters < 0.06 * found.parameters


@pytest.mark.parametrize("row", TABLES["mfu"], ids=lambda row: f"{row[0]} {row[1]}")
def test_a_measured_step_has_the_published_mfu(
    row: tuple[str, str, int, str, float, float, float, str],
) -> None:
    name, gpu, seq_len, checkpointing, rate, mfu, tolerance, _ = row
    request = make_request(MODELS[name], 64, gpu, seq_len, None, checkpointing=checkpointing)
    before = estimate_speed(request)
    found = estimate_speed(replace(request, step_seconds=seq_len / rate))
    assert found.mfu is not None and found.hfu is not None and before.mfu is not None
    assert found.mfu[0] == found.mfu[1] == pytest.approx(mfu, abs=tolerance)
    assert before.mfu[0] < mfu < before.mfu[1]
    more = {"none": 1.0, "selective": 1.1, "full": 4 / 3}[checkpointing]
    assert found.mfu[0] <= found.hfu[0] <= found.mfu[0] * more + 1e-9


def test_the_gpt_models_of_korthikanti_et_al() -> None:
    """Table 5 of arXiv:2205.05198: 175B on 64 A100, batch 64, 13.75 s: 51.4% MFU, 52.8% HFU (selective)."""
    settings = TrainingSettings(framework="megatron", checkpointing="selective", accumulation=64)
    layout = ParallelLayout(tp=8, pp=8, virtual_stages=3)
    request = Training(
        MODELS["GPT-3 175B"], layout, settings, Device("A100", 81920), 8, 8, step_seconds=13.75
    )
    found = estimate_speed(request)
    assert found.mfu is not None and found.hfu is not None
    assert found.mfu[0] == pytest.approx(0.514, abs=0.01) and found.hfu[0] == pytest.approx(0.528, abs=0.01)


def test_a_step_by_hand() -> None:
    settings = TrainingSettings(framework="fsdp", micro_batch=2, accumulation=4, seq_len=4096)
    layout = ParallelLayout(tp=2, dp=8, zero=3)
    request = Training(LLAMA7B, layout, settings, Device("NVIDIA H100 80GB HBM3", 81559), 8, 2)
    found = estimate_speed(replace(request, step_seconds=2.0, tokens=1e9))
    assert found.tokens_per_step == 2 * 4 * 8 * 4096
    assert found.flops_per_step == count_token_flops(LLAMA7B, 4096) * found.tokens_per_step
    each = found.flops_per_step / 2.0 / 16 / 1e12
    assert found.tflops == (each, each) and found.mfu == pytest.approx((each / 989, each / 989))
    assert found.total_seconds is not None and found.gpu_hours is not None
    assert found.total_seconds[0] == pytest.approx(1e9 / found.tokens_per_step * 2)
    assert found.gpu_hours[0] == pytest.approx(found.total_seconds[0] * 16 / 3600)


@pytest.mark.parametrize("device", [Device("CPU", 1000, kind="cpu"), Device("unknown", 1000)])
def test_nothing_is_claimed_of_an_unknown_device(device: Device) -> None:
    request = replace(make_request(LLAMA7B, 8, "H100", 2048, 1e9), device=device)
    found = estimate_speed(request)
    assert (found.peak_tflops, found.step_seconds, found.mfu, found.hfu, found.gpu_hours) == (None,) * 5
    measured = estimate_speed(replace(request, step_seconds=1.0))
    assert measured.tflops and measured.gpu_hours and measured.mfu is None


def test_fp32_has_a_peak_and_no_range() -> None:
    found = estimate_speed(make_request(LLAMA7B, 8, "A100", 2048, None, precision="fp32"))
    assert (found.peak_tflops, found.step_seconds) == (19.5, None)


def test_a_gpu_is_found_by_its_names_and_what_is_not_in_the_table_is_not_guessed() -> None:
    for short, names in TABLES["gpus"].items():
        for name in names:
            found = find_gpu(name)
            assert found is not None and found.name == short
            assert found.memory_mib == next(gpu.memory_mib for gpu in GPU_TYPES if gpu.name == short)
    assert [name for name in TABLES["unknown_gpus"] if find_gpu(name)] == []


def test_peaks_by_what_is_computed_in() -> None:
    old, new = find_gpu("V100"), find_gpu("H100")
    assert old is not None and old.peak_tflops == (("fp32", 15.7), ("fp16", 125))
    assert new is not None and new.peak_tflops == (
        ("fp32", 67),
        ("tf32", 494),
        ("bf16", 989),
        ("fp8", 1979),
    )


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


@given(
    st.lists(
        texts
        | st.sampled_from([word for names in TABLES["gpus"].values() for word in " ".join(names).split()])
    ).map(" ".join)
)
def test_any_name_is_found_or_not(name: str) -> None:
    found = find_gpu(name)
    assert found is None or found.memory_mib > 0
