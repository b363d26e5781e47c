"""Peak memory of the fullest GPU of a training: `estimate_memory`.

Weights, gradients and optimizer states by bytes a parameter, activations by counting tensors, and what else
is allocated at the moments of a step, by counting what the code of each framework allocates. DDP and FSDP2
are taken with models as Hugging Face's, Megatron with fused norms and a parallel loss. Of the bundled program
the code is known (`TrainingSettings.bundled`), which makes most ranges narrow.

Published totals: 16 bytes a parameter of mixed-precision Adam (ZeRO, arXiv:1910.02054, section 3.1), 18 with
fp32 gradients (Megatron-LM's distributed optimizer: 6 + 12 / dp), 16 in fp32, 8 in bf16 alone.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

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
    list_stages,
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

    Of the pipeline stages that can be the fullest, moments of a training step are estimated; the highest one
    of the fullest stage is the answer. Low and high ends bound what the formulas leave open; `allocated` of
    the bundled program is held against torch's memory tracker (docs/fit.md). Bytes; raises nothing for
    dimensions above zero.
    """
    estimates = [_estimate_stage(Stage(training, *stage)) for stage in _choose_stages(training)]
    return max(estimates, key=lambda estimate: estimate.total.expected)


def count_kept(training: Training) -> Range:
    """Count the activations between forward and backward of a GPU of the first stage, wherever they are."""
    stage = Stage(training, *_choose_stages(training)[0])
    return stage.kept * stage.count_in_flight()


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


def _choose_stages(training: Training) -> list[tuple[int, int, int]]:
    """Give (stage, first layer, layers) of the first, second and last stage: those between hold less."""
    layers = training.model.layers
    stages = max(1, min(training.layout.pp, layers))
    every = [(stage, *found) for stage, found in enumerate(list_stages(layers, stages))]
    return every if len(every) <= 3 else [every[0], every[1], every[-1]]


def _estimate_stage(stage: "Stage") -> Estimate:
    """Estimate the moment with the highest expected total, with libraries, fragmentation and the context.

    Another moment's high end may be higher: what it has more is added to the high end of `temporary`, so that
    the high ends together bound all moments.
    """
    training, settings = stage.training, stage.settings
    moments = list(stage.list_moments())
    peak = max(moments, key=lambda moment: moment.total.expected)
    more = max(moment.total.high for moment in moments) - peak.total.high
    parts = {**peak.parts, "temporary": peak.parts["temporary"] + Range(0, 0, more)}
    context, lost = PROCESS, NOTHING
    if training.on_gpu:
        parts["temporary"] += CUBLAS
        context = estimate_context(training.layout)
        lost = count_lost(sum(parts.values(), NOTHING), expandable=settings.expandable_segments)
    allocated = sum(parts.values(), NOTHING)
    reserved = allocated + lost
    sharded = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")
    frozen = "" if settings.quantization == "none" else f", frozen in {settings.quantization}"
    modules = f" of {', '.join(settings.recompute_modules)}" if settings.recompute_modules else ""
    notes = {
        "weights": f"{settings.precision}{frozen}, sharded: {sharded[min(3, max(0, training.layout.zero))]}",
        "gradients": f"at the peak: {peak.name}",
        "optimizer": settings.optimizer + (" in the backward pass" if settings.optimizer_in_backward else ""),
        "activations": f"checkpointing: {settings.checkpointing}{modules}"
        + ("; in CPU memory" if settings.activation_offload else ""),
        "temporary": "gradients of activations, workspaces",
    }
    shown = (
        *(MemoryPart(name, parts[name], notes.get(name, "")) for name in PARTS),
        MemoryPart(
            "context", context, "CUDA's context, kernels, NCCL" if training.on_gpu else "Python and torch"
        ),
        MemoryPart("fragmentation", lost, "reserved and not filled"),
    )
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
    width = 2 if settings.precision == "bf16" else 4
    moments = float(MOMENTS[settings.optimizer] * width)
    if settings.optimizer == "adamw8bit":
        moments = EIGHT_BIT_STATE
    elif settings.optimizer == "adafactor":
        moments = 2 * width / max(1, hidden_size)
    fp8 = 2.0 if settings.precision == "fp8" else 0.0
    gradients: float = 4
    if settings.precision == "fp32":
        weights, optimizer, copy = 4.0, moments, 0.0
    elif settings.precision == "bf16":
        weights, gradients, optimizer, copy = 2.0, 2, moments, 0.0
    elif settings.lora or settings.framework in ("ddp", "fsdp"):
        weights, optimizer, copy = 4.0, moments, 2.0 if settings.lora else 2 + fp8
    else:
        gradients = 4 if settings.framework == "megatron" else 2
        weights, optimizer, copy = 2 + fp8, 4 + moments, 0.0
    if settings.gradients != "auto":
        gradients = 2 if settings.gradients == "bf16" else 4
    return weights, gradients, optimizer, copy


@dataclass(frozen=True, slots=True)
class Moment:
    """What is allocated at one moment."""

    name: str
    parts: dict[str, Range]
    """By all of PARTS."""

    @property
    def total(self) -> Range:
        """All of it."""
        return sum(self.parts.values(), NOTHING)


class Stage:
    """A GPU of one pipeline stage: what it holds, keeps and has beside that for a while, in bytes."""

    def __init__(self, training: Training, index: int, first: int, count: int) -> None:
        """Count what a GPU has of the stage that has `count` layers from layer `first` on."""
        self.training, self.index = training, index
        self.model, self.layout, self.settings = training.model, training.layout, training.settings
        self.parameters, self.trained = count_stage(training, first, count, index)
        self.width = self.settings.width
        self.tokens = self.settings.micro_batch * divide_up(self.settings.seq_len, self.layout.cp)
        """Of a micro-batch on a GPU: cp splits the sequence."""
        self.table = divide_up(self.model.vocab_size * self.model.hidden_size, self.layout.tp)
        """Parameters of the output layer on a GPU."""
        self._hold_states()
        self._keep_activations()

    # States: weights, gradients, optimizer.

    def _find_shards(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Give the GPUs over which weights, gradients and optimizer are split: (dense parameters, experts).

        ZeRO's stages 1 to 3 (arXiv:1910.02054), over dp * cp replicas, or `shard_size` of them (hybrid
        sharding); experts over the replicas that hold the same ones, dp * cp / ep. FSDP2 shards its weights
        always: with zero=2 it keeps the gathered ones (reshard_after_forward=False).
        """
        layout = self.layout
        wide = min(layout.replicas, layout.shard_size or layout.replicas)
        # Megatron folds ep over tp.
        holders = layout.replicas if layout.ep <= layout.replicas else layout.replicas * layout.tp
        both, none = (wide, max(1, min(wide, holders // max(1, layout.ep)))), (1, 1)
        sharded = 2 if self.settings.framework == "fsdp" else 3
        return (
            both if layout.zero >= sharded else none,
            both if layout.zero >= 2 else none,
            both if layout.zero >= 1 else none,
        )

    def _hold_states(self) -> None:
        """Set weights, gradients (at the end of backward) and optimizer, and the temporaries of its step.

        Offloaded parameters are on the GPU while they compute alone (ZeRO-Infinity, arXiv:2104.07857), as are
        their sharded gradients; offloaded optimizer states never are (ZeRO-Offload, arXiv:2101.06840).
        """
        settings, trained = self.settings, self.trained
        of_weight, of_gradient, of_state, self.copy_bytes = count_state_bytes(
            settings, self.model.hidden_size
        )
        self.gradient_bytes = of_gradient
        by_weights, by_gradients, by_optimizer = self._find_shards()
        self.weights = Range.of(of_weight * _count_shard(trained, by_weights))
        if settings.lora:
            self.weights += self._count_frozen(by_weights)
        self.gradients = round(of_gradient * _count_shard(trained, by_gradients))
        self.all_gradients = self.gradients
        """What DDP's buckets hold, which stays if the gradients themselves are freed at once."""
        local = _count_shard(trained, by_optimizer)
        self.optimizer = self._count_optimizer(local, of_state)
        self.step = self._count_step(local)
        if settings.optimizer_in_backward:  # those of a layer or a table
            largest = max(trained.largest_layer, trained.tables)
            self.gradients = min(self.gradients, round(of_gradient * divide_up(largest, by_gradients[0])))
            most = self.gradients
            self.step = Range.of(0, min(self.step.expected, most), min(self.step.high, most))
        if settings.offload != "none":
            self.optimizer, self.step = NOTHING, NOTHING
            # DeepSpeed's leave the GPU by buckets in the backward pass (arXiv:2101.06840, section 4.2).
            if self.layout.zero >= 2 and (settings.framework == "zero" or settings.offload == "parameters"):
                self.gradients = 0
        if settings.offload == "parameters":
            self.weights = NOTHING
        if settings.optimizer == "muon" and settings.offload == "none":
            matrix = 2 * count_largest_matrix(self.model)  # a few 16-bit copies of a matrix at a time
            self.step = Range.of(matrix, 4 * matrix, 8 * matrix)

    def _count_frozen(self, shards: tuple[int, int]) -> Range:
        """Count what a GPU holds of the frozen model; the tables and norms are not quantized.

        High: peft's prepare_model_for_kbit_training casts them to fp32. Low: the output layer is quantized
        too (litgpt).
        """
        parameters, width = self.parameters, self.width
        if self.settings.quantization == "none":
            return Range.of(width * _count_shard(parameters, shards))
        low, expected, high = QUANTIZED[self.settings.quantization]
        quantized = _count_shard(replace(parameters, tables=0, norm=0), shards)
        rest = divide_up(parameters.root, shards[0])
        head = 0 if self.model.tied_embeddings else rest / 2
        return Range.of(
            low * (quantized + head) + width * (rest - head),
            expected * quantized + width * rest,
            high * quantized + 4 * rest,
        )

    def _count_optimizer(self, local: int, of_state: float) -> Range:
        """Count the optimizer's states of `local` parameters.

        Muon leaves tables and norms to AdamW, which keeps a second moment (github.com/KellerJordan/Muon,
        "embeddings, classifier heads and scalars by AdamW"). Adafactor has a first moment as an option, and
        small matrices have longer rows and columns for their size.
        """
        expected, high = round(of_state * local), 0
        if self.settings.optimizer == "muon":
            width = 2 if self.settings.precision == "bf16" else 4
            expected += round(width * local * (self.trained.tables / max(1, self.trained.total)))
        if self.settings.optimizer == "adafactor":
            high = 4 * local // 50
        return Range(expected, expected, expected + high)

    def _count_step(self, local: int) -> Range:
        """Estimate the temporaries of an optimizer's step over `local` parameters.

        A fused or compiled step has none; torch's default for CUDA, `foreach`, takes a list of temporaries of
        all gradients: for AdamW the root of the second moment (torch.optim._multi_tensor_adamw), for
        Adafactor the squares and the updates.
        """
        settings = self.settings
        whole = (2 if settings.precision == "bf16" else 4) * local
        if settings.optimizer == "adafactor":
            return Range(0, 2 * whole, 3 * whole)
        has_none = settings.optimizer_fused or settings.bundled or settings.framework in ("zero", "megatron")
        if has_none or settings.optimizer != "adamw":
            return NOTHING
        return Range(0 if settings.optimizer_fused is None else whole, whole, whole)

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

        def count(how: Implementation) -> float:
            return count_layer_bytes(self.training, mixture=run.mixture, how=how, recomputed=recomputed)

        if settings.bundled:
            each = count(Implementation())
            return Range.of(tokens * (0.98 * each), tokens * each, tokens * (1.02 * each) * crowd)
        fused = bool(settings.compile) or settings.framework == "megatron"
        eager = settings.framework != "megatron" and not settings.compile
        low = count(Implementation(fused_mlp=fused))
        expected = count(Implementation(eager_norms=eager, fused_mlp=not eager))
        high = count(Implementation(self.model.position == "learned", eager, fused and not eager))
        if settings.precision == "fp8":  # inputs of matrices may be kept in 8 bits (Transformer Engine)
            low *= 0.6
        if settings.lora:
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
        model, settings, tokens, stream, width = (
            self.model,
            self.settings,
            self.tokens,
            self.stream,
            self.width,
        )
        inner = float(model.intermediate_size)
        if run.mixture and model.experts is not None:
            inner = (model.experts.per_token + model.experts.shared) * model.experts.intermediate_size
        kept = tokens * count_mlp_bytes(model, inner, width) / self.layout.tp
        if not settings.bundled:
            crowd = 1.5 if run.mixture else 1.0
            return Range.of(0.25 * kept, 0.5 * kept + stream, 0.75 * kept * crowd + 2 * stream)
        found = 0.5 * kept + stream + tokens * width * model.hidden_size
        if has_plain_attention(model, width):
            found = max(found, 2 * tokens * width * model.heads * settings.seq_len - kept + stream)
        each = 4 + 2 * settings.autocast if settings.framework == "ddp" else width
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

    def list_moments(self) -> Iterator[Moment]:
        """Give the moments of a step at which memory can be at its peak."""
        settings, layout, parameters = self.settings, self.layout, self.parameters
        flight, layers = self.count_in_flight(), parameters.layer_count
        every, one = self.kept * flight, self.kept * (1 / layers)
        beside = every * (max(0.0, flight - 1) / flight)
        first = beside + one
        if settings.activation_offload:
            # torchtune's OffloadActivations copies on a stream of its own, and holds at most five layers'
            # meanwhile.
            most = Range.of(one.low, 2 * one.expected, 5 * one.high)
            every = Range.of(
                min(every.low, most.low), min(every.expected, most.expected), min(every.high, most.high)
            )
        copies, held, whole = self._count_weight_copies(), self._count_held(), self.gradients
        copy, recomputes = copies * (1 / layers), settings.checkpointing != "none"
        tied, stream = self.model.tied_embeddings, Range.of(self.stream)
        buffers = (
            self._count_buckets() + self._gather() + self._count_zero_buckets() + self._count_exchanged()
        )
        # The output layer's gradient is outside of DDP's buckets while it waits.
        waits = parameters.has_head and settings.framework == "ddp"
        tables = self.trained.tables if settings.lora else self.table
        table = round(self.gradient_bytes * tables) if waits else 0

        if parameters.has_head:
            outer, root = Range.of(self.outer), self._count_root(buffers)
            yield self._moment("loss", held, every + copies + outer, sent=root, logits=self._count_logits())
        if waits:
            made = table + (2 * self.table if settings.autocast else 0)
            kept = every + (NOTHING if recomputes else copies) + stream
            yield self._moment("backward of the output layer", held, kept, Range.of(made) + stream, buffers)
        if settings.framework == "fsdp" and layout.zero == 3:
            yield from self._list_sharded_moments(every, beside)
        else:
            waiting = 0 if (held and not tied) or settings.optimizer_in_backward else table
            last = every + (copy if recomputes else copies)
            yield self._moment("backward of the last layer", held + waiting, last, self.working, buffers)
            early = whole + (table if tied else 0) if held else whole - self._count_late_gradients()
            yield self._moment("backward of the first layer", early, first + copy, self.working, buffers)
        embedding = whole + (table if held else 0) + (table if tied else 0)
        reduced = self._count_root_reduction(buffers)
        yield self._moment("backward of the embedding", embedding, NOTHING, stream, reduced)
        yield self._moment("optimizer step", max(whole, held), NOTHING, self.step, self._count_buckets())

    def _moment(
        self,
        name: str,
        gradients: float,
        activations: Range,
        temporary: Range = NOTHING,
        sent: Range = NOTHING,
        logits: Range = NOTHING,
    ) -> Moment:
        """Make a moment, with the weights and the optimizer."""
        sizes = (self.weights, Range.of(gradients), self.optimizer, activations, logits, temporary, sent)
        return Moment(name, dict(zip(PARTS, sizes, strict=True)))

    def _list_sharded_moments(self, every: Range, beside: Range) -> Iterator[Moment]:
        """Give the moments of FSDP2's backward pass through layers: inside a layer, and with all its
        gradients.

        `every` are the activations of all layers, `beside` those beside the first layer's in its backward
        pass. Beside a layer's whole weights are those of the one gathered ahead, and the fp32 input of the
        reduce-scatter of the layer after it (torch.distributed.fsdp, FSDPParamGroup).
        """
        layers, trained = self.parameters.layer_count, self.trained.largest_layer
        held, one, neighbour = self._count_held(), self.kept * (1 / layers), min(1, layers - 1)
        layer = self._find_gathered_width() * self.parameters.largest_layer
        for name, gradients, others, ahead, after in (
            ("the last layer", held, every - one, neighbour, 0),
            ("the last layers", held, every - one * 2, neighbour, neighbour),
            ("the first layer", max(held, self.gradients), beside, 0, neighbour),
        ):
            gathered = round((1 + ahead) * layer + 4 * after * trained)
            sent = self._gather(gathered) + self._count_exchanged()
            yield self._moment(f"backward of {name}", gradients, others + one, self.working, sent)
            end, temporary = others + Range.of(self.stream), Range.of(3 * self.stream + self.width * trained)
            yield self._moment(f"end of the backward of {name}", gradients, end, temporary, sent)

    def _find_gathered_width(self) -> float:
        """Give the bytes of a layer's parameter when it is whole; quantized ones are gathered as they are."""
        kind = self.settings.quantization
        return self.width if kind == "none" else QUANTIZED[kind][1]

    def _count_late_gradients(self) -> int:
        """Count what the backward pass makes last: the first layer's gradients, the embedding's."""
        settings = self.settings
        if settings.framework != "ddp" or settings.lora or settings.optimizer_in_backward:
            return 0
        table = 0 if self.model.tied_embeddings else self.table
        return round(self.gradient_bytes * (self.parameters.largest_layer + table))

    def _count_held(self) -> int:
        """Count the gradients that are allocated in the forward pass.

        In buckets, or from earlier micro-steps; DDP has both if gradients are views of its buckets, which
        those of micro-steps without communication (no_sync) are not yet.
        """
        settings = self.settings
        if settings.optimizer_in_backward:
            return 0
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
        settings = self.settings
        if settings.bundled:
            return Range.of(self._count_chunked_loss())
        known = {"fused": (0.0, 0.5, 1.5), "chunked": (0.3, 1.2, 2.5), "compiled": (4.0, 5.0, 7.0)}
        if settings.loss in known:
            low, expected, high = known[settings.loss]
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
        count, table = self.tokens * divide_up(self.model.vocab_size, self.layout.tp), 0
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
        return peak + (4 * hidden + 2 * table + 2 * hidden if self.settings.autocast else width * hidden)

    # Communication.

    def _count_buckets(self) -> Range:
        """Give DDP's buckets, unless gradients are views of them (gradient_as_bucket_view, off by
        default).
        """
        layout, settings = self.layout, self.settings
        if settings.framework != "ddp" or layout.replicas == 1 or layout.zero > 0 or settings.bundled:
            return NOTHING
        return Range.of(0, self.all_gradients, self.all_gradients)

    def _gather(self, layers: int | None = None) -> Range:
        """Estimate what is whole at a time with zero=3 or FSDP: `layers` bytes of layers' weights and
        gradients.

        Beside them FSDP2's root (tables and final norm), and the gradient of the output layer, which waits
        for the end of backward. DeepSpeed: two layers, one gathered ahead, with the gradients of one.
        """
        settings, parameters, trained, width = self.settings, self.parameters, self.trained, self.width
        layer = round(self._find_gathered_width() * parameters.largest_layer)
        if self.layout.zero == 2 and settings.framework == "fsdp":
            # reshard_after_forward=False: whole weights, and between micro-batches of a pipeline whole
            # gradients.
            gradients = 4 * trained.total if self.layout.pp > 1 else 0
            weights = width * parameters.total
            return Range.of(weights, weights + gradients, 1.05 * (weights + gradients))
        if self.layout.zero < 3:
            return NOTHING
        root = width * parameters.root
        if settings.framework != "fsdp" or layers is None:
            expected = 2 * layer + root + (width + 2) * trained.largest_layer
            return Range.of(2 * layer, expected, 1.2 * expected + root)
        table = trained.tables if settings.lora else self.table
        expected = layers + root + (width * table if parameters.has_head else 0)
        if settings.bundled:
            return Range.of(0.9 * expected, expected, 1.1 * expected)
        return Range.of(2 * layer + width * trained.largest_layer, expected, 1.2 * expected + root)

    def _count_root(self, buffers: Range) -> Range:
        """Count what FSDP2 has whole at the loss: its root's weights, and what it gathered of the last
        layer.
        """
        if not self.settings.bundled or self.settings.framework != "fsdp":
            return buffers
        root = self.width * (self.parameters.root + self.parameters.largest_layer)
        return Range.of(0.9 * root, root, 1.1 * root)

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

    def _count_zero_buckets(self) -> Range:
        """Estimate DeepSpeed's buckets: one for reduction, two if it overlaps with computation."""
        if self.settings.framework != "zero" or self.layout.zero == 0:
            return NOTHING
        bucket = 2 * min(ZERO_BUCKET, self.trained.total)
        return Range.of(0.1 * bucket, bucket, 2 * bucket)

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
