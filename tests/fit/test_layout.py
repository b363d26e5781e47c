"""Batches and layouts: solved, refused, and whether what an error proposes works."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.fit.training import (
    ParallelLayout,
    Training,
    TrainingSettings,
    check_layout,
    solve_batch,
)
from tests.fit.made_requests import H100, MODELS, TABLES, change

LLAMA70B, MIXTRAL, GPT2 = (MODELS[name] for name in ("Llama 2 70B", "Mixtral 8x7B", "GPT-2 124M"))


BASE = Training(LLAMA70B, ParallelLayout(), TrainingSettings("megatron", seq_len=4096), H100, gpus_per_node=8)


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


@pytest.mark.parametrize("row", TABLES["layouts"], ids=lambda row: row["error"][0])
def test_a_layout_that_cannot_be_is_refused_with_the_nearest(row: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        check_layout(change(BASE, {key: value for key, value in row.items() if key != "error"}))
    assert [part for part in row["error"] if part not in str(caught.value)] == []


def test_layouts_that_are_used() -> None:
    for row in TABLES["good_layouts"]:
        check_layout(change(BASE, row))


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
