"""Memory of training with the common frameworks, by published formulas: for programs that are not known.

DDP and FSDP2 are taken with models as Hugging Face's, Megatron with fused norms and a parallel loss.
"""

from dataclasses import dataclass

from launcher.fit.activation_memory import (
    LayerActivations,
    count_in_flight,
    count_layer_activations,
    count_logit_bytes,
    count_mlp_bytes,
    count_selected,
    count_tokens,
)
from launcher.fit.fit_model import FitRequest, Range
from launcher.fit.memory_moment import NOTHING, Moment, add_ranges, make_exact, make_range
from launcher.fit.rank_parameters import LayerRun, RankParameters, count_largest_matrix
from launcher.fit.state_memory import StateMemory, count_state_bytes, estimate_states, has_fp32_weights

ZERO_BUCKET = 500_000_000
"""Numbers of DeepSpeed's reduce and all-gather buckets (reduce_bucket_size, deepspeed.ai's configuration)."""
SELECTED = (1.0, 1.1, 1.55)
"""Low, expected and high of what selective checkpointing keeps by operator. torchtitan's Llama 3.1 8B keeps
60 to 70 KB a token and layer compiled, 74 to 85 eager, 100 with norms in Python (its commits 2271b6386,
5940ddeb5, 40f8fd007); counted are 64. By layer it is half of all."""
MEGATRON_SELECTIVE = 0.5
"""Least share with Megatron, where attention's scores alone are not kept, unless norms, latent attention's
up-projection or the MLP's activation are recomputed too (Megatron Core's recompute_modules)."""


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes of a micro-batch on a GPU of one stage."""

    kept: Range
    """By all layers of the stage between forward and backward."""
    again: Range
    """Of the layer that is computed again, with checkpointing."""
    working: Range
    """Gradients of activations inside a layer."""
    stream: int
    """One tensor of the hidden size."""


def list_framework_moments(request: FitRequest, parameters: RankParameters, stage: int) -> tuple[Moment, ...]:
    """List the moments at which memory can be at its peak: the loss, the end of backward, the step."""
    states = estimate_states(request, parameters)
    activations = estimate_activations(request, parameters)
    flight = count_in_flight(request, stage)
    kept = scale_range(activations.kept, flight)
    buffers = estimate_buffers(request, parameters, states, activations)
    held = make_exact(states.gradients) if are_gradients_held(request) else NOTHING
    copies = count_weight_copies(request, parameters)
    common = {"weights": make_exact(states.weights), "optimizer": states.optimizer}
    working = activations.working + activations.again
    first = scale_range(activations.kept, 1 / max(1, parameters.layer_count))
    return (
        Moment(
            "loss" if parameters.has_head else "backward of the last layer",
            gradients=held,
            activations=kept + copies,
            logits=estimate_logits(request) if parameters.has_head else NOTHING,
            temporary=NOTHING if parameters.has_head else working,
            communication=buffers,
            **common,
        ),
        Moment(
            "backward of the last layer",
            gradients=held,
            activations=kept + copies,
            temporary=working,
            communication=buffers,
            **common,
        ),
        Moment(
            "backward of the first layer",
            gradients=make_exact(states.gradients),
            activations=scale_range(kept, max(0.0, flight - 1) / flight) + first,
            temporary=working,
            communication=buffers,
            **common,
        ),
        Moment(
            "reduction of the tables' gradients",
            gradients=make_exact(states.gradients),
            communication=count_root_reduction(request, parameters, buffers),
            **common,
        ),
        Moment(
            "optimizer step",
            gradients=make_exact(states.gradients),
            temporary=count_step(request, states),
            communication=held_buffers(request, states),
            **common,
        ),
    )


def count_step(request: FitRequest, states: StateMemory) -> Range:
    """Give the step's temporaries; Muon makes a few 16-bit copies of a matrix at a time."""
    if request.settings.optimizer != "muon" or request.settings.offload != "none":
        return states.step
    matrix = 2 * count_largest_matrix(request.model)
    return make_range(matrix, 4 * matrix, 8 * matrix)


def scale_range(value: Range, factor: float) -> Range:
    """Multiply a range."""
    return make_range(value.low * factor, value.expected * factor, value.high * factor)


def are_gradients_held(request: FitRequest) -> bool:
    """Tell whether gradients are allocated in the forward pass: in buckets, or from earlier micro-steps."""
    layout, settings = request.layout, request.settings
    if settings.accumulation > 1 or layout.pp > 1 or settings.framework in ("megatron", "zero"):
        return True
    return settings.framework == "ddp" and layout.dp * layout.cp > 1


def count_weight_copies(request: FitRequest, parameters: RankParameters) -> Range:
    """Count the 16-bit copies of weights that torch.autocast keeps to the backward pass, with fp32 weights.

    FSDP's are the unsharded layers, in `communication`.
    """
    sharded = 2 if request.settings.framework == "fsdp" else 3
    if not has_fp32_weights(request.settings) or request.layout.zero >= sharded:
        return NOTHING
    cast = count_state_bytes(request.settings, request.model.hidden_size).cast
    whole = cast * parameters.total
    return make_range(0 if request.settings.checkpointing == "full" else 0.8 * whole, whole, whole)


def count_run(request: FitRequest, run: LayerRun) -> tuple[float, float, float]:
    """Give the bytes a token that a layer keeps on a GPU: (low, expected, high).

    Low: fused norms, and no dropout; compiled a fused SwiGLU too. High: norms written in Python, and dropout
    if positions are learned (GPT-2, GPT-3; MPT has none). Expected: norms as Hugging Face's, unless
    compiled or Megatron's.
    """
    model, settings, layout = request.model, request.settings, request.layout
    width = 4 if settings.precision == "fp32" else 2
    # Selective checkpointing computes the scores again (arXiv:2205.05198, section 5).
    flash = settings.flash_attention or settings.checkpointing == "selective"
    eager = settings.framework != "megatron" and not settings.compile
    old, fused = model.position == "learned", bool(settings.compile) or settings.framework == "megatron"

    def count(*, dropout: bool, eager_norms: bool, fused_mlp: bool) -> LayerActivations:
        return count_layer_activations(
            model,
            settings.seq_len,
            mixture=run.mixture,
            width=width,
            flash=flash,
            dropout=dropout,
            eager_norms=eager_norms,
            fused_mlp=fused_mlp,
        )

    low, expected, high = (
        count(dropout=dropout, eager_norms=norms, fused_mlp=thin).share(
            layout.tp, sequence_parallel=layout.sequence_parallel
        )
        for dropout, norms, thin in (
            (False, False, fused),
            (False, eager, not eager),
            (old, eager, fused and not eager),
        )
    )
    if settings.precision == "fp8":
        # Inputs of matrices may be kept in 8 bits (Transformer Engine).
        low *= 0.6
    return low, expected, 1.05 * high


def estimate_activations(request: FitRequest, parameters: RankParameters) -> StageActivations:
    """Estimate the activations of a micro-batch on a GPU.

    With full checkpointing a layer keeps its input, 2 sbh (arXiv:2205.05198, section 5), and one layer at a
    time all of its tensors. Experts may get more than their share of tokens: the high end has half as
    much again.
    """
    settings, layout, model = request.settings, request.layout, request.model
    tokens = count_tokens(request)
    width = 4 if settings.precision == "fp32" else 2
    stream = tokens * width * model.hidden_size
    local = stream // layout.tp if layout.sequence_parallel else stream
    each = [(run, count_run(request, run)) for run in parameters.layers]
    kept, again, working = NOTHING, NOTHING, NOTHING
    for run, (low, expected, high) in each:
        crowd = 1.5 if run.mixture else 1.0
        layer = make_range(tokens * low, tokens * expected, tokens * high * crowd)
        inner = count_inner(request, run)
        working = max(
            working,
            make_range(
                0.5 * tokens * inner, tokens * inner + local, 1.5 * tokens * inner * crowd + 2 * local
            ),
            key=lambda one: one.expected,
        )
        if settings.checkpointing == "full":
            kept += scale_range(make_exact(local), run.count)
            again = max(again, layer, key=lambda one: one.expected)
        elif settings.checkpointing == "selective":
            kept += scale_range(keep_selected(request, run, layer, tokens), run.count)
            again = max(again, count_again(request, tokens), key=lambda one: one.expected)
        else:
            kept += scale_range(layer, run.count)
    return StageActivations(kept, again, working, local)


def keep_selected(request: FitRequest, run: LayerRun, layer: Range, tokens: int) -> Range:
    """Give what selective checkpointing keeps of a layer's activations, without attention's scores."""
    settings, layout = request.settings, request.layout
    if settings.framework == "megatron":
        return make_range(MEGATRON_SELECTIVE * layer.low, layer.expected, layer.high)
    width = 4 if settings.precision == "fp32" else 2
    kept = count_selected(request.model, mixture=run.mixture, width=width)
    each = tokens * kept.share(layout.tp, sequence_parallel=layout.sequence_parallel)
    low, expected, high = (share * each for share in SELECTED)
    if run.mixture:
        low, high = 0.5 * low, 1.5 * high
    if settings.precision == "fp8" and settings.compile is False:
        # torchao's eager fp8 took 81.8 GiB where bf16 took 49.6 (torchtitan's 2271b6386), compiled 47.8.
        expected, high = 0.8 * layer.expected, layer.high
    return make_range(low, expected, high)


def count_again(request: FitRequest, tokens: int) -> Range:
    """Count the scores of one layer that selective checkpointing computes again."""
    if request.settings.flash_attention:
        return NOTHING
    layer = count_layer_activations(request.model, request.settings.seq_len, flash=False, dropout=True)
    return make_exact(tokens * layer.scores / request.layout.tp)


def count_inner(request: FitRequest, run: LayerRun) -> float:
    """Give the bytes a token of gradients inside a layer's MLP, half of what the MLP keeps."""
    model, settings = request.model, request.settings
    width = 4 if settings.precision == "fp32" else 2
    inner = float(model.intermediate_size)
    if run.mixture and model.experts is not None:
        inner = (model.experts.per_token + model.experts.shared) * model.experts.intermediate_size
    return count_mlp_bytes(model, inner, width) / 2 / request.layout.tp


def estimate_logits(request: FitRequest) -> Range:
    """Estimate the logits with their loss and gradients; tp splits them over the vocabulary."""
    low, expected, high = count_logit_bytes(request)
    count = count_tokens(request) * -(-request.model.vocab_size // request.layout.tp)
    return make_range(low * count, expected * count, high * count)


def held_buffers(request: FitRequest, states: StateMemory) -> Range:
    """Give DDP's buckets, unless gradients are views of them (gradient_as_bucket_view, off by default)."""
    layout = request.layout
    if request.settings.framework != "ddp" or layout.dp * layout.cp == 1 or layout.zero > 0:
        return NOTHING
    return make_range(0, states.gradients, states.gradients)


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


def estimate_gathered(request: FitRequest, parameters: RankParameters) -> Range:
    """Estimate the weights that are unsharded at a time, and gradients to be reduced, with zero=3 or FSDP.

    Two layers, one of them gathered ahead, the gradients of one, the fp32 input of a reduce-scatter, and
    FSDP2's root (tables and final norm), as its code does (torch.distributed.fsdp, FSDPParamGroup).
    """
    width = 4 if request.settings.precision == "fp32" else 2
    if request.layout.zero == 2 and request.settings.framework == "fsdp":
        # reshard_after_forward=False: whole weights, and between micro-batches of a pipeline whole gradients.
        gradients = 4 * parameters.total if request.layout.pp > 1 else 0
        weights = width * parameters.total
        return make_range(weights, weights + gradients, 1.05 * (weights + gradients))
    if request.layout.zero < 3:
        return NOTHING
    layer, root = parameters.largest_layer, parameters.tables + parameters.norm
    reduced = 4 * layer if request.settings.framework == "fsdp" else 2 * layer
    expected = width * (3 * layer + root) + reduced
    return make_range(2 * width * layer, expected, 1.2 * expected + width * root)


def count_root_reduction(request: FitRequest, parameters: RankParameters, buffers: Range) -> Range:
    """Count what FSDP2 holds at the end of backward: the root's weights, gradients, and their fp32 copy."""
    if request.settings.framework != "fsdp" or request.layout.zero < 3:
        return buffers
    width = 4 if request.settings.precision == "fp32" else 2
    root, layer = parameters.tables + parameters.norm, parameters.largest_layer
    each = (2 * width + 4) * root
    return make_range(0.9 * each, each + 4 * layer, each + (4 + 3 * width) * layer + 4 * root)


def estimate_zero_buckets(request: FitRequest, parameters: RankParameters) -> Range:
    """Estimate DeepSpeed's buckets: one for reduction, two if it overlaps with computation."""
    if request.settings.framework != "zero" or request.layout.zero == 0:
        return NOTHING
    bucket = 2 * min(ZERO_BUCKET, parameters.total)
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
