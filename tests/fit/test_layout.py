"""Batches and layouts: solved, refused, and whether what an error proposes works."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.fit.training import (
    ModelDimensions,
    ParallelLayout,
    Training,
    TrainingSettings,
    check_layout,
    solve_batch,
)
from tests.fit.made_requests import H100, MODELS

LLAMA70B, MIXTRAL, GPT2 = (MODELS[name] for name in ("Llama 2 70B", "Mixtral 8x7B", "GPT-2 124M"))


def make_request(
    layout: ParallelLayout, model: ModelDimensions = LLAMA70B, gpus: int = 8, **settings: object
) -> Training:
    nodes = max(1, layout.world_size // gpus)
    chosen = replace(TrainingSettings(framework="megatron", seq_len=4096), **settings)  # type: ignore[arg-type]  # of several types
    return Training(model, layout, chosen, H100, gpus_per_node=gpus, nodes=nodes)


@pytest.mark.parametrize(
    ("sizes", "solved"),
    [
        ((None, 1, None, None), (1, 1)),
        ((4, 8, None, None), (4, 1)),
        ((4, 8, None, 256), (4, 8)),
        ((None, 8, 8, 256), (4, 8)),
        ((None, 8, None, 256), (1, 32)),
        ((4, 8, 8, 256), (4, 8)),
        ((3, 8, None, 256), "global_batch=256 .*(24).*micro_batch=2 .*micro_batch=4.*=240.*=264"),
        ((4, 8, 7, 256), "accumulation=8 .*=224"),
        ((10**15, 10**15, None, None), "bits.*at most"),
    ],
)
def test_any_one_is_solved_from_the_others_or_refused_with_the_nearest(
    sizes: tuple[int | None, int, int | None, int | None], solved: tuple[int, int] | str
) -> None:
    if isinstance(solved, tuple):
        assert solve_batch(*sizes) == solved
        return
    with pytest.raises(UsageError, match=solved):
        solve_batch(*sizes)


sizes = st.integers(1, 4096) | st.sampled_from([1, 2, 8, 64, 10**6, 10**12])


@given(micro_batch=st.none() | sizes, dp=sizes, accumulation=st.none() | sizes, total=sizes)
def test_every_batch_that_an_error_proposes_works(
    micro_batch: int | None, dp: int, accumulation: int | None, total: int
) -> None:
    known = {"micro_batch": micro_batch, "accumulation": accumulation, "global_batch": total}
    try:
        micro, steps = solve_batch(micro_batch, dp, accumulation, total)
    except UsageError as error:
        fixes = re.findall(r"(\w+)=(\d+)", str(error).partition(": set ")[2])
        assert fixes or "at most" in str(error)
        for name, value in fixes:
            solve_batch(dp=dp, **{**known, name: int(value)})
    else:
        assert micro * dp * steps == total


BAD = [
    (make_request(ParallelLayout(tp=16, dp=1)), ("tp=16", "kv_heads=8", "parallel.tp=8")),
    (make_request(ParallelLayout(tp=3, dp=8)), ("tp=3 does not divide", "tp=2 or parallel.tp=4")),
    (make_request(ParallelLayout(pp=96)), ("pp=96", "layers=80", "pp=80")),
    (
        make_request(ParallelLayout(pp=16, virtual_stages=8)),
        ("virtual_stages=8", "layers=80", "virtual_stages=5 or less"),
    ),
    (make_request(ParallelLayout(dp=8, ep=8)), ("ep=8", "no experts")),
    (make_request(ParallelLayout(dp=8, ep=3), MIXTRAL), ("ep=3", "experts.count=8", "ep=2 or")),
    (
        make_request(ParallelLayout(tp=2, dp=4, ep=8, zero=3), MIXTRAL, framework="fsdp"),
        ("ep=8", "dp * cp (4)", "ep=4"),
    ),
    (make_request(ParallelLayout(cp=8), seq_len=4100), ("seq_len=4100", "2 * parallel.cp (16)", "=4096")),
    (make_request(ParallelLayout(tp=8), seq_len=4100), ("seq_len=4100", "parallel.tp (8)", "=4104")),
    (make_request(ParallelLayout(dp=8), GPT2), ("seq_len=4096", "max_seq_len=1024")),
    (make_request(ParallelLayout(dp=8, zero=1), framework="ddp"), ("zero=1", "ddp", "zero=0")),
    (make_request(ParallelLayout(dp=8), framework="fsdp"), ("zero=0", "fsdp", "zero=2")),
    (make_request(ParallelLayout(pp=2, dp=4, zero=3), framework="zero"), ("zero=3", "pp=2")),
    (make_request(ParallelLayout(dp=8, zero=3, shard_size=3)), ("shard_size=3", "=2 or", "=4")),
    (make_request(ParallelLayout(dp=8, shard_size=4)), ("shard_size=4", "zero=0")),
    (make_request(ParallelLayout(dp=8), micro_batch=10**40), ("fit.accumulation=(a number of 136 bits)",)),
    (make_request(ParallelLayout(dp=8), framework="x"), ("framework=x", "megatron")),
    (
        replace(make_request(ParallelLayout(tp=8, pp=3)), nodes=4),
        ("24 GPUs", "32", "nodes=3", "pp=2 and parallel.dp=2"),
    ),
    (replace(make_request(ParallelLayout(dp=16)), nodes=4), ("16 GPUs", "nodes=2", "dp=32")),
    (replace(make_request(ParallelLayout(dp=8)), global_batch=12), ("global_batch=12", "=8")),
]


@pytest.mark.parametrize(
    ("request_", "parts"), BAD, ids=lambda value: "" if isinstance(value, tuple) else None
)
def test_a_layout_that_cannot_be_is_refused_with_the_nearest(
    request_: Training, parts: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        check_layout(request_)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "good",
    [
        make_request(ParallelLayout(tp=8, pp=4, dp=2, virtual_stages=5)),
        make_request(ParallelLayout(dp=8, cp=2, ep=8, zero=1), MIXTRAL),
        make_request(ParallelLayout(pp=16, dp=2), replace(LLAMA70B, layers=126)),
        make_request(ParallelLayout(dp=64, zero=3, shard_size=8), framework="fsdp"),
        make_request(ParallelLayout(), gpus=1, framework="ddp"),
    ],
)
def test_layouts_that_are_used(good: Training) -> None:
    check_layout(good)


numbers = st.integers(-2, 130) | st.sampled_from([1, 2, 4, 8, 16, 64, 10**9, 10**40])
small = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
layouts = st.builds(
    ParallelLayout,
    tp=small | numbers,
    pp=small | numbers,
    dp=small | numbers,
    cp=small | numbers,
    ep=st.just(1) | numbers,
    zero=st.integers(-1, 4),
    shard_size=st.none() | numbers,
    sequence_parallel=st.booleans(),
    virtual_stages=st.just(1) | numbers,
)
requests = st.builds(
    Training,
    model=st.sampled_from([LLAMA70B, MIXTRAL, GPT2]),
    layout=layouts,
    settings=st.builds(
        TrainingSettings,
        framework=st.sampled_from(["ddp", "fsdp", "zero", "megatron"]),
        micro_batch=numbers,
        accumulation=numbers,
        seq_len=st.sampled_from([1024, 4096, 1000, 1]) | numbers,
    ),
    device=st.just(H100),
    gpus_per_node=small | numbers,
    nodes=small | numbers,
    global_batch=st.none() | numbers,
)


@given(requests)
def test_any_layout_is_taken_or_refused(found: Training) -> None:
    try:
        check_layout(found)
    except UsageError as error:
        assert len(str(error)) < 400 and ": " in str(error)


@given(st.builds(replace, requests, layout=layouts, gpus_per_node=st.just(8), nodes=small))
def test_what_an_error_proposes_for_a_layout_works(found: Training) -> None:
    """The proposed value removes the error: no error names the same key with the proposed value."""
    try:
        check_layout(found)
    except UsageError as error:
        proposed = str(error).partition(": set ")[2]
        one = re.match(r"parallel\.(tp|pp|ep|shard_size|virtual_stages|zero)=(\d+)(?! and)", proposed)
        if one is None:
            return
        changed = replace(found, layout=replace(found.layout, **{one[1]: int(one[2])}))  # type: ignore[arg-type]  # all are int
        try:
            check_layout(changed)
        except UsageError as other:
            assert not str(other).startswith(f"parallel.{one[1]}=")
