"""Speed of a training: TFLOPS, MFU and HFU of a measured step, or a range by published runs before it.

MFU counts what the model needs (PaLM, arXiv:2204.02311, appendix B: the masked half of attention included),
HFU also what is computed again; both are shares of the dense peak of all GPUs at the precision.
"""

from dataclasses import dataclass

from launcher.fit.fit_model import FitRequest, SpeedEstimate
from launcher.fit.gpu_table import GpuType, find_gpu
from launcher.fit.parameter_counts import count_active_parameters, count_model_parameters, count_token_flops


@dataclass(frozen=True, slots=True)
class MfuRange:
    """MFU of published runs."""

    low: float
    high: float
    source: str


AMPERE = MfuRange(
    0.30,
    0.70,
    # torchtune's Llama 3.2 3B, compiled, 68 to 69% (its README); MosaicML's llm-foundry 36 to 64%
    # (scripts/train/benchmarking/README.md); torchtitan 50.5 to 61.1%
    # (docs/performance.md); LLaMA 65B 49% (arXiv:2302.13971: 380 tokens/s/GPU); MT-NLG 530B 30.2%
    # (arXiv:2204.02311, table 3); Megatron-LM 33 to 39% (arXiv:2104.04473, table 1: 44 to 52% with
    # recomputation); Korthikanti et al. 42 to 56% (arXiv:2205.05198, table 5).
    "A100 runs of torchtune, llm-foundry, torchtitan, LLaMA, Megatron-LM",
)
HOPPER = MfuRange(
    0.26,
    0.48,
    # llm-foundry 26 to 46%; Llama 3.1 405B 38 to 43% (arXiv:2407.21783, table 4); torchtitan's Llama 3.1 8B
    # 33 to 39% (benchmarks/llama3_h100_202412_torchtitan.md); Megatron Core up to 47% (its README).
    "H100 runs of llm-foundry, Llama 3.1, torchtitan, Megatron Core",
)
BLACKWELL = MfuRange(
    0.20,
    0.48,
    # torchtitan's Llama 3.1 8B 21% on B200 with a power limit (docs of mxfp8), 42% on GB200 (nvfp4);
    # Megatron-Bridge's Qwen3 235B 33%.
    "B200 and GB200 runs of torchtitan, Megatron-Bridge; H100's at the high end",
)
FP8 = MfuRange(
    0.115,
    0.43,
    # llm-foundry 14 to 30% of the fp8 peak; torchtitan's Llama 3.1 8B 12% eager, 25 to 32% compiled;
    # DeepSeek-V3 22% (2.664M GPU-hours for 14.8T tokens, arXiv:2412.19437, table 1); Transformer Engine's
    # recipes 37 to 42% (Megatron-Bridge's performance summary, Megatron-LM's examples/llama).
    "fp8 runs of llm-foundry, torchtitan, DeepSeek-V3, Megatron-Bridge, of the fp8 peak",
)
VOLTA = MfuRange(0.20, 0.35, "V100 runs: GPT-3 21% (arXiv:2204.02311), Megatron-LM 30% (arXiv:1909.08053)")
OTHER = MfuRange(0.20, 0.50, "an assumption, since no published run on such a GPU is known here")
HOPPERS = ("h100", "h200", "h800", "h20", "gh200")
BLACKWELLS = ("b200", "b300", "gb200", "gb300")
VOLTAS = ("v100", "t4")
AMPERES = ("a100", "a800")
SMALL = 1_000_000_000
"""Parameters below which starting kernels counts."""
SMALL_SHARE, MIXTURE_SHARE, SPLIT_SHARE = 0.4, 0.45, 0.7
"""Of the low end: small models with small micro-batches, by reasoning (llm-foundry's 125M reaches 43% with
large ones); mixtures, whose tokens travel between GPUs (torchtitan's DeepSeek-V3 16B 12%);
layers or sequences that are split over GPUs (its Qwen3 32B 19 to 25% with tp 8 and 4, 405B 9 to 12%)."""
QUANTIZED_SHARE = 0.5
"""Of the low end with quantized weights, which are made 16-bit ones in each product: litgpt's nf4 runs are
1.1 to 2 times as slow as its LoRA runs (tutorials/resource-tables.md)."""
RECOMPUTING_SHARE = 0.92
"""Of the high end with all activations computed again: llm-foundry's best is 59.5% with it, 64.2% without."""


def find_mfu_range(request: FitRequest, gpu: GpuType) -> MfuRange | None:
    """Return what published runs reach on such a GPU; None for fp32, which nobody publishes."""
    settings = request.settings
    if settings.precision == "fp32":
        return None
    first = gpu.name.split()[0]
    families = ((BLACKWELLS, BLACKWELL), (HOPPERS, HOPPER), (AMPERES, AMPERE), (VOLTAS, VOLTA))
    found = next((family for names, family in families if first in names), OTHER)
    if settings.precision == "fp8" and gpu.fp8:
        found = FP8
    low, high = found.low, found.high
    low *= SMALL_SHARE if count_model_parameters(request.model) < SMALL else 1
    low *= MIXTURE_SHARE if request.model.experts else 1
    low *= SPLIT_SHARE if max(request.layout.tp, request.layout.cp) > 1 else 1
    low *= QUANTIZED_SHARE if settings.quantization != "none" else 1
    high *= RECOMPUTING_SHARE if settings.checkpointing == "full" else 1
    return MfuRange(low, high, found.source)


def estimate_speed(request: FitRequest) -> SpeedEstimate:
    """Estimate speed: of the measured step if there is one, else by what published runs reach."""
    settings, layout, model = request.settings, request.layout, request.model
    tokens = settings.micro_batch * settings.accumulation * layout.dp * settings.seq_len
    is_frozen = settings.lora is not None
    flops = float(count_token_flops(model, settings.seq_len, is_frozen=is_frozen)) * tokens
    gpu = find_gpu(request.device.name) if request.device.kind == "gpu" else None
    peak = gpu.find_precision_peak(settings.precision) if gpu else None
    mfu_range = find_mfu_range(request, gpu) if gpu else None
    ideal = flops / (peak * 1e12 * layout.world_size) if peak else None
    seconds: tuple[float, float] | None = None
    if request.step_seconds is not None and request.step_seconds > 0:
        seconds = (request.step_seconds, request.step_seconds)
    elif ideal is not None and mfu_range is not None:
        seconds = (ideal / mfu_range.high, ideal / mfu_range.low)
    mfu = (ideal / seconds[1], ideal / seconds[0]) if ideal is not None and seconds else None
    again = count_recomputation(request)
    total, hours = estimate_total(request, tokens, seconds)
    return SpeedEstimate(
        parameters=count_model_parameters(model),
        active_parameters=count_active_parameters(model),
        tokens_per_step=tokens,
        flops_per_step=flops,
        peak_tflops=peak,
        peak_source=describe_peak(gpu, mfu_range if request.step_seconds is None else None),
        step_seconds=seconds,
        mfu=mfu,
        hfu=(mfu[0] * again, mfu[1] * again) if mfu else None,
        tflops=list_tflops(flops, layout.world_size, seconds),
        total_seconds=total,
        gpu_hours=hours,
    )


def count_recomputation(request: FitRequest) -> float:
    """Return the operations with what is computed again, over those of the model."""
    settings, model = request.settings, request.model
    is_frozen = settings.lora is not None
    done = count_token_flops(
        model,
        settings.seq_len,
        settings.checkpointing,
        early_stop=settings.framework != "megatron",
        is_frozen=is_frozen,
    )
    return done / count_token_flops(model, settings.seq_len, is_frozen=is_frozen)


def list_tflops(
    flops: float, world_size: int, seconds: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the TFLOPS of a GPU, low and high; None without the seconds of a step."""
    if seconds is None:
        return None
    each = flops / world_size / 1e12
    return each / seconds[1], each / seconds[0]


def describe_peak(gpu: GpuType | None, found: MfuRange | None) -> str:
    """Say where the peak is from, and the range if it is a published one."""
    if gpu is None:
        return ""
    return f"{gpu.source}; range: {found.source}" if found else gpu.source


def estimate_total(
    request: FitRequest, tokens_per_step: int, seconds: tuple[float, float] | None
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Return seconds and GPU-hours to the token budget; None without a budget or the seconds of a step."""
    if request.tokens is None or seconds is None:
        return None, None
    steps = request.tokens / tokens_per_step
    low, high = steps * seconds[0], steps * seconds[1]
    each = request.layout.world_size / 3600
    return (low, high), (low * each, high * each)
