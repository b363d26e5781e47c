"""Memory of a training step, moment by moment, by counting what the code of each framework allocates.

DDP and FSDP2 are taken with models as Hugging Face's, Megatron with fused norms and a parallel loss. Of the
bundled program the code is known (`TrainingSettings.bundled`), which makes most ranges narrow.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from launcher.fit.activation_memory import (
    StageActivations,
    count_in_flight,
    count_logit_bytes,
    count_tokens,
    estimate_activations,
    find_width,
    keep_on_gpu,
)
from launcher.fit.fit_model import (
    NOTHING,
    FitRequest,
    Range,
    add_ranges,
    make_exact,
    make_range,
    scale_range,
    take_away,
)
from launcher.fit.parameter_counts import (
    RankParameters,
    count_largest_matrix,
    count_trained,
    divide_up,
)
from launcher.fit.state_memory import (
    QUANTIZED,
    StateMemory,
    count_state_bytes,
    estimate_states,
    has_fp32_weights,
)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is allocated at one moment, in bytes."""

    name: str
    weights: Range = NOTHING
    gradients: Range = NOTHING
    optimizer: Range = NOTHING
    activations: Range = NOTHING
    logits: Range = NOTHING
    temporary: Range = NOTHING
    communication: Range = NOTHING

    @property
    def total(self) -> Range:
        """All of it."""
        return add_ranges([getattr(self, name) for name in PART_NAMES])


PART_NAMES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "temporary",
    "communication",
)


ZERO_BUCKET = 500_000_000
"""Numbers of DeepSpeed's reduce and all-gather buckets (reduce_bucket_size, deepspeed.ai's configuration)."""
CHUNK = 2048
"""Tokens whose logits the bundled program has at a time (launcher/programs/transformer.py)."""


def list_moments(request: FitRequest, parameters: RankParameters, stage: int) -> tuple[Moment, ...]:
    """List the moments of a step at which memory can be at its peak, on a GPU of a pipeline stage."""
    states, activations = estimate_states(request, parameters), estimate_activations(request, parameters)
    flight, layers = count_in_flight(request, stage), max(1, parameters.layer_count)
    every, one = scale_range(activations.kept, flight), scale_range(activations.kept, 1 / layers)
    beside = scale_range(every, max(0.0, flight - 1) / flight)
    first = beside + one
    if request.settings.activation_offload:
        every = keep_on_gpu(every, one)
    copies = count_weight_copies(request, parameters)
    copy, recomputes = scale_range(copies, 1 / layers), request.settings.checkpointing != "none"
    held, whole = count_held(request, states), states.gradients
    tied, table = request.model.tied_embeddings, count_table_gradient(request, parameters)
    stream, working = make_exact(activations.stream), activations.working + activations.again
    buffers = estimate_buffers(request, parameters, states, activations)

    def moment(
        name: str, gradients: float, activations: Range, temporary: Range = NOTHING, sent: Range = buffers
    ) -> Moment:
        weights, optimizer = states.weights, states.optimizer
        return Moment(name, weights, make_exact(gradients), optimizer, activations, NOTHING, temporary, sent)

    found = []
    if parameters.has_head:
        outer, root = make_exact(activations.outer), count_root(request, parameters, buffers)
        loss = moment("loss", held, every + copies + outer, sent=root)
        found.append(replace(loss, logits=estimate_logits(request, parameters)))
    if parameters.has_head and request.settings.framework == "ddp":
        made = table + (2 * count_table(request) if request.settings.autocast else 0)
        kept = every + (NOTHING if recomputes else copies) + stream
        found.append(moment("backward of the output layer", held, kept, make_exact(made) + stream))
    waiting = 0 if (held and not tied) or request.settings.optimizer_in_backward else table
    last = every + (copy if recomputes else copies)
    early = whole + (table if tied else 0) if held else whole - count_late_gradients(request, parameters)
    if request.settings.framework == "fsdp" and request.layout.zero == 3:
        found += list_sharded_moments(request, parameters, activations, (every, beside), moment)
    else:
        found.append(moment("backward of the last layer", held + waiting, last, working))
        found.append(moment("backward of the first layer", early, first + copy, working))
    embedding = whole + (table if held else 0) + (table if tied else 0)
    reduced = count_root_reduction(request, parameters, buffers)
    found.append(moment("backward of the embedding", embedding, NOTHING, stream, reduced))
    step, views = count_step(request, states), held_buffers(request, states)
    return (*found, moment("optimizer step", max(whole, held), NOTHING, step, views))


def list_sharded_moments(
    request: FitRequest,
    parameters: RankParameters,
    activations: StageActivations,
    kept: tuple[Range, Range],
    moment: Callable[..., Moment],
) -> Iterator[Moment]:
    """Give the moments of FSDP2's backward pass through layers: inside a layer, and with all its gradients.

    `kept` are the activations of all layers, and those beside the first layer's in its backward pass.
    Beside a layer's whole weights are those of the one gathered ahead, and the fp32 input of the
    reduce-scatter of the layer after it (torch.distributed.fsdp, FSDPParamGroup).
    """
    layers, trained = max(1, parameters.layer_count), count_trained(request, parameters).largest_layer
    width, layer = find_width(request), find_gathered_width(request) * parameters.largest_layer
    states, neighbour = estimate_states(request, parameters), min(1, layers - 1)
    held = count_held(request, states)
    (every, beside), one = kept, scale_range(activations.kept, 1 / layers)
    stream, working = make_exact(activations.stream), activations.working + activations.again
    for name, gradients, others, ahead, after in (
        ("the last layer", held, take_away(every, one), neighbour, 0),
        ("the last layers", held, take_away(every, one, 2), neighbour, neighbour),
        ("the first layer", max(held, states.gradients), beside, 0, neighbour),
    ):
        gathered = round((1 + ahead) * layer + 4 * after * trained)
        sent = estimate_gathered(request, parameters, gathered) + estimate_exchanged(request, activations)
        yield moment(f"backward of {name}", gradients, others + one, working, sent)
        end = others + stream
        temporary = make_exact(3 * activations.stream + width * trained)
        yield moment(f"end of the backward of {name}", gradients, end, temporary, sent)


def find_gathered_width(request: FitRequest) -> float:
    """Give the bytes of a layer's parameter when it is whole; quantized ones are gathered as they are."""
    kind = request.settings.quantization
    return find_width(request) if kind == "none" else QUANTIZED[kind][1]


def count_table(request: FitRequest) -> int:
    """Count the parameters of the output layer on a GPU."""
    return divide_up(request.model.vocab_size * request.model.hidden_size, request.layout.tp)


def count_table_gradient(request: FitRequest, parameters: RankParameters) -> int:
    """Count the bytes of the output layer's gradient outside of DDP's buckets, while it waits.

    Megatron and DeepSpeed add it to their buffers at once.
    """
    if not parameters.has_head or request.settings.framework != "ddp":
        return 0
    each = count_state_bytes(request.settings, request.model.hidden_size)
    lora = request.settings.lora
    return round(
        each.gradients * (count_trained(request, parameters).tables if lora else count_table(request))
    )


def count_late_gradients(request: FitRequest, parameters: RankParameters) -> int:
    """Count the bytes of what the backward pass makes last: the first layer's gradients, the embedding's."""
    settings = request.settings
    if settings.framework != "ddp" or settings.lora or settings.optimizer_in_backward:
        return 0
    each = count_state_bytes(settings, request.model.hidden_size)
    table = 0 if request.model.tied_embeddings else count_table(request)
    return round(each.gradients * (parameters.largest_layer + table))


def count_held(request: FitRequest, states: StateMemory) -> int:
    """Count the bytes of gradients that are allocated in the forward pass.

    In buckets, or from earlier micro-steps; DDP has both if gradients are views of its buckets, which those
    of micro-steps without communication (no_sync) are not yet.
    """
    layout, settings = request.layout, request.settings
    if settings.optimizer_in_backward:
        return 0
    accumulates = settings.accumulation > 1 or layout.pp > 1
    if settings.framework == "ddp":
        buckets = layout.dp * layout.cp > 1
        return states.gradients * ((buckets + accumulates) if settings.bundled else (buckets or accumulates))
    return states.gradients if accumulates or settings.framework in ("megatron", "zero") else 0


def count_step(request: FitRequest, states: StateMemory) -> Range:
    """Give the step's temporaries; Muon makes a few 16-bit copies of a matrix at a time."""
    if request.settings.optimizer != "muon" or request.settings.offload != "none":
        return states.step
    matrix = 2 * count_largest_matrix(request.model)
    return make_range(matrix, 4 * matrix, 8 * matrix)


def count_weight_copies(request: FitRequest, parameters: RankParameters) -> Range:
    """Count the 16-bit copies of weights that torch.autocast keeps to the backward pass, with fp32 weights.

    FSDP's are the unsharded layers, in `communication`.
    """
    sharded = 2 if request.settings.framework == "fsdp" else 3
    if not has_fp32_weights(request.settings) or request.layout.zero >= sharded:
        return NOTHING
    cast = count_state_bytes(request.settings, request.model.hidden_size).cast
    if request.settings.bundled:  # the output layer's is the loss's
        return make_exact(cast * (parameters.total - parameters.tables))
    whole = cast * count_trained(request, parameters).total
    return make_range(0 if request.settings.checkpointing == "full" else 0.8 * whole, whole, whole)


def estimate_logits(request: FitRequest, parameters: RankParameters) -> Range:
    """Estimate the logits with their loss and gradients; tp splits them over the vocabulary.

    A chunked or fused loss goes backward chunk by chunk, so that the output layer's gradient is there, and a
    chunk's that is added to it.
    """
    settings = request.settings
    if settings.bundled:
        return make_exact(count_chunked_loss(request))
    low, expected, high = count_logit_bytes(request)
    count, table = count_tokens(request) * divide_up(request.model.vocab_size, request.layout.tp), 0
    if settings.loss in ("chunked", "fused") and settings.lora is None:
        table = find_width(request) * count_table(request)
    return make_range(low * count, expected * count + table, high * count + 2 * table)


def count_chunked_loss(request: FitRequest) -> int:
    """Count the bytes of the bundled program's loss at its peak (launcher/programs/transformer.py).

    A chunk's fp32 logits and their logarithms, or the gradients of its logits and of the table; several
    chunks add up the table's gradient in fp32. With autocast the copies of the table and of the input too.
    """
    settings, width, tokens, table = (
        request.settings,
        find_width(request),
        count_tokens(request),
        count_table(request),
    )
    chunk, several = min(tokens, CHUNK) * request.model.vocab_size, tokens > CHUNK
    summed = (4 if several else width) * table
    before = 0 if not several else summed if tokens > 2 * CHUNK else width * table
    parts = 2 if width == 2 else 1  # the second one's, and the first one's until it is in fp32
    peak = max(8 * chunk + before, width * chunk + summed + parts * width * table * several)
    hidden = tokens * request.model.hidden_size
    return peak + (4 * hidden + 2 * table + 2 * hidden if settings.autocast else width * hidden)


def held_buffers(request: FitRequest, states: StateMemory) -> Range:
    """Give DDP's buckets, unless gradients are views of them (gradient_as_bucket_view, off by default)."""
    layout, settings = request.layout, request.settings
    if settings.framework != "ddp" or layout.dp * layout.cp == 1 or layout.zero > 0 or settings.bundled:
        return NOTHING
    return make_range(0, states.all_gradients, states.all_gradients)


def estimate_buffers(
    request: FitRequest, parameters: RankParameters, states: StateMemory, activations: StageActivations
) -> Range:
    """Estimate the buffers of communication during the backward pass."""
    return add_ranges(
        [
            held_buffers(request, states),
            estimate_gathered(request, parameters),
            estimate_zero_buckets(request, parameters),
            estimate_exchanged(request, activations),
        ]
    )


def estimate_gathered(request: FitRequest, parameters: RankParameters, layers: int | None = None) -> Range:
    """Estimate what is whole at a time with zero=3 or FSDP: `layers` bytes of layers' weights and gradients.

    Beside them FSDP2's root (tables and final norm), and the gradient of the output layer, which waits for
    the end of backward. DeepSpeed: two layers, one gathered ahead, with the gradients of one.
    """
    width, trained = find_width(request), count_trained(request, parameters)
    layer = round(find_gathered_width(request) * parameters.largest_layer)
    if request.layout.zero == 2 and request.settings.framework == "fsdp":
        # reshard_after_forward=False: whole weights, and between micro-batches of a pipeline whole gradients.
        gradients = 4 * trained.total if request.layout.pp > 1 else 0
        weights = width * parameters.total
        return make_range(weights, weights + gradients, 1.05 * (weights + gradients))
    if request.layout.zero < 3:
        return NOTHING
    root = width * (parameters.tables + parameters.norm)
    if request.settings.framework != "fsdp" or layers is None:
        expected = 2 * layer + root + (width + 2) * trained.largest_layer
        return make_range(2 * layer, expected, 1.2 * expected + root)
    table = trained.tables if request.settings.lora else count_table(request)
    expected = layers + root + (width * table if parameters.has_head else 0)
    if request.settings.bundled:
        return make_range(0.9 * expected, expected, 1.1 * expected)
    return make_range(2 * layer + width * trained.largest_layer, expected, 1.2 * expected + root)


def count_root(request: FitRequest, parameters: RankParameters, buffers: Range) -> Range:
    """Count what FSDP2 has whole at the loss: its root's weights, and what it gathered of the last layer."""
    if not request.settings.bundled or request.settings.framework != "fsdp":
        return buffers
    root = find_width(request) * (parameters.tables + parameters.norm + parameters.largest_layer)
    return make_range(0.9 * root, root, 1.1 * root)


def count_root_reduction(request: FitRequest, parameters: RankParameters, buffers: Range) -> Range:
    """Count what FSDP2 holds at the end of backward: the root's gradients, and their fp32 copy.

    Other programs than the bundled one may have the root's weights then, and the last layers' buffers.
    """
    if request.settings.framework != "fsdp" or request.layout.zero < 3 or request.settings.lora:
        return buffers
    width, root, layer = find_width(request), parameters.tables + parameters.norm, parameters.largest_layer
    if request.settings.bundled:
        return make_exact((width + 4) * root)
    each = (2 * width + 4) * root
    return make_range(0.9 * each, each + 4 * layer, each + (4 + 3 * width) * layer + 4 * root)


def estimate_zero_buckets(request: FitRequest, parameters: RankParameters) -> Range:
    """Estimate DeepSpeed's buckets: one for reduction, two if it overlaps with computation."""
    if request.settings.framework != "zero" or request.layout.zero == 0:
        return NOTHING
    bucket = 2 * min(ZERO_BUCKET, count_trained(request, parameters).total)
    return make_range(0.1 * bucket, bucket, 2 * bucket)


def estimate_exchanged(request: FitRequest, activations: StageActivations) -> Range:
    """Estimate the activations that are sent: tp gathers whole sequences, pp sends the stream both ways."""
    layout, total = request.layout, NOTHING
    if layout.tp > 1 and layout.sequence_parallel:
        whole = activations.stream * layout.tp
        total += make_range(0, whole, 2 * whole)
    if layout.pp > 1:
        total += make_range(activations.stream, 2 * activations.stream, 4 * activations.stream)
    return total
