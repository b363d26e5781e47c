"""PyTorch's allocator settings of a rank, and the library that serves malloc, as the plan has them."""

from dataclasses import replace

import pytest

from launcher.plan.allocator import format_settings, parse_settings
from launcher.plan.json_form import machine_from_json, machine_to_json
from launcher.plan.model import Machine, Plan, RankPlan, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe

ONE = convert(describe(["0-7"], [0]))
AMD = replace(ONE, gpus=(replace(ONE.gpus[0], vendor="amd"),))
WSL = replace(ONE, kernel="5.15.167.4-microsoft-standard-WSL2")
CUDA, HIP, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
MIMALLOC = "/usr/lib/libmimalloc.so"


def plan_one(machine: Machine, allocator: str = "expandable_segments:True", **environ: str) -> RankPlan:
    made = plan(machine, Request(1, allocator=allocator, environ=tuple(environ.items())))
    return made.ranks[0]


def read_whole(rank: RankPlan) -> str | None:
    """The settings that a rank gets: the same under both names, or under none."""
    found = [dict(rank.env).get(name) for name in (CUDA, NEW)]
    assert found[0] == found[1] and HIP not in dict(rank.env)
    return found[0]


def test_a_rank_with_a_gpu_gets_one_text_under_both_names() -> None:
    assert read_whole(plan_one(ONE)) == "expandable_segments:True"
    text = "backend:native,roundup_power2_divisions:[256:1,512:2,>:8]"
    assert read_whole(plan_one(ONE, text)) == text
    assert read_whole(plan_one(ONE, "")) is None


def test_a_rank_without_a_gpu_gets_nothing() -> None:
    rank = plan_one(replace(ONE, gpus=()), **{CUDA: "max_split_size_mb:64"})
    assert read_whole(rank) is None
    assert not [note for note in rank.notes if "max_split" in note]


@pytest.mark.parametrize("name", [CUDA, HIP, NEW])
@pytest.mark.parametrize(
    ("theirs", "whole", "kept"),
    [
        ("max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64"),
        ("expandable_segments:False", "expandable_segments:False", "expandable_segments:False"),
        (" expandable_segments : False ,", "expandable_segments:False", "expandable_segments:False"),
        (
            "roundup_power2_divisions:[256:1, >:8],max_split_size_mb:64,max_split_size_mb:80",
            "expandable_segments:True,roundup_power2_divisions:[256:1,>:8],max_split_size_mb:80",
            "roundup_power2_divisions:[256:1,>:8],max_split_size_mb:80",
        ),
    ],
)
def test_the_users_keys_win_and_the_others_stay(name: str, theirs: str, whole: str, kept: str) -> None:
    rank = plan_one(ONE, **{name: theirs})
    assert read_whole(rank) == whole
    assert f"{name}: {kept} kept, set by the user" in rank.notes
    assert not [note for note in rank.notes if "left out" in note]


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert plan_one(ONE, **{CUDA: "", NEW: " "}) == replace(
        plan_one(ONE), variables=plan_one(ONE, **{CUDA: "", NEW: " "}).variables
    )


def test_of_several_variables_the_one_counts_that_torch_hears() -> None:
    environ = {NEW: "backend:cudaMallocAsync", HIP: "bogus", CUDA: "max_split_size_mb:64"}
    rank = plan_one(ONE, **environ)
    assert read_whole(rank) == "expandable_segments:True,max_split_size_mb:64"
    not_heard = [note for note in rank.notes if f"is not heard: torch takes {CUDA} alone" in note]
    assert [note.partition("=")[0] for note in not_heard] == [HIP, NEW]
    assert read_whole(plan_one(ONE, **{NEW: "max_split_size_mb:64", CUDA: ""})) is not None


@pytest.mark.parametrize(
    "broken",
    [
        "expandable_segments:true",
        "max_split",
        "max_split_size_mb:5",
        "a:b:c",
        "roundup_power2_divisions:[2:1",
        "no:1",
    ],
)
def test_a_variable_that_torch_refuses_is_left_alone(broken: str) -> None:
    """The job fails as it would have, and with a newer torch that knows the key it runs as it would have."""
    rank = plan_one(ONE, **{CUDA: broken})
    assert read_whole(rank) is None
    assert f"{CUDA}={broken} kept as the user has it: torch may not take it" in rank.notes


def test_later_settings_under_the_new_name_stay_from_a_torch_that_passes_over_both() -> None:
    rank = plan_one(ONE, **{NEW: "per_process_memory_fraction:0.9"})
    whole = "expandable_segments:True,per_process_memory_fraction:0.9"
    assert {name: value for name, value in rank.env if "ALLOC" in name} == {NEW: whole}
    assert read_whole(plan_one(ONE, **{CUDA: "per_process_memory_fraction:0.9"})) == whole


@pytest.mark.parametrize(("machine", "why"), [(AMD, "ROCm 7"), (WSL, "issues/192330")])
def test_expandable_segments_are_left_out_where_they_do_not_work(machine: Machine, why: str) -> None:
    rank = plan_one(machine, "expandable_segments:True,max_split_size_mb:64")
    assert read_whole(rank) == "max_split_size_mb:64"
    (note,) = (note for note in rank.notes if "left out" in note)
    assert note.startswith("expandable_segments:True left out: ") and why in note
    asked = plan_one(machine, **{CUDA: "expandable_segments:True"})
    assert read_whole(asked) == "expandable_segments:True"
    assert not [note for note in asked.notes if "left out" in note]
    assert read_whole(plan_one(machine, "expandable_segments:False")) == "expandable_segments:False"


@pytest.mark.parametrize("theirs", [{}, {CUDA: "backend:cudaMallocAsync"}])
def test_cudas_own_pool_takes_no_native_setting(theirs: dict[str, str]) -> None:
    ours = "expandable_segments:True,pinned_use_background_threads:True"
    rank = plan_one(ONE, ours + ("" if theirs else ",backend:cudaMallocAsync"), **theirs)
    assert read_whole(rank) == "pinned_use_background_threads:True,backend:cudaMallocAsync"
    assert "expandable_segments:True left out: backend:cudaMallocAsync ignores it" in rank.notes


def test_what_the_user_gives_beside_cudas_own_pool_stays() -> None:
    rank = plan_one(ONE, "backend:cudaMallocAsync", **{CUDA: "expandable_segments:True"})
    assert read_whole(rank) == "backend:cudaMallocAsync,expandable_segments:True"


def test_the_notation_is_read_back() -> None:
    settings = {
        "a": "1",
        "roundup_power2_divisions": "[256:1,>:8]",
        "expandable_segments_reserve_by_class": "[x:8G]",
    }
    assert parse_settings(format_settings(settings)) == settings
    assert parse_settings("") == {}
    for broken in (
        ",",
        "a",
        "a:",
        ":1",
        "a:1,,b:2",
        "a:[1",
        "a:1]",
        "a:[1][2]",
        "a:b:c",
        "[a:1",
        "a:1;b:2:3",
    ):
        assert parse_settings(broken) is None, broken


def test_a_snapshot_holds_the_kernel_and_older_ones_load_without_it() -> None:
    data = machine_to_json(WSL)
    assert machine_from_json(data) == WSL
    assert "kernel" not in machine_to_json(ONE)
    assert machine_from_json(machine_to_json(ONE)) == ONE


def plan_host(word: str, library: str | None, **environ: str) -> Plan:
    request = Request(1, host_allocator=word, host_library=library, environ=tuple(environ.items()))
    return plan(replace(ONE, gpus=()), request)


@pytest.mark.parametrize(
    ("theirs", "whole"),
    [("", "/l/libx.so"), ("/a.so /b.so", "/l/libx.so:/a.so:/b.so"), ("c.so", "/l/libx.so:c.so")],
)
def test_a_library_for_malloc_comes_before_what_the_user_preloads(theirs: str, whole: str) -> None:
    made = plan_host("tcmalloc", "/l/libx.so", LD_PRELOAD=theirs)
    assert dict(made.ranks[0].env)["LD_PRELOAD"] == whole
    assert made.warnings == ()


def test_a_malloc_of_the_users_stays() -> None:
    rank = plan_host("jemalloc", "/l/libx.so", LD_PRELOAD=f"/a.so:{MIMALLOC}").ranks[0]
    assert "LD_PRELOAD" not in dict(rank.env)
    assert (
        f"LD_PRELOAD=/a.so:{MIMALLOC} kept, set by the user: {MIMALLOC} replaces malloc already" in rank.notes
    )


@pytest.mark.parametrize(
    ("word", "package"), [("tcmalloc", "libtcmalloc-minimal4"), ("jemalloc", "libjemalloc2")]
)
def test_a_library_that_is_missing_is_a_warning_with_its_package(word: str, package: str) -> None:
    made = plan_host(word, "")
    assert "LD_PRELOAD" not in dict(made.ranks[0].env)
    (warning,) = made.warnings
    assert (
        warning.startswith(f"allocator.host={word}, but its library is not on this node")
        and package in warning
    )


def test_on_another_machine_it_is_not_looked_for() -> None:
    made = plan_host("tcmalloc", None)
    assert (made.warnings, "LD_PRELOAD" in dict(made.ranks[0].env)) == ((), False)
    assert "allocator.host=tcmalloc: its library is looked for on the node that runs" in made.ranks[0].notes


def test_the_systems_malloc_needs_nothing() -> None:
    rank = plan_host("system", None, LD_PRELOAD="/a.so").ranks[0]
    assert not [note for note in rank.notes if "LD_PRELOAD" in note or "allocator" in note]
