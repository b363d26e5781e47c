"""Peak memory of the fullest GPU of a training: `estimate_memory`.

Weights, gradients and optimizer states by bytes a parameter, activations by counting tensors, and what else
is allocated at the moments of a step, by counting what the code of each framework allocates. DDP and FSDP2
are taken with models as Hugging Face's, Megatron with fused norms and a parallel loss. Of the bundled program
the code is known (`TrainingSettings.bundled`), which makes most ranges narrow.

Published totals: 16 bytes a parameter of mixed-precision Adam (ZeRO, arXiv:1910.02054, section 3.1), 18 with
fp32 gradients (Megatron-LM's distributed optimizer: 6 + 12 / dp), 16 in fp32, 8 in bf16 alone.
"""

from collections.abc import Iterator

from launcher.fit.counts import (
    LayerRun,
    StageParameters,
    count_inner,
    count_layer_bytes,
    count_matrix_ends,
    count_mlp_bytes,
    count_scores,
    count_selected_bytes,
    count_stage,
    count_trained,
    divide_up,
    has_plain_attention,
)
from launcher.fit.training import NOTHING, Estimate, Lora, MemoryPart, Range, Training, TrainingSettings

MIB = 2**20
CUBLAS = Range(0, 32 * MIB, 64 * MIB)
"""Workspaces of cuBLAS, in torch's allocator: 32 MiB for each thread that multiplies on Hopper, 8 before
(CUBLAS_WORKSPACE_CONFIG's defaults; aten/src/ATen/cuda/CublasHandlePool.cpp)."""
CONTEXT = Range(400 * MIB, 700 * MIB, 1024 * MIB)
"""CUDA's context and the kernels of torch and its libraries, outside torch's allocator: 0.5 to 1 GiB."""
NCCL = Range(300 * MIB, 1024 * MIB, 2048 * MIB)
"""Buffers of NCCL's communicators: 1 to 2 GiB; less for one communicator within a node, the low end."""
EXPANDABLE, FIXED = (0.01, 0.03, 0.05), (0.01, 0.08, 0.15)
"""Share of reserved memory that no tensor fills: 3 to 5% with expandable segments, 10 to 15% without
(docs/allocator.md)."""
PROCESS = Range(300 * MIB, 600 * MIB, 1024 * MIB)
"""Resident memory of Python with torch, of a rank that computes on CPUs."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "temporary", "communication")
"""In torch's allocator, in the order in which they are shown."""
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Moments of a parameter in the type of the optimizer's states: AdamW (arXiv:1711.05101), Lion
(arXiv:2302.06675), SGD with momentum."""
EIGHT_BIT_STATE = 2 + 2 * 4 / 256
"""Bytes a parameter of two moments of 8 bits, each block of 256 with a scale in fp32 (arXiv:2110.02861)."""
NF4 = (0.516, 0.55, 0.5625)
"""Low, expected and high bytes of a frozen weight: 4 bits and a scale for each 64, in fp32 (bitsandbytes), or
in 8 bits too (double quantization, arXiv:2305.14314, section 3; torchao)."""
SELECTED = {True: (0.94, 1.03, 1.12), False: (1.15, 1.25, 1.57), None: (0.94, 1.1, 1.57)}
"""Low, expected and high of what selective checkpointing keeps by operator, if compiled, eager or not known.
torchtitan's Llama 3.1 8B keeps 60 to 70 KB a token and layer compiled, 74 to 85 eager, 100 with norms in
Python (its commits 2271b6386, 5940ddeb5, 40f8fd007); counted are 64. By layer it is half of all."""
MEGATRON_SELECTIVE = 0.5
"""Least share with Megatron, where attention's scores alone are not kept, unless norms, latent attention's
up-projection or the MLP's activation are recomputed too (Megatron Core's recompute_modules)."""
ZERO_BUCKET = 500_000_000
"""Numbers of DeepSpeed's reduce and all-gather buckets (reduce_bucket_size, deepspeed.ai's configuration)."""
CHUNK = 2048
"""Tokens whose logits the bundled program has at a time (launcher/programs/transformer.py)."""
LOSSES = {"fused": (0.0, 0.5, 1.5), "chunked": (0.3, 1.2, 2.5), "compiled": (4.0, 5.0, 7.0)}
"""Bytes of a logit with its loss and gradients; see `_Stage._count_logits`."""
SHARDED = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")
Moment = dict[str, Range]
"""What is allocated at one moment, by all of PARTS."""


def estimate_memory(training: Training) -> Estimate:
    """Estimate the peak memory of the fullest GPU, by parts.

    Of the pipeline stages that can be the fullest, moments of a training step are estimated; the highest one
    of the fullest stage is the answer. Low and high ends bound what the formulas leave open; `allocated` of
    the bundled program is held against torch's memory tracker (docs/fit.md).
    """
    last = max(1, min(training.layout.pp, training.model.layers)) - 1
    stages = sorted({0, min(1, last), last})  # those between hold less
    return max((_estimate_stage(training, stage) for stage in stages), key=lambda one: one.total.expected)


def count_lost(tensors: Range, *, expandable: bool) -> Range:
    """Estimate what torch's allocator reserves and no tensor fills."""
    low, expected, high = EXPANDABLE if expandable else FIXED
    return Range.of(low * tensors.low, expected * tensors.expected, high * tensors.high)


def _estimate_stage(training: Training, index: int) -> Estimate:
    """Estimate the moment with the highest expected total, with libraries, fragmentation and the context.

    Another moment's high end may be higher: what it has more is added to the high end of `temporary`, so that
    the high ends together bound all moments.
    """
    settings, layout, stage = training.settings, training.layout, _Stage(training, index)
    totals = {name: (sum(parts.values(), NOTHING), parts) for name, parts in stage.list_moments()}
    peak = max(totals, key=lambda name: totals[name][0].expected)
    total, parts = totals[peak]
    more = max(other.high for other, _ in totals.values()) - total.high
    parts["temporary"] += Range(0, 0, more)
    context, lost, where = PROCESS, NOTHING, "Python and torch"
    if training.on_gpu:
        parts["temporary"] += CUBLAS
        lost = count_lost(sum(parts.values(), NOTHING), expandable=settings.expandable_segments)
        context, where = CONTEXT, "CUDA's context, kernels, NCCL"
        # NCCL has buffers for each group of ranks.
        if groups := sum(size > 1 for size in (layout.replicas, layout.tp, layout.pp, layout.ep)):
            context += Range(min(groups * NCCL.low, NCCL.expected), NCCL.expected, NCCL.high)
    allocated = sum(parts.values(), NOTHING)
    reserved = allocated + lost
    frozen = "" if settings.quantization == "none" else f", frozen in {settings.quantization}"
    notes = {
        "weights": f"{settings.precision}{frozen}, sharded: {SHARDED[min(3, max(0, layout.zero))]}",
        "gradients": f"at the peak: {peak}",
        "optimizer": settings.optimizer,
        "activations": f"checkpointing: {settings.checkpointing}",
        "temporary": "gradients of activations, workspaces",
    }
    shown = [MemoryPart(name, parts[name], notes.get(name, "")) for name in PARTS]
    shown.append(MemoryPart("context", context, where))
    shown.append(MemoryPart("fragmentation", lost, "reserved and not filled"))
    return Estimate(tuple(shown), reserved + context, allocated, reserved, index)


def _count_state_bytes(settings: TrainingSettings) -> tuple[float, float, float, float]:
    """Give the bytes of a trained parameter: weights, gradients, optimizer, and the copy that layers compute
    with.

    The optimizer's are its moments, and fp32 master weights if the weights are in 16 bits. The copy is there
    while layers compute; 0 if they compute with the weights.

    `mixed` with DDP or FSDP2 is fp32 weights and gradients (torch.autocast, MixedPrecisionPolicy), and 16-bit
    copies; DeepSpeed keeps weights and gradients of 16 bits beside fp32 masters (arXiv:1910.02054);
    Megatron-LM accumulates gradients in fp32. fp8 keeps a copy of 8 bits of each weight and of its transpose
    beside (Transformer Engine). LoRA's adapters are in fp32, as peft casts them: they are small.
    """
    precision, framework = settings.precision, settings.framework
    moments = EIGHT_BIT_STATE
    if settings.optimizer in MOMENTS:
        moments = MOMENTS[settings.optimizer] * (2 if precision == "bf16" else 4)
    fp8 = 2.0 if precision == "fp8" else 0.0
    if precision == "fp32":
        return 4, 4, moments, 0
    if precision == "bf16":
        return 2, 2, moments, 0
    if settings.lora or framework in ("ddp", "fsdp"):
        return 4, 4, moments, 2 if settings.lora else 2 + fp8
    return 2 + fp8, 4 if framework == "megatron" else 2, 4 + moments, 0


class _Stage:
    """A GPU of one pipeline stage: what it holds, keeps and has beside that for a while, in bytes."""

    def __init__(self, training: Training, index: int) -> None:
        self.training, self.index = training, index
        self.model, self.layout, self.settings = training.model, training.layout, training.settings
        each, more = divmod(self.model.layers, max(1, min(self.layout.pp, self.model.layers)))
        first = index * each + min(index, more)
        self.parameters = count_stage(training, first, each + (index < more), index)
        self.trained = count_trained(training, self.parameters)
        self.width = self.settings.width
        self.tokens = self.settings.micro_batch * divide_up(self.settings.seq_len, self.layout.cp)
        """Of a micro-batch on a GPU: cp splits the sequence."""
        self.table = divide_up(self.model.vocab_size * self.model.hidden_size, self.layout.tp)
        """Parameters of the output layer on a GPU."""
        kind = self.settings.quantization
        self.gathered = self.width if kind == "none" else NF4[1]
        """Bytes of a layer's parameter when it is whole; quantized ones are gathered as they are."""
        self._hold_states()
        self._keep_activations()

    def _hold_states(self) -> None:
        """Set weights, gradients (at the end of backward) and optimizer, and the temporaries of its step.

        ZeRO's stages 1 to 3 (arXiv:1910.02054) shard them over dp * cp replicas, or `shard_size` of them
        (hybrid sharding); experts over the replicas that hold the same ones, dp * cp / ep. FSDP2 shards its
        weights always: with zero=2 it keeps the gathered ones (reshard_after_forward=False).

        Offloaded parameters are on the GPU while they compute alone (ZeRO-Infinity, arXiv:2104.07857), as are
        their sharded gradients; offloaded optimizer states never are (ZeRO-Offload, arXiv:2101.06840).

        A fused or compiled optimizer step has no temporaries; torch's default for CUDA, `foreach`, takes a
        list of them, for AdamW the root of the second moment (torch.optim._multi_tensor_adamw).
        """
        settings, layout, trained = self.settings, self.layout, self.trained
        wide = min(layout.replicas, layout.shard_size or layout.replicas)
        # Megatron folds ep over tp.
        holders = layout.replicas if layout.ep <= layout.replicas else layout.replicas * layout.tp
        spread = wide, max(1, min(wide, holders // max(1, layout.ep)))

        def share(parameters: StageParameters, stage: int) -> tuple[int, int]:
            """Give a GPU's parameters: those in no layer, and all of layers, sharded from a stage on."""
            dense, experts = spread if layout.zero >= stage else (1, 1)
            held = sum(run.count * run.dense for run in parameters.layers)
            routed = sum(run.count * run.experts for run in parameters.layers)
            root = divide_up(parameters.root, dense)
            return root, divide_up(parameters.root + held, dense) - root + divide_up(routed, experts)

        of_weight, self.gradient_bytes, of_state, self.copy_bytes = _count_state_bytes(settings)
        weights_from = 2 if settings.framework == "fsdp" else 3
        local = sum(share(trained, 1))
        self.weights = Range.of(of_weight * sum(share(trained, weights_from)))
        if settings.lora:
            self.weights += self._count_frozen(*share(self.parameters, weights_from))
        self.gradients = round(self.gradient_bytes * sum(share(trained, 2)))
        self.optimizer, self.step = Range.of(of_state * local), NOTHING
        in_place = settings.optimizer_fused or settings.bundled or settings.framework in ("zero", "megatron")
        if settings.optimizer == "adamw" and not in_place:
            whole = (2 if settings.precision == "bf16" else 4) * local
            self.step = Range.of(0 if settings.optimizer_fused is None else whole, whole, whole)
        if settings.offload != "none":
            self.optimizer, self.step = NOTHING, NOTHING
            # DeepSpeed's leave the GPU by buckets in the backward pass (arXiv:2101.06840, section 4.2).
            if layout.zero >= 2 and (settings.framework == "zero" or settings.offload == "parameters"):
                self.gradients = 0
        if settings.offload == "parameters":
            self.weights = NOTHING

    def _count_frozen(self, root: int, layers: int) -> Range:
        """Count what a GPU holds of the frozen model; the tables and norms are not quantized.

        High: peft's prepare_model_for_kbit_training casts them to fp32. Low: the output layer is quantized
        too (litgpt).
        """
        if self.settings.quantization == "none":
            return Range.of(self.width * (root + layers))
        low, expected, high = NF4
        head = 0 if self.model.tied_embeddings else root / 2
        least = low * (layers + head) + self.width * (root - head)
        return Range.of(least, expected * layers + self.width * root, high * layers + 4 * root)

    # Activations.

    def _keep_activations(self) -> None:
        """Set the bytes of a micro-batch's activations.

        `kept` by all layers between forward and backward; `working` inside a layer's backward pass, with what
        a layer that is computed again has beside what it kept; `stream`, one tensor of the hidden size;
        `outer`, tokens, rotary angles, inputs of the final norm and of the output layer.

        With full checkpointing a layer keeps its input, 2 sbh (arXiv:2205.05198, section 5), and one layer at
        a time all of its tensors. Experts may get more than their share of tokens: the high end has half as
        much again.
        """
        settings, layout, model, tokens = self.settings, self.layout, self.model, self.tokens
        stream = tokens * (4 if settings.autocast else self.width) * model.hidden_size
        self.stream = stream // layout.tp if layout.sequence_parallel else stream
        angles = settings.seq_len * model.head_width * 4 if model.position == "rope" else 0
        self.outer = self.stream + tokens * (self.width * model.hidden_size // layout.tp + 16) + angles
        self.kept, again, working = NOTHING, NOTHING, NOTHING
        for run in self.parameters.layers:
            one = layer = self._count_run(run)
            if settings.checkpointing == "full":
                one = Range.of(self.stream)
            elif settings.checkpointing == "selective":
                one = self._keep_selected(run, layer)
                if not settings.flash_attention:  # the scores of one layer
                    layer += Range.of(tokens * count_scores(self.training, dropout=True) / layout.tp)
            self.kept += one * run.count
            again = max(again, layer - one, key=lambda each: each.expected)
            working = max(working, self._count_working(run), key=lambda each: each.expected)
        if settings.quantization != "none":  # 16-bit weights to compute with, of a matrix, of a layer at most
            inner = model.experts.intermediate_size if model.experts else model.intermediate_size
            rises = 1.5 if model.mlp == "swiglu" else 1
            widest = max(rises * inner, model.heads * model.head_width)
            matrix = 2 * model.hidden_size * widest / layout.tp
            again += Range.of(matrix, 2 * matrix, max(2 * matrix, 2 * self.parameters.largest_layer))
        self.working = working + again

    def _count_run(self, run: LayerRun) -> Range:
        """Count the bytes that a layer keeps.

        Low: fused norms, and no dropout; compiled a fused SwiGLU too. High: norms written in Python, and
        dropout if positions are learned (GPT-2, GPT-3; MPT has none), and before LoRA's adapters: the mask
        and what is left of their inputs. Expected: norms as Hugging Face's, unless compiled or Megatron's.
        Functions on quantized weights keep each matrix's input (bitsandbytes' MatMul4Bit), torchao's do not;
        litgpt's nf4 runs keep about as much as the inputs and half of the results more than its LoRA runs.
        """
        settings, tokens, training, mixture = self.settings, self.tokens, self.training, run.mixture
        crowd = 1.5 if mixture else 1.0
        if settings.bundled:
            each = count_layer_bytes(training, mixture=mixture)
            return Range.of(tokens * (0.98 * each), tokens * each, tokens * (1.02 * each) * crowd)
        fused = bool(settings.compile) or settings.framework == "megatron"
        drops = self.model.position == "learned"
        low, expected, high = (
            count_layer_bytes(training, mixture=mixture, dropout=dropout, eager_norms=eager, fused_mlp=fused)
            for dropout, eager in ((False, False), (False, not fused), (drops, not fused))
        )
        if settings.precision == "fp8":  # inputs of matrices may be kept in 8 bits (Transformer Engine)
            low *= 0.6
        if settings.lora:
            high += (self.width + 1) * count_matrix_ends(self.model, settings.lora, mixture=mixture)[0]
        if settings.quantization != "none":
            inputs, outputs, _ = count_matrix_ends(self.model, Lora(1), mixture=mixture)
            expected += self.width * inputs
            high += self.width * (inputs + outputs)
        return Range.of(tokens * low, tokens * expected, tokens * (1.05 * high) * crowd)

    def _keep_selected(self, run: LayerRun, layer: Range) -> Range:
        """Give what selective checkpointing keeps of a layer's activations, without attention's scores."""
        settings = self.settings
        if settings.framework == "megatron":
            return Range.of(MEGATRON_SELECTIVE * layer.low, layer.expected, layer.high)
        each = self.tokens * count_selected_bytes(self.training, mixture=run.mixture)
        if settings.bundled:
            return Range.of(0.98 * each, each, 1.02 * each)
        low, expected, high = (share * each for share in SELECTED[settings.compile])
        if run.mixture:
            low, high = 0.5 * low, 1.5 * high
        if settings.precision == "fp8" and settings.compile is False:
            # torchao's eager fp8 took 81.8 GiB where bf16 took 49.6 (torchtitan's 2271b6386), compiled 47.8.
            expected, high = 0.8 * layer.expected, layer.high
        return Range.of(low, expected, high)

    def _count_working(self, run: LayerRun) -> Range:
        """Count the bytes of gradients of activations inside a layer: in its MLP, half of what that keeps.

        torch's plain attention has gradients of its scores and of their softmax. The high end has what flash
        attention's backward takes inside its kernel: the query's gradient in fp32, and repeated keys.
        """
        model, settings, tokens, stream = self.model, self.settings, self.tokens, self.stream
        inner = count_inner(model, mixture=run.mixture)
        kept = tokens * count_mlp_bytes(self.training, inner) / self.layout.tp
        if not settings.bundled:
            crowd = 1.5 if run.mixture else 1.0
            return Range.of(0.25 * kept, 0.5 * kept + stream, 0.75 * kept * crowd + 2 * stream)
        found = 0.5 * kept + stream + tokens * self.width * model.hidden_size
        if has_plain_attention(self.training):
            found = max(found, 2 * tokens * count_scores(self.training) - kept + stream)
        each = 4 + 2 * settings.autocast if settings.framework == "ddp" else self.width
        matrix = each * model.hidden_size * inner
        groups = 2 * self.width if model.heads != model.kv_heads else 0
        kernel = tokens * (4 + groups) * model.heads * model.head_width
        return Range.of(0.9 * found, found + matrix, 1.1 * found + matrix + kernel)

    def _count_in_flight(self) -> float:
        """Give how many micro-batches' activations the stage holds at most.

        1F1B: as many as stages from this one to the last; interleaved stages 1 + (pp - 1) / (pp * v) times
        the first one's pp (arXiv:2104.04473, section 2.2; arXiv:2205.05198, section 4.2.3).
        """
        layout = self.layout
        if layout.pp == 1:
            return 1.0
        held = float(layout.pp - self.index)
        if layout.virtual_stages > 1:
            held *= 1 + (layout.pp - 1) / (layout.pp * layout.virtual_stages)
        return min(held, float(max(1, self.settings.accumulation)))

    # Moments.

    def list_moments(self) -> Iterator[tuple[str, Moment]]:
        """Give the moments of a step at which memory can be at its peak."""
        settings, layout, parameters = self.settings, self.layout, self.parameters
        flight, layers, whole = self._count_in_flight(), parameters.layer_count, self.gradients
        every, beside = self.kept * flight, self.kept * max(0.0, flight - 1)
        copies, held, stream = self._count_weight_copies(), self._count_held(), Range.of(self.stream)
        one, copy = self.kept * (1 / layers), copies * (1 / layers)
        recomputes, tied = settings.checkpointing != "none", self.model.tied_embeddings
        is_fsdp, is_ddp = settings.framework == "fsdp", settings.framework == "ddp"
        buckets = NOTHING  # of DDP, unless gradients are views of them (gradient_as_bucket_view)
        if is_ddp and layout.replicas > 1 and layout.zero == 0 and not settings.bundled:
            buckets = Range.of(0, whole, whole)
        buffers = buckets + self._gather() + self._count_exchanged()
        # The output layer's gradient is outside of DDP's buckets while it waits.
        waits = parameters.has_head and is_ddp
        tables = self.trained.tables if settings.lora else self.table
        table = round(self.gradient_bytes * tables) if waits else 0
        if parameters.has_head:
            sent = buffers
            if settings.bundled and is_fsdp:  # the root's weights, and what is left of the last layer
                root = self.width * (parameters.root + parameters.largest_layer)
                sent = Range.of(0.9 * root, root, 1.1 * root)
            kept = every + copies + Range.of(self.outer)
            yield self._make_moment("loss", held, kept, sent=sent, logits=self._count_logits())
        if waits:
            made = table + (2 * self.table if settings.autocast else 0)
            kept = every + (NOTHING if recomputes else copies) + stream
            temporary = Range.of(made) + stream
            yield self._make_moment("backward of the output layer", held, kept, temporary, buffers)
        if is_fsdp and layout.zero == 3:
            yield from self._list_sharded_moments(every, beside)
        else:
            waiting = 0 if held and not tied else table
            last = every + (copy if recomputes else copies)
            yield self._make_moment("backward of the last layer", held + waiting, last, self.working, buffers)
            early = whole + (table if tied else 0)
            if not held:
                early = whole - self._count_late_gradients()
            first = beside + one + copy
            yield self._make_moment("backward of the first layer", early, first, self.working, buffers)
        end = whole + table * ((held > 0) + tied)
        reduced = self._count_root_reduction(buffers)
        yield self._make_moment("backward of the embedding", end, NOTHING, stream, reduced)
        yield self._make_moment("optimizer step", max(whole, held), NOTHING, self.step, buckets)

    def _make_moment(
        self,
        name: str,
        gradients: float,
        activations: Range,
        temporary: Range = NOTHING,
        sent: Range = NOTHING,
        logits: Range = NOTHING,
    ) -> tuple[str, Moment]:
        """Make a moment, with the weights and the optimizer."""
        sizes = (self.weights, Range.of(gradients), self.optimizer, activations, logits, temporary, sent)
        return name, dict(zip(PARTS, sizes, strict=True))

    def _list_sharded_moments(self, every: Range, beside: Range) -> Iterator[tuple[str, Moment]]:
        """Give the moments of FSDP2's backward pass through layers: inside a layer, and with all its
        gradients.

        `every` are the activations of all layers, `beside` those beside the first layer's in its backward
        pass. Beside a layer's whole weights are those of the one gathered ahead, and the fp32 input of the
        reduce-scatter of the layer after it (torch.distributed.fsdp, FSDPParamGroup).
        """
        layers, trained = self.parameters.layer_count, self.trained.largest_layer
        held, one, neighbour = self._count_held(), self.kept * (1 / layers), min(1, layers - 1)
        layer = self.gathered * self.parameters.largest_layer
        for name, gradients, others, ahead, after in (
            ("the last layer", held, every - one, neighbour, 0),
            ("the last layers", held, every - one * 2, neighbour, neighbour),
            ("the first layer", max(held, self.gradients), beside, 0, neighbour),
        ):
            whole = round((1 + ahead) * layer + 4 * after * trained)
            sent = self._gather(whole) + self._count_exchanged()
            yield self._make_moment(f"backward of {name}", gradients, others + one, self.working, sent)
            end, temporary = others + Range.of(self.stream), Range.of(3 * self.stream + self.width * trained)
            yield self._make_moment(f"end of the backward of {name}", gradients, end, temporary, sent)

    def _count_late_gradients(self) -> int:
        """Count what the backward pass makes last: the first layer's gradients, the embedding's."""
        if self.settings.framework != "ddp" or self.settings.lora:
            return 0
        table = 0 if self.model.tied_embeddings else self.table
        return round(self.gradient_bytes * (self.parameters.largest_layer + table))

    def _count_held(self) -> int:
        """Count the gradients that are allocated in the forward pass.

        In buckets, or from earlier micro-steps; DDP has both if gradients are views of its buckets, which
        those of micro-steps without communication (no_sync) are not yet.
        """
        settings = self.settings
        accumulates = settings.accumulation > 1 or self.layout.pp > 1
        if settings.framework == "ddp":
            has_buckets = self.layout.replicas > 1
            times = has_buckets + accumulates if settings.bundled else has_buckets or accumulates
            return self.gradients * times
        return self.gradients if accumulates or settings.framework in ("megatron", "zero") else 0

    def _count_weight_copies(self) -> Range:
        """Count the 16-bit copies of weights that torch.autocast keeps to the backward pass, with fp32
        weights.

        FSDP's are the unsharded layers, in `communication`.
        """
        settings = self.settings
        sharded = 2 if settings.framework == "fsdp" else 3
        if self.copy_bytes == 0 or settings.lora or self.layout.zero >= sharded:
            return NOTHING
        if settings.bundled:  # the output layer's is the loss's
            return Range.of(self.copy_bytes * (self.parameters.total - self.parameters.tables))
        whole = self.copy_bytes * self.trained.total
        return Range.of(0 if settings.checkpointing == "full" else 0.8 * whole, whole, whole)

    def _count_logits(self) -> Range:
        """Estimate the logits with their loss and gradients; tp splits them over the vocabulary.

        A plain loss has the 16-bit logits, their fp32 copy, the logarithms, two gradients: 14 bytes a logit
        by torch's cross_entropy, 16 by torchtitan's Qwen3 32B (its pull request 1690), 18.7 to 21 there with
        tensor parallelism (DTensor's parallel loss). Compiled, or in flash-attention's kernel, the 16-bit
        logits and their gradient: 4 (torchtitan's mxfp8.md and nvfp4.md), at most 6.7 in llm-foundry's 350m
        rows. If the model is compiled, the loss may not be. Whoever checkpoints by operator (torchtitan)
        often compiles, the loss too. Megatron's works in place. A chunked or fused loss goes backward chunk
        by chunk, so that the output layer's gradient is there, and a chunk's that is added to it.
        """
        settings, table = self.settings, 0
        if settings.bundled:
            return Range.of(self._count_chunked_loss())
        if settings.loss in LOSSES:
            low, expected, high = LOSSES[settings.loss]
        elif settings.framework == "megatron":
            low, expected, high = 6.0, 8.0, 12.0
        elif self.layout.tp > 1 and not settings.compile:
            low, expected, high = 15.0, 18.5, 22.0
        elif settings.loss == "plain" or settings.compile is False:
            low, expected, high = 10.0, 14.0, 18.0
        elif settings.compile:
            low, expected, high = 4.0, 6.0, 14.0
        else:
            low, expected, high = 4.0 if settings.checkpointing == "selective" else 6.0, 11.0, 17.5
        count = self.tokens * divide_up(self.model.vocab_size, self.layout.tp)
        if settings.loss in ("chunked", "fused") and settings.lora is None:
            table = self.width * self.table
        return Range.of(low * count, expected * count + table, high * count + 2 * table)

    def _count_chunked_loss(self) -> int:
        """Count the bundled program's loss at its peak (launcher/programs/transformer.py).

        A chunk's fp32 logits and their logarithms, or the gradients of its logits and of the table; several
        chunks add up the table's gradient in fp32. With autocast the copies of the table and of the input
        too.
        """
        width, tokens, table = self.width, self.tokens, self.table
        chunk, several = min(tokens, CHUNK) * self.model.vocab_size, tokens > CHUNK
        summed = (4 if several else width) * table
        before = 0 if not several else summed if tokens > 2 * CHUNK else width * table
        parts = 2 if width == 2 else 1  # the second one's, and the first one's until it is in fp32
        peak = max(8 * chunk + before, width * chunk + summed + parts * width * table * several)
        hidden = tokens * self.model.hidden_size
        return peak + (6 * hidden + 2 * table if self.settings.autocast else width * hidden)

    # Communication.

    def _gather(self, layers: int | None = None) -> Range:
        """Estimate what is whole at a time with zero=3 or FSDP, and DeepSpeed's buckets.

        `layers` are bytes of layers' weights and gradients. Beside them FSDP2's root (tables and final norm),
        and the gradient of the output layer, which waits for the end of backward. DeepSpeed: two layers, one
        gathered ahead, with the gradients of one, and a bucket for reduction, two if it overlaps.
        """
        settings, parameters, trained, width = self.settings, self.parameters, self.trained, self.width
        layer, zero, found = round(self.gathered * parameters.largest_layer), self.layout.zero, NOTHING
        if settings.framework == "zero" and zero > 0:
            bucket = 2 * min(ZERO_BUCKET, trained.total)
            found = Range.of(0.1 * bucket, bucket, 2 * bucket)
        if zero == 2 and settings.framework == "fsdp":
            # reshard_after_forward=False: whole weights, and between micro-batches of a pipeline whole
            # gradients.
            gradients = 4 * trained.total if self.layout.pp > 1 else 0
            weights = width * parameters.total
            return Range.of(weights, weights + gradients, 1.05 * (weights + gradients))
        if zero < 3:
            return found
        root = width * parameters.root
        if settings.framework != "fsdp" or layers is None:
            expected = 2 * layer + root + (width + 2) * trained.largest_layer
            return found + Range.of(2 * layer, expected, 1.2 * expected + root)
        table = trained.tables if settings.lora else self.table
        expected = layers + root + (width * table if parameters.has_head else 0)
        if settings.bundled:
            return Range.of(0.9 * expected, expected, 1.1 * expected)
        return Range.of(2 * layer + width * trained.largest_layer, expected, 1.2 * expected + root)

    def _count_root_reduction(self, buffers: Range) -> Range:
        """Count what FSDP2 holds at the end of backward: the root's gradients, and their fp32 copy.

        Other programs than the bundled one may have the root's weights then, and the last layers' buffers.
        """
        if self.settings.framework != "fsdp" or self.layout.zero < 3 or self.settings.lora:
            return buffers
        width, root, layer = self.width, self.parameters.root, self.parameters.largest_layer
        if self.settings.bundled:
            return Range.of((width + 4) * root)
        each = (2 * width + 4) * root
        return Range.of(0.9 * each, each + 4 * layer, each + (4 + 3 * width) * layer + 4 * root)

    def _count_exchanged(self) -> Range:
        """Estimate the activations that are sent: tp gathers whole sequences, pp sends the stream both
        ways.
        """
        total = NOTHING
        if self.layout.tp > 1 and self.layout.sequence_parallel:
            whole = self.stream * self.layout.tp
            total += Range.of(0, whole, 2 * whole)
        if self.layout.pp > 1:
            total += Range.of(self.stream, 2 * self.stream, 4 * self.stream)
        return total
