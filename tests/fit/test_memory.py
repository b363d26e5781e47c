"""Memory estimates: published figures, torch's memory tracker, and what must hold for any setting.

The tracked peaks of a grid are recorded (`python -m tests.benchmarks fit` tracks them again), and a few are
tracked here.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.fit.advice import advise, budget_node, estimate_speed
from launcher.fit.counts import Implementation, count_layer_bytes, count_stage
from launcher.fit.memory import CUBLAS, Stage, count_state_bytes, estimate_memory
from launcher.fit.training import (
    Device,
    Estimate,
    Experts,
    LatentAttention,
    Lora,
    ModelDimensions,
    ParallelLayout,
    Training,
    TrainingSettings,
    check_layout,
)
from tests.benchmarks.fit import FEW, GRID, MOST_ABOVE, FitCase, find_missing, track_cases
from tests.fit.made_requests import DATA, H100, LLAMA7B, MODELS, TABLES
from tests.fuzzing import WORDS

GIB = 2**30
LLAMA_13B = MODELS["Llama 2 13B"]


def ask(
    model: ModelDimensions = LLAMA7B,
    layout: ParallelLayout | None = None,
    training: TrainingSettings | None = None,
    device: Device = H100,
) -> Training:
    return Training(model, layout or ParallelLayout(), training or TrainingSettings(), device, 8)


def part(estimate: Estimate, name: str) -> int:
    return next(one.bytes.expected for one in estimate.parts if one.name == name)


GPTS = tuple(MODELS[name] for name in ("22B", "GPT-3 175B", "530B", "1T"))
"""Table 3 of arXiv:2205.05198; all with a sequence of 2048 and tp=8."""


def count_korthikanti(model: ModelDimensions, layout: ParallelLayout, checkpointing: str) -> float:
    """Bytes a token that a layer keeps, with dropout and without flash attention."""
    settings = TrainingSettings("megatron", seq_len=2048, flash_attention=False, checkpointing=checkpointing)
    request = ask(model, layout, settings)
    return count_layer_bytes(request, mixture=False, how=Implementation(dropout=True))


def count_in_flight(request: Training, stage: int) -> float:
    return Stage(request, stage, 4 * stage, 4).count_in_flight()


@pytest.mark.parametrize("model", GPTS, ids=lambda model: model.name)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_activations_of_a_layer_are_those_of_korthikanti(
    model: ModelDimensions, sequence_parallel: bool, selective: bool
) -> None:
    """Table 2 of arXiv:2205.05198, over sh, for one sequence: 10 + 24/t + 5as/ht and its variants."""
    t, ratio = 8, 5 * model.heads * 2048 / model.hidden_size
    published = (34 / t if sequence_parallel else 10 + 24 / t) + (0 if selective else ratio / t)
    layout = ParallelLayout(tp=t, sequence_parallel=sequence_parallel)
    counted = count_korthikanti(model, layout, "selective" if selective else "none")
    assert counted / model.hidden_size == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("model", "saved"), [(GPTS[1], 0.70), (GPTS[2], 0.65)])
def test_scores_are_the_published_share(model: ModelDimensions, saved: float) -> None:
    """Section 5 of arXiv:2205.05198: selective recomputation saves 70% for GPT-3, 65% for MT-NLG."""
    whole, rest = (count_korthikanti(model, ParallelLayout(), kind) for kind in ("none", "selective"))
    assert 1 - rest / whole == pytest.approx(saved, abs=0.01)


def test_the_first_stage_holds_the_activations_of_pp_micro_batches() -> None:
    request = ask(layout=ParallelLayout(pp=8), training=TrainingSettings("megatron", accumulation=64))
    assert [count_in_flight(request, stage) for stage in (0, 1, 7)] == [8, 7, 1]
    interleaved = replace(request, layout=ParallelLayout(pp=8, virtual_stages=3))
    assert count_in_flight(interleaved, 0) == pytest.approx(8 * (1 + 7 / 24))
    few = replace(request, settings=replace(request.settings, accumulation=2))
    assert count_in_flight(few, 0) == 2


@pytest.mark.parametrize("row", TABLES["state_bytes"], ids=str)
def test_bytes_a_parameter(row: tuple[str, str, str, str, float]) -> None:
    """ZeRO (arXiv:1910.02054, section 3.1): 16; Megatron-LM's distributed optimizer: 6 + 12 / dp."""
    framework, precision, optimizer, gradients, published = row
    training = TrainingSettings(framework, precision, optimizer, gradients=gradients)
    assert sum(count_state_bytes(training, 4096)[:3]) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("zero", "published"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_of_zeros_stages(zero: int, published: float) -> None:
    """Figure 1 of arXiv:1910.02054: 7.5 billion parameters over 64 GPUs, in GB of 10^9 bytes."""
    model = ModelDimensions("7.5B", 0, 36, 4096, 32, 32, 128, 17066, 1024, mlp="gelu")
    request = ask(model, ParallelLayout(dp=64, zero=zero), TrainingSettings("zero"))
    parts, _ = count_stage(request, 0, 36, 0)
    assert parts.total == pytest.approx(7.5e9, rel=0.02)
    estimate = estimate_memory(request)
    states = sum(part(estimate, name) for name in ("weights", "gradients", "optimizer"))
    assert states / 1e9 == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(("shape", "qk_norm", "published"), TABLES["layer_copies"])
def test_measured_copies_of_the_stream_are_in_the_range(shape: Any, qk_norm: bool, published: float) -> None:
    """The ml-engineering book (Stas Bekman) measured a layer's activations, in bf16 copies of sbh."""
    model = replace(ModelDimensions("measured", *shape), qk_norm=qk_norm)
    request = ask(model, ParallelLayout(dp=8, zero=3), TrainingSettings("fsdp", seq_len=4096))
    kept = Stage(request, 0, 0, model.layers).kept * (1 / model.layers / 4096 / 2)
    low, expected, high = (value / model.hidden_size for value in (kept.low, kept.expected, kept.high))
    assert low <= published <= 1.1 * high
    assert expected == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("model", "lora", "published"),
    [
        (LLAMA7B, Lora(8, ("q_proj", "v_proj")), 4_194_304),
        (LLAMA_13B, Lora(8, ("q_proj", "v_proj")), 6_553_600),
        (LLAMA7B, Lora(64), 159_907_840),
        (LLAMA7B, Lora(8, ("q_proj", "lm_head")), 32 * 8 * 2 * 4096 + 8 * (4096 + 32000)),
        (replace(LLAMA7B, experts=Experts(8, 2, 14336)), Lora(4, ("up_proj",)), 32 * 8 * 4 * (4096 + 14336)),
    ],
)  # fmt: skip
def test_adapters_have_their_published_parameters(model: ModelDimensions, lora: Lora, published: int) -> None:
    """litgpt's tutorials/resource-tables.md: 4,194,304 and 6,553,600; all matrices, rank 64: 160 million."""
    request = ask(model, training=TrainingSettings(lora=lora))
    assert count_stage(request, 0, model.layers, 0)[1].total == published


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    training = TrainingSettings(precision="bf16", lora=Lora(8))
    frozen = estimate_memory(ask(training=training))
    assert part(frozen, "weights") == 2 * (6_738_415_616 + 19_988_480)
    assert part(frozen, "optimizer") == 2 * 2 * 19_988_480
    nf4, int8 = (
        part(estimate_memory(ask(training=replace(training, quantization=kind))), "weights") / 6.738e9
        for kind in ("nf4", "int8")
    )
    assert 0.5 < nf4 < 0.7
    assert 1 < int8 < 1.2


def test_a_matrix_without_an_adapter_does_not_keep_its_input() -> None:
    """34 sbh of a layer with GELU less 2 for each input that nobody needs: of attention's and MLP's four."""
    gpt = MODELS["7.5B"]
    each = [
        count_layer_bytes(
            ask(gpt, training=TrainingSettings(lora=Lora(1, targets))), mixture=False, how=Implementation()
        )
        for targets in (("all-linear",), ("q_proj",), ("up_proj",), ("down_proj",))
    ]
    whole = count_layer_bytes(ask(gpt), mixture=False, how=Implementation())
    rank = 2  # bytes of an adapter's low-rank result
    assert each == [
        whole + 6 * rank,
        whole - 2 * 4096 - 8 * 4096 + rank,
        whole - 2 * 4096 - 8 * 4096 + rank,
        whole - 4 * 4096 + rank,
    ]


def test_offloaded_activations_are_in_the_nodes_memory() -> None:
    training = TrainingSettings(micro_batch=4, seq_len=4096, checkpointing="full", lora=Lora(8))
    request = ask(layout=ParallelLayout(dp=8), training=training)
    moved = replace(request, settings=replace(training, activation_offload=True))
    here, there = estimate_memory(request), estimate_memory(moved)
    inputs = 32 * 4 * 4096 * 2 * 4096
    assert here.allocated.expected - there.allocated.expected == pytest.approx(inputs, rel=0.1)
    needs = [
        line.needed for one in (request, moved) for line in budget_node(one) if line.name == "CPU memory"
    ]
    assert needs[0] == needs[1], "the GPUs' sum is more than both"
    lines = [line.note for line in budget_node(moved) if line.name == "CPU memory"]
    assert f"activations {8 * 1.5 * inputs / GIB:.0f}" in lines[0]


SCORES = 2 * 64 * 2048 / 6144


def test_modules_that_are_recomputed_are_not_kept() -> None:
    """Of the 34 + 2as/h sbh of arXiv:2205.05198, section 4.1, without dropout: the tensors of that block."""
    saved = {"core_attn": SCORES, "attention": 8 + SCORES, "layernorm": 4, "mlp": 16}
    saved |= {"attention mlp": 24 + SCORES, "moe mla_up_proj": 0}
    model, each = GPTS[0], 2048 * GPTS[0].hidden_size
    training = TrainingSettings("megatron", seq_len=2048, flash_attention=False)
    plain = part(estimate_memory(ask(model, training=training)), "activations")
    for modules, size in saved.items():
        some = replace(training, checkpointing="selective", recompute_modules=tuple(modules.split()))
        again = part(estimate_memory(ask(model, training=some)), "activations")
        assert (plain - again) / model.layers / each == pytest.approx(size, rel=0.02, abs=0.1), modules


def test_states_on_a_cpu_have_no_cuda_context() -> None:
    estimate = estimate_memory(ask(device=Device("cpu", 32768, "cpu")))
    assert part(estimate, "context") < GIB and not part(estimate, "fragmentation")


ANY_MODELS = st.builds(
    lambda heads, groups, width, **more: ModelDimensions(
        "any",
        heads=heads * groups,
        kv_heads=heads,
        head_width=width,
        hidden_size=heads * groups * width,
        **more,
    ),
    heads=st.integers(1, 8),
    groups=st.integers(1, 4),
    width=st.sampled_from([8, 64, 128]),
    vocab_size=st.integers(256, 200_000),
    layers=st.integers(1, 100),
    intermediate_size=st.integers(1, 50_000),
    max_seq_len=st.integers(1, 100_000),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    mlp=st.sampled_from(["swiglu", "gelu"]),
    position=st.sampled_from(["rope", "learned"]),
    bias=st.booleans(),
    tied_embeddings=st.booleans(),
    experts=st.none() | st.builds(Experts, *[st.integers(1, 64)] * 3, st.integers(0, 2), st.integers(0, 9)),
    latent_attention=st.none()
    | st.builds(LatentAttention, st.none() | st.integers(1, 999), *[st.integers(1, 99)] * 4),
)  # fmt: skip
SMALL = st.integers(1, 16)
LAYOUTS = st.builds(ParallelLayout, *[SMALL] * 5, st.integers(0, 3), st.none() | SMALL, st.booleans(), SMALL)
TRAINING = st.builds(
    TrainingSettings,
    st.sampled_from(WORDS["parallel.framework"]),
    st.sampled_from(WORDS["fit.precision"]),
    st.sampled_from(WORDS["fit.optimizer"]),
    st.sampled_from(WORDS["fit.checkpointing"]),
    st.sampled_from(WORDS["fit.offload"]),
    st.integers(1, 10_000),
    st.integers(1, 1000),
    st.integers(1, 1_000_000),
    st.booleans(),
    bundled=st.booleans(),
    expandable_segments=st.booleans(),
    lora=st.none()
    | st.builds(
        Lora, st.integers(1, 99), st.lists(st.sampled_from(WORDS["fit.lora.targets"]), min_size=1).map(tuple)
    ),
    quantization=st.sampled_from(WORDS["fit.quantization"]),
    optimizer_in_backward=st.booleans(),
    activation_offload=st.booleans(),
    recompute_modules=st.lists(st.sampled_from(WORDS["fit.recompute_modules"])).map(tuple),
)
PLAIN = st.builds(ParallelLayout, dp=SMALL, zero=st.sampled_from([0, 3]))
REQUESTS = st.builds(ask, ANY_MODELS, LAYOUTS | PLAIN, TRAINING)


@given(REQUESTS, st.none() | st.floats(1, 1e20), st.none() | st.floats(1e-300, 1e20))
def test_whatever_is_taken_has_memory_in_order_speed_and_advice(
    found: Training, tokens: float | None, seconds: float | None
) -> None:
    request = replace(found, tokens=tokens, step_seconds=seconds)
    estimate = estimate_memory(request)
    ranges = [one.bytes for one in estimate.parts]
    for value in (*ranges, estimate.total, estimate.allocated, estimate.reserved):
        assert 0 <= value.low <= value.expected <= value.high
    assert estimate.total.high == sum(value.high for value in ranges)
    assert estimate.allocated.expected <= estimate.reserved.expected <= estimate.total.expected
    try:
        check_layout(replace(request, gpus_per_node=request.layout.world_size))
    except UsageError:
        return
    speed = estimate_speed(request)
    pairs = (speed.step_seconds, speed.mfu, speed.hfu, speed.tflops, speed.total_seconds, speed.gpu_hours)
    assert speed.flops_per_step > 0 and all(pair is None or 0 <= pair[0] <= pair[1] for pair in pairs)
    assert all(one.what and one.level in ("warning", "note") for one in advise(request))


@given(REQUESTS, st.integers(1, 8), st.integers(0, 2048))
def test_more_tokens_never_take_less_memory(request: Training, factor: int, longer: int) -> None:
    training = request.settings
    more = replace(training, micro_batch=training.micro_batch * factor, seq_len=training.seq_len + longer)
    before, after = (estimate_memory(replace(request, settings=one)).total for one in (training, more))
    assert before.expected <= after.expected
    assert before.high <= after.high


RECORDED = json.loads((DATA / "tracked_peaks.json").read_text())["peaks"]


def check_estimate(case: FitCase, truth: int) -> None:
    allocated = estimate_memory(case.request).allocated
    # The tracker sees no workspaces of libraries, and the smallest models have no more than those.
    assert allocated.expected - CUBLAS.expected == pytest.approx(truth, rel=0.05), case.label
    assert truth <= (1 + MOST_ABOVE) * allocated.high, case.label
    assert allocated.low <= 1.001 * truth, case.label


def test_estimates_of_the_grid_are_what_torch_tracked() -> None:
    peaks = RECORDED
    assert set(peaks) == {case.label for case in (*FEW, *GRID)}
    for case in (*FEW, *GRID):
        check_estimate(case, peaks[case.label])


@pytest.mark.slow
def test_the_recorded_peaks_are_what_torch_tracks(tmp_path: Path) -> None:
    if missing := find_missing():
        pytest.skip(f"there is no {missing}")
    peaks = RECORDED
    for case, truth in zip(FEW, track_cases(FEW, tmp_path), strict=True):
        assert truth == pytest.approx(peaks[case.label], rel=0.01), case.label
        check_estimate(case, truth)
