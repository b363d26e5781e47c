"""What a job needs of its nodes, and what makes it slow: the node's budget, and advice on shapes and layouts.

Budget: the book "Machine Learning Engineering" (S. Bekman, chapters on CPUs and CPU memory):
`gpus * (workers + 1) + 4` cores, and at least as much CPU memory as the GPUs have together. Advice: NVIDIA's
"Matrix Multiplication Background User's Guide" (dimensions in multiples of 8 elements of 16 bits for tensor
cores, of 64 on an A100); "The Case for Co-Designing Model Architectures with Hardware" (arXiv:2401.14489);
the same book; others beside the rule.
"""

from collections.abc import Iterator

from launcher.fit.fit_model import Advice, BudgetLine, FitRequest, ModelDimensions
from launcher.fit.gpu_table import find_gpu
from launcher.fit.memory_estimate import count_kept
from launcher.fit.parameter_counts import count_model_parameters, count_token_flops
from launcher.plan.rules import count_node_cores

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


def budget_node(request: FitRequest) -> tuple[BudgetLine, ...]:
    """Return a line for each resource of a node; for ranks on CPUs, memory and /dev/shm alone."""
    lines = [budget_memory(request), budget_shared_memory(request)]
    return tuple(lines if request.device.kind == "cpu" else [budget_cores(request), *lines])


def budget_cores(request: FitRequest) -> BudgetLine:
    """Return the line of CPU cores: one for a rank's process and for each worker, and the system's."""
    gpus, workers, cores = request.gpus_per_node, request.node.num_workers, request.node.cores
    needed = count_node_cores(gpus, workers)
    system = needed - gpus * (workers + 1)
    enough = cores is None or cores >= needed
    most = max(0, ((cores or 0) - system) // gpus - 1)
    fix = f"dataloader.num_workers={most}" if most < workers else ""
    note = f"{gpus} x (1 + {workers} workers) + {system}"
    if request.settings.offload != "none":
        note += "; more for the optimizer on CPUs"
    fix = "" if enough else f"{fix}, or ask for {needed} cores (cluster.cpus_per_task)".removeprefix(", or ")
    return BudgetLine("CPU cores", needed, cores, "cores", enough, note, fix)


def budget_memory(request: FitRequest) -> BudgetLine:
    """Return the line of CPU memory, in GiB: what the job's parts sum to, and at least the GPUs' memory."""
    parts = dict(list_memory(request))
    needed, note = (
        sum(parts.values()),
        ", ".join(f"{name} {gib:.0f}" for name, gib in parts.items() if gib >= 0.5),
    )
    gpus = request.gpus_per_node * request.device.memory_mib / 1024 if request.device.kind == "gpu" else 0
    if gpus > needed:
        needed, note = gpus, f"the GPUs' sum; {note}"
    kib = request.node.memory_kib
    available = None if kib is None else kib / (1 << 20)
    enough = available is None or available >= needed
    return BudgetLine(
        "CPU memory", needed, available, "GiB", enough, note, "" if enough else advise_memory(request, parts)
    )


def list_memory(request: FitRequest) -> Iterator[tuple[str, float]]:
    """Give what takes CPU memory on a node, in GiB."""
    node, ranks = request.node, request.gpus_per_node
    if request.device.kind == "gpu":  # on CPUs, the ranks' memory is the estimate's
        yield "system", SYSTEM_GIB
        yield "ranks", ranks * PROCESS_GIB
    yield "workers", ranks * node.num_workers * (node.worker_gib or WORKER_GIB)
    yield "offload", count_offloaded(request) / GIB
    if request.settings.activation_offload:
        yield "activations", ranks * count_kept(request).expected * PINNED_ROUNDING / GIB
    yield "checkpoint on rank 0", count_gathered(request) / GIB


def count_offloaded(request: FitRequest) -> float:
    """Return the bytes of states that a node keeps in CPU memory, pinned."""
    parameters, layout = count_model_parameters(request.model), request.layout
    copies = 1 if layout.zero else layout.dp * layout.cp
    share = min(1.0, request.gpus_per_node * copies / layout.world_size)
    return OFFLOADED.get(request.settings.offload, 0) * parameters * share * PINNED_ROUNDING


def count_gathered(request: FitRequest) -> int:
    """Return the bytes of a full checkpoint that rank 0 gathers; 0 for a program that saves in shards.

    The bundled program saves by torch.distributed.checkpoint, Megatron its own shards.
    """
    if request.is_bundled or request.settings.framework == "megatron" or request.layout.zero < 3:
        return 0
    return MASTER_BYTES * count_model_parameters(request.model)


def advise_memory(request: FitRequest, parts: dict[str, float]) -> str:
    """Say what to change if CPU memory is short, by what takes most of it."""
    largest = max(parts, key=lambda name: parts[name])
    if largest == "activations":
        return "fit.activation_offload=false, or fit.checkpointing=full: less is kept"
    if largest == "offload":
        return "more nodes share the states (nodes=N), or fit.offload=none"
    if largest == "workers":
        return "fewer workers (dataloader.num_workers=N)"
    if largest.startswith("checkpoint"):
        return "save in shards (torch.distributed.checkpoint)"
    return "ask for more (cluster.mem=0 is all of a node)"


def budget_shared_memory(request: FitRequest) -> BudgetLine:
    """Return the line of /dev/shm, in GiB: batches of the workers, and NCCL's transports."""
    ranks, workers, settings = request.gpus_per_node, request.node.num_workers, request.settings
    batches = ranks * workers * PREFETCHED * settings.micro_batch * settings.seq_len * TOKEN_BYTES
    nccl = ranks * NCCL_MIB << 20 if ranks > 1 and request.device.kind == "gpu" else 0
    needed = (batches + nccl) / GIB
    available = None if request.node.shm_kib is None else request.node.shm_kib / (1 << 20)
    enough = available is None or available >= needed
    note = "batches of text, NCCL" if nccl else "batches of text"
    fix = "" if enough else "a larger /dev/shm (docker: --shm-size), or dataloader.num_workers=0"
    return BudgetLine(SHARED_MEMORY, needed, available, "GiB", enough, note, fix)


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


def advise(request: FitRequest) -> tuple[Advice, ...]:
    """Give advice, warnings first."""
    found = [*advise_model(request), *advise_precision(request), *advise_links(request)]
    found += [*advise_pipeline(request), *advise_batch(request)]
    return tuple(sorted(found, key=lambda one: one.level != "warning"))


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def advise_model(request: FitRequest) -> Iterator[Advice]:
    """Advise on the model's dimensions."""
    model, tp = request.model, request.layout.tp
    if request.device.kind == "gpu":
        yield from advise_vocabulary(model, tp, request.settings.seq_len)
        yield from advise_heads(model)
        yield from advise_widths(model, tp)
    if tp > 1 and model.hidden_size // tp < NARROW:
        yield Advice(
            "note",
            f"parallel.tp={tp} leaves each GPU {model.hidden_size // tp} of model.hidden_size="
            f"{model.hidden_size}: its products are narrow",
            "a smaller parallel.tp, with the states sharded by parallel.zero instead",
        )
    most, length = model.max_seq_len, request.settings.seq_len
    if length > most:
        yield Advice(
            "warning",
            f"fit.seq_len={length} is more than model.max_seq_len={most}",
            f"fit.seq_len={most}, or a model whose rotary frequencies are scaled",
        )


def advise_vocabulary(model: ModelDimensions, tp: int, seq_len: int) -> Iterator[Advice]:
    """Advise to pad the vocabulary."""
    multiple = TILE * tp
    if model.vocab_size % multiple == 0:
        return
    padded = round_up(model.vocab_size, multiple)
    share = 6 * model.vocab_size * model.hidden_size / count_token_flops(model, seq_len)
    gain = f"the output layer is {share:.0%} of the operations"
    if model.vocab_size % LEAST_MULTIPLE:
        gain += "; 25% of GPT-2's step by 50257 to 50304 (A. Karpathy, nanoGPT)"
    level = "warning" if model.vocab_size % LEAST_MULTIPLE and share > 0.02 else "note"
    of_tp = f" (64 * parallel.tp={tp})" if tp > 1 else ""
    what = f"model.vocab_size={model.vocab_size} is no multiple of {multiple}{of_tp}"
    yield Advice(level, what, f"pad it to {padded}", gain)


def advise_heads(model: ModelDimensions) -> Iterator[Advice]:
    """Advise on the width of a head."""
    width = model.head_width
    if width > LARGEST_HEAD:
        yield Advice(
            "warning",
            f"heads are {width} wide, and FlashAttention-2 has none wider than {LARGEST_HEAD}",
            "more heads of 64 or 128",
        )
    elif width % LEAST_MULTIPLE:
        yield Advice(
            "warning",
            f"heads are {width} wide, no multiple of 8: attention does without fast kernels",
            "heads of 64 or 128",
            "up to 39% of a step by efficient shapes (arXiv:2401.14489)",
        )
    elif width % TILE:
        yield Advice(
            "note",
            f"heads are {width} wide, no multiple of 64",
            "heads of 64 or 128",
            "heads of 64 and 128 use tensor cores best (arXiv:2401.14489)",
        )


def advise_widths(model: ModelDimensions, tp: int) -> Iterator[Advice]:
    """Advise on the hidden size and on the widths inside MLP and experts."""
    widths = {"model.hidden_size": (model.hidden_size, 1)}
    if model.experts is not None:
        widths["model.experts.intermediate_size"] = (model.experts.intermediate_size, 1)
    if model.experts is None or model.experts.dense_layers:
        widths["model.intermediate_size"] = (model.intermediate_size, tp)
    for key, (width, parts) in widths.items():
        if width % (TILE * parts):
            yield advise_width(key, width, parts, is_swiglu=model.mlp == "swiglu")


def advise_width(key: str, width: int, parts: int, *, is_swiglu: bool) -> Advice:
    """Advise to round a width of a matrix, of which each GPU has a part."""
    near = max(1, round(width / (TILE * parts))) * TILE * parts
    bad = width % (LEAST_MULTIPLE * parts)
    gain = ""
    if is_swiglu and key.endswith("intermediate_size") and bad:
        gain = "SwiGLU's 10922 to 10944: 273 to 398 TFLOPS on an H100 (S. Bekman)"
    what = f"{key}={width} is no multiple of {TILE}"
    if parts > 1:
        what = f"{key}={width} over parallel.tp={parts} is {width / parts:g}, no multiple of {TILE}"
    return Advice("warning" if bad else "note", what, f"{key}={near}", gain)


def advise_precision(request: FitRequest) -> Iterator[Advice]:
    """Advise on what the GPU computes in."""
    settings, device, model = request.settings, request.device, request.model
    gpu = find_gpu(device.name) if device.kind == "gpu" else None
    names = dict(gpu.peak_tflops) if gpu else {}
    if gpu and settings.precision == "fp8" and gpu.fp8 is None:
        yield Advice(
            "warning", f"fit.precision=fp8, and a {device.name} computes no fp8", "fit.precision=mixed"
        )
    if gpu and settings.precision in ("bf16", "mixed") and "bf16" not in names:
        yield Advice(
            "warning",
            f"fit.precision={settings.precision}, and a {device.name} has no fast bf16",
            "fp16 with loss scaling, which needs the same memory",
        )
    if gpu and gpu.tf32 and settings.precision == "fp32":
        yield Advice(
            "note",
            "fit.precision=fp32 leaves tensor cores unused",
            'torch.set_float32_matmul_precision("high") for TF32, or fit.precision=mixed',
            f"peaks: fp32 {gpu.fp32:g}, TF32 {gpu.tf32:g}, bf16 {gpu.bf16:g} TFLOPS",
        )
    for name in ("hidden_size", "intermediate_size"):
        if settings.precision == "fp8" and getattr(model, name) % FP8_MULTIPLE:
            value = getattr(model, name)
            yield Advice(
                "warning",
                f"model.{name}={value} is no multiple of 16, which products in fp8 need",
                f"model.{name}={round_up(value, FP8_MULTIPLE)}",
            )


def advise_links(request: FitRequest) -> Iterator[Advice]:
    """Advise on groups that cross nodes or NVLink's domain."""
    layout, each = request.layout, request.gpus_per_node
    domain = request.device.nvlink_domain or each
    if layout.tp > domain:
        within = layout.tp <= each and each % layout.tp == 0
        yield Advice(
            "warning",
            f"parallel.tp={layout.tp} is more than the {domain} GPUs that NVLink or a node connects: four"
            f" all-reduces of each layer go over {'PCIe' if within else 'the network'}",
            f"parallel.tp={domain} or less, and parallel.pp or parallel.zero for the rest",
            "Megatron-LM keeps tp within a node (arXiv:2104.04473, section 5)",
        )
    elif layout.tp > 1 and request.nodes > 1 and each % layout.tp and domain <= each:
        yield Advice(
            "warning",
            f"parallel.tp={layout.tp} does not divide the {each} GPUs of a node: a group spans two nodes",
            "a divisor",
        )
    for name, what in (("ep", "the all-to-alls of experts"), ("cp", "the exchange of keys and values")):
        size = getattr(layout, name) * layout.tp
        if getattr(layout, name) > 1 and size > domain:
            yield Advice(
                "warning" if name == "ep" else "note",
                f"parallel.{name}={getattr(layout, name)} with parallel.tp={layout.tp} spans {size} GPUs,"
                f" and NVLink or a node connects {domain}: {what} go over slower links",
                f"parallel.{name}={max(1, domain // layout.tp)} or less, unless they are overlapped",
                "as long as the computation in DeepSeek-V3, which overlaps it (arXiv:2412.19437, 3.2.1)"
                if name == "ep"
                else "",
            )


def advise_pipeline(request: FitRequest) -> Iterator[Advice]:
    """Advise on the bubble of the pipeline, (pp - 1) / (v m + pp - 1), and on uneven stages."""
    layout, micro_steps = request.layout, request.settings.accumulation
    if layout.pp == 1:
        return
    idle = layout.pp - 1
    bubble = idle / (layout.virtual_stages * micro_steps + idle)
    if bubble > LARGEST_BUBBLE:
        enough = -(-idle * 9 // layout.virtual_stages)
        steps = "1 micro-step" if micro_steps == 1 else f"{micro_steps} micro-steps"
        fix = f"fit.accumulation={enough} makes it 10%"
        if layout.virtual_stages == 1 and request.model.layers >= 2 * layout.pp:
            fix += ", or parallel.virtual_stages=2"
        yield Advice(
            "warning",
            f"the pipeline of {layout.pp} stages idles {bubble:.0%} of a step of {steps}",
            fix,
            "share (pp - 1) / (v m + pp - 1) (arXiv:2104.04473, section 2.2)",
        )
    if layout.virtual_stages > 1 and micro_steps % layout.pp:
        yield Advice(
            "warning",
            f"fit.accumulation={micro_steps} is no multiple of parallel.pp={layout.pp}, which Megatron-LM's"
            " interleaved schedule needs",
            f"fit.accumulation={round_up(micro_steps, layout.pp)}",
        )
    chunks = layout.pp * layout.virtual_stages
    if request.model.layers % chunks:
        most = -(-request.model.layers // chunks)
        yield Advice(
            "note",
            f"model.layers={request.model.layers} over {chunks} stages is uneven: the largest has {most}",
            "a parallel.pp that divides the layers, or the ends of the pipeline with fewer layers",
        )


def advise_batch(request: FitRequest) -> Iterator[Advice]:
    """Advise on the micro-batch, accumulation and attention."""
    settings, layout = request.settings, request.layout
    tokens = settings.micro_batch * settings.seq_len // layout.cp
    if tokens < FEW_TOKENS and request.device.kind == "gpu":
        yield Advice(
            "note",
            f"a micro-batch of {tokens} tokens a GPU is short for products of matrices",
            "a larger micro-batch if it fits: `launch tune batch` finds it",
        )
    if tokens % TILE and request.device.kind == "gpu":
        yield Advice(
            "note",
            f"a micro-batch has {tokens} tokens, no multiple of 64",
            "a sequence length of a power of two",
        )
    if layout.zero == 3 and settings.accumulation > 1 and layout.dp * layout.cp > 1:
        yield Advice(
            "note",
            f"sharded weights are gathered in each of fit.accumulation={settings.accumulation} micro-steps",
            "a larger micro-batch and fewer micro-steps",
        )
    if not settings.flash_attention and settings.seq_len >= FEW_TOKENS:
        yield Advice(
            "warning",
            f"without flash attention each layer keeps heads * seq_len^2 ({settings.seq_len}) weights",
            "torch's scaled_dot_product_attention, or fit.flash_attention=true",
            "attention 2 to 4 times as fast (arXiv:2205.14135)",
        )
