"""Parameters that one GPU holds: its pipeline stage, its share by tensor and expert parallelism."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from launcher.fit.fit_model import FitRequest, ModelDimensions
from launcher.fit.parameter_counts import (
    LayerParameters,
    ModelParameters,
    count_layer,
    count_mlp,
    count_part_parameters,
    list_attention_matrices,
    list_mlp_matrices,
)


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Equal layers of a stage."""

    count: int
    mixture: bool
    """Whether they have experts in place of the MLP."""
    dense: int
    """Parameters of one layer on this GPU, without the routed experts."""
    experts: int
    """Parameters of one layer's routed experts on this GPU."""


@dataclass(frozen=True, slots=True)
class RankParameters:
    """What a GPU of one pipeline stage holds before anything is sharded over its replicas."""

    layers: tuple[LayerRun, ...]
    tables: int
    """Embedding, positions and output layer."""
    norm: int
    """The final norm."""
    has_head: bool

    @property
    def layer_count(self) -> int:
        """Layers of this stage."""
        return sum(run.count for run in self.layers)

    @property
    def dense(self) -> int:
        """All parameters but the routed experts'."""
        return self.tables + self.norm + sum(run.count * run.dense for run in self.layers)

    @property
    def experts(self) -> int:
        """The routed experts' parameters."""
        return sum(run.count * run.experts for run in self.layers)

    @property
    def total(self) -> int:
        """All of this GPU."""
        return self.dense + self.experts

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max((run.dense + run.experts for run in self.layers), default=0)


def divide_up(total: int, parts: int) -> int:
    """Divide, and round up: the fullest of `parts` shares."""
    return -(-total // max(1, parts))


def list_stages(layers: int, stages: int) -> Iterator[tuple[int, int]]:
    """Give (first layer, number of layers) of each pipeline stage; what is left over is the first ones'."""
    each, more = divmod(layers, stages)
    first = 0
    for stage in range(stages):
        count = each + (stage < more)
        yield first, count
        first += count


def split_layer(layer: LayerParameters, request: FitRequest) -> tuple[int, int]:
    """Give one layer's (dense, expert) parameters on a GPU.

    Matrices are split by tp, experts by ep and tp; norms, router and down-projections of latent attention
    are whole on each GPU (Megatron-LM, arXiv:1909.08053; Megatron Core's MoE).
    """
    layout = request.layout
    whole = layer.latent + layer.router + layer.norms
    dense = divide_up(layer.attention + layer.mlp, layout.tp) + whole
    folded = layout.ep > layout.dp * layout.cp  # over tp, as Megatron Core does: then tp does not split them
    return dense, divide_up(layer.experts, layout.ep if folded else layout.tp * layout.ep)


def count_stage(request: FitRequest, first: int, count: int, stage: int) -> RankParameters:
    """Count the parameters of a GPU of the stage that has `count` layers from layer `first` on."""
    model, layout = request.model, request.layout
    parts = count_part_parameters(model)
    starts_at = model.layers if model.experts is None else min(model.experts.dense_layers, model.layers)
    dense = max(0, min(first + count, starts_at) - first)
    runs = []
    for size, mixture in ((dense, False), (count - dense, True)):
        if size:
            layer = count_layer(model, starts_at if mixture else 0)
            runs.append(LayerRun(size, mixture, *split_layer(layer, request)))
    last = stage == layout.pp - 1
    tables = count_tables(parts, model, is_first=stage == 0, is_last=last, tp=layout.tp)
    return RankParameters(tuple(runs), tables, parts.final_norm if last else 0, last)


def count_tables(
    parts: ModelParameters, model: ModelDimensions, *, is_first: bool, is_last: bool, tp: int
) -> int:
    """Count the tables of a stage: tp splits the embedding, and a tied one is on both ends of a pipeline."""
    tables = divide_up(parts.embedding, tp) + parts.positions if is_first else 0
    if is_last:
        tied_elsewhere = model.tied_embeddings and not is_first
        tables += divide_up(parts.embedding if tied_elsewhere else parts.head, tp)
    return tables


def count_trained(request: FitRequest, parameters: RankParameters) -> RankParameters:
    """Count the parameters that are trained on a GPU: all of them, or LoRA's adapters.

    An adapter is two matrices, of `rank` by a matrix's inputs and by its outputs; tp does not split it here.
    """
    model, lora = request.model, request.settings.lora
    if lora is None:
        return parameters

    def count(matrices: Iterable[tuple[str, int, int]]) -> int:
        return lora.rank * sum(ins + outs for name, ins, outs in matrices if name in lora.matrices)

    runs, attention = [], count(list_attention_matrices(model))
    for run in parameters.layers:
        inner, held, shared = model.intermediate_size, 0, 1
        if run.mixture and model.experts is not None:
            inner, shared = model.experts.intermediate_size, model.experts.shared
            held = divide_up(model.experts.count, request.layout.ep)
        expert = count(list_mlp_matrices(model, inner))
        runs.append(LayerRun(run.count, run.mixture, attention + shared * expert, held * expert))
    has_head = parameters.has_head
    head = count([("lm_head", model.hidden_size, model.vocab_size)]) if has_head else 0
    return RankParameters(tuple(runs), head, 0, has_head)


def count_largest_matrix(model: ModelDimensions) -> int:
    """Count the parameters of a layer's largest matrix: optimizers that work by matrix need as much."""
    inner = model.experts.intermediate_size if model.experts else model.intermediate_size
    return max(count_mlp(model, inner) // 2, model.hidden_size * model.heads * model.head_width)
