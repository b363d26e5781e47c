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
from launcher.fit.choice import assess
from launcher.fit.counts import count_layer_bytes, count_model_parameters
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Training
from tests.benchmarks.fit import FEW, GRID, MOST_ABOVE, FitCase, find_missing, track_cases
from tests.fit.made_requests import DATA, MODELS, SETTINGS, TABLES, ask, change
from tests.fuzzing import WORDS

GIB = 2**30
CUBLAS = 32 << 20
"""Expected of libraries' workspaces, which the tracker does not see."""


def expect(request: Training, *names: str) -> int:
    """Bytes that are expected of some parts."""
    return sum(part.bytes.expected for part in estimate_memory(request).parts if part.name in names)


GPTS = ("22B", "GPT-3 175B", "530B", "1T")
"""Table 3 of arXiv:2205.05198; all with a sequence of 2048 and tp=8."""


def count_korthikanti(model: str, layout: dict[str, Any], checkpointing: str) -> float:
    """Bytes a token that a layer keeps, with dropout, fused norms and without flash attention."""
    settings = {"framework": "megatron", "seq_len": 2048, "flash_attention": False}
    request = ask(model, layout=layout, settings={**settings, "checkpointing": checkpointing})
    return count_layer_bytes(request, 1).high / 1.05


@pytest.mark.parametrize("model", GPTS)
def test_activations_of_a_layer_are_those_of_korthikanti(model: str) -> None:
    """Table 2 of arXiv:2205.05198, over sh, for one sequence: 10 + 24/t + 5as/ht and its variants."""
    t, ratio = 8, 5 * MODELS[model].heads * 2048 / MODELS[model].hidden_size
    for sequence_parallel in (False, True):
        for kind, scores in (("selective", 0), ("none", ratio / t)):
            published = (34 / t if sequence_parallel else 10 + 24 / t) + scores
            counted = count_korthikanti(model, {"tp": t, "sequence_parallel": sequence_parallel}, kind)
            assert counted / MODELS[model].hidden_size == pytest.approx(published, rel=0.05)


def test_the_first_stage_holds_the_activations_of_pp_micro_batches() -> None:
    def keep(steps: int, **layout: int) -> int:
        settings = {"framework": "megatron", "accumulation": steps}
        return expect(ask(layout={"pp": 8, **layout}, settings=settings), "activations")

    one = keep(2) / 2
    assert keep(64) == pytest.approx(8 * one, rel=1e-3)
    assert keep(64, virtual_stages=3) == pytest.approx(8 * (1 + 7 / 24) * one, rel=1e-3)


@pytest.mark.parametrize("row", TABLES["state_bytes"], ids=str)
def test_bytes_a_parameter(row: tuple[str, str, str, str, float]) -> None:
    """ZeRO (arXiv:1910.02054, section 3.1): 16; Megatron-LM's distributed optimizer: 6 + 12 / dp."""
    framework, precision, optimizer, gradients, published = row
    named = {"framework": framework, "precision": precision, "optimizer": optimizer, "gradients": gradients}
    request = ask(settings={**named, "seq_len": 1}, layout={"zero": 2} if framework == "fsdp" else {})
    states = expect(request, "weights", "gradients", "optimizer")
    assert states / count_model_parameters(request.model) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("zero", "published"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_of_zeros_stages(zero: int, published: float) -> None:
    """Figure 1 of arXiv:1910.02054: 7.5 billion parameters over 64 GPUs, in GB of 10^9 bytes."""
    request = ask("7.5B", layout={"dp": 64, "zero": zero}, settings={"framework": "zero"})
    model = replace(request.model, vocab_size=0, position="rope", intermediate_size=17066)
    assert count_model_parameters(model) == pytest.approx(7.5e9, rel=0.02)
    states = expect(replace(request, model=model), "weights", "gradients", "optimizer")
    assert states / 1e9 == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(("shape", "qk_norm", "published"), TABLES["layer_copies"])
def test_measured_copies_of_the_stream_are_in_the_range(shape: Any, qk_norm: bool, published: float) -> None:
    """The ml-engineering book (Stas Bekman) measured a layer's activations, in bf16 copies of sbh."""
    names = ("vocab_size", "layers", "hidden_size", "heads", "kv_heads", "head_width", "intermediate_size")
    model = dict(zip((*names, "max_seq_len"), shape, strict=True))
    settings = {"framework": "fsdp", "seq_len": 4096}
    request = ask({**model, "qk_norm": qk_norm}, layout={"dp": 8, "zero": 3}, settings=settings)
    kept = count_layer_bytes(request, 1) * (1 / 2 / model["hidden_size"] * 1000)
    low, expected, high = (value / 1000 for value in (kept.low, kept.expected, kept.high))
    assert low <= published <= 1.1 * high
    assert expected == pytest.approx(published, rel=0.15)


EXPERTS = {"experts": {"count": 8, "per_token": 2, "intermediate_size": 14336}}


@pytest.mark.parametrize(
    ("model", "lora", "published"),
    [
        ({}, {"rank": 8, "targets": ["q_proj", "v_proj"]}, 4_194_304),
        (SETTINGS["models"]["Llama 2 13B"], {"rank": 8, "targets": ["q_proj", "v_proj"]}, 6_553_600),
        ({}, {"rank": 64}, 159_907_840),
        ({}, {"rank": 8, "targets": ["q_proj", "lm_head"]}, 32 * 8 * 2 * 4096 + 8 * (4096 + 32000)),
        (EXPERTS, {"rank": 4, "targets": ["up_proj"]}, 32 * 8 * 4 * (4096 + 14336)),
    ],
)  # fmt: skip
def test_adapters_have_their_published_parameters(
    model: dict[str, Any], lora: dict[str, Any], published: int
) -> None:
    """litgpt's tutorials/resource-tables.md: 4,194,304 and 6,553,600; all matrices, rank 64: 160 million."""
    request = ask({**SETTINGS["models"]["llama7b"], **model}, settings={"lora": lora})
    assert expect(request, "optimizer") == 8 * published


def test_a_matrix_without_an_adapter_does_not_keep_its_input() -> None:
    """34 sbh of a layer with GELU less 2 for each input that nobody needs: of attention's and MLP's four."""

    def keep(**settings: Any) -> int:
        return count_layer_bytes(ask("7.5B", settings=settings), 1).low

    whole, rank = keep(), 2  # bytes of an adapter's low-rank result
    for name, less in (("all-linear", 0), ("q_proj", 10), ("up_proj", 10), ("down_proj", 4)):
        adapters = 6 if name == "all-linear" else 1
        kept = keep(lora={"rank": 1, "targets": [name]})
        assert kept == whole - less * 4096 + adapters * rank, name


def test_offloaded_activations_are_in_the_nodes_memory() -> None:
    settings = {"micro_batch": 4, "seq_len": 4096, "checkpointing": "full", "lora": {"rank": 8}}
    request = ask(layout={"dp": 8}, settings=settings)
    moved = replace(request, settings=replace(request.settings, activation_offload=True))
    inputs = 32 * 4 * 4096 * 2 * 4096
    reports = [assess(one) for one in (request, moved)]
    here, there = (one.estimate.allocated.expected for one in reports)
    assert here - there == pytest.approx(inputs, rel=0.1)
    lines = [line for one in reports for line in one.budget if line.name == "CPU memory"]
    assert lines[0].needed == lines[1].needed, "the GPUs' sum is more than both"
    assert f"activations {8 * 1.5 * inputs / GIB:.0f}" in lines[1].note


def test_modules_that_are_recomputed_are_not_kept() -> None:
    """Of the 34 + 2as/h sbh of arXiv:2205.05198, section 4.1, without dropout: the tensors of that block."""
    scores, model = 2 * 64 * 2048 / 6144, MODELS["22B"]
    saved = {"core_attn": scores, "attention": 8 + scores, "layernorm": 4, "mlp": 16}
    saved |= {"attention mlp": 24 + scores, "moe mla_up_proj": 0}
    settings = {"framework": "megatron", "seq_len": 2048, "flash_attention": False}
    plain = expect(ask("22B", settings=settings), "activations")
    for modules, size in saved.items():
        some = {"checkpointing": "selective", "recompute_modules": modules.split()}
        again = expect(ask("22B", settings={**settings, **some}), "activations")
        each = (plain - again) / model.layers / 2048 / model.hidden_size
        assert each == pytest.approx(size, rel=0.02, abs=0.1), modules


def test_states_on_a_cpu_have_no_cuda_context() -> None:
    request = ask(device={"name": "cpu", "memory_mib": 32768, "kind": "cpu"})
    assert expect(request, "context") < GIB and not expect(request, "fragmentation")


def make_any(heads: int, groups: int, width: int, **more: Any) -> dict[str, Any]:
    sizes = {"heads": heads * groups, "kv_heads": heads, "head_width": width}
    return {**sizes, "hidden_size": heads * groups * width, **more}


LATENT = ("kv_rank", "rope_width", "plain_width", "value_width")
ANY_MODELS = st.builds(
    make_any,
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
    experts=st.none()
    | st.fixed_dictionaries(
        {
            **dict.fromkeys(("count", "per_token", "intermediate_size"), st.integers(1, 64)),
            "shared": st.integers(0, 2),
            "dense_layers": st.integers(0, 9),
        }
    ),
    latent_attention=st.none()
    | st.fixed_dictionaries(
        {"query_rank": st.none() | st.integers(1, 999), **dict.fromkeys(LATENT, st.integers(1, 99))}
    ),
)
SMALL = st.integers(1, 16)
LAYOUTS = st.fixed_dictionaries(
    {
        **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "virtual_stages"), SMALL),
        "zero": st.integers(0, 3),
        "shard_size": st.none() | SMALL,
        "sequence_parallel": st.booleans(),
    }
)
TRAINING = st.fixed_dictionaries(
    {
        "framework": st.sampled_from(WORDS["parallel.framework"]),
        "micro_batch": st.integers(1, 10_000),
        "accumulation": st.integers(1, 1000),
        "seq_len": st.integers(1, 1_000_000),
        "lora": st.none()
        | st.fixed_dictionaries(
            {
                "rank": st.integers(1, 99),
                "targets": st.lists(st.sampled_from(WORDS["fit.lora.targets"]), min_size=1),
            }
        ),
        "recompute_modules": st.lists(st.sampled_from(WORDS["fit.recompute_modules"])),
        **{
            name: st.sampled_from(WORDS[f"fit.{name}"])
            for name in ("precision", "optimizer", "checkpointing", "offload", "quantization")
        },
        **dict.fromkeys(("flash_attention", "expandable_segments", "optimizer_in_backward"), st.booleans()),
        "activation_offload": st.booleans(),
    }
)
PLAIN = st.fixed_dictionaries({"dp": SMALL, "zero": st.sampled_from([0, 3])})
REQUESTS = st.builds(
    ask, ANY_MODELS, st.just(8), layout=LAYOUTS | PLAIN, settings=TRAINING, is_bundled=st.booleans()
)


@given(REQUESTS, st.none() | st.floats(1, 1e20), st.none() | st.floats(1e-300, 1e20))
def test_whatever_is_taken_has_memory_in_order_speed_and_advice(
    found: Training, tokens: float | None, seconds: float | None
) -> None:
    size = found.layout.world_size
    asked = {"tokens": tokens, "step_seconds": seconds}
    request = change(found, {"settings": asked, "gpus_per_node": size, "nodes": 1})
    estimate = estimate_memory(request)
    ranges = [one.bytes for one in estimate.parts]
    for value in (*ranges, estimate.total, estimate.allocated, estimate.reserved):
        assert 0 <= value.low <= value.expected <= value.high
    assert estimate.total.high == sum(value.high for value in ranges)
    assert estimate.allocated.expected <= estimate.reserved.expected <= estimate.total.expected
    try:  # the memory of a device that is not known has no changes to be searched for
        report = assess(replace(request, device=replace(request.device, memory_mib=0)))
    except UsageError:
        return
    speed = report.speed
    pairs = (speed.step_seconds, speed.mfu, speed.hfu, speed.tflops, speed.total_seconds, speed.gpu_hours)
    assert speed.flops_per_step > 0 and all(pair is None or 0 <= pair[0] <= pair[1] for pair in pairs)
    assert all(one.what and one.level in ("warning", "note") for one in report.advice)


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
    # The smallest models have no more than the workspaces of libraries.
    assert allocated.expected - CUBLAS == pytest.approx(truth, rel=0.05), case.label
    assert truth <= (1 + MOST_ABOVE) * allocated.high, case.label
    assert allocated.low <= 1.001 * truth, case.label


def test_estimates_of_the_grid_are_what_torch_tracked() -> None:
    assert set(RECORDED) == {case.label for case in (*FEW, *GRID)}
    for case in (*FEW, *GRID):
        check_estimate(case, RECORDED[case.label])


@pytest.mark.slow
def test_the_recorded_peaks_are_what_torch_tracks(tmp_path: Path) -> None:
    if missing := find_missing():
        pytest.skip(f"there is no {missing}")
    for case, truth in zip(FEW, track_cases(FEW, tmp_path), strict=True):
        assert truth == pytest.approx(RECORDED[case.label], rel=0.01), case.label
        check_estimate(case, truth)
