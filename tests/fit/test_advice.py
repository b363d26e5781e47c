"""Advice: nothing on shapes that are good, and each rule by a setting that breaks it. What nodes need."""

from dataclasses import replace
from typing import Any

import pytest

from launcher.fit.advice import BudgetLine, advise, budget_node
from launcher.fit.training import (
    Device,
    NodeResources,
    ParallelLayout,
    Training,
    TrainingSettings,
)
from tests.fit.made_requests import H100, MODELS, NODE, REQUEST, TABLES, change, make_request

GOOD = Training(
    replace(MODELS["Llama 2 70B"], vocab_size=32768),
    ParallelLayout(tp=8, pp=4, dp=2, virtual_stages=5),
    TrainingSettings(framework="megatron", seq_len=4096, accumulation=32),
    H100,
    gpus_per_node=8,
    nodes=8,
)


def test_a_good_setting_has_no_advice() -> None:
    assert advise(GOOD) == ()


@pytest.mark.parametrize("row", TABLES["advice"], ids=lambda row: row["what"])
def test_a_rule(row: dict[str, Any]) -> None:
    said = ("level", "what", "fix", "gain")
    request = change(GOOD, {key: value for key, value in row.items() if key not in said})
    found = [one for one in advise(request) if row["what"] in one.what]
    assert [one.level for one in found] == [row["level"]]
    assert row["fix"] in found[0].fix and row["gain"] in found[0].gain


def test_tensor_parallelism_within_a_domain_of_several_nodes() -> None:
    """Four GPUs of a node, 72 that NVLink connects."""
    rack = Device("NVIDIA GB200", 189471, nvlink_domain=72)
    assert advise(change(GOOD, {"device": rack, "gpus_per_node": 4, "nodes": 16})) == ()


def test_shapes_are_no_matter_on_cpus() -> None:
    cpu = Device("CPU", 16000, kind="cpu")
    odd = {"vocab_size": 50257, "head_width": 100, "intermediate_size": 28673}
    assert advise(change(GOOD, {"model": odd, "device": cpu, "nodes": 1, "gpus_per_node": 64})) == ()


def test_warnings_come_first() -> None:
    levels = [one.level for one in advise(change(GOOD, {"model": {"head_width": 320, "hidden_size": 8200}}))]
    assert levels == sorted(levels, reverse=True) and len(set(levels)) == 2


def budget(request: Training) -> dict[str, BudgetLine]:
    return {line.name: line for line in budget_node(request)}


@pytest.mark.parametrize(("workers", "cores"), [(2, 28), (4, 44), (0, 12)])
def test_the_books_cores_of_eight_gpus(workers: int, cores: int) -> None:
    line = budget(replace(REQUEST, node=replace(NODE, num_workers=workers)))["CPU cores"]
    assert (line.needed, line.available, line.enough) == (cores, 112, True)


def test_too_few_cores_have_a_fix_that_is_enough() -> None:
    small = replace(REQUEST, node=replace(NODE, cores=32, num_workers=4))
    line = budget(small)["CPU cores"]
    assert not line.enough and line.fix.startswith("dataloader.num_workers=2")
    assert budget(replace(small, node=replace(small.node, num_workers=2)))["CPU cores"].enough
    tiny = budget(replace(REQUEST, node=replace(NODE, cores=4)))["CPU cores"]
    assert not tiny.enough and "dataloader.num_workers=0" in tiny.fix


def test_memory_is_at_least_the_gpus_sum() -> None:
    line = budget(REQUEST)["CPU memory"]
    assert line.needed == pytest.approx(8 * 81559 / 1024)
    assert line.enough
    short = budget(replace(REQUEST, node=replace(NODE, memory_kib=256 << 20)))["CPU memory"]
    assert not short.enough and short.fix


def test_an_offloaded_optimizer_is_in_the_nodes_that_share_it() -> None:
    offload = replace(REQUEST.settings, offload="optimizer")
    one = make_request(ParallelLayout(dp=8, zero=3), offload)
    eight = make_request(ParallelLayout(dp=64, zero=3), offload)
    needed = [count_parts(replace(request, is_bundled=True)) for request in (one, eight)]
    assert needed[0] == pytest.approx(16 * 6_738_415_616 * 1.5 / (1 << 30))
    assert needed[1] == pytest.approx(needed[0] / 8)


def count_parts(request: Training) -> float:
    """GiB of what depends on the model: without workers, and without what a GPU's rank takes."""
    on_cpus = replace(request, device=replace(request.device, kind="cpu"), node=NodeResources())
    return budget(on_cpus)["CPU memory"].needed


def test_a_gathered_checkpoint_counts_where_a_program_may_gather_it() -> None:
    sharded = make_request(ParallelLayout(dp=8, zero=3))
    assert count_parts(sharded) == pytest.approx(4 * 6_738_415_616 / (1 << 30))
    assert count_parts(replace(sharded, is_bundled=True)) == 0


def test_batches_of_the_workers_are_in_shared_memory() -> None:
    long = make_request(ParallelLayout(dp=8), TrainingSettings(micro_batch=512, seq_len=131072))
    line = budget(replace(long, node=replace(NODE, shm_kib=64 << 10)))["/dev/shm"]
    assert not line.enough and "--shm-size" in line.fix
    assert budget(REQUEST)["/dev/shm"].enough


def test_what_is_not_known_is_enough() -> None:
    assert all(line.enough for line in budget_node(replace(REQUEST, node=NodeResources())))


def test_ranks_on_cpus_have_no_line_of_cores() -> None:
    on_cpus = replace(REQUEST, device=replace(REQUEST.device, kind="cpu"))
    assert "CPU cores" not in budget(on_cpus)
