"""Peak memory of the fullest GPU of a training: `estimate_memory`.

Weights, gradients and optimizer states by bytes a parameter, activations by counting tensors, and what else
is allocated at the moments of a step, by counting what the code of each framework allocates. DDP and FSDP2
are taken with models as Hugging Face's, Megatron with fused norms and a parallel loss. Of the bundled program
the code is known (`Training.is_bundled`), which makes most ranges narrow.

Published totals: 16 bytes a parameter of mixed-precision Adam (ZeRO, arXiv:1910.02054, section 3.1), 18 with
fp32 gradients (Megatron-LM's distributed optimizer: 6 + 12 / dp), 16 in fp32, 8 in bf16 alone.
"""

from collections.abc import Iterator
from dataclasses import astuple

from launcher.fit.counts import (
    CROWD,
    StageParameters,
    count_layer_bytes,
    count_stage,
    divide_up,
    find_widths,
    has_plain_attention,
    list_matrices,
    list_runs,
)
from launcher.fit.settings import ParallelConfig
from launcher.fit.training import NOTHING, Estimate, Experts, MemoryPart, Range, Training

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
    estimates = [_estimate_stage(stage) for stage in _list_stages(training)]
    return max(estimates, key=lambda estimate: estimate.total.expected)


def count_kept(training: Training) -> Range:
    """Count the activations between forward and backward of a GPU of the first stage, wherever they are."""
    stage = _list_stages(training)[0]
    return stage.kept * stage.flight


def _list_stages(training: Training) -> list["Stage"]:
    """List the first, second and last stage of a pipeline; layers left over are the first stages'."""
    stages = max(1, min(training.layout.pp, training.model.layers))
    each, more = divmod(training.model.layers, stages)
    chosen = sorted({0, min(1, stages - 1), stages - 1})
    return [Stage(training, one, one * each + min(one, more), each + (one < more)) for one in chosen]


def list_others(
    tensors: Range, layout: ParallelConfig, *, on_gpu: bool, expandable: bool
) -> dict[str, Range]:
    """Estimate what is allocated beside tensors, by parts.

    NCCL has buffers for each group of ranks; less for one communicator within a node, the low end.
    """
    if not on_gpu:
        return {"workspaces": NOTHING, "context": PROCESS, "fragmentation": NOTHING}
    groups, context = sum(size > 1 for size in (layout.replicas, layout.tp, layout.pp, layout.ep)), CONTEXT
    if groups:
        context += Range(min(groups * NCCL.low, NCCL.expected), NCCL.expected, NCCL.high)
    ends, shares = astuple(tensors + CUBLAS), EXPANDABLE if expandable else FIXED
    lost = Range.of(*(share * end for share, end in zip(shares, ends, strict=True)))
    return {"workspaces": CUBLAS, "context": context, "fragmentation": lost}


def _estimate_stage(stage: "Stage") -> Estimate:
    """Estimate the moment with the highest expected total, with libraries, fragmentation and the context.

    Another moment's high end may be higher: what it has more is added to the high end of `temporary`, so that
    the high ends together bound all moments.
    """
    training, settings, layout = stage.training, stage.settings, stage.layout
    moments = [(sum(parts.values(), NOTHING), name, parts) for name, parts in stage.list_moments()]
    peak, name, parts = max(moments, key=lambda moment: moment[0].expected)
    parts["temporary"] += Range(0, 0, max(total.high for total, _, _ in moments) - peak.high)
    expandable = training.expandable_segments
    others = list_others(sum(parts.values(), NOTHING), layout, on_gpu=training.on_gpu, expandable=expandable)
    parts["temporary"] += others.pop("workspaces")
    modules = f" of {', '.join(settings.recompute_modules)}" if settings.recompute_modules else ""
    sharded = ("optimizer", "gradients", "weights")[: max(0, layout.zero)]
    notes = {
        "weights": f"{settings.precision}, sharded: {', '.join(sharded) or 'nothing'}",
        "gradients": f"at the peak: {name}",
        "activations": f"checkpointing: {settings.checkpointing}{modules}",
    }
    every = {**parts, **others}
    shown = tuple(MemoryPart(name, size, notes.get(name, "")) for name, size in every.items())
    return Estimate(shown, stage.index)


def count_state_bytes(training: Training) -> tuple[float, float, float, float]:
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
    settings, framework = training.settings, training.layout.framework
    width, fp8 = 2 if settings.precision == "bf16" else 4, 2 * (settings.precision == "fp8")
    rare = {"adamw8bit": EIGHT_BIT_STATE, "adafactor": 2 * width / max(1, training.model.hidden_size)}
    moments = rare.get(settings.optimizer, MOMENTS[settings.optimizer] * width)
    weights, gradients, masters, copy = width, width, 0, 0
    if settings.precision in ("mixed", "fp8"):
        if settings.lora.rank or framework in ("ddp", "fsdp"):
            copy = 2 if settings.lora.rank else 2 + fp8
        else:
            weights, gradients, masters = 2 + fp8, 4 if framework == "megatron" else 2, 4
    if settings.gradients != "auto":
        gradients = 2 if settings.gradients == "bf16" else 4
    return weights, gradients, masters + moments, copy


class Stage:
    """A GPU of one pipeline stage: what it holds, keeps and has beside that for a while, in bytes."""

    def __init__(self, training: Training, index: int, first: int, count: int) -> None:
        """Count what a GPU has of the stage that has `count` layers from layer `first` on.

        In flight are as many micro-batches as stages from this one to the last (1F1B); with interleaved
        stages 1 + (pp - 1) / (pp * v) times the first one's pp (arXiv:2104.04473, section 2.2;
        arXiv:2205.05198, section 4.2.3).
        """
        self.training, self.index = training, index
        self.model, self.layout, self.settings = training.model, training.layout, training.settings
        self.parameters, self.trained = count_stage(training, first, count, index)
        self.runs, self.has_head = list_runs(self.model, first, count), index == self.layout.pp - 1
        settings, layout, model = self.settings, self.layout, self.model
        self.width, self.framework = settings.width, layout.framework
        self.tokens = settings.micro_batch * divide_up(settings.seq_len, layout.cp)
        """Of a micro-batch on a GPU: cp splits the sequence."""
        stream = self.tokens * (4 if self.training.autocast else self.width) * model.hidden_size
        self.stream = stream // layout.tp if layout.sequence_parallel else stream
        """One tensor of the hidden size."""
        self.table = divide_up(model.vocab_size * model.hidden_size, layout.tp)
        """Parameters of the output layer on a GPU."""
        self.largest_matrix = max(one.parameters for one in list_matrices(model, model.experts))
        quantized = settings.quantization
        each = self.width if quantized == "none" else QUANTIZED[quantized][1]
        self.layer = round(each * self.parameters.largest_layer)
        """Bytes of a layer's weights when they are whole; quantized ones are gathered as they are."""
        held = float(layout.pp - index)
        if layout.virtual_stages > 1:
            held *= 1 + (layout.pp - 1) / (layout.pp * layout.virtual_stages)
        self.flight = 1.0 if layout.pp == 1 else min(held, float(max(1, settings.accumulation)))
        self._hold_states()
        self._keep_activations()

    def _hold_states(self) -> None:
        """Set weights, gradients (at the end of backward) and optimizer, and the temporaries of its step.

        ZeRO's stages 1 to 3 (arXiv:1910.02054) shard over dp * cp replicas, or `shard_size` of them (hybrid
        sharding); experts over the replicas that hold the same ones, dp * cp / ep. FSDP2 shards its weights
        always: with zero=2 it keeps the gathered ones (reshard_after_forward=False). Offloaded parameters are
        on the GPU while they compute alone (ZeRO-Infinity, arXiv:2104.07857), as are their sharded gradients;
        offloaded optimizer states never are (ZeRO-Offload, arXiv:2101.06840).

        Muon leaves tables and norms to AdamW, which keeps a second moment (github.com/KellerJordan/Muon,
        "embeddings, classifier heads and scalars by AdamW"). A fused or compiled step has no temporaries;
        torch's default for CUDA, `foreach`, takes a list of temporaries of all gradients: for AdamW the root
        of the second moment (torch.optim._multi_tensor_adamw), for Adafactor the squares and the updates.
        """
        settings, layout, trained = self.settings, self.layout, self.trained
        optimizer, zero = settings.optimizer, layout.zero
        of_weight, of_gradient, of_state, self.copy_bytes = count_state_bytes(self.training)
        self.gradient_bytes = of_gradient
        wide = min(layout.replicas, layout.shard_size or layout.replicas)
        # Megatron folds ep over tp.
        holders = layout.replicas if layout.ep <= layout.replicas else layout.replicas * layout.tp
        both = (wide, max(1, min(wide, holders // max(1, layout.ep))))
        self.shards_weights = zero >= (2 if self.framework == "fsdp" else 3)
        by_weights, by_gradients, by_optimizer = (
            both if shards else (1, 1) for shards in (self.shards_weights, zero >= 2, zero >= 1)
        )
        self.weights = Range.of(of_weight * _count_shard(trained, by_weights))
        if settings.lora.rank:
            self.weights += self._count_frozen(by_weights)
        self.gradients = round(of_gradient * _count_shard(trained, by_gradients))
        has_buckets = self.framework == "ddp" and layout.replicas > 1
        # DDP's, unless gradients are views of them (gradient_as_bucket_view, off by default); they stay if
        # the gradients themselves are freed at once.
        self.buckets = Range(0, self.gradients, self.gradients)
        if not has_buckets or self.training.is_bundled:
            self.buckets = NOTHING
        local, width = _count_shard(trained, by_optimizer), 2 if settings.precision == "bf16" else 4
        states, whole, self.step = round(of_state * local), width * local, NOTHING
        if optimizer == "muon":
            states += round(whole * (trained.tables / max(1, trained.total)))
        self.optimizer = Range.of(states)
        has_none = (
            settings.optimizer_fused or self.training.is_bundled or self.framework in ("zero", "megatron")
        )
        if optimizer == "adafactor":
            self.step = Range(0, 2 * whole, 3 * whole)
        elif optimizer == "adamw" and not has_none:
            self.step = Range(0 if settings.optimizer_fused is None else whole, whole, whole)
        if settings.optimizer_in_backward:  # those of a layer or a table
            largest = max(trained.largest_layer, trained.tables)
            self.gradients = min(self.gradients, round(of_gradient * divide_up(largest, by_gradients[0])))
            ends = (min(end, self.gradients) for end in (self.step.expected, self.step.high))
            self.step = Range.of(0, *ends)
        if optimizer == "muon":  # a few 16-bit copies of a matrix at a time
            self.step = Range.of(*(2 * copies * self.largest_matrix for copies in (1, 4, 8)))
        if settings.offload != "none":
            self.optimizer, self.step = NOTHING, NOTHING
            # DeepSpeed's leave the GPU by buckets in the backward pass (arXiv:2101.06840, section 4.2).
            if zero >= 2 and (self.framework == "zero" or settings.offload == "parameters"):
                self.gradients = 0
        if settings.offload == "parameters":
            self.weights = NOTHING
        # Gradients that are allocated in the forward pass: in buckets, or from earlier micro-steps; DDP has
        # both if gradients are views of its buckets, which those of micro-steps without communication
        # (no_sync) are not yet.
        accumulates = settings.accumulation > 1 or layout.pp > 1
        times = int(accumulates or has_buckets or self.framework in ("megatron", "zero"))
        if self.training.is_bundled and has_buckets:
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
        quantized = _count_shard(parameters._replace(dense=parameters.dense - parameters.root), shards)
        rest = divide_up(parameters.root, shards[0])
        head = 0 if self.model.tied_embeddings else rest / 2
        least = low * (quantized + head) + width * (rest - head)
        return Range.of(least, expected * quantized + width * rest, high * quantized + 4 * rest)

    def _keep_activations(self) -> None:
        """Set the bytes of a micro-batch's activations.

        `kept` by all layers between forward and backward; `working` inside a layer's backward pass, with what
        a layer that is computed again has beside what it kept; `outer`, tokens, rotary angles, inputs of the
        final norm and of the output layer.

        With full checkpointing a layer keeps its input, 2 sbh (arXiv:2205.05198, section 5), and one layer at
        a time all of its tensors.
        """
        settings, layout, model, tokens = self.settings, self.layout, self.model, self.tokens
        angles = settings.seq_len * model.head_width * 4 if model.position == "rope" else 0
        self.outer = self.stream + tokens * (self.width * model.hidden_size // layout.tp + 16) + angles
        by_operator = settings.checkpointing == "selective" and not settings.recompute_modules
        self.kept, again, working = NOTHING, NOTHING, NOTHING
        for count, experts in self.runs:
            one = layer = count_layer_bytes(self.training, tokens, experts)
            if settings.checkpointing == "full":
                one = Range.of(self.stream)
            elif by_operator:
                one = self._keep_selected(layer, experts)
            elif settings.checkpointing == "selective":
                one = count_layer_bytes(self.training, tokens, experts, settings.recompute_modules)
            self.kept += one * count
            again = max(again, layer - one, key=lambda each: each.expected)
            if by_operator and not settings.flash_attention:  # the scores of one layer, with dropout's mask
                again += Range.of(5 * tokens * model.heads * settings.seq_len / layout.tp)
            working = max(working, self._count_working(experts), key=lambda each: each.expected)
        if settings.quantization != "none":  # 16-bit weights to compute with, of a matrix, of a layer at most
            matrix = 2 * divide_up(self.largest_matrix, layout.tp)
            again += Range.of(matrix, 2 * matrix, max(2 * matrix, 2 * self.parameters.largest_layer))
        self.working = working + again

    def _keep_selected(self, layer: Range, experts: Experts | None) -> Range:
        """Give what selective checkpointing by operator keeps of a layer's activations, without scores.

        The layer's input, attention's result, and the result of each matrix (the bundled program) or of every
        second one (torchtitan); of routed experts half of what is sent to them and back.
        """
        settings, model, layout, width = self.settings, self.model, self.layout, self.width
        if self.framework == "megatron":
            return Range.of(MEGATRON_SELECTIVE * layer.low, layer.expected, layer.high)
        every, hidden = 1 if self.training.is_bundled else 2, model.hidden_size
        stream, (*made, out) = 4 if self.training.autocast else width, find_widths(model)
        inner = experts.shared * experts.intermediate_size if experts else model.intermediate_size
        sent = hidden * experts.per_token if experts else 0
        results = sum(made) + (2 if model.mlp == "swiglu" else 1) * inner
        sequence = stream * hidden + width * (2 * hidden / every + sent)
        split = width * (out + results / every) + 4 * model.heads
        each = self.tokens * (split / layout.tp + sequence / (layout.tp if layout.sequence_parallel else 1))
        if self.training.is_bundled:
            return Range.about(each, 0.02)
        low, expected, high = (share * each for share in SELECTED[settings.compile])
        if experts:
            low, high = 0.5 * low, CROWD * high
        if settings.precision == "fp8" and settings.compile is False:
            # torchao's eager fp8 took 81.8 GiB where bf16 took 49.6 (torchtitan's 2271b6386), compiled 47.8.
            expected, high = 0.8 * layer.expected, layer.high
        return Range.of(low, expected, high)

    def _count_working(self, experts: Experts | None) -> Range:
        """Count the bytes of gradients of activations inside a layer: in its MLP, half of what that keeps.

        torch's plain attention has gradients of its scores and of their softmax. The high end has what flash
        attention's backward takes inside its kernel: the query's gradient in fp32, and repeated keys.
        """
        model, tokens, stream, width = self.model, self.tokens, self.stream, self.width
        inner = model.intermediate_size
        if experts:
            inner = (experts.per_token + experts.shared) * experts.intermediate_size
        kept = tokens * (4 if model.mlp == "swiglu" else 2) * width * inner / self.layout.tp
        if not self.training.is_bundled:
            most = 0.75 * kept * (CROWD if experts else 1) + 2 * stream
            return Range.of(0.25 * kept, 0.5 * kept + stream, most)
        found = 0.5 * kept + stream + tokens * width * model.hidden_size
        if has_plain_attention(self.training):
            found = max(found, 2 * tokens * width * model.heads * self.settings.seq_len - kept + stream)
        each = 4 + 2 * self.training.autocast if self.framework == "ddp" else width
        matrix = each * model.hidden_size * inner
        groups = 2 * width if model.heads != model.kv_heads else 0
        kernel = tokens * (4 + groups) * model.heads * model.head_width
        return Range.of(0.9 * found, found + matrix, 1.1 * found + matrix + kernel)

    def list_moments(self) -> Iterator[tuple[str, dict[str, Range]]]:
        """Give the moments of a step at which memory can be at its peak: its name, and what is allocated, by
        parts.

        The loss; the backward pass of the output layer, of the last layers, of the first one and of the
        embedding; the optimizer's step. Beside a layer's whole weights FSDP2 has those of the one gathered
        ahead, and the fp32 input of the reduce-scatter of the layer after it (torch.distributed.fsdp,
        FSDPParamGroup).
        """
        settings, parameters, trained, width = self.settings, self.parameters, self.trained, self.width
        held, whole, layers = self.held, self.gradients, max(1, sum(count for count, _ in self.runs))
        every, one, stream = self.kept * self.flight, self.kept * (1 / layers), self.stream
        beside = every * (max(0.0, self.flight - 1) / self.flight)
        """Beside the first layer's activations in its backward pass."""
        recomputes, is_ddp = settings.checkpointing != "none", self.framework == "ddp"
        shards_all = self.framework == "fsdp" and self.layout.zero == 3
        if settings.activation_offload:
            # torchtune's OffloadActivations copies on a stream of its own, and holds at most five layers'
            # meanwhile.
            most = (one.low, 2 * one.expected, 5 * one.high)
            every = Range.of(*map(min, astuple(every), most))
        # The 16-bit copies of fp32 weights that torch.autocast keeps to the backward pass; FSDP's are the
        # unsharded layers, in `communication`, and the bundled program's output layer's is the loss's.
        copies = NOTHING
        if self.copy_bytes and not settings.lora.rank and not self.shards_weights:
            size = self.copy_bytes * trained.total
            copies = Range.of(0 if settings.checkpointing == "full" else 0.8 * size, size, size)
            if self.training.is_bundled:
                copies = Range.of(self.copy_bytes * (parameters.total - parameters.tables))
        copy, tied, exchanged = copies * (1 / layers), self.model.tied_embeddings, self._count_exchanged()
        # The output layer's gradient is outside of DDP's buckets while it waits.
        waits = self.has_head and is_ddp
        table = (
            round(self.gradient_bytes * (trained.tables if settings.lora.rank else self.table))
            if waits
            else 0
        )
        always = {**dict.fromkeys(PARTS, NOTHING), "weights": self.weights, "optimizer": self.optimizer}
        always["communication"] = self.buckets + self._gather() + exchanged

        def meet(name: str, gradients: float, **own: Range) -> tuple[str, dict[str, Range]]:
            return name, {**always, "gradients": Range.of(gradients), **own}

        if self.has_head:
            own = {"activations": every + copies + self.outer, "logits": self._count_logits()}
            if self.training.is_bundled and self.framework == "fsdp":
                # Its root's weights, and what it gathered of the last layer.
                root = width * (parameters.root + parameters.largest_layer)
                own["communication"] = Range.about(root, 0.1)
            yield meet("loss", held, **own)
        if waits:
            made = table + (2 * self.table if self.training.autocast else 0) + stream
            kept = every + (NOTHING if recomputes else copies) + stream
            name = "backward of the output layer"
            yield meet(name, held, activations=kept, temporary=Range.of(made))
        if shards_all:
            after = min(1, layers - 1)
            for name, gradients, others, gathered, reduced in (
                ("the last layer", held, every - one, after, 0),
                ("the last layers", held, every - one * 2, after, after),
                ("the first layer", max(held, whole), beside, 0, after),
            ):
                size = (1 + gathered) * self.layer + 4 * reduced * trained.largest_layer
                own = {"communication": self._gather(size) + exchanged, "temporary": self.working}
                yield meet(f"backward of {name}", gradients, activations=others + one, **own)
                own["temporary"] = Range.of(3 * stream + width * trained.largest_layer)
                yield meet(f"end of the backward of {name}", gradients, activations=others + stream, **own)
        else:
            waiting = 0 if (held and not tied) or settings.optimizer_in_backward else table
            last, working = every + (copy if recomputes else copies), self.working
            yield meet("backward of the last layer", held + waiting, activations=last, temporary=working)
            early = whole + (table if held and tied else 0)
            if not held and is_ddp and not settings.lora.rank and not settings.optimizer_in_backward:
                # What is made last: the first layer's gradients, the embedding's.
                late = parameters.largest_layer + (0 if tied else self.table)
                early -= round(self.gradient_bytes * late)
            kept = beside + one + copy
            yield meet("backward of the first layer", early, activations=kept, temporary=working)
        own = {"temporary": Range.of(stream)}
        if shards_all and not settings.lora.rank:
            # The root's gradients, and their fp32 copy; other programs than the bundled one may have the
            # root's weights then, and the last layers' buffers.
            root, layer = parameters.root, parameters.largest_layer
            each = (2 * width + 4) * root
            sent = Range.of(0.9 * each, each + 4 * layer, each + (4 + 3 * width) * layer + 4 * root)
            own["communication"] = Range.of((width + 4) * root) if self.training.is_bundled else sent
        yield meet("backward of the embedding", whole + (bool(held) + tied) * table, **own)
        name, own = "optimizer step", {"temporary": self.step, "communication": self.buckets}
        yield meet(name, max(whole, held), **own)

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
        if self.training.is_bundled:
            chunk, several = min(tokens, CHUNK) * self.model.vocab_size, tokens > CHUNK
            summed = (4 if several else width) * table
            before = 0 if not several else summed if tokens > 2 * CHUNK else width * table
            parts = 2 if width == 2 else 1  # the second one's, and the first one's until it is in fp32
            peak = max(8 * chunk + before, width * chunk + summed + parts * width * table * several)
            hidden = tokens * self.model.hidden_size
            return Range.of(peak + (6 * hidden + 2 * table if self.training.autocast else width * hidden))
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
        has_gradient = settings.loss in ("chunked", "fused") and settings.lora.rank is None
        gradient = width * table * has_gradient
        return Range.of(low * count, expected * count + gradient, high * count + 2 * gradient)

    def _gather(self, layers: int | None = None) -> Range:
        """Estimate what is whole at a time with zero=3 or FSDP: `layers` bytes of layers' weights and
        gradients; and DeepSpeed's buckets, one for reduction, two if it overlaps with computation.

        Beside them FSDP2's root (tables and final norm), and the gradient of the output layer, which waits
        for the end of backward. DeepSpeed: two layers, one gathered ahead, with the gradients of one.
        """
        parameters, trained, width, zero = self.parameters, self.trained, self.width, self.layout.zero
        total, layer, root = NOTHING, self.layer, self.width * self.parameters.root
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
        least, expected = 2 * layer, 2 * layer + root + (width + 2) * trained.largest_layer
        if layers is not None:
            table = trained.tables if self.settings.lora.rank else self.table
            least += width * trained.largest_layer
            expected = layers + root + (width * table if self.has_head else 0)
            if self.training.is_bundled:
                return Range.about(expected, 0.1)
        return total + Range.of(least, expected, 1.2 * expected + root)

    def _count_exchanged(self) -> Range:
        """Estimate the activations that are sent: tp gathers whole sequences, pp sends the stream both
        ways.
        """
        whole = self.stream * self.layout.tp * (self.layout.tp > 1 and self.layout.sequence_parallel)
        sent = self.stream * (self.layout.pp > 1)
        return Range(sent, whole + 2 * sent, 2 * whole + 4 * sent)


def _count_shard(parameters: StageParameters, shards: tuple[int, int]) -> int:
    """Give the parameters of a GPU's shard; `shards` are those of dense parameters and of experts."""
    return divide_up(parameters.dense, shards[0]) + divide_up(parameters.experts, shards[1])
