"""Peak memory of the fullest GPU of a training: `estimate_memory`.

Weights, gradients and optimizer states by bytes a parameter, activations by counting tensors, and what else
is allocated at the moments of a step, by counting what the code of each framework allocates. DDP and FSDP2
are taken with models as Hugging Face's, Megatron with fused norms and a parallel loss. Of the bundled program
the code is known (`TrainingSettings.bundled`), which makes most ranges narrow.

Published totals: 16 bytes a parameter of mixed-precision Adam (ZeRO, arXiv:1910.02054, section 3.1), 18 with
fp32 gradients (Megatron-LM's distributed optimizer: 6 + 12 / dp), 16 in fp32, 8 in bf16 alone.
"""

from collections.abc import Collection, Iterator
from dataclasses import astuple, replace

from launcher.fit.counts import (
    Implementation,
    LayerRun,
    StageParameters,
    count_largest_matrix,
    count_layer_bytes,
    count_mlp_bytes,
    count_scores,
    count_selected_bytes,
    count_stage,
    divide_up,
    has_plain_attention,
    list_adapters,
)
from launcher.fit.training import (
    NOTHING,
    Estimate,
    Lora,
    MemoryPart,
    ParallelLayout,
    Range,
    Training,
    TrainingSettings,
)

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
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0, "adamw8bit": 0}
"""Moments of a parameter in the type of the optimizer's states. AdamW (arXiv:1711.05101) 2; Lion
(arXiv:2302.06675), SGD with momentum and Muon (Jordan et al., 2024) 1; Adafactor (arXiv:1804.04235) keeps
rows and columns, AdamW in 8 bits (arXiv:2110.02861) one byte for each of two moments."""
QUANTIZED = {"nf4": (0.516, 0.55, 0.5625), "int8": (1.0, 1.002, 1.1)}
"""Low, expected and high bytes of a frozen weight. NF4: 4 bits and a scale for each 64, in fp32
(bitsandbytes), or in 8 bits too (double quantization, arXiv:2305.14314, section 3; torchao); LLM.int8: 8
bits and a scale for each row (arXiv:2208.07339)."""
EIGHT_BIT_STATE = 2 + 2 * 4 / 256
"""Bytes a parameter of two moments of 8 bits, each block of 256 with a scale in fp32."""
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


def estimate_memory(training: Training) -> Estimate:
    """Estimate the peak memory of the fullest GPU, by parts.

    Of the pipeline stages that can be the fullest (the first, second and last: those between hold less),
    moments of a training step are estimated; the highest one of the fullest stage is the answer. Low and high
    ends bound what the formulas leave open; `allocated` of the bundled program is held against torch's memory
    tracker (docs/fit.md). Bytes; raises nothing for dimensions above zero.
    """
    every = _list_stages(training)
    chosen = every if len(every) <= 3 else [every[0], every[1], every[-1]]
    estimates = [_estimate_stage(Stage(training, *stage)) for stage in chosen]
    return max(estimates, key=lambda estimate: estimate.total.expected)


def count_kept(training: Training) -> Range:
    """Count the activations between forward and backward of a GPU of the first stage, wherever they are."""
    stage = Stage(training, *_list_stages(training)[0])
    return stage.kept * stage.count_in_flight()


def _list_stages(training: Training) -> list[tuple[int, int, int]]:
    """List (stage, first layer, layers) of a pipeline; layers that are left over are the first stages'."""
    layers = training.model.layers
    stages = max(1, min(training.layout.pp, layers))
    each, more = divmod(layers, stages)
    return [(stage, stage * each + min(stage, more), each + (stage < more)) for stage in range(stages)]


def estimate_context(layout: ParallelLayout) -> Range:
    """Estimate what is outside torch's allocator on a GPU: NCCL has buffers for each group of ranks."""
    groups = sum(size > 1 for size in (layout.replicas, layout.tp, layout.pp, layout.ep))
    if not groups:
        return CONTEXT
    return CONTEXT + Range(min(groups * NCCL.low, NCCL.expected), NCCL.expected, NCCL.high)


def count_lost(tensors: Range, *, expandable: bool) -> Range:
    """Estimate what torch's allocator reserves and no tensor fills."""
    low, expected, high = EXPANDABLE if expandable else FIXED
    return Range.of(low * tensors.low, expected * tensors.expected, high * tensors.high)


def _estimate_stage(stage: "Stage") -> Estimate:
    """Estimate the moment with the highest expected total, with libraries, fragmentation and the context.

    Another moment's high end may be higher: what it has more is added to the high end of `temporary`, so that
    the high ends together bound all moments.
    """
    training, settings = stage.training, stage.settings
    moments = [(sum(parts.values(), NOTHING), name, parts) for name, parts in stage.list_moments()]
    peak, name, parts = max(moments, key=lambda moment: moment[0].expected)
    parts["temporary"] += Range(0, 0, max(total.high for total, _, _ in moments) - peak.high)
    context, lost, about = PROCESS, NOTHING, "Python and torch"
    if training.on_gpu:
        parts["temporary"] += CUBLAS
        context, about = estimate_context(training.layout), "CUDA's context, kernels, NCCL"
        lost = count_lost(sum(parts.values(), NOTHING), expandable=settings.expandable_segments)
    allocated = sum(parts.values(), NOTHING)
    reserved = allocated + lost
    sharded = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")
    frozen = "" if settings.quantization == "none" else f", frozen in {settings.quantization}"
    modules = f" of {', '.join(settings.recompute_modules)}" if settings.recompute_modules else ""
    moved = "; in CPU memory" if settings.activation_offload else ""
    notes = {
        "weights": f"{settings.precision}{frozen}, sharded: {sharded[min(3, max(0, training.layout.zero))]}",
        "gradients": f"at the peak: {name}",
        "optimizer": settings.optimizer + " in the backward pass" * settings.optimizer_in_backward,
        "activations": f"checkpointing: {settings.checkpointing}{modules}{moved}",
        "temporary": "gradients of activations, workspaces",
        "context": about,
        "fragmentation": "reserved and not filled",
    }
    every = {**parts, "context": context, "fragmentation": lost}
    shown = tuple(MemoryPart(name, size, notes.get(name, "")) for name, size in every.items())
    return Estimate(shown, reserved + context, allocated, reserved, stage.index)


def count_state_bytes(settings: TrainingSettings, hidden_size: int) -> tuple[float, float, float, float]:
    """Give the bytes of a trained parameter: weights, gradients, optimizer, and the copy that layers compute
    with.

    The optimizer's are its moments, and fp32 master weights if the weights are in 16 bits. The copy is there
    while layers compute; 0 if they compute with the weights.

    `mixed` with DDP or FSDP2 is fp32 weights and gradients (torch.autocast, MixedPrecisionPolicy), and 16-bit
    copies; DeepSpeed keeps weights and gradients of 16 bits beside fp32 masters (arXiv:1910.02054);
    Megatron-LM accumulates gradients in fp32. fp8 keeps a copy of 8 bits of each weight and of its transpose
    beside (Transformer Engine). LoRA's adapters are in fp32, as peft casts them: they are small. Adafactor
    has a row and a column in fp32 of each matrix, at least hidden_size long.
    """
    width, fp8 = 2 if settings.precision == "bf16" else 4, 2 * (settings.precision == "fp8")
    rare = {"adamw8bit": EIGHT_BIT_STATE, "adafactor": 2 * width / max(1, hidden_size)}
    moments = rare.get(settings.optimizer, MOMENTS[settings.optimizer] * width)
    weights, gradients, masters, copy = width, width, 0, 0
    if settings.precision in ("mixed", "fp8"):
        if settings.lora or settings.framework in ("ddp", "fsdp"):
            copy = 2 if settings.lora else 2 + fp8
        else:
            weights, gradients, masters = 2 + fp8, 4 if settings.framework == "megatron" else 2, 4
    if settings.gradients != "auto":
        gradients = 2 if settings.gradients == "bf16" else 4
    return weights, gradients, masters + moments, copy


class Stage:
    """A GPU of one pipeline stage: what it holds, keeps and has beside that for a while, in bytes."""

    def __init__(self, training: Training, index: int, first: int, count: int) -> None:
        """Count what a GPU has of the stage that has `count` layers from layer `first` on."""
        self.training, self.index = training, index
        self.model, self.layout, self.settings = training.model, training.layout, training.settings
        self.parameters, self.trained = count_stage(training, first, count, index)
        self.width, self.framework = self.settings.width, self.settings.framework
        self.tokens = self.settings.micro_batch * divide_up(self.settings.seq_len, self.layout.cp)
        """Of a micro-batch on a GPU: cp splits the sequence."""
        self.table = divide_up(self.model.vocab_size * self.model.hidden_size, self.layout.tp)
        """Parameters of the output layer on a GPU."""
        quantized = self.settings.quantization
        each = self.width if quantized == "none" else QUANTIZED[quantized][1]
        self.layer = each * self.parameters.largest_layer
        """Bytes of a layer's weights when they are whole; quantized ones are gathered as they are."""
        self._hold_states()
        self._keep_activations()

    # States: weights, gradients, optimizer.

    def _hold_states(self) -> None:
        """Set weights, gradients (at the end of backward) and optimizer, and the temporaries of its step.

        ZeRO's stages 1 to 3 (arXiv:1910.02054) shard over dp * cp replicas, or `shard_size` of them (hybrid
        sharding); experts over the replicas that hold the same ones, dp * cp / ep. FSDP2 shards its weights
        always: with zero=2 it keeps the gathered ones (reshard_after_forward=False). Offloaded parameters are
        on the GPU while they compute alone (ZeRO-Infinity, arXiv:2104.07857), as are their sharded gradients;
        offloaded optimizer states never are (ZeRO-Offload, arXiv:2101.06840).

        Muon leaves tables and norms to AdamW, which keeps a second moment (github.com/KellerJordan/Muon,
        "embeddings, classifier heads and scalars by AdamW"). Adafactor has a first moment as an option, and
        small matrices have longer rows and columns for their size. A fused or compiled step has no
        temporaries; torch's default for CUDA, `foreach`, takes a list of temporaries of all gradients: for
        AdamW the root of the second moment (torch.optim._multi_tensor_adamw), for Adafactor the squares and
        the updates.
        """
        settings, layout, trained, optimizer = (
            self.settings,
            self.layout,
            self.trained,
            self.settings.optimizer,
        )
        of_weight, of_gradient, of_state, self.copy_bytes = count_state_bytes(
            settings, self.model.hidden_size
        )
        self.gradient_bytes = of_gradient
        wide = min(layout.replicas, layout.shard_size or layout.replicas)
        # Megatron folds ep over tp.
        holders = layout.replicas if layout.ep <= layout.replicas else layout.replicas * layout.tp
        both = (wide, max(1, min(wide, holders // max(1, layout.ep))))
        self.shards_weights = layout.zero >= (2 if self.framework == "fsdp" else 3)
        by_weights, by_gradients, by_optimizer = (
            both if shards else (1, 1) for shards in (self.shards_weights, layout.zero >= 2, layout.zero >= 1)
        )
        self.weights = Range.of(of_weight * _count_shard(trained, by_weights))
        if settings.lora:
            self.weights += self._count_frozen(by_weights)
        self.gradients = round(of_gradient * _count_shard(trained, by_gradients))
        has_buckets = self.framework == "ddp" and layout.replicas > 1
        # DDP's, unless gradients are views of them (gradient_as_bucket_view, off by default); they stay if
        # the gradients themselves are freed at once.
        self.buckets = NOTHING
        if has_buckets and layout.zero <= 0 and not settings.bundled:
            self.buckets = Range.of(0, self.gradients, self.gradients)
        local, width = _count_shard(trained, by_optimizer), 2 if settings.precision == "bf16" else 4
        states, whole, self.step = round(of_state * local), width * local, NOTHING
        if optimizer == "muon":
            states += round(width * local * (trained.tables / max(1, trained.total)))
        self.optimizer = Range(states, states, states + (4 * local // 50 if optimizer == "adafactor" else 0))
        has_none = settings.optimizer_fused or settings.bundled or self.framework in ("zero", "megatron")
        if optimizer == "adafactor":
            self.step = Range(0, 2 * whole, 3 * whole)
        elif optimizer == "adamw" and not has_none:
            self.step = Range(0 if settings.optimizer_fused is None else whole, whole, whole)
        if settings.optimizer_in_backward:  # those of a layer or a table
            largest = max(trained.largest_layer, trained.tables)
            self.gradients = min(self.gradients, round(of_gradient * divide_up(largest, by_gradients[0])))
            self.step = Range.of(
                0, *(min(end, self.gradients) for end in (self.step.expected, self.step.high))
            )
        if optimizer == "muon":
            matrix = 2 * count_largest_matrix(self.model)  # a few 16-bit copies of a matrix at a time
            self.step = Range.of(matrix, 4 * matrix, 8 * matrix)
        if settings.offload != "none":
            self.optimizer, self.step = NOTHING, NOTHING
            # DeepSpeed's leave the GPU by buckets in the backward pass (arXiv:2101.06840, section 4.2).
            if layout.zero >= 2 and (self.framework == "zero" or settings.offload == "parameters"):
                self.gradients = 0
        if settings.offload == "parameters":
            self.weights = NOTHING
        # Gradients that are allocated in the forward pass: in buckets, or from earlier micro-steps; DDP has
        # both if gradients are views of its buckets, which those of micro-steps without communication
        # (no_sync) are not yet.
        accumulates = settings.accumulation > 1 or layout.pp > 1
        times = int(accumulates or has_buckets or self.framework in ("megatron", "zero"))
        if settings.bundled and has_buckets:
            times += accumulates
        self.held = 0 if settings.optimizer_in_backward else self.gradients * times

    def _count_frozen(self, shards: tuple[int, int]) -> Range:
        """Count what a GPU holds of the frozen model; the tables and norms are not quantized.

        High: peft's prepare_model_for_kbit_training casts them to fp32. Low: the output layer is quantized
        too (litgpt).
        """
        parameters, width = self.parameters, self.width
        if self.settings.quantization == "none":
            return Range.of(width * _count_shard(parameters, shards))
        low, expected, high = QUANTIZED[self.settings.quantization]
        quantized = _count_shard(replace(parameters, root=0), shards)
        rest = divide_up(parameters.root, shards[0])
        head = 0 if self.model.tied_embeddings else rest / 2
        least = low * (quantized + head) + width * (rest - head)
        return Range.of(least, expected * quantized + width * rest, high * quantized + 4 * rest)

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
        by_operator = settings.checkpointing == "selective" and not settings.recompute_modules
        self.kept, again, working = NOTHING, NOTHING, NOTHING
        for run in self.parameters.layers:
            one = layer = self._count_run(run)
            if settings.checkpointing == "full":
                one = Range.of(self.stream)
            elif by_operator:
                one = self._keep_selected(run, layer)
            elif settings.checkpointing == "selective":
                one = self._count_run(run, settings.recompute_modules)
            self.kept += one * run.count
            again = max(again, layer - one, key=lambda each: each.expected)
            if by_operator and not settings.flash_attention:  # the scores of one layer
                scores = count_scores(model, settings.seq_len, 2, dropout=True)
                again += Range.of(tokens * scores / layout.tp)
            working = max(working, self._count_working(run), key=lambda each: each.expected)
        if settings.quantization != "none":  # 16-bit weights to compute with, of a matrix, of a layer at most
            matrix = 2 * divide_up(count_largest_matrix(model), layout.tp)
            again += Range.of(matrix, 2 * matrix, max(2 * matrix, 2 * self.parameters.largest_layer))
        self.working = working + again

    def _count_run(self, run: LayerRun, recomputed: Collection[str] = ()) -> Range:
        """Count the bytes that a layer keeps.

        Low: fused norms, and no dropout; compiled a fused SwiGLU too. High: norms written in Python, and
        dropout if positions are learned (GPT-2, GPT-3; MPT has none), and before LoRA's adapters: the mask
        and what is left of their inputs. Expected: norms as Hugging Face's, unless compiled or Megatron's.
        Functions on quantized weights keep each matrix's input (bitsandbytes' MatMul4Bit), torchao's do not;
        litgpt's nf4 runs keep about as much as the inputs and half of the results more than its LoRA runs.
        """
        settings, tokens, crowd = self.settings, self.tokens, 1.5 if run.mixture else 1.0
        fused = bool(settings.compile) or self.framework == "megatron"
        hows = (
            Implementation(fused_mlp=fused),
            Implementation(eager_norms=not fused, fused_mlp=fused),
            Implementation(self.model.position == "learned", not fused, fused),
        )
        if settings.bundled:
            hows = (Implementation(),) * 3
        low, expected, high = (
            count_layer_bytes(self.training, mixture=run.mixture, how=how, recomputed=recomputed)
            for how in hows
        )
        if settings.bundled:
            return Range.of(tokens * (0.98 * expected), tokens * expected, tokens * (1.02 * expected) * crowd)
        if settings.precision == "fp8":  # inputs of matrices may be kept in 8 bits (Transformer Engine)
            low *= 0.6
        adapters = list_adapters(self.model, settings.lora, mixture=run.mixture)
        high += (self.width + 1) * sum(one.inputs * one.passes for one in adapters)
        if settings.quantization != "none":
            every = list_adapters(self.model, Lora(1), mixture=run.mixture)
            inputs = self.width * sum(one.inputs * one.passes for one in every)
            expected += inputs
            high = high + inputs + self.width * sum(one.outputs * one.passes for one in every)
        return Range.of(tokens * low, tokens * expected, tokens * (1.05 * high) * crowd)

    def _keep_selected(self, run: LayerRun, layer: Range) -> Range:
        """Give what selective checkpointing keeps of a layer's activations, without attention's scores."""
        settings = self.settings
        if self.framework == "megatron":
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
        model, tokens, stream, width = self.model, self.tokens, self.stream, self.width
        inner = float(model.intermediate_size)
        if run.mixture and model.experts is not None:
            inner = (model.experts.per_token + model.experts.shared) * model.experts.intermediate_size
        kept = tokens * count_mlp_bytes(model, inner, width) / self.layout.tp
        if not self.settings.bundled:
            crowd = 1.5 if run.mixture else 1.0
            return Range.of(0.25 * kept, 0.5 * kept + stream, 0.75 * kept * crowd + 2 * stream)
        found = 0.5 * kept + stream + tokens * width * model.hidden_size
        if has_plain_attention(model, width):
            found = max(found, 2 * tokens * width * model.heads * self.settings.seq_len - kept + stream)
        each = 4 + 2 * self.settings.autocast if self.framework == "ddp" else width
        matrix = each * model.hidden_size * inner
        groups = 2 * width if model.heads != model.kv_heads else 0
        kernel = tokens * (4 + groups) * model.heads * model.head_width
        return Range.of(0.9 * found, found + matrix, 1.1 * found + matrix + kernel)

    def count_in_flight(self) -> float:
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

    def list_moments(self) -> Iterator[tuple[str, dict[str, Range]]]:
        """Give the moments of a step at which memory can be at its peak: its name, and what is allocated by
        all of PARTS.

        The loss; the backward pass of the output layer, of the last layers, of the first one and of the
        embedding; the optimizer's step. Beside a layer's whole weights FSDP2 has those of the one gathered
        ahead, and the fp32 input of the reduce-scatter of the layer after it (torch.distributed.fsdp,
        FSDPParamGroup).
        """
        settings, layout, parameters, trained = self.settings, self.layout, self.parameters, self.trained
        flight, held, whole = self.count_in_flight(), self.held, self.gradients
        layers = max(1, sum(run.count for run in parameters.layers))
        every, one = self.kept * flight, self.kept * (1 / layers)
        beside = every * (max(0.0, flight - 1) / flight)
        """Beside the first layer's activations in its backward pass."""
        first, recomputes = beside + one, settings.checkpointing != "none"
        if settings.activation_offload:
            # torchtune's OffloadActivations copies on a stream of its own, and holds at most five layers'
            # meanwhile.
            most = (one.low, 2 * one.expected, 5 * one.high)
            every = Range.of(*map(min, astuple(every), most))
        # The 16-bit copies of fp32 weights that torch.autocast keeps to the backward pass; FSDP's are the
        # unsharded layers, in `communication`, and the bundled program's output layer's is the loss's.
        copies = NOTHING
        if self.copy_bytes and not settings.lora and not self.shards_weights:
            size = self.copy_bytes * trained.total
            copies = Range.of(0 if settings.checkpointing == "full" else 0.8 * size, size, size)
            if settings.bundled:
                copies = Range.of(self.copy_bytes * (parameters.total - parameters.tables))
        copy, tied, stream = copies * (1 / layers), self.model.tied_embeddings, Range.of(self.stream)
        exchanged, is_fsdp = self._count_exchanged(), self.framework == "fsdp"
        buffers = self.buckets + self._gather() + exchanged
        # The output layer's gradient is outside of DDP's buckets while it waits.
        waits = parameters.has_head and self.framework == "ddp"
        table = round(self.gradient_bytes * (trained.tables if settings.lora else self.table)) if waits else 0

        def meet(
            name: str,
            gradients: float,
            activations: Range = NOTHING,
            temporary: Range = NOTHING,
            sent: Range = buffers,
            logits: Range = NOTHING,
        ) -> tuple[str, dict[str, Range]]:
            sizes = (self.weights, Range.of(gradients), self.optimizer, activations, logits, temporary, sent)
            return name, dict(zip(PARTS, sizes, strict=True))

        if parameters.has_head:
            sent, kept = buffers, every + copies + Range.of(self.outer)
            if settings.bundled and is_fsdp:  # its root's weights, and what it gathered of the last layer
                root = self.width * (parameters.root + parameters.largest_layer)
                sent = Range.of(0.9 * root, root, 1.1 * root)
            yield meet("loss", held, kept, sent=sent, logits=self._count_logits())
        if waits:
            made = table + (2 * self.table if settings.autocast else 0)
            kept = every + (NOTHING if recomputes else copies) + stream
            yield meet("backward of the output layer", held, kept, Range.of(made) + stream)
        if is_fsdp and layout.zero == 3:
            after = min(1, layers - 1)
            for name, gradients, others, gathered, reduced in (
                ("the last layer", held, every - one, after, 0),
                ("the last layers", held, every - one * 2, after, after),
                ("the first layer", max(held, whole), beside, 0, after),
            ):
                size = round((1 + gathered) * self.layer + 4 * reduced * trained.largest_layer)
                sent = self._gather(size) + exchanged
                yield meet(f"backward of {name}", gradients, others + one, self.working, sent)
                temporary = Range.of(3 * self.stream + self.width * trained.largest_layer)
                yield meet(f"end of the backward of {name}", gradients, others + stream, temporary, sent)
        else:
            waiting = 0 if (held and not tied) or settings.optimizer_in_backward else table
            last = every + (copy if recomputes else copies)
            yield meet("backward of the last layer", held + waiting, last, self.working)
            early = float(whole)
            if held:
                early += table if tied else 0
            elif self.framework == "ddp" and not settings.lora and not settings.optimizer_in_backward:
                # What is made last: the first layer's gradients, the embedding's.
                late = parameters.largest_layer + (0 if tied else self.table)
                early -= round(self.gradient_bytes * late)
            yield meet("backward of the first layer", early, first + copy, self.working)
        embedding, sent = whole + (table if held else 0) + (table if tied else 0), buffers
        if is_fsdp and layout.zero == 3 and not settings.lora:
            # The root's gradients, and their fp32 copy; other programs than the bundled one may have the
            # root's weights then, and the last layers' buffers.
            width, root, layer = self.width, parameters.root, parameters.largest_layer
            each = (2 * width + 4) * root
            sent = Range.of(0.9 * each, each + 4 * layer, each + (4 + 3 * width) * layer + 4 * root)
            if settings.bundled:
                sent = Range.of((width + 4) * root)
        yield meet("backward of the embedding", embedding, temporary=stream, sent=sent)
        yield meet("optimizer step", max(whole, held), temporary=self.step, sent=self.buckets)

    def _count_logits(self) -> Range:
        """Estimate the logits with their loss and gradients; tp splits them over the vocabulary.

        A plain loss has the 16-bit logits, their fp32 copy, the logarithms, two gradients: 14 bytes a logit
        by torch's cross_entropy, 16 by torchtitan's Qwen3 32B (its pull request 1690), 18.7 to 21 there with
        tensor parallelism (DTensor's parallel loss). Compiled, or in flash-attention's kernel, the 16-bit
        logits and their gradient: 4 (torchtitan's mxfp8.md and nvfp4.md), at most 6.7 in llm-foundry's 350m
        rows. If the model is compiled, the loss may not be. Whoever checkpoints by operator (torchtitan)
        often compiles, the loss too. Megatron's works in place. A chunked or fused loss goes backward chunk
        by chunk, so that the output layer's gradient is there, and a chunk's that is added to it.

        The bundled program's (launcher/programs/transformer.py) is chunked and known: a chunk's fp32 logits
        and their logarithms, or the gradients of its logits and of the table; several chunks add up the
        table's gradient in fp32. With autocast the copies of the table and of the input too.
        """
        settings, width, tokens, table = self.settings, self.width, self.tokens, self.table
        if settings.bundled:
            chunk, several = min(tokens, CHUNK) * self.model.vocab_size, tokens > CHUNK
            summed = (4 if several else width) * table
            before = 0 if not several else summed if tokens > 2 * CHUNK else width * table
            parts = 2 if width == 2 else 1  # the second one's, and the first one's until it is in fp32
            peak = max(8 * chunk + before, width * chunk + summed + parts * width * table * several)
            hidden = tokens * self.model.hidden_size
            return Range.of(peak + (6 * hidden + 2 * table if settings.autocast else width * hidden))
        low, expected, high = 4.0 if settings.checkpointing == "selective" else 6.0, 11.0, 17.5
        known = {"fused": (0.0, 0.5, 1.5), "chunked": (0.3, 1.2, 2.5), "compiled": (4.0, 5.0, 7.0)}
        if settings.loss in known:
            low, expected, high = known[settings.loss]
        elif self.framework == "megatron":
            low, expected, high = 6.0, 8.0, 12.0
        elif self.layout.tp > 1 and not settings.compile:
            low, expected, high = 15.0, 18.5, 22.0
        elif settings.loss == "plain" or settings.compile is False:
            low, expected, high = 10.0, 14.0, 18.0
        elif settings.compile:
            low, expected, high = 4.0, 6.0, 14.0
        count = tokens * divide_up(self.model.vocab_size, self.layout.tp)
        has_gradient = settings.loss in ("chunked", "fused") and settings.lora is None
        gradient = width * table * has_gradient
        return Range.of(low * count, expected * count + gradient, high * count + 2 * gradient)

    # Communication.

    def _gather(self, layers: int | None = None) -> Range:
        """Estimate what is whole at a time with zero=3 or FSDP: `layers` bytes of layers' weights and
        gradients; and DeepSpeed's buckets, one for reduction, two if it overlaps with computation.

        Beside them FSDP2's root (tables and final norm), and the gradient of the output layer, which waits
        for the end of backward. DeepSpeed: two layers, one gathered ahead, with the gradients of one.
        """
        settings, parameters, trained, width = self.settings, self.parameters, self.trained, self.width
        total, layer, zero = NOTHING, round(self.layer), self.layout.zero
        if self.framework == "zero" and zero:
            bucket = 2 * min(ZERO_BUCKET, trained.total)
            total = Range.of(0.1 * bucket, bucket, 2 * bucket)
        if zero == 2 and self.framework == "fsdp":
            # reshard_after_forward=False: whole weights, and between micro-batches of a pipeline whole
            # gradients.
            gradients = 4 * trained.total if self.layout.pp > 1 else 0
            weights = width * parameters.total
            return Range.of(weights, weights + gradients, 1.05 * (weights + gradients))
        if zero < 3:
            return total
        root = width * parameters.root
        if self.framework != "fsdp" or layers is None:
            expected = 2 * layer + root + (width + 2) * trained.largest_layer
            return total + Range.of(2 * layer, expected, 1.2 * expected + root)
        table = trained.tables if settings.lora else self.table
        expected = layers + root + (width * table if parameters.has_head else 0)
        if settings.bundled:
            return Range.of(0.9 * expected, expected, 1.1 * expected)
        return Range.of(2 * layer + width * trained.largest_layer, expected, 1.2 * expected + root)

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


def _count_shard(parameters: StageParameters, shards: tuple[int, int]) -> int:
    """Give the parameters of a GPU's shard; `shards` are those of dense parameters and of experts."""
    return divide_up(parameters.dense, shards[0]) + divide_up(parameters.experts, shards[1])
