"""What a job needs of a node's cores, memory and /dev/shm."""

from dataclasses import replace

import pytest

from launcher.fit.fit_model import BudgetLine, FitRequest, NodeResources, ParallelLayout, TrainingSettings
from launcher.fit.node_budget import budget_node
from tests.fit.made_requests import NODE, REQUEST, make_request


def budget(request: FitRequest) -> dict[str, BudgetLine]:
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
    needed = [dict(list_parts(request))["offload"] for request in (one, eight)]
    assert needed[0] == pytest.approx(16 * 6_738_415_616 * 1.5 / (1 << 30))
    assert needed[1] == pytest.approx(needed[0] / 8)


def list_parts(request: FitRequest) -> list[tuple[str, float]]:
    from launcher.fit.node_budget import list_memory

    return list(list_memory(request))


def test_a_gathered_checkpoint_counts_where_a_program_may_gather_it() -> None:
    sharded = make_request(ParallelLayout(dp=8, zero=3))
    gathered = dict(list_parts(sharded))["checkpoint on rank 0"]
    assert gathered == pytest.approx(4 * 6_738_415_616 / (1 << 30))
    assert dict(list_parts(replace(sharded, is_bundled=True)))["checkpoint on rank 0"] == 0


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
