"""Memory of the bundled program, tensor by tensor: which ones its code keeps for the backward pass.

Every term stands for tensors that launcher/programs/transformer.py, parallel.py and training_loop.py make.
`python -m tests.benchmarks fit` holds the sums against torch's memory tracker; docs/fit.md has the table.
"""

from dataclasses import dataclass

from launcher.fit.fit_model import FitRequest, ModelDimensions, Range
from launcher.fit.memory_moment import Moment, make_exact, make_range
from launcher.fit.rank_parameters import RankParameters, divide_up
from launcher.fit.state_memory import StateMemory, estimate_states

FP32 = 4
CHUNK = 2048
"""Tokens whose logits exist at a time, as in launcher/programs/chunked_loss.py."""


@dataclass(frozen=True, slots=True)
class ProgramTensors:
    """Sizes in bytes of what one micro-batch makes on a GPU."""

    states: StateMemory
    sharded: bool
    """FSDP2, rather than DDP or one process."""
    replicas: int
    shards: int
    held: int
    """Gradients that are allocated in the forward pass already."""
    block: int
    """Kept by one block for its backward pass."""
    stored: int
    """Kept by one block between forward and backward: its input alone with checkpointing."""
    copies: int
    """Autocast's 16-bit copies of one block's matrices, within `block`."""
    working: int
    """Gradients of activations inside one block, at their peak."""
    attention_kernel: int
    """What the backward kernel of attention takes inside, which no tracker sees."""
    stream: int
    """The residual stream of a micro-batch."""
    outer: int
    """Tokens, rotary angles, input of the final norm, and the gradient of its result."""
    loss: int
    """Of the chunked loss at its peak, with the table's gradient: see launcher/programs/chunked_loss.py."""
    table_gradient: int
    """That is made with the loss and waits for the backward pass."""
    width: int
    """Bytes of a number in the computation."""
    block_parameters: int
    matrices: int
    """Parameters of one block's matrices."""
    inner_matrix: int
    """Parameters of one matrix of the MLP."""
    table: int
    """Parameters of the output layer."""
    tables: int
    """Parameters outside of blocks."""
    layers: int
    tied: bool


def is_autocast(request: FitRequest) -> bool:
    """Tell whether the program computes by torch.autocast over fp32 weights: with bf16, unless by FSDP2."""
    return request.settings.precision != "fp32" and request.settings.framework != "fsdp"


def count_saved(request: FitRequest, width: int, stream: int) -> float:
    """Count the bytes a token that one block keeps.

    The input of each norm (`stream` bytes an element) with its statistics; the inputs of the matrices, which
    autocast copies for each matrix; rotated queries and keys, values; the result of attention, and with
    rotary positions its copy in the order of tokens (flash attention keeps its query's order); in the MLP
    the results of its matrices and their product.
    """
    model = request.model
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    statistics = 4 if model.norm == "rmsnorm" else 8
    swiglu = model.mlp == "swiglu"
    inputs = (3 + (2 if swiglu else 1)) if is_autocast(request) else 2
    norms = 2 * (stream * model.hidden_size + statistics)
    return (
        norms
        + inputs * width * model.hidden_size
        + count_kept_attention(request, width, query, key)
        + (4 if swiglu else 2) * width * model.intermediate_size
    )


def count_kept_attention(request: FitRequest, width: int, query: int, key: int) -> float:
    """Count the bytes a token inside attention, by the kernel that torch takes.

    Flash in 16 bits; in fp32 the memory-efficient one, whose result is in the order of tokens; in fp32 with
    grouped queries neither (sdp_utils.cpp), so that keys and values are repeated and all scores are kept.
    """
    model, settings = request.model, request.settings
    logarithms = 4 * model.heads
    if settings.precision != "fp32":
        copied = query if model.position == "rope" else 0
        return width * (query + 2 * key + query + copied) + logarithms
    if model.heads == model.kv_heads:
        return width * (query + 2 * key + query) + logarithms
    return width * (3 * query + query + model.heads * settings.seq_len)


def count_working(request: FitRequest, width: int, stream: int) -> float:
    """Count the bytes a token of gradients inside a block at their peak.

    Of the MLP: those of its inner results less what is freed by then, beside the stream's; of attention with
    all scores: the scores' and the softmax's.
    """
    model, settings = request.model, request.settings
    inner = (2 if model.mlp == "swiglu" else 1) * width * model.intermediate_size
    mlp = inner + (stream + width) * model.hidden_size
    if settings.precision != "fp32" or model.heads == model.kv_heads:
        return mlp
    scores = 2 * width * model.heads * settings.seq_len
    freed = (4 if model.mlp == "swiglu" else 2) * width * model.intermediate_size
    return max(mlp, scores - freed + stream * model.hidden_size)


def count_block_matrices(model: ModelDimensions) -> tuple[int, int]:
    """Count the parameters of one block's matrices, and of one of its MLP."""
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    inner = model.hidden_size * model.intermediate_size
    count = 3 if model.mlp == "swiglu" else 2
    return model.hidden_size * 2 * (query + key) + count * inner, inner


def measure_tensors(request: FitRequest, parameters: RankParameters) -> ProgramTensors:
    """Give the sizes of the program's tensors."""
    model, settings, layout = request.model, request.settings, request.layout
    sharded = settings.framework == "fsdp"
    width = FP32 if settings.precision == "fp32" else 2
    stream = width if sharded else FP32
    tokens = settings.micro_batch * settings.seq_len
    matrices, inner = count_block_matrices(model)
    autocast = is_autocast(request)
    table = model.vocab_size * model.hidden_size
    copies = 2 * matrices if autocast else 0
    block = round(tokens * count_saved(request, width, stream)) + copies
    residual = tokens * stream * model.hidden_size
    states = estimate_states(request, parameters)
    replicas = layout.dp * layout.cp
    angles = settings.seq_len * model.head_width * FP32 if model.position == "rope" else 0
    outer = residual + tokens * (width * model.hidden_size + 16) + angles
    chunk, several = min(tokens, CHUNK) * model.vocab_size, tokens > CHUNK
    waiting = (FP32 if several else width) * table
    before = 0 if not several else waiting if tokens > 2 * CHUNK else width * table
    loss = max(2 * FP32 * chunk + before, width * chunk + waiting + width * table * several)
    loss += tokens * stream * model.hidden_size + (
        2 * table + tokens * 2 * model.hidden_size if autocast else 0
    )
    query = tokens * model.heads * model.head_width
    return ProgramTensors(
        states=states,
        sharded=sharded,
        replicas=replicas,
        shards=min(replicas, layout.shard_size or replicas) if sharded else 1,
        held=count_held(request, parameters, states),
        block=block,
        stored=count_stored(request, block, residual),
        copies=copies,
        working=round(tokens * count_working(request, width, stream)),
        attention_kernel=(FP32 + (2 * width if model.heads != model.kv_heads else 0)) * query,
        stream=residual,
        outer=outer,
        loss=loss,
        table_gradient=waiting,
        width=width,
        block_parameters=parameters.largest_layer,
        matrices=matrices,
        inner_matrix=inner,
        table=table,
        tables=parameters.tables + parameters.norm,
        layers=model.layers,
        tied=model.tied_embeddings,
    )


def count_stored(request: FitRequest, block: int, residual: int) -> int:
    """Count the bytes that one block keeps between forward and backward.

    With selective checkpointing the results of matrices and of attention, and the block's input.
    """
    model, settings = request.model, request.settings
    if settings.checkpointing == "none":
        return block
    if settings.checkpointing == "full":
        return residual
    width = FP32 if settings.precision == "fp32" else 2
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    inner = (2 if model.mlp == "swiglu" else 1) * model.intermediate_size
    each = width * (2 * query + 2 * key + 2 * model.hidden_size + inner) + 4 * model.heads
    return residual + settings.micro_batch * settings.seq_len * each


def count_held(request: FitRequest, parameters: RankParameters, states: StateMemory) -> int:
    """Give the bytes of gradients that exist in the forward pass.

    DDP's buckets, of which the last micro-step's gradients are views; those of earlier micro-steps, which are
    outside of buckets (no_sync), and which FSDP2 keeps unsharded in fp32.
    """
    replicas, accumulates = request.layout.dp * request.layout.cp, request.settings.accumulation > 1
    if request.settings.framework == "fsdp":
        return states.gradients if accumulates else 0
    return states.gradients * ((replicas > 1) + accumulates)


def list_bundled_moments(request: FitRequest, parameters: RankParameters) -> tuple[Moment, ...]:
    """List the moments at which the bundled program's memory can be at its peak."""
    tensors = measure_tensors(request, parameters)
    forward = (describe_forward(tensors),)
    if tensors.sharded:
        return (*forward, *list_sharded_backward(tensors))
    return (*forward, *list_replicated_backward(tensors))


def make_moment(
    tensors: ProgramTensors,
    name: str,
    *,
    gradients: float = 0,
    activations: float = 0,
    logits: float = 0,
    temporary: float = 0,
    unseen: float = 0,
    communication: float = 0,
) -> Moment:
    """Make a moment: with weights and optimizer, and `unseen` bytes of kernels at the high end alone."""
    return Moment(
        name,
        weights=make_exact(tensors.states.weights),
        gradients=make_exact(gradients),
        optimizer=tensors.states.optimizer,
        activations=make_range(0.98 * activations, activations, 1.02 * activations),
        logits=make_exact(logits),
        temporary=make_range(0, temporary, 1.1 * temporary + unseen),
        communication=make_range(0.9 * communication, communication, 1.1 * communication),
    )


def count_root(tensors: ProgramTensors) -> int:
    """Give the bytes of FSDP2's unsharded root: the tables and the final norm, whole until backward's end."""
    return tensors.width * tensors.tables if tensors.sharded else 0


def describe_forward(tensors: ProgramTensors) -> Moment:
    """Describe the end of the forward pass, where autocast still holds its copies of all weights."""
    copies = tensors.layers * tensors.copies if tensors.stored != tensors.block else 0
    return make_moment(
        tensors,
        "end of the forward pass",
        gradients=tensors.held,
        activations=tensors.layers * tensors.stored + tensors.outer + copies,
        logits=tensors.loss,
        communication=count_root(tensors),
    )


def list_replicated_backward(tensors: ProgramTensors) -> tuple[Moment, ...]:
    """List the moments of the backward pass with whole replicas.

    The gradient of the output layer, in 16 bits and in fp32; the last block's backward, with all activations;
    the first one's, with all gradients but its own; the embedding's gradient; the optimizer's step.
    """
    kept, bucketed = tensors.held > 0, tensors.held > 0
    table = FP32 * tensors.table
    both = table + (2 * tensors.table if tensors.copies else 0)
    waiting = table if tensors.tied or not bucketed else 0
    matrix = (FP32 + (2 if tensors.copies else 0)) * tensors.inner_matrix
    again = tensors.block - tensors.stored
    inside = tensors.working + matrix
    everything = tensors.states.gradients
    early = max(0, everything - FP32 * (tensors.block_parameters + (0 if tensors.tied else tensors.table)))
    head = tensors.layers * tensors.stored + tensors.stream
    return (
        make_moment(
            tensors,
            "backward of the output layer",
            gradients=tensors.held,
            activations=head,
            temporary=both + tensors.stream,
        ),
        make_moment(
            tensors,
            "backward of the last block",
            gradients=tensors.held + (0 if kept and not tensors.tied else waiting),
            activations=tensors.layers * tensors.stored + again,
            temporary=inside,
            unseen=tensors.attention_kernel,
        ),
        make_moment(
            tensors,
            "backward of the first block",
            gradients=everything + (table if tensors.tied else 0) if kept else early,
            activations=tensors.stored + again,
            temporary=inside,
            unseen=tensors.attention_kernel,
        ),
        make_moment(
            tensors,
            "backward of the embedding",
            gradients=everything,
            temporary=tensors.stream + (table if kept else 0) + (table if tensors.tied else 0),
        ),
        describe_step(tensors),
    )


def list_sharded_backward(tensors: ProgramTensors) -> tuple[Moment, ...]:
    """List the moments of the backward pass with FSDP2: of the last blocks, of the first one, and the end.

    At the end the root's gradients are reduced: of the tables and the final norm.
    """
    done = max(0, tensors.layers - 1)
    return (
        *describe_sharded_block(tensors, "backward of the last blocks", max(0, done - 1), min(1, done)),
        *describe_sharded_block(tensors, "backward of the first block", 0, 0),
        make_moment(
            tensors,
            "reduction of the tables' gradients",
            gradients=tensors.states.gradients + tensors.held,
            temporary=tensors.stream,
            communication=(tensors.width + FP32) * tensors.tables,
        ),
        describe_step(tensors),
    )


def describe_sharded_block(
    tensors: ProgramTensors, name: str, before: int, ahead: int
) -> tuple[Moment, Moment]:
    """Describe one block's backward pass with FSDP2: inside its MLP, and at its end, with all its gradients.

    `before` blocks have theirs to come, `ahead` of which is gathered already. Beside this block's whole
    weights are the fp32 input of the reduce-scatter of the block after it, and the root with the output
    layer's gradient.
    """
    parameters, width = tensors.block_parameters, tensors.width
    after = tensors.layers - before - 1
    shards = after * divide_up(FP32 * parameters, tensors.shards)
    whole = (1 + ahead) * width * parameters + min(1, after) * FP32 * parameters
    communication = count_root(tensors) + width * tensors.table + whole
    again = tensors.block - tensors.stored
    return (
        make_moment(
            tensors,
            name,
            gradients=tensors.held + shards,
            activations=(before + 1) * tensors.stored + again,
            temporary=tensors.working + width * tensors.inner_matrix,
            unseen=tensors.attention_kernel,
            communication=communication,
        ),
        make_moment(
            tensors,
            name,
            gradients=tensors.held + shards,
            activations=before * tensors.stored + tensors.stream,
            temporary=3 * tensors.stream + width * parameters,
            unseen=tensors.attention_kernel,
            communication=communication,
        ),
    )


def describe_step(tensors: ProgramTensors) -> Moment:
    """Describe the optimizer's step: AdamW's is fused, without temporaries."""
    moment = make_moment(tensors, "optimizer step", gradients=max(tensors.states.gradients, tensors.held))
    step = tensors.states.step
    return Moment(
        moment.name,
        weights=moment.weights,
        gradients=moment.gradients,
        optimizer=moment.optimizer,
        temporary=Range(step.low, step.expected, step.high),
    )
