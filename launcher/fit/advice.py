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
from launcher.fit.gpus import find_gpu
from launcher.fit.memory import count_kept
from launcher.fit.training import Training, read_rules
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
LARGEST_BUBBLE = 0.1
LONG_SEQUENCE = 2048
"""Tokens from which on attention without a flash kernel costs much."""


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
    workers, on_gpu, cores = node.num_workers, training.on_gpu, count_node_cores(ranks, node.num_workers)
    parameters = count_model_parameters(training.model)
    # States in CPU memory are pinned.
    share = min(1.0, ranks * (1 if layout.zero else layout.replicas) / layout.world_size)
    # The bundled program saves by torch.distributed.checkpoint, Megatron its own shards.
    in_shards = training.is_bundled or layout.framework == "megatron" or layout.zero < 3
    kept = count_kept(training).expected if settings.activation_offload else 0
    parts = {
        # On CPUs, the ranks' memory is the estimate's.
        "system": SYSTEM_GIB * on_gpu,
        "ranks": ranks * PROCESS_GIB * on_gpu,
        "workers": ranks * workers * (node.worker_gib or WORKER_GIB),
        "offload": OFFLOADED.get(settings.offload, 0) * parameters * share * PINNED_ROUNDING / GIB,
        "activations": ranks * kept * PINNED_ROUNDING / GIB,
        "checkpoint on rank 0": 0 if in_shards else MASTER_BYTES * parameters / GIB,
    }
    memory, gpus = sum(parts.values()), ranks * training.device.memory_mib / 1024 * on_gpu
    note = ", ".join(f"{name} {gib:.0f}" for name, gib in parts.items() if gib >= 0.5)
    shm = ranks * workers * PREFETCHED * settings.micro_batch * settings.seq_len * TOKEN_BYTES
    shm += ranks * NCCL_MIB << 20 if ranks > 1 and on_gpu else 0
    few_workers, more = "fewer workers (dataloader.num_workers)", "ask for more"
    rows = (
        (
            *("CPU cores", cores, node.cores, "cores"),
            f"{ranks} x (1 + {workers} workers), and the system's",
            f"{few_workers}, or {more} (cluster.cpus_per_task={workers + 1})",
        ),
        (
            *("CPU memory", max(gpus, memory), node.memory_kib and node.memory_kib / (1 << 20), "GiB"),
            f"the GPUs' sum; {note}" if gpus > memory else note,
            f"less of these, or {more} (cluster.mem=0 is all of a node)",
        ),
        (
            *(SHARED_MEMORY, shm / GIB, node.shm_kib and node.shm_kib / (1 << 20), "GiB"),
            "batches of text, NCCL",
            f"{few_workers}, or a larger /dev/shm (docker: --shm-size)",
        ),
    )
    return tuple(
        BudgetLine(name, needed, has, unit, enough, said, "" if enough else fix)
        for name, needed, has, unit, said, fix in (rows if on_gpu else rows[1:])
        for enough in (has is None or has >= needed,)
    )


@dataclass(frozen=True, slots=True)
class Advice:
    """Something about the settings that a person should know."""

    level: str
    """`warning` (it will cost) or `note`."""
    what: str
    fix: str


def advise(training: Training) -> tuple[Advice, ...]:
    """Give advice, warnings first."""
    parts = {name: getattr(training, name) for name in ("model", "layout", "settings", "device")}
    found = []
    for rule, values in _find_faults(training):
        texts = read_rules()["advice"][rule]
        found.append(Advice(*(texts[name].format(**parts, **values) for name in ("level", "what", "fix"))))
    return tuple(sorted(found, key=lambda one: one.level != "warning"))


def _find_faults(training: Training) -> Iterator[tuple[str, dict[str, object]]]:
    """Give the rules that shapes, the precision, groups of GPUs or the pipeline break, with their values."""
    model, settings, layout, device = training.model, training.settings, training.layout, training.device
    precision, experts, tp = settings.precision, model.experts, layout.tp
    gpu = find_gpu(device.name) if training.on_gpu else None
    broken = {
        "long": settings.seq_len > model.max_seq_len,
        "no_flash": not settings.flash_attention and settings.seq_len >= LONG_SEQUENCE,
        "no_fp8": gpu and precision == "fp8" and gpu.fp8 is None,
        # TF32 and bf16 came with the same generation.
        "no_bf16": gpu and precision in ("bf16", "mixed") and gpu.tf32 is None,
        "no_tensor_cores": gpu and precision == "fp32" and gpu.tf32,
    }
    yield from ((rule, {}) for rule, is_broken in broken.items() if is_broken)
    widths = {
        "vocab_size": (model.vocab_size, tp),
        "hidden_size": (model.hidden_size, 1),
        "head_width": (model.head_width, 1),
    }
    if experts is not None:
        widths["experts.intermediate_size"] = (experts.intermediate_size, 1)
    if experts is None or experts.dense_layers:
        widths["intermediate_size"] = (model.intermediate_size, tp)
    for key, (width, pieces) in widths.items() if training.on_gpu else ():
        multiple = TILE * pieces
        values = {"key": key, "width": width, "multiple": multiple, "near": -(-width // multiple) * multiple}
        values["of_tp"] = f" (64 * parallel.tp={pieces})" if pieces > 1 else ""
        values["level"] = "warning" if width % (LEAST_MULTIPLE * pieces) else "note"
        if width % multiple:
            yield "width", values
    domain = device.nvlink_domain or training.gpus_per_node
    for name, size, inner, exchanged in (
        ("tp", tp, 1, "four all-reduces of each layer"),
        ("ep", layout.ep, tp, "the all-to-alls of experts"),
        ("cp", layout.cp, tp, "the exchange of keys and values"),
    ):
        values = {"name": name, "size": size, "gpus": size * inner, "domain": domain, "exchanged": exchanged}
        values |= {"level": "note" if name == "cp" else "warning", "most": max(1, domain // inner)}
        if size > 1 and size * inner > domain:
            yield "crossing", values
    steps, chunks, idle = settings.accumulation, layout.virtual_stages, layout.pp - 1
    if (bubble := idle / (chunks * steps + idle)) > LARGEST_BUBBLE:
        yield "bubble", {"bubble": bubble, "enough": -(-idle * 9 // chunks)}
    if layout.pp > 1 and chunks > 1 and steps % layout.pp:
        yield "interleaved", {"even": -(-steps // layout.pp) * layout.pp}


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


def estimate_speed(training: Training) -> SpeedEstimate:
    """Estimate speed: of the measured step if there is one, else by what published runs reach.

    Nobody publishes runs in fp32.
    """
    settings, model, layout = training.settings, training.model, training.layout
    parameters, gpus, seconds, peak, source = count_model_parameters(model), layout.world_size, None, None, ""
    of_token, done = (
        count_token_flops(
            *(model, settings.seq_len, kind),
            early_stop=layout.framework != "megatron",
            is_frozen=settings.lora.rank is not None,
        )
        for kind in ("none", settings.checkpointing)
    )
    again, tokens = done / of_token, training.step_sequences * settings.seq_len
    flops, ideal = float(of_token) * tokens, None
    if gpu := find_gpu(training.device.name) if training.on_gpu else None:
        peak, source = gpu.find_precision_peak(settings.precision), gpu.source
        ideal = flops / (peak * 1e12 * gpus)
    if settings.step_seconds is not None:
        seconds = (settings.step_seconds, settings.step_seconds)
    elif gpu and ideal and settings.precision != "fp32":
        is_fp8 = settings.precision == "fp8" and gpu.fp8
        low, high, runs = read_rules()["speed"]["fp8" if is_fp8 else gpu.runs]
        low *= SMALL_SHARE if parameters < SMALL else 1
        low *= MIXTURE_SHARE if model.experts else 1
        low *= SPLIT_SHARE if max(layout.tp, layout.cp) > 1 else 1
        low *= QUANTIZED_SHARE if settings.quantization != "none" else 1
        high *= RECOMPUTING_SHARE if settings.checkpointing == "full" else 1
        seconds, source = (ideal / high, ideal / low), f"{source}; range: {runs}"
    counts = (parameters, count_active_parameters(model), tokens)
    found = SpeedEstimate(*counts, flops, peak, source, seconds)
    if seconds is None:
        return found
    low, high = seconds
    mfu, each = (ideal / high, ideal / low) if ideal is not None else None, flops / gpus / 1e12
    steps = None if settings.tokens is None else settings.tokens / tokens
    return replace(
        found,
        mfu=mfu,
        hfu=(mfu[0] * again, mfu[1] * again) if mfu else None,
        tflops=(each / high, each / low),
        total_seconds=None if steps is None else (steps * low, steps * high),
        gpu_hours=None if steps is None else (steps * low * gpus / 3600, steps * high * gpus / 3600),
    )
