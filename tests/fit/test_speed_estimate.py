"""Speed against published runs, and by hand."""

from dataclasses import replace

import pytest

from launcher.fit.advice import estimate_speed
from launcher.fit.counts import count_token_flops
from launcher.fit.training import (
    Device,
    Experts,
    LatentAttention,
    ModelDimensions,
    ParallelLayout,
    Training,
    TrainingSettings,
)

LLAMA7B = ModelDimensions("llama7b", 32000, 32, 4096, 32, 32, 128, 11008, 4096)
LLAMA65B = ModelDimensions("llama65b", 32000, 80, 8192, 64, 64, 128, 22016, 2048)
LLAMA70B = ModelDimensions("llama70b", 32000, 80, 8192, 64, 8, 128, 28672, 4096)
LLAMA3_70B = replace(LLAMA70B, vocab_size=128256, max_seq_len=8192)
LLAMA405B = ModelDimensions("llama405b", 128256, 126, 16384, 128, 8, 128, 53248, 8192)
LLAMA3_8B = ModelDimensions("llama3_8b", 128256, 32, 4096, 32, 8, 128, 14336, 8192)
MPT7B = ModelDimensions(
    "mpt7b",
    *(50368, 32, 4096, 32, 32, 128, 16384, 2048),
    norm="layernorm",
    mlp="gelu",
    position="learned",
    bias=True,
    tied_embeddings=True,
)
GPT175B = replace(MPT7B, name="gpt175b", layers=96, hidden_size=12288, heads=96, kv_heads=96)
GPT175B = replace(GPT175B, intermediate_size=4 * 12288, vocab_size=51200)
BLOOM = replace(GPT175B, name="bloom", layers=70, hidden_size=14336, heads=112, kv_heads=112)
BLOOM = replace(BLOOM, intermediate_size=4 * 14336, vocab_size=250880)
DEEPSEEK = ModelDimensions(
    "deepseek_v3",
    *(129280, 61, 7168, 128, 128, 192, 18432, 4096),
    experts=Experts(256, 8, 2048, 1, 3),
    latent_attention=LatentAttention(1536, 512, 64, 128, 128),
)


def make_request(
    model: ModelDimensions, gpus: int, gpu: str, seq_len: int, tokens: float | None, **settings: str
) -> Training:
    chosen = replace(TrainingSettings(framework="fsdp", seq_len=seq_len), **settings)  # type: ignore[arg-type]  # all are texts
    layout = ParallelLayout(dp=gpus, zero=3)
    return Training(model, layout, chosen, Device(gpu, 81920), 8, gpus // 8, tokens=tokens)


PUBLISHED_HOURS = [
    # (model, GPUs, GPU, sequence, tokens, published GPU-hours, source)
    (LLAMA65B, 2048, "A100", 2048, 1.4e12, 1_022_362, "LLaMA 65B (arXiv:2302.13971, table 15)"),
    (LLAMA7B, 512, "A100", 4096, 2e12, 184_320, "Llama 2 7B (arXiv:2307.09288, table 2)"),
    (LLAMA70B, 2048, "A100", 4096, 2e12, 1_720_320, "Llama 2 70B (arXiv:2307.09288, table 2)"),
    (LLAMA3_70B, 8192, "H100", 8192, 15e12, 6_400_000, "Llama 3 70B (meta-llama/llama3, MODEL_CARD.md)"),
    (LLAMA405B, 16384, "H100", 8192, 15.6e12, 30_840_000, "Llama 3.1 405B (MODEL_CARD.md)"),
    (MPT7B, 440, "A100-40GB", 2048, 1e12, 440 * 9.5 * 24, "MPT-7B: 440 A100-40GB, 9.5 days (MosaicML)"),
    (BLOOM, 384, "A100", 2048, 366e9, 1_082_990, "BLOOM 176B (arXiv:2211.02001)"),
]


@pytest.mark.parametrize(
    "row",
    PUBLISHED_HOURS,
    ids=[row[6] for row in PUBLISHED_HOURS],
)
def test_published_gpu_hours_are_in_the_range(
    row: tuple[ModelDimensions, int, str, int, float, float, str],
) -> None:
    model, gpus, gpu, seq_len, tokens, hours, _ = row
    found = estimate_speed(make_request(model, gpus, gpu, seq_len, tokens))
    assert found.gpu_hours is not None and found.total_seconds is not None
    assert found.gpu_hours[0] <= hours <= found.gpu_hours[1]
    assert found.total_seconds[0] <= hours * 3600 / gpus <= found.total_seconds[1]


def test_llama_65b_takes_21_days() -> None:
    found = estimate_speed(make_request(LLAMA65B, 2048, "A100", 2048, 1.4e12))
    assert found.total_seconds is not None
    assert found.total_seconds[0] <= 21 * 86400 <= found.total_seconds[1] <= 36 * 86400


def test_deepseek_v3_in_fp8() -> None:
    found = estimate_speed(make_request(DEEPSEEK, 2048, "H800", 4096, 14.8e12, precision="fp8"))
    assert found.gpu_hours is not None and found.gpu_hours[0] <= 2_664_000 <= found.gpu_hours[1]
    assert found.active_parameters < 0.06 * found.parameters


PUBLISHED_MFU = [
    # (model, GPU, sequence, checkpointing, tokens a second and GPU, published MFU, tolerance, source)
    # It counts the embedding too, 6 * 0.53e9 of 58e9 operations.
    (LLAMA3_8B, "A100", 8192, "selective", 2973, 0.582, 0.031, "torchtitan docs/performance.md"),
    (LLAMA70B, "A100", 4096, "full", 353, 0.505, 0.01, "torchtitan docs/performance.md"),
    (LLAMA3_70B, "A100", 8192, "full", 331, 0.517, 0.01, "torchtitan docs/performance.md"),
    (MPT7B, "A100", 2048, "none", 4641, 0.6423, 0.01, "llm-foundry scripts/train/benchmarking"),
    (MPT7B, "H100", 2048, "none", 10643, 0.4644, 0.01, "llm-foundry scripts/train/benchmarking"),
]


@pytest.mark.parametrize("row", PUBLISHED_MFU, ids=[f"{row[0].name} {row[1]}" for row in PUBLISHED_MFU])
def test_a_measured_step_has_the_published_mfu(
    row: tuple[ModelDimensions, str, int, str, float, float, float, str],
) -> None:
    model, gpu, seq_len, checkpointing, rate, mfu, tolerance, _ = row
    request = make_request(model, 64, gpu, seq_len, None, checkpointing=checkpointing)
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
    request = Training(GPT175B, layout, settings, Device("A100", 81920), 8, 8, step_seconds=13.75)
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
