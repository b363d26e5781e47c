"""What is said of a training: layouts that cannot be, changes, advice, nodes; and of a tracked peak."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.fit.choice import assess, choose_settings, correct_estimate, estimate_step, judge_total
from launcher.fit.training import Learned, Training, check_layout, solve_batch
from launcher.runs.records import fingerprint_ranks
from tests.fit.made_requests import MODELS, REQUEST, TABLES, ask, change
from tests.fit.test_memory import REQUESTS

GIB = 1 << 30
H100 = REQUEST.device
CPU = replace(H100, name="CPU", memory_mib=16000, kind="cpu")
BASE = ask("Llama 2 70B", 8, settings={"framework": "megatron", "seq_len": 4096}, nodes=1)

# Batches and layouts: solved, refused, and whether what an error proposes works.


@pytest.mark.parametrize(
    ("sizes", "solved"),
    [
        ((None, 1, None, None), (1, 1)),
        ((4, 8, None, None), (4, 1)),
        ((4, 8, None, 256), (4, 8)),
        ((None, 8, 8, 256), (4, 8)),
        ((None, 8, None, 256), (1, 32)),
        ((4, 8, 8, 256), (4, 8)),
        ((3, 8, None, 256), "global_batch=256 .*divisible.*(24).*=240 or .*=264"),
        ((4, 8, 7, 256), "accumulation=7 .*=224"),
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
    try:
        micro, steps = solve_batch(micro_batch, dp, accumulation, total)
    except UsageError as error:
        fixes = re.findall(r"global_batch=(\d+)", str(error).partition(": set ")[2])
        assert fixes
        for value in fixes:
            solve_batch(micro_batch, dp, accumulation, int(value))
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


@given(REQUESTS, st.sampled_from(["", "Llama 2 70B", "Mixtral 8x7B", "GPT-2 124M"]), st.booleans())
def test_any_layout_is_taken_or_refused_with_a_value_that_works(
    found: Training, name: str, fits: bool
) -> None:
    """The proposed value removes the error: no error names the same key with the proposed value."""
    found = replace(found, model=MODELS.get(name, found.model))
    found = replace(found, gpus_per_node=found.layout.world_size, nodes=1) if fits else found
    try:
        check_layout(found)
    except UsageError as error:
        assert len(str(error)) < 400 and ": set " in str(error)
        proposed = str(error).partition(": set ")[2]
        one = re.match(r"parallel\.(tp|pp|ep|shard_size|virtual_stages|zero)=(\d+)", proposed)
        if one is None:
            return
        changed = replace(found, layout=replace(found.layout, **{one[1]: int(one[2])}))  # type: ignore[arg-type]  # all are int
        try:
            check_layout(changed)
        except UsageError as other:
            assert not str(other).startswith(f"parallel.{one[1]}=")


# Changes that make it fit.


def propose(request: Training, gib: float) -> list[tuple[str, ...]]:
    device = replace(request.device, memory_mib=int(gib * 1024))
    report = assess(replace(request, device=device))
    assert report.verdict == "does_not_fit"
    assert all(change.total.high <= gib * GIB and change.why for change in report.changes)
    return [change.settings for change in report.changes]


SHARDED = ask(layout={"dp": 8, "zero": 3}, settings={"framework": "fsdp", "micro_batch": 8, "seq_len": 4096})


def test_single_changes_come_first_and_the_cheapest_of_each() -> None:
    """Half the micro-batch costs 3%, selective checkpointing 4%, tensor parallelism 10%."""
    assert propose(SHARDED, 150) == [
        ("fit.micro_batch=4", "fit.accumulation=2"),
        ("fit.checkpointing=selective",),
        ("parallel.tp=2", "fit.accumulation=2"),
    ]


def test_combinations_if_no_single_change_is_enough() -> None:
    for gib, least in ((100, 2), (40, 2), (10, 4)):
        found = propose(REQUEST, gib)
        keys = [
            {setting.partition("=")[0] for setting in settings} - {"fit.accumulation"} for settings in found
        ]
        assert len(found) == 3 and max(map(len, keys)) >= least
        assert not any(one < other for one in keys for other in keys), "no change has more than is needed"


def test_nothing_is_proposed_if_nothing_helps() -> None:
    assert propose(REQUEST, 0.5) == []


def test_the_bundled_programs_changes_are_its_own_options() -> None:
    bundled = replace(REQUEST, is_bundled=True)
    for settings in propose(bundled, 40) + propose(bundled, 70):
        keys = [setting.partition("=")[0] for setting in settings]
        assert {key.partition(".")[0] for key in keys} <= {"program", "nodes"}
    assert ("program.parallel=fsdp", "program.activation_checkpointing=full") in propose(bundled, 50)


@pytest.mark.parametrize("gib", [24, 48, 63])
def test_a_change_sets_something_where_the_choice_was_made_before_runs_measured_more(gib: int) -> None:
    device = replace(H100, memory_mib=gib * 1024)
    free = frozenset({"fit.micro_batch", "fit.checkpointing", "parallel.framework", "fit.accumulation"})
    asked = replace(REQUEST, is_bundled=True, free=free, sequences=512, device=device)
    report = assess(choose_settings(asked), Learned(1.15, 0.0, 1))
    assert report.verdict != "fits" and report.changes and all(one.settings for one in report.changes)


def test_a_set_global_batch_is_kept_and_micro_batches_divide_it() -> None:
    six = change(SHARDED, {"settings": {"micro_batch": 6, "global_batch": 48}})
    for gib in (110, 90, 60):
        for settings in propose(six, gib):
            pairs = dict(setting.split("=") for setting in settings)
            replicas = 8 * int(pairs.get("nodes", 1)) // int(pairs.get("parallel.tp", 1))
            micro_batch, steps = int(pairs.get("fit.micro_batch", 6)), int(pairs.get("fit.accumulation", 1))
            assert micro_batch * steps * replicas == 48


@pytest.mark.parametrize(("gib", "nodes"), [(31, 9), (29, 10), (25, 15), (23.5, 18), (22.5, 20)])
def test_the_fewest_nodes_are_those_that_divide_a_set_global_batch(gib: float, nodes: int) -> None:
    alone = {"framework": "fsdp", "micro_batch": 1, "accumulation": 360, "seq_len": 2048}
    large = ask(
        "LLaMA 65B",
        layout={"dp": 8, "zero": 3},
        settings={**alone, "checkpointing": "full"},
        global_batch=8 * 360,
        is_bundled=True,
    )
    ((first, *_),) = propose(large, gib)
    assert first == f"nodes={nodes}"


def test_heads_are_not_split_unevenly_and_replicas_that_are_set_are_set_anew() -> None:
    odd = replace(REQUEST, model=replace(REQUEST.model, heads=25, kv_heads=25))
    assert not [one for one in propose(odd, 40) if any("parallel.tp" in setting for setting in one)]
    found = propose(replace(SHARDED, fixed=("parallel.dp",)), 150)
    assert ("parallel.tp=2", "parallel.dp=4", "fit.accumulation=2") in found


# Advice: nothing on shapes that are good, and each rule by a setting that breaks it. What nodes need.

GOOD = change(
    replace(BASE, nodes=8),
    {
        "model": {"vocab_size": 32768},
        "layout": {"tp": 8, "pp": 4, "dp": 2, "virtual_stages": 5},
        "settings": {"accumulation": 32},
        "device": {"memory_mib": 0},
    },
)


def test_a_good_setting_has_no_advice() -> None:
    assert assess(GOOD).advice == ()
    # Four GPUs of a node, 72 that NVLink connects.
    rack = replace(H100, name="NVIDIA GB200", memory_mib=0, nvlink_domain=72)
    assert assess(change(GOOD, {"device": rack, "gpus_per_node": 4, "nodes": 16})).advice == ()
    odd = {"vocab_size": 50257, "head_width": 100}
    assert assess(change(GOOD, {"model": odd, "device": CPU, "nodes": 1, "gpus_per_node": 64})).advice == ()


@pytest.mark.parametrize("row", TABLES["advice"], ids=lambda row: row["what"])
def test_a_rule(row: dict[str, Any]) -> None:
    said = ("level", "what", "fix")
    request = change(GOOD, {key: value for key, value in row.items() if key not in said})
    size = request.layout.world_size
    advice = assess(replace(request, nodes=size // request.gpus_per_node)).advice
    found = [one for one in advice if row["what"] in one.what]
    assert [one.level for one in found] == [row["level"]]
    assert row["fix"] in found[0].fix
    levels = [one.level for one in advice]
    assert levels == sorted(levels, reverse=True), "warnings come first"


def budget(request: Training) -> dict[str, Any]:
    return {
        line.name: line
        for line in assess(replace(request, device=replace(request.device, memory_mib=0))).budget
    }


def set_node(request: Training, **fields: Any) -> Training:
    return replace(request, node=replace(request.node, **fields))


@pytest.mark.parametrize(("workers", "cores"), [(2, 28), (4, 44), (0, 12)])
def test_the_books_cores_of_eight_gpus(workers: int, cores: int) -> None:
    line = budget(set_node(REQUEST, num_workers=workers))["CPU cores"]
    assert (line.needed, line.available, line.enough) == (cores, 112, True)
    short = budget(set_node(REQUEST, num_workers=workers, cores=cores - 1))["CPU cores"]
    assert not short.enough and "dataloader.num_workers" in short.fix


def test_memory_is_at_least_the_gpus_sum() -> None:
    line = next(line for line in assess(REQUEST).budget if line.name == "CPU memory")
    assert line.needed == pytest.approx(8 * 81559 / 1024) and line.enough
    short = budget(set_node(REQUEST, memory_kib=8 << 20))["CPU memory"]
    assert not short.enough and short.fix


def count_parts(request: Training) -> float:
    """GiB of what depends on the model: without workers, and without what a GPU's rank takes."""
    on_cpus = set_node(replace(request, device=CPU), num_workers=0)
    return float(budget(on_cpus)["CPU memory"].needed)


def test_what_the_model_needs_of_the_nodes() -> None:
    """A checkpoint, where a program may gather it; an offloaded optimizer, in the nodes that share it."""
    parameters = 6_738_415_616
    assert count_parts(SHARDED) == pytest.approx(4 * parameters / GIB)
    assert count_parts(replace(SHARDED, is_bundled=True)) == 0
    needed = []
    for nodes in (1, 8):
        request = change(SHARDED, {"layout": {"dp": 8 * nodes}, "settings": {"offload": "optimizer"}})
        needed.append(count_parts(replace(request, nodes=nodes, is_bundled=True)))
    assert needed[0] == pytest.approx(16 * parameters * 1.5 / GIB)
    assert needed[1] == pytest.approx(needed[0] / 8)


def test_batches_of_the_workers_are_in_shared_memory_and_what_is_not_known_is_enough() -> None:
    long = change(REQUEST, {"settings": {"micro_batch": 512, "seq_len": 131072}})
    line = budget(set_node(long, shm_kib=64 << 10))["/dev/shm"]
    assert not line.enough and "--shm-size" in line.fix
    assert budget(REQUEST)["/dev/shm"].enough
    unknown = budget(set_node(REQUEST, **dict.fromkeys(("cores", "memory_kib", "shm_kib")), num_workers=0))
    assert all(line.enough for line in unknown.values()) and len(unknown) == 3
    assert "CPU cores" not in budget(replace(REQUEST, device=CPU))


# A program whose steps ran on fake tensors.

PEAK = {"activations": 20 * GIB, "weights": 40 * GIB}


@pytest.mark.parametrize(
    ("gib", "verdict"), [(40, "fits"), (60, "fits"), (76, "tight"), (78, "tight"), (90, "does_not_fit")]
)
def test_a_verdict(gib: int, verdict: str) -> None:
    estimate = estimate_step({"weights": gib * GIB}, H100, 8, expandable=True)
    assert judge_total(estimate.total, 81559 << 20) == verdict
    assert judge_total(estimate.total, 0) == ""


def test_what_comes_on_top_of_tensors() -> None:
    good, bad = (estimate_step(PEAK, H100, 1, expandable=expandable) for expandable in (True, False))
    assert bad.reserved.high > good.reserved.high > 60 * GIB
    found = estimate_step(PEAK, CPU, 1, expandable=True)
    assert found.total.low > 60 * GIB == found.allocated.expected == found.reserved.expected


def test_what_was_measured_counts() -> None:
    for device, name in ((H100, "reserved"), (CPU, "total")):
        first = estimate_step(PEAK, device, 1, expandable=True)
        found = correct_estimate(first, Learned(1.1, 0.0, 1), on_gpu=device == H100)
        before, after = getattr(first, name), getattr(found, name)
        assert after.expected == pytest.approx(1.1 * before.expected, rel=1e-6)
        assert after.high == pytest.approx(1.02 * after.expected, rel=1e-6)
    assert "1 run of train/1 had 110%" in assess(REQUEST, Learned(1.1, 0.0, 1, "train/1")).learned


def test_numbers_that_do_not_matter_are_left_out() -> None:
    words = ["train.py", "--lr", "3e-4", "--batch-size", "8", "--steps=100", "--seed", "1"]
    other = ["train.py", "--lr=1", "--batch-size", "8"]
    assert fingerprint_ranks(words, "gpu", 8) == fingerprint_ranks(other, "gpu", 8)
    assert fingerprint_ranks(words, "gpu", 8) != fingerprint_ranks(words, "gpu", 4)
    assert fingerprint_ranks(["a", "b c"], "gpu", 8) != fingerprint_ranks(["a b", "c"], "gpu", 8)
