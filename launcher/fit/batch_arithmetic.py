"""What has to divide what: GPUs of a job, batches, heads, layers, experts, sequences.

All errors are UsageError with the value, the rule, and the nearest settings that work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from launcher.errors import UsageError
from launcher.fit.fit_model import FitRequest

LARGEST_SETTING = 10**12
"""No count of GPUs, sequences or tokens of a step is larger; products of them are still exact."""
MOST_TRIED = 10_000
"""Values that are tried in search of a near divisor."""
PRODUCT = "fit.micro_batch * parallel.dp * fit.accumulation"
SHARDED_BY = {"ddp": (0,), "fsdp": (2, 3), "zero": (0, 1, 2, 3), "megatron": (0, 1, 2, 3)}
"""Stages of `parallel.zero` that a framework has."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """global_batch = micro_batch * dp * accumulation, in sequences."""

    micro_batch: int
    dp: int
    accumulation: int
    global_batch: int


def solve_batch(
    *,
    micro_batch: int | None = None,
    dp: int | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
) -> BatchSizes:
    """Solve global_batch = micro_batch * dp * accumulation for what is None.

    Without a global batch, None is 1. With one, accumulation is solved first, then dp, then the micro-batch;
    others that are None are 1. Raises UsageError with the nearest settings if there is no whole solution.
    """
    keys = {"fit.micro_batch": micro_batch, "parallel.dp": dp, "fit.accumulation": accumulation}
    if global_batch is not None:
        keys = solve_global(keys, global_batch)
    micro, replicas, steps = (value or 1 for value in keys.values())
    product = micro * replicas * steps
    check_product(product)
    return BatchSizes(micro, replicas, steps, product)


def solve_global(keys: dict[str, int | None], global_batch: int) -> dict[str, int | None]:
    """Fill in the factors of a global batch that are None; raises UsageError."""
    missing = [key for key in ("fit.accumulation", "parallel.dp", "fit.micro_batch") if keys[key] is None]
    product = 1
    for value in keys.values():
        product *= value or 1
    check_product(product)
    if missing and global_batch % product == 0:
        return {**keys, missing[0]: global_batch // product}
    if not missing and product == global_batch:
        return keys
    raise UsageError(describe_batch_mismatch(keys, missing, product, global_batch))


def describe_batch_mismatch(
    keys: dict[str, int | None], missing: list[str], product: int, global_batch: int
) -> str:
    """Say which batches are near: other factors with the same global batch, and other global batches."""
    given = " * ".join(f"{key}={value}" for key, value in keys.items() if value is not None)
    rule = f"is not divisible by {given} ({product})" if missing else f"is not {given} ({product})"
    fixes = []
    for key in ("fit.micro_batch", "fit.accumulation"):
        value = keys[key]
        if value is not None and global_batch % (product // value) == 0:
            whole = global_batch // (product // value)
            near = list_near_divisors(whole, value) if missing else [whole]
            fixes += [f"{key}={one}" for one in near[:2]]
    if missing:
        below = global_batch // product * product
        fixes += [
            f"fit.global_batch={one}" for one in (below, below + product) if 1 <= one <= LARGEST_SETTING
        ]
    else:
        fixes.append(f"fit.global_batch={product}")
    return f"fit.global_batch={global_batch} {rule}: set {' or '.join(fixes)}"


def list_near_divisors(number: int, near: int) -> list[int]:
    """List the greatest divisor below a value and the least above it, the nearer first."""
    below = next((one for one in range(min(near, number), 0, -1)[:MOST_TRIED] if number % one == 0), 1)
    above = next((one for one in range(near + 1, number + 1)[:MOST_TRIED] if number % one == 0), below)
    return sorted({below, above}, key=lambda one: (abs(one - near), one))


def check_product(product: int) -> None:
    """Raise UsageError for a global batch that is too large; the settings check its factors."""
    if product > LARGEST_SETTING:
        shown = product if product < LARGEST_SETTING**2 else f"(a number of {product.bit_length()} bits)"
        raise UsageError(f"{PRODUCT}={shown}: give at most {LARGEST_SETTING}")


def check_layout(request: FitRequest) -> None:
    """Raise UsageError for a layout that the model or the job cannot have, with the nearest that work."""
    check_world_size(request)
    check_tensor_split(request)
    check_stages(request)
    check_expert_split(request)
    check_sequence(request)
    check_sharding(request)
    settings = request.settings
    if settings.optimizer_in_backward and settings.accumulation > 1:
        raise UsageError(
            f"fit.optimizer_in_backward=true with fit.accumulation={settings.accumulation}: gradients"
            " that are freed at once cannot be accumulated, set fit.accumulation=1"
        )
    solve_batch(
        micro_batch=settings.micro_batch,
        dp=request.layout.dp,
        accumulation=settings.accumulation,
        global_batch=request.global_batch,
    )


def check_world_size(request: FitRequest) -> None:
    """Refuse a layout that has not as many GPUs as the job."""
    layout, ranks = request.layout, request.gpus_per_node * request.nodes
    if layout.world_size == ranks:
        return
    factors = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp")}
    given = " * ".join(f"{name} {value}" for name, value in factors.items() if value > 1) or "one GPU"
    of_nodes = f"{request.nodes} node{'s' * (request.nodes > 1)} of {request.gpus_per_node}"
    fixes = " or ".join(list_world_fixes(request, ranks))
    raise UsageError(
        f"parallel: {given} is {layout.world_size} GPUs, and the job has {ranks} ({of_nodes}): set {fixes}"
    )


def list_world_fixes(request: FitRequest, ranks: int) -> Iterator[str]:
    """Give settings with which a layout has as many GPUs as the job."""
    layout, each = request.layout, request.gpus_per_node
    split = layout.world_size // layout.dp
    if layout.world_size % each == 0:
        yield f"nodes={layout.world_size // each}"
    if ranks % split == 0:
        yield f"parallel.dp={ranks // split}"
        return
    for name in ("tp", "pp", "cp"):
        value = getattr(layout, name)
        if value > 1 and ranks % (split // value) == 0:
            near = list_near_divisors(ranks // (split // value), value)[0]
            yield f"parallel.{name}={near} and parallel.dp={ranks // (split // value * near)}"
            return
    yield f"parallel.tp={gcd(layout.tp, each)}, parallel.pp=1, parallel.cp=1 and parallel.dp=auto"


def check_tensor_split(request: FitRequest) -> None:
    """Refuse tensor parallelism that does not divide heads and widths: each GPU has whole heads."""
    model, tp = request.model, request.layout.tp
    sizes = {"heads": model.heads}
    if model.latent_attention is None:
        sizes["kv_heads"] = model.kv_heads
    if model.experts is None or model.experts.dense_layers:
        sizes["intermediate_size"] = model.intermediate_size
    common = gcd(*sizes.values())
    for name, size in sizes.items():
        if size % tp:
            refuse_divisor("parallel.tp", tp, f"does not divide model.{name}={size}", common)


def refuse_divisor(key: str, value: int, problem: str, number: int) -> None:
    """Raise UsageError for a setting that has to divide a number."""
    near = " or ".join(f"{key}={one}" for one in list_near_divisors(number, value))
    raise UsageError(f"{key}={value} {problem}: set {near}")


def check_stages(request: FitRequest) -> None:
    """Refuse more pipeline stages, or chunks of them, than layers."""
    layout, layers = request.layout, request.model.layers
    if layout.virtual_stages > 1 and layout.pp == 1:
        raise UsageError(
            f"parallel.virtual_stages={layout.virtual_stages} with parallel.pp=1: chunks are of pipeline"
            " stages, set parallel.pp, or leave it out"
        )
    if layout.pp > layers:
        raise UsageError(
            f"parallel.pp={layout.pp} is more than model.layers={layers}: set parallel.pp={layers} or less"
        )
    if layout.pp * layout.virtual_stages > layers:
        most = layers // layout.pp
        raise UsageError(
            f"parallel.pp={layout.pp} * parallel.virtual_stages={layout.virtual_stages} is more than"
            f" model.layers={layers}: set parallel.virtual_stages={most} or less"
        )


def check_expert_split(request: FitRequest) -> None:
    """Refuse expert parallelism that divides neither experts nor replicas."""
    layout, experts = request.layout, request.model.experts
    if layout.ep == 1:
        return
    if experts is None:
        raise UsageError(
            f"parallel.ep={layout.ep}, but {request.model.name} has no experts: set parallel.ep=1, or choose"
            " a mixture such as model=mixtral8x7b"
        )
    replicas = layout.dp * layout.cp
    common = gcd(experts.count, replicas)
    if experts.count % layout.ep:
        problem = f"does not divide model.experts.count={experts.count}"
        refuse_divisor("parallel.ep", layout.ep, problem, common)
    # Megatron Core folds ep over tp: the experts' GPUs are those of a pipeline stage.
    folds = request.settings.framework == "megatron" and (replicas * layout.tp) % layout.ep == 0
    if replicas % layout.ep and not folds:
        refuse_divisor("parallel.ep", layout.ep, f"does not divide dp * cp ({replicas})", common)


def check_sequence(request: FitRequest) -> None:
    """Refuse sequences that cannot be split, or are longer than the table of positions.

    Under a causal mask each GPU takes two pieces, one from either end, for equal work (Megatron-LM and
    torchtitan alike), so 2 * cp divides the sequence. Sequence parallelism splits that further over tp.
    """
    layout, length = request.layout, request.settings.seq_len
    most = request.model.max_seq_len
    if request.model.position == "learned" and length > most:
        raise UsageError(f"fit.seq_len={length} is more than model.max_seq_len={most}, the rows of its table")
    pieces = 2 * layout.cp if layout.cp > 1 else 1
    step = pieces * layout.tp if layout.sequence_parallel else pieces
    if length % step:
        below = length // step * step
        near = [one for one in (below, below + step) if one]
        shown = " or ".join(f"fit.seq_len={one}" for one in near)
        why = " * ".join(
            ["2 * parallel.cp"] * (layout.cp > 1) + ["parallel.tp"] * (step != pieces or layout.cp == 1)
        )
        raise UsageError(f"fit.seq_len={length} is not divisible by {why} ({step}): set {shown}")


def check_sharding(request: FitRequest) -> None:
    """Refuse stages that a framework does not have, and groups that do not divide the replicas."""
    layout, framework = request.layout, request.settings.framework
    stages = SHARDED_BY.get(framework)
    if stages is None:
        raise UsageError(f"parallel.framework={framework}: choose from {', '.join(SHARDED_BY)}")
    if layout.zero not in stages:
        near = min(stages, key=lambda stage: abs(stage - layout.zero))
        raise UsageError(
            f"parallel.zero={layout.zero} is nothing that parallel.framework={framework} does: set"
            f" parallel.zero={near}, or another framework"
        )
    if framework == "zero" and layout.pp > 1 and layout.zero > 1:
        raise UsageError(
            f"parallel.zero={layout.zero} with parallel.pp={layout.pp}: DeepSpeed's pipeline keeps gradients"
            " whole, set parallel.zero=1, or parallel.framework=fsdp"
        )
    if layout.shard_size is not None:
        check_shard_size(request, layout.shard_size)


def check_shard_size(request: FitRequest, size: int) -> None:
    """Refuse groups for hybrid sharding that do not divide the replicas."""
    replicas = request.layout.dp * request.layout.cp
    if request.layout.zero == 0:
        raise UsageError(
            f"parallel.shard_size={size} with parallel.zero=0, which shards nothing: leave it out"
        )
    if replicas % size:
        refuse_divisor("parallel.shard_size", size, f"does not divide dp * cp ({replicas})", replicas)
