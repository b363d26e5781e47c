"""What a job needs of its nodes, what makes it slow, and how fast it is.

Budget: the book "Machine Learning Engineering" (S. Bekman, chapters on CPUs and CPU memory):
`gpus * (workers + 1) + 4` cores, and at least as much CPU memory as the GPUs have together. Advice: NVIDIA's
"Matrix Multiplication Background User's Guide" (dimensions in multiples of 8 elements of 16 bits for tensor
cores, of 64 on an A100); "The Case for Co-Designing Model Architectures with Hardware" (arXiv:2401.14489);
the same book; others beside the rule. Speed: TFLOPS, MFU and HFU of a measured step, or a range by published
runs before it. MFU counts what the model needs (PaLM, arXiv:2204.02311, appendix B: the masked half of
attention included), HFU also what is computed again; both are shares of the dense peak of all GPUs at the
precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launcher.fit.counts import count_active_parameters, count_model_parameters, count_token_flops
from launcher.fit.gpus import GpuType, find_gpu
from launcher.fit.memory import count_kept
from launcher.fit.training import Training
from launcher.plan.resources import count_node_cores

GIB = 1 << 30
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a name to show
PROCESS_GIB = 2.5
"""A rank's own: Python, torch, CUDA's libraries and its context on the host."""
WORKER_GIB = 0.5
"""A DataLoader worker of text, if `dataloader.worker_gib` does not say."""
SYSTEM_GIB = 8.0
PINNED_ROUNDING = 1.5
"""torch's allocator of pinned memory rounds up to powers of two: 1 to 2 times, 1.5 in the middle."""
OFFLOADED = {"optimizer": 16, "parameters": 20}
"""Bytes a parameter in CPU memory: fp32 weights 4, moments 8, gradients 4; and bf16 weights with gradients 4
(ZeRO-Offload, arXiv:2101.06840)."""
MASTER_BYTES = 4
"""Of a parameter in a full checkpoint that rank 0 gathers: fp32 weights; the optimizer's states are saved in
shards as a rule."""
TOKEN_BYTES = 16
"""Of a token in a batch: its number and the next one's, in 64 bits each."""
PREFETCHED = 3
"""Batches of a worker in /dev/shm: two prefetched, and the one in use."""
NCCL_MIB = 32
"""Of /dev/shm for each rank's transports within a node."""
TILE = 64
"""Elements of 16 bits in 128 bytes, by which an A100's tensor cores are used best (NVIDIA's guide)."""
LEAST_MULTIPLE = 8
"""Below it a product may not use tensor cores at full rate (NVIDIA's guide)."""
FP8_MULTIPLE = 16
"""What Transformer Engine and torch.float8 want of both dimensions."""
LARGEST_HEAD = 256
"""FlashAttention-2's widest head."""
LARGEST_BUBBLE = 0.1
NARROW = 1024
"""Width of a GPU's part of the hidden size from which on tensor parallelism costs little."""
FEW_TOKENS = 2048
"""Tokens of a micro-batch below which products are short."""


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """A resource of the node: what the job needs and has."""

    name: str
    """`CPU cores`, `CPU memory`, `/dev/shm`."""
    needed: float
    available: float | None
    unit: str
    """`cores` or `GiB`."""
    enough: bool
    note: str = ""
    fix: str = ""


def budget_node(training: Training) -> tuple[BudgetLine, ...]:
    """Return a line for each resource of a node; for ranks on CPUs, memory and /dev/shm alone.

    CPU cores: one for a rank's process and for each worker, and the system's. CPU memory: what the job's
    parts sum to, and at least the GPUs' memory; /dev/shm: batches of the workers, and NCCL's transports.
    """
    node, ranks, layout, settings = training.node, training.gpus_per_node, training.layout, training.settings
    found, workers, on_gpu = list[BudgetLine](), node.num_workers, training.on_gpu

    def add(name: str, needed: float, has: float | None, note: str, fix: str, unit: str = "GiB") -> None:
        enough = has is None or has >= needed
        found.append(BudgetLine(name, needed, has, unit, enough, note, "" if enough else fix))

    if on_gpu:
        needed = count_node_cores(ranks, workers)
        system = needed - ranks * (workers + 1)
        note = f"{ranks} x (1 + {workers} workers) + {system}"
        note += "; more for the optimizer on CPUs" if settings.offload != "none" else ""
        most = max(0, ((node.cores or 0) - system) // ranks - 1)
        fix = f"dataloader.num_workers={most}, or " if most < workers else ""
        add(
            "CPU cores",
            needed,
            node.cores,
            note,
            f"{fix}ask for {needed} cores (cluster.cpus_per_task)",
            "cores",
        )
    parameters = count_model_parameters(training.model)
    # States in CPU memory are pinned.
    share = min(1.0, ranks * (1 if layout.zero else layout.replicas) / layout.world_size)
    # The bundled program saves by torch.distributed.checkpoint, Megatron its own shards.
    in_shards = training.is_bundled or settings.framework == "megatron" or layout.zero < 3
    kept = count_kept(training).expected if settings.activation_offload else 0
    parts = {
        # On CPUs, the ranks' memory is the estimate's.
        **({"system": SYSTEM_GIB, "ranks": ranks * PROCESS_GIB} if on_gpu else {}),
        "workers": ranks * workers * (node.worker_gib or WORKER_GIB),
        "offload": OFFLOADED.get(settings.offload, 0) * parameters * share * PINNED_ROUNDING / GIB,
        "activations": ranks * kept * PINNED_ROUNDING / GIB,
        "checkpoint on rank 0": 0 if in_shards else MASTER_BYTES * parameters / GIB,
    }
    total, gpus = sum(parts.values()), ranks * training.device.memory_mib / 1024 if on_gpu else 0
    note = ", ".join(f"{name} {gib:.0f}" for name, gib in parts.items() if gib >= 0.5)
    has = None if node.memory_kib is None else node.memory_kib / (1 << 20)
    fixes = {
        "activations": "fit.activation_offload=false, or fit.checkpointing=full: less is kept",
        "offload": "more nodes share the states (nodes=N), or fit.offload=none",
        "workers": "fewer workers (dataloader.num_workers=N)",
        "checkpoint on rank 0": "save in shards (torch.distributed.checkpoint)",
    }
    fix = fixes.get(max(parts, key=lambda name: parts[name]), "ask for more (cluster.mem=0 is all of a node)")
    add("CPU memory", max(gpus, total), has, f"the GPUs' sum; {note}" if gpus > total else note, fix)
    batches = ranks * workers * PREFETCHED * settings.micro_batch * settings.seq_len * TOKEN_BYTES
    nccl = ranks * NCCL_MIB << 20 if ranks > 1 and on_gpu else 0
    has = None if node.shm_kib is None else node.shm_kib / (1 << 20)
    fix = "a larger /dev/shm (docker: --shm-size), or dataloader.num_workers=0"
    add(
        SHARED_MEMORY,
        (batches + nccl) / GIB,
        has,
        "batches of text, NCCL" if nccl else "batches of text",
        fix,
    )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Advice:
    """Something about the settings that a person should know."""

    level: str
    """`warning` (it will cost) or `note`."""
    what: str
    fix: str = ""
    gain: str = ""
    """Expected gain, with its source."""


def advise(training: Training) -> tuple[Advice, ...]:
    """Give advice, warnings first."""
    rules = (_advise_model, _advise_precision, _advise_links, _advise_schedule)
    found = [one for rule in rules for one in rule(training)]
    return tuple(sorted(found, key=lambda one: one.level != "warning"))


def _advise(is_warning: bool, what: str, fix: str, gain: str = "") -> Advice:
    """Make a warning, or a note."""
    return Advice("warning" if is_warning else "note", what, fix, gain)


def _round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def _advise_model(training: Training) -> Iterator[Advice]:
    """Advise on the vocabulary, the width of a head, the hidden size, and widths inside MLP and experts."""
    model, tp, length = training.model, training.layout.tp, training.settings.seq_len
    head, widths, multiple = model.head_width, dict[str, tuple[int, int]](), TILE * tp
    if training.on_gpu:
        widths["model.hidden_size"] = (model.hidden_size, 1)
        if model.experts is not None:
            widths["model.experts.intermediate_size"] = (model.experts.intermediate_size, 1)
        if model.experts is None or model.experts.dense_layers:
            widths["model.intermediate_size"] = (model.intermediate_size, tp)
    if training.on_gpu and model.vocab_size % multiple:
        share = 6 * model.vocab_size * model.hidden_size / count_token_flops(model, length)
        gain, is_odd = f"the output layer is {share:.0%} of the operations", model.vocab_size % LEAST_MULTIPLE
        gain += "; 25% of GPT-2's step by 50257 to 50304 (A. Karpathy, nanoGPT)" if is_odd else ""
        of_tp = f" (64 * parallel.tp={tp})" if tp > 1 else ""
        what = f"model.vocab_size={model.vocab_size} is no multiple of {multiple}{of_tp}"
        fix = f"pad it to {_round_up(model.vocab_size, multiple)}"
        yield _advise(bool(is_odd) and share > 0.02, what, fix, gain)
    if training.on_gpu and head > LARGEST_HEAD:
        what = f"heads are {head} wide, and FlashAttention-2 has none wider than {LARGEST_HEAD}"
        yield _advise(True, what, "more heads of 64 or 128")
    elif training.on_gpu and head % TILE:
        what, gain = "no multiple of 64", "heads of 64 and 128 use tensor cores best"
        if is_odd := head % LEAST_MULTIPLE:
            what, gain = (
                "no multiple of 8: attention does without fast kernels",
                "up to 39% of a step by efficient shapes",
            )
        what = f"heads are {head} wide, {what}"
        yield _advise(bool(is_odd), what, "heads of 64 or 128", f"{gain} (arXiv:2401.14489)")
    for key, (width, parts) in widths.items():
        if width % (TILE * parts):
            near, is_odd = (
                max(1, round(width / (TILE * parts))) * TILE * parts,
                width % (LEAST_MULTIPLE * parts),
            )
            has_gain = model.mlp == "swiglu" and key.endswith("intermediate_size") and is_odd
            gain = "SwiGLU's 10922 to 10944: 273 to 398 TFLOPS on an H100 (S. Bekman)" if has_gain else ""
            split = f" over parallel.tp={parts} is {width / parts:g}," if parts > 1 else " is"
            yield _advise(bool(is_odd), f"{key}={width}{split} no multiple of {TILE}", f"{key}={near}", gain)
    if tp > 1 and model.hidden_size // tp < NARROW:
        part = f"{model.hidden_size // tp} of model.hidden_size={model.hidden_size}"
        what = f"parallel.tp={tp} leaves each GPU {part}: its products are narrow"
        yield _advise(False, what, "a smaller parallel.tp, with the states sharded by parallel.zero instead")
    if length > model.max_seq_len:
        what = f"fit.seq_len={length} is more than model.max_seq_len={model.max_seq_len}"
        fix = f"fit.seq_len={model.max_seq_len}, or a model whose rotary frequencies are scaled"
        yield _advise(True, what, fix)


def _advise_precision(training: Training) -> Iterator[Advice]:
    """Advise on what the GPU computes in."""
    precision, name = training.settings.precision, training.device.name
    gpu = find_gpu(name) if training.on_gpu else None
    if gpu and precision == "fp8" and gpu.fp8 is None:
        yield _advise(True, f"fit.precision=fp8, and a {name} computes no fp8", "fit.precision=mixed")
    if gpu and precision in ("bf16", "mixed") and "bf16" not in dict(gpu.peak_tflops):
        what = f"fit.precision={precision}, and a {name} has no fast bf16"
        yield _advise(True, what, "fp16 with loss scaling, which needs the same memory")
    if gpu and gpu.tf32 and precision == "fp32":
        fix = 'torch.set_float32_matmul_precision("high") for TF32, or fit.precision=mixed'
        gain = f"peaks: fp32 {gpu.fp32:g}, TF32 {gpu.tf32:g}, bf16 {gpu.bf16:g} TFLOPS"
        yield _advise(False, "fit.precision=fp32 leaves tensor cores unused", fix, gain)
    for key in ("hidden_size", "intermediate_size"):
        value = getattr(training.model, key)
        if precision == "fp8" and value % FP8_MULTIPLE:
            what = f"model.{key}={value} is no multiple of 16, which products in fp8 need"
            yield _advise(True, what, f"model.{key}={_round_up(value, FP8_MULTIPLE)}")


def _advise_links(training: Training) -> Iterator[Advice]:
    """Advise on groups that cross nodes or NVLink's domain."""
    layout, each, tp = training.layout, training.gpus_per_node, training.layout.tp
    domain = training.device.nvlink_domain or each
    if tp > domain:
        links = "PCIe" if tp <= each and each % tp == 0 else "the network"
        yield _advise(
            True,
            f"parallel.tp={tp} is more than the {domain} GPUs that NVLink or a node connects: four"
            f" all-reduces of each layer go over {links}",
            f"parallel.tp={domain} or less, and parallel.pp or parallel.zero for the rest",
            "Megatron-LM keeps tp within a node (arXiv:2104.04473, section 5)",
        )
    elif tp > 1 and training.nodes > 1 and each % tp and domain <= each:
        what = f"parallel.tp={tp} does not divide the {each} GPUs of a node: a group spans two nodes"
        yield _advise(True, what, "a divisor")
    overlap = "as long as the computation in DeepSeek-V3, which overlaps it (arXiv:2412.19437, 3.2.1)"
    for name, size, what, gain in (
        ("ep", layout.ep, "the all-to-alls of experts", overlap),
        ("cp", layout.cp, "the exchange of keys and values", ""),
    ):
        if size > 1 and size * tp > domain:
            yield _advise(
                name == "ep",
                f"parallel.{name}={size} with parallel.tp={tp} spans {size * tp} GPUs,"
                f" and NVLink or a node connects {domain}: {what} go over slower links",
                f"parallel.{name}={max(1, domain // tp)} or less, unless they are overlapped",
                gain,
            )


def _advise_schedule(training: Training) -> Iterator[Advice]:
    """Advise on the bubble of the pipeline, (pp - 1) / (v m + pp - 1), on uneven stages, on the micro-batch
    and attention.
    """
    settings, layout, layers = training.settings, training.layout, training.model.layers
    steps, chunks, idle = settings.accumulation, layout.pp * layout.virtual_stages, layout.pp - 1
    bubble = idle / (layout.virtual_stages * steps + idle)
    if bubble > LARGEST_BUBBLE:
        fix = f"fit.accumulation={-(-idle * 9 // layout.virtual_stages)} makes it 10%"
        if layout.virtual_stages == 1 and layers >= 2 * layout.pp:
            fix += ", or parallel.virtual_stages=2"
        shown = f"{steps} micro-step{'s' * (steps > 1)}"
        what = f"the pipeline of {layout.pp} stages idles {bubble:.0%} of a step of {shown}"
        yield _advise(True, what, fix, "share (pp - 1) / (v m + pp - 1) (arXiv:2104.04473, section 2.2)")
    if layout.pp > 1 and layout.virtual_stages > 1 and steps % layout.pp:
        what = f"fit.accumulation={steps} is no multiple of parallel.pp={layout.pp}, which Megatron-LM's"
        fix = f"fit.accumulation={_round_up(steps, layout.pp)}"
        yield _advise(True, f"{what} interleaved schedule needs", fix)
    if layout.pp > 1 and layers % chunks:
        what = f"model.layers={layers} over {chunks} stages is uneven: the largest has {-(-layers // chunks)}"
        fix = "a parallel.pp that divides the layers, or the ends of the pipeline with fewer layers"
        yield _advise(False, what, fix)
    tokens = settings.micro_batch * settings.seq_len // layout.cp
    if tokens < FEW_TOKENS and training.on_gpu:
        what = f"a micro-batch of {tokens} tokens a GPU is short for products of matrices"
        yield _advise(False, what, "a larger micro-batch if it fits: `launch tune batch` finds it")
    if tokens % TILE and training.on_gpu:
        what = f"a micro-batch has {tokens} tokens, no multiple of 64"
        yield _advise(False, what, "a sequence length of a power of two")
    if layout.zero == 3 and steps > 1 and layout.replicas > 1:
        what = f"sharded weights are gathered in each of fit.accumulation={steps} micro-steps"
        yield _advise(False, what, "a larger micro-batch and fewer micro-steps")
    if not settings.flash_attention and settings.seq_len >= FEW_TOKENS:
        what = f"without flash attention each layer keeps heads * seq_len^2 ({settings.seq_len}) weights"
        fix = "torch's scaled_dot_product_attention, or fit.flash_attention=true"
        yield _advise(True, what, fix, "attention 2 to 4 times as fast (arXiv:2205.14135)")


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Speed of one optimizer step and of the whole training; ranges are (low, high)."""

    parameters: int
    active_parameters: int
    tokens_per_step: int
    flops_per_step: float
    """Of the model, all GPUs: without recomputation."""
    peak_tflops: float | None
    """Dense, of one GPU at the precision; None if unknown."""
    peak_source: str
    step_seconds: tuple[float, float] | None = None
    """Expected; both ends are the measured one if there is one."""
    mfu: tuple[float, float] | None = None
    hfu: tuple[float, float] | None = None
    tflops: tuple[float, float] | None = None
    """Of one GPU, without recomputation."""
    total_seconds: tuple[float, float] | None = None
    """To the token budget."""
    gpu_hours: tuple[float, float] | None = None


BLACKWELL, HOPPER, AMPERE = (
    ("b200", "b300", "gb200", "gb300"),
    ("h100", "h200", "h800", "h20", "gh200"),
    ("a100", "a800"),
)
MFU_RANGES = (
    # torchtitan's Llama 3.1 8B 21% on B200 with a power limit (docs of mxfp8), 42% on GB200 (nvfp4);
    # Megatron-Bridge's Qwen3 235B 33%.
    (BLACKWELL, 0.20, 0.48, "B200 and GB200 runs of torchtitan, Megatron-Bridge; H100's at the high end"),
    # llm-foundry 26 to 46%; Llama 3.1 405B 38 to 43% (arXiv:2407.21783, table 4); torchtitan's Llama 3.1 8B
    # 33 to 39% (benchmarks/llama3_h100_202412_torchtitan.md); Megatron Core up to 47% (its README).
    (HOPPER, 0.26, 0.48, "H100 runs of llm-foundry, Llama 3.1, torchtitan, Megatron Core"),
    # torchtune's Llama 3.2 3B, compiled, 68 to 69% (its README); MosaicML's llm-foundry 36 to 64%
    # (scripts/train/benchmarking/README.md); torchtitan 50.5 to 61.1%
    # (docs/performance.md); LLaMA 65B 49% (arXiv:2302.13971: 380 tokens/s/GPU); MT-NLG 530B 30.2%
    # (arXiv:2204.02311, table 3); Megatron-LM 33 to 39% (arXiv:2104.04473, table 1: 44 to 52% with
    # recomputation); Korthikanti et al. 42 to 56% (arXiv:2205.05198, table 5).
    (AMPERE, 0.30, 0.70, "A100 runs of torchtune, llm-foundry, torchtitan, LLaMA, Megatron-LM"),
    (
        ("v100", "t4"),
        0.20,
        0.35,
        "V100 runs: GPT-3 21% (arXiv:2204.02311), Megatron-LM 30% (arXiv:1909.08053)",
    ),
)
"""First words of GPUs' names, and the low and high MFU of published runs on them."""
OTHER = (0.20, 0.50, "an assumption, since no published run on such a GPU is known here")
FP8 = (0.115, 0.43, "fp8 runs of llm-foundry, torchtitan, DeepSeek-V3, Megatron-Bridge, of the fp8 peak")
"""llm-foundry 14 to 30% of the fp8 peak; torchtitan's Llama 3.1 8B 12% eager, 25 to 32% compiled; DeepSeek-V3
22% (2.664M GPU-hours for 14.8T tokens, arXiv:2412.19437, table 1); Transformer Engine's recipes 37 to 42%
(Megatron-Bridge's performance summary, Megatron-LM's examples/llama)."""
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


def _find_mfu_range(training: Training, gpu: GpuType) -> tuple[float, float, str] | None:
    """Return what published runs reach on such a GPU, and which; None for fp32, which nobody publishes."""
    settings, first = training.settings, gpu.name.split()[0]
    if settings.precision == "fp32":
        return None
    found = next(((low, high, source) for names, low, high, source in MFU_RANGES if first in names), OTHER)
    low, high, source = FP8 if settings.precision == "fp8" and gpu.fp8 else found
    low *= SMALL_SHARE if count_model_parameters(training.model) < SMALL else 1
    low *= MIXTURE_SHARE if training.model.experts else 1
    low *= SPLIT_SHARE if max(training.layout.tp, training.layout.cp) > 1 else 1
    low *= QUANTIZED_SHARE if settings.quantization != "none" else 1
    high *= RECOMPUTING_SHARE if settings.checkpointing == "full" else 1
    return low, high, source


def estimate_speed(training: Training) -> SpeedEstimate:
    """Estimate speed: of the measured step if there is one, else by what published runs reach."""
    settings, model, gpus = training.settings, training.model, training.layout.world_size
    measured, early_stop = training.step_seconds, settings.framework != "megatron"
    of_token, done = (
        count_token_flops(
            model, settings.seq_len, kind, early_stop=early_stop, is_frozen=settings.lora is not None
        )
        for kind in ("none", settings.checkpointing)
    )
    again, tokens = done / of_token, training.step_sequences * settings.seq_len
    flops = float(of_token) * tokens
    gpu = find_gpu(training.device.name) if training.on_gpu else None
    peak = gpu.find_precision_peak(settings.precision) if gpu else None
    published = _find_mfu_range(training, gpu) if gpu else None
    ideal = flops / (peak * 1e12 * gpus) if peak else None
    source = (
        f"{gpu.source}{f'; range: {published[2]}' if published and measured is None else ''}" if gpu else ""
    )
    found = SpeedEstimate(
        parameters=count_model_parameters(model),
        active_parameters=count_active_parameters(model),
        tokens_per_step=tokens,
        flops_per_step=flops,
        peak_tflops=peak,
        peak_source=source,
    )
    if measured is not None and measured > 0:
        low, high = measured, measured
    elif ideal is not None and published is not None:
        low, high = ideal / published[1], ideal / published[0]
    else:
        return found
    mfu, each = (ideal / high, ideal / low) if ideal is not None else None, flops / gpus / 1e12
    total = hours = None
    if training.tokens is not None:
        steps = training.tokens / tokens
        total = (steps * low, steps * high)
        hours = (total[0] * (gpus / 3600), total[1] * (gpus / 3600))
    return replace(
        found,
        step_seconds=(low, high),
        mfu=mfu,
        hfu=(mfu[0] * again, mfu[1] * again) if mfu else None,
        tflops=(each / high, each / low),
        total_seconds=total,
        gpu_hours=hours,
    )
