"""Advice: nothing on shapes that are good, and each rule by a setting that breaks it. What nodes need."""

from dataclasses import replace

import pytest

from launcher.fit.advice import BudgetLine, advise, budget_node
from launcher.fit.training import (
    Device,
    NodeResources,
    ParallelLayout,
    Training,
    TrainingSettings,
)
from tests.fit.made_requests import H100, MODELS, NODE, REQUEST, make_request

LLAMA70B, MIXTRAL = (replace(MODELS[name], vocab_size=32768) for name in ("Llama 2 70B", "Mixtral 8x7B"))
GOOD = Training(
    LLAMA70B,
    ParallelLayout(tp=8, pp=4, dp=2, virtual_stages=5),
    TrainingSettings(framework="megatron", seq_len=4096, accumulation=32),
    H100,
    gpus_per_node=8,
    nodes=8,
)


def change(
    request: Training = GOOD,
    model: dict[str, int] | None = None,
    **others: dict[str, object] | Device | int,
) -> Training:
    """A request with fields of its parts changed."""
    parts: dict[str, object] = {"model": replace(request.model, **(model or {}))}  # type: ignore[arg-type]  # all are int
    for name, value in others.items():
        part = getattr(request, name)
        parts[name] = replace(part, **value) if isinstance(value, dict) else value
    return replace(request, **parts)  # type: ignore[arg-type]  # of several types


def test_a_good_setting_has_no_advice() -> None:
    assert advise(GOOD) == ()


CASES = [
    (change(model={"vocab_size": 50257}), "note", "vocab_size=50257", "50688", "25%"),
    (change(model={"vocab_size": 50257, "layers": 20}), "warning", "vocab_size=50257", "50688", "25%"),
    (change(model={"vocab_size": 32000}), "note", "64 * parallel.tp=8", "32256", "operations"),
    (change(model={"head_width": 320}), "warning", "320 wide", "128", ""),
    (change(model={"head_width": 100}), "warning", "no multiple of 8", "128", "39%"),
    (change(model={"head_width": 80}), "note", "no multiple of 64", "64 or 128", "tensor cores"),
    (change(model={"intermediate_size": 28673}), "warning", "28673 over parallel.tp=8", "28672", "398"),
    (change(model={"hidden_size": 8200}), "note", "hidden_size=8200", "8192", ""),
    (change(settings={"precision": "fp8"}, device=replace(H100, name="A100")), "warning", "fp8", "mixed", ""),
    (change(device=replace(H100, name="Tesla V100-SXM2-32GB")), "warning", "no fast bf16", "fp16", ""),
    (change(settings={"precision": "fp32"}), "note", "tensor cores", "TF32", "494"),
    (change(model={"hidden_size": 8200}, settings={"precision": "fp8"}), "warning", "of 16", "8208", ""),
    (change(layout={"tp": 16, "dp": 1}), "warning", "tp=16 is more", "tp=8 or less", "arXiv:2104.04473"),
    (
        change(gpus_per_node=6, device=replace(H100, nvlink_domain=6), layout={"tp": 4}),
        "warning",
        "does not divide the 6 GPUs",
        "divisor",
        "",
    ),
    (change(nodes=1, device=replace(H100, nvlink_domain=2)), "warning", "PCIe", "tp=2", ""),
    (change(layout={"cp": 2}), "note", "cp=2", "cp=1", ""),
    (change(replace(GOOD, model=MIXTRAL), layout={"tp": 4, "ep": 4}), "warning", "ep=4", "ep=2", "DeepSeek"),
    (
        change(settings={"accumulation": 4}, layout={"virtual_stages": 1}),
        "warning",
        "idles 43%",
        "fit.accumulation=27",
        "(pp - 1)",
    ),
    (change(settings={"accumulation": 30}), "warning", "no multiple of parallel.pp=4", "=32", ""),
    (change(layout={"virtual_stages": 3}), "note", "uneven: the largest has 7", "divides", ""),
    (change(settings={"seq_len": 1024}), "note", "1024 tokens", "launch tune batch", ""),
    (change(settings={"seq_len": 4100}), "note", "no multiple of 64", "power of two", ""),
    (change(settings={"seq_len": 8192}), "warning", "max_seq_len=4096", "4096", ""),
    (change(layout={"zero": 3}), "note", "gathered in each", "micro-batch", ""),
    (change(settings={"flash_attention": False}), "warning", "flash", "scaled_dot", "arXiv:2205.14135"),
    (
        change(replace(GOOD, model=replace(MODELS["GPT-2 124M"], max_seq_len=4096)), layout={"tp": 4}),
        "note",
        "192 of model.hidden_size=768",
        "smaller parallel.tp",
        "",
    ),
]


@pytest.mark.parametrize(
    ("request_", "level", "what", "fix", "gain"), CASES, ids=[str(row[2]) for row in CASES]
)
def test_a_rule(request_: Training, level: str, what: str, fix: str, gain: str) -> None:
    found = [one for one in advise(request_) if what in one.what]
    assert [one.level for one in found] == [level]
    assert fix in found[0].fix and gain in found[0].gain


def test_tensor_parallelism_within_a_domain_of_several_nodes() -> None:
    """Four GPUs of a node, 72 that NVLink connects."""
    rack = Device("NVIDIA GB200", 189471, nvlink_domain=72)
    assert advise(change(device=rack, gpus_per_node=4, nodes=16)) == ()


def test_shapes_are_no_matter_on_cpus() -> None:
    cpu = Device("CPU", 16000, kind="cpu")
    odd = {"vocab_size": 50257, "head_width": 100, "intermediate_size": 28673}
    assert advise(change(model=odd, device=cpu, nodes=1, gpus_per_node=64)) == ()


def test_warnings_come_first() -> None:
    levels = [one.level for one in advise(change(model={"head_width": 320, "hidden_size": 8200}))]
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
