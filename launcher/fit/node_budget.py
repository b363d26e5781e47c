"""What a job needs of each node's CPU cores, CPU memory and /dev/shm, against what it has.

Rules of the ml-engineering book (S. Bekman, chapters on CPUs and CPU memory): `gpus * (workers + 1) + 4`
cores, and at least as much CPU memory as the GPUs have together.
"""

from collections.abc import Iterator

from launcher.fit.fit_model import BudgetLine, FitRequest
from launcher.fit.memory_estimate import count_kept
from launcher.fit.parameter_counts import count_model_parameters
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
