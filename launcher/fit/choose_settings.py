"""What the bundled program computes with if nobody says: the fastest setting whose high estimate fits."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from launcher.fit.fit_model import Change, FitRequest, GridCell, Range
from launcher.fit.speed_estimate import estimate_speed

GIB = 1 << 30
UNKNOWN_MEMORY = 8 * GIB
"""Of a device that does not tell: a small slice of a GPU has it."""
ENOUGH_TOKENS = 8192
"""Of a micro-step: more of them make the matrix products of a GPU little faster."""
MOST_TOKENS = 65536
"""Of a micro-step that is chosen."""
DEFAULT_BATCH = 8
"""Sequences of a micro-step at most, and one micro-step, without a global batch."""
MOST_NODES = 4096
"""Of the search for nodes that are enough."""
NAMES = tuple(
    f"program.{name}" for name in ("batch_size", "activation_checkpointing", "parallel", "grad_accumulation")
)
OTHER_NAMES = ("fit.micro_batch", "fit.checkpointing", "parallel.framework", "fit.accumulation")
"""The same of a program that the bundled one cannot stand for."""
SPARE = 0.02
"""Share of a device's memory that the choice leaves: the driver keeps some of the total that it reports. Of
79.65 GiB of an H100 torch has 79.1, of 40 of an A100 39.4, of 22.5 of an A10G 22.1, as its errors say."""
LADDER = ("none", "selective", "full")
"""From the fastest to the one that keeps least: about 3% and 30% slower (arXiv:2205.05198)."""


def choose_settings(request: FitRequest, estimate: Callable[[FitRequest], Range]) -> FitRequest:
    """Return a request with what is free chosen; what is not keeps its value.

    As little recomputation as lets ENOUGH_TOKENS fit, or all that the global batch asks for, with DDP before
    FSDP; if nothing does, the largest micro-batch that fits; if nothing fits, what takes least. What fits
    leaves SPARE of the device.
    """
    free = request.free
    capacity = (1 - SPARE) * ((request.device.memory_mib << 20) or UNKNOWN_MEMORY)
    best: FitRequest | None = None
    for checkpointing in LADDER if free.checkpointing else (request.settings.checkpointing,):
        for framework in list_frameworks(request):
            sizes = list_micro_batches(request)
            for size in sizes:
                one = set_up(request, (size, checkpointing, framework))
                if estimate(one).high <= capacity:
                    break
            else:
                continue
            if size == sizes[0] or size * request.settings.seq_len >= ENOUGH_TOKENS:
                return one
            if best is None or size > best.settings.micro_batch:
                best = one
    if best:
        return best
    checkpointing = LADDER[-1] if free.checkpointing else request.settings.checkpointing
    least = list_micro_batches(request)[-1]
    return set_up(request, (least, checkpointing, [*list_frameworks(request)][-1]))


def list_frameworks(request: FitRequest) -> Iterator[str]:
    """Give `ddp` before `fsdp`; one process has nobody to share with."""
    if not request.free.parallel:
        yield request.settings.framework
        return
    yield "ddp"
    if request.layout.world_size > 1:
        yield "fsdp"


def list_micro_batches(request: FitRequest) -> list[int]:
    """List sizes from the largest that makes sense down to 1: those that give the global batch, if any do."""
    settings, sequences = request.settings, request.free.sequences
    if not request.free.micro_batch:
        return [settings.micro_batch]
    most = DEFAULT_BATCH
    if sequences:
        ranks = request.layout.dp * (1 if request.free.accumulation else settings.accumulation)
        most = min(max(1, MOST_TOKENS // settings.seq_len), -(-sequences // ranks))
        if sequences % ranks == 0:
            return [size for size in range(most, 0, -1) if sequences // ranks % size == 0]
    return [1 << power for power in reversed(range(most.bit_length()))]


def set_up(request: FitRequest, chosen: tuple[int, str, str]) -> FitRequest:
    """Return a request with these settings, and micro-steps for the global batch."""
    size, checkpointing, framework = chosen
    settings, sequences = request.settings, request.free.sequences
    steps = settings.accumulation
    if request.free.accumulation:
        steps = max(1, round(sequences / (size * request.layout.dp))) if sequences else 1
    settings = replace(
        settings,
        micro_batch=size,
        accumulation=steps,
        checkpointing=checkpointing,
        framework=framework,
        autocast=settings.precision == "mixed" and framework == "ddp",
    )
    zero = {"ddp": 0, "fsdp": 3}.get(framework, request.layout.zero)
    return replace(request, settings=settings, layout=replace(request.layout, zero=zero))


def list_grid(request: FitRequest, estimate: Callable[[FitRequest], Range]) -> Iterator[GridCell]:
    """Give micro-batches by checkpointing by sharding, with the global batch of a request."""
    settings, layout = request.settings, request.layout
    batch = settings.micro_batch * settings.accumulation * layout.dp
    kinds = ("ddp", "fsdp") if 1 < layout.world_size == layout.dp else ()
    most = min(max(1, MOST_TOKENS // settings.seq_len), max(1, batch // layout.dp))
    sizes = {1 << power for power in range(most.bit_length())} | {settings.micro_batch}
    free = replace(request.free, accumulation=True, sequences=batch)
    current = (settings.micro_batch, settings.checkpointing, settings.framework)
    for size in sorted(sizes):
        for checkpointing in LADDER:
            for framework in kinds if settings.framework in kinds else (settings.framework,):
                cell = (size, checkpointing, framework)
                one = request if cell == current else set_up(replace(request, free=free), cell)
                if framework == settings.framework:
                    one = replace(one, layout=layout)
                speed = estimate_speed(one)
                seconds = speed.step_seconds
                tokens = (
                    (speed.tokens_per_step / seconds[1], speed.tokens_per_step / seconds[0])
                    if seconds
                    else None
                )
                yield GridCell(*cell, estimate(one), tokens, cell == current)


def describe_choice(request: FitRequest, total: Range) -> str:
    """Say in a line what was chosen, and why."""
    settings, layout = request.settings, request.layout
    known = request.device.memory_mib << 20
    capacity = known or UNKNOWN_MEMORY
    steps, length = settings.accumulation, settings.seq_len
    batch = settings.micro_batch * steps * layout.dp
    tokens = settings.micro_batch * length
    free = request.free
    why = f"at most {total.high / GIB:.1f} of {capacity / GIB:.1f} GiB"
    if total.high > capacity:
        why = f"nothing takes less; {why}"
    elif free.checkpointing and settings.checkpointing != "none":
        fewer = (
            f"fewer than {min(ENOUGH_TOKENS, tokens):,} tokens fit" if free.micro_batch else "it does not fit"
        )
        why += f"; without recomputation {fewer}"
    if not known:
        why += f"; the memory of {request.device.name} is not known, and taken as {capacity / GIB:.0f} GiB"
    names = NAMES if request.is_bundled else OTHER_NAMES
    values = (settings.micro_batch, settings.checkpointing, settings.framework, steps)
    is_free = (free.micro_batch, free.checkpointing, free.parallel, free.accumulation)
    chosen = " ".join(
        f"{name}={value}" for name, value, may in zip(names, values, is_free, strict=True) if may
    )
    return f"chosen: {chosen} ({batch} sequences of {length}, {batch * length:,} tokens a step): {why}"


def find_least_nodes(request: FitRequest, estimate: Callable[[FitRequest], Range]) -> Change | None:
    """Return the smallest number of nodes with which a job fits, chosen anew; None if none is known."""
    capacity, each = request.device.memory_mib << 20, request.layout.dp // request.nodes

    def fit_on(nodes: int) -> Change | None:
        wider = replace(request, nodes=nodes, layout=replace(request.layout, dp=each * nodes))
        total = estimate(choose_settings(wider, estimate))
        why = f"states are sharded over {nodes} nodes, the fewest that are enough"
        return Change((f"nodes={nodes}",), why, total) if total.high <= capacity else None

    low, high = request.nodes, 2 * request.nodes
    while (found := fit_on(high)) is None:
        if high >= MOST_NODES:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if one := fit_on(middle):
            high, found = middle, one
        else:
            low = middle
    return found
