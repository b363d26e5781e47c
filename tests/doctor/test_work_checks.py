"""Measured work of made-up nodes, and what is said of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from launcher.doctor.node_facts import NodeFacts, NodeFinding, WorkResult
from launcher.doctor.work_checks import judge_work

H100 = "NVIDIA H100 80GB HBM3"


def gpu(index: int, value: float | None = 700.0, **changes: object) -> WorkResult:
    result = WorkResult("matmul", f"GPU {index}", value, "TFLOPS", "8192:aa", device=H100)
    return replace(result, **changes)  # type: ignore[arg-type]


def cpus(value: float = 0.1) -> WorkResult:
    return WorkResult("matmul", "CPU", value, "TFLOPS", device="EPYC, 2 CPUs")


def memory(value: float) -> WorkResult:
    return WorkResult("memory", "CPU", value, "GB/s", device="EPYC, 2 CPUs")


def node(host: str, *work: WorkResult, boot_id: str = "") -> NodeFacts:
    return NodeFacts(host, 0, 0.0, torch="2.9", work=work, boot_id=boot_id or host)


def judge(*nodes: NodeFacts, tolerance: float = 0.93) -> list[NodeFinding]:
    """Findings that are more than that all is well."""
    return [one for one in judge_work(nodes, tolerance) if one.finding.level != "ok"]


def summarize(found: Sequence[NodeFinding]) -> list[tuple[str, str, str]]:
    return [(one.host, one.finding.level, one.finding.what.partition(":")[0]) for one in found]


def make_gpus(values: Sequence[float]) -> list[WorkResult]:
    return [gpu(index, value) for index, value in enumerate(values)]


def test_equal_devices_have_no_finding_and_are_told_of() -> None:
    found = judge_work([node("a", *make_gpus([700] * 8)), node("b", *make_gpus([690] * 8))], 0.93)
    assert [one.finding.level for one in found] == ["ok"]
    assert found[0].finding.what == f"matrix product: 690 to 700 TFLOPS on 16 of {H100}"


@pytest.mark.parametrize(
    ("value", "level"), [(660.0, ""), (652.0, ""), (650.0, "warning"), (565.0, "warning"), (550.0, "error")]
)
def test_a_gpu_below_the_median_of_the_others(value: float, level: str) -> None:
    found = judge(node("a", *make_gpus([700] * 8)), node("b", *make_gpus([700] * 7 + [value])))
    assert summarize(found) == ([("b", level, "GPU 7")] if level else [])


def test_a_node_all_of_whose_gpus_are_slow_among_two() -> None:
    found = judge(node("a", *make_gpus([700] * 8)), node("b", *make_gpus([500] * 8)))
    assert summarize(found) == [("b", "error", "GPU 0, GPU 1, GPU 2, GPU 3 and 4 more")]
    assert "71% of the median of the job's others (700 TFLOPS)" in found[0].finding.what
    assert "cluster.exclude=b" in found[0].finding.fix


def test_kinds_of_gpus_are_not_compared() -> None:
    other = [gpu(index, 300.0, device="NVIDIA A100", checksum="8192:bb") for index in range(8)]
    assert judge(node("a", *make_gpus([700] * 8)), node("b", *other)) == []


def test_what_failed_is_an_error_with_its_text_made_harmless() -> None:
    found = judge(node("a", gpu(0), gpu(1, None, checksum="", problem="no answer within 7 s\x1b[2J")))
    assert summarize(found) == [("a", "error", "GPU 1")]
    assert "failed: no answer within 7 s\\x1b[2J" in found[0].finding.what


def test_what_found_no_time_is_unknown_once() -> None:
    late = [WorkResult(name, "node", None, reason="no time was left") for name in ("memory", "all_reduce")]
    (found,) = judge(node("a", cpus(), *late))
    assert found.finding.level == "unknown"
    what = "memory bandwidth, all_reduce in the node not measured: no time was left"
    assert found.finding.what == what


def test_a_gpu_that_computes_other_bits_than_most() -> None:
    wrong = gpu(3, checksum="8192:bb")
    found = judge(node("a", gpu(0), gpu(1), gpu(2)), node("b", wrong, gpu(4)))
    assert summarize(found) == [("b", "error", "GPU 3")]
    assert "silent data corruption" in found[0].finding.why


def test_two_that_differ_make_nobody_sick() -> None:
    found = judge(node("a", gpu(0)), node("b", gpu(0, checksum="8192:bb")))
    assert [(one.host, one.finding.level) for one in found] == [("", "warning")]


def test_bits_are_compared_for_the_same_size_and_torch_alone() -> None:
    smaller, newer = gpu(1, checksum="4096:bb"), gpu(0, checksum="8192:cc")
    nodes = (node("a", gpu(0), smaller), node("b", gpu(0)), replace(node("c", newer), torch="2.10"))
    assert judge(*nodes) == []


@pytest.mark.parametrize(("value", "level"), [(0.08, ""), (0.07, "warning"), (0.05, "error")])
def test_a_nodes_cpus_against_the_others(value: float, level: str) -> None:
    found = judge(node("a", cpus()), node("b", cpus()), node("c", cpus(value)))
    assert summarize(found) == ([("c", level, "CPU")] if level else [])


@pytest.mark.parametrize(("value", "level"), [(40.0, ""), (30.0, "warning"), (20.0, "error")])
def test_a_node_with_slow_memory(value: float, level: str) -> None:
    nodes = [node(host, cpus(), memory(60.0)) for host in "abc"]
    found = judge(*nodes, node("d", cpus(), memory(value)))
    assert summarize(found) == ([("d", level, "CPU")] if level else [])


def test_nodes_of_one_machine_disturb_each_other() -> None:
    nodes = [node(host, cpus(), boot_id="same") for host in "ab"]
    assert judge(*nodes, node("c", cpus(0.04), boot_id="same")) == []
    found = judge(*nodes, node("c", cpus(0.02), boot_id="same"))
    assert [one[:2] for one in summarize(found)] == [("c", "error")]


def test_all_far_below_what_the_gpu_is_known_for_is_a_note() -> None:
    def copies(value: float) -> list[WorkResult]:
        return [WorkResult("copy_to", f"GPU {at}", value, "GB/s", device=H100) for at in range(8)]

    (found,) = judge(node("a", *copies(24.0)))
    assert (found.host, found.finding.level) == ("", "note")
    assert "24 GB/s at the median; 48 GB/s" in found.finding.what
    assert judge(node("a", *copies(45.0))) == []


def test_no_nodes_and_no_work_have_no_finding() -> None:
    assert judge_work([], 0.93) == ()
    assert judge_work([node("a"), node("b")], 0.93) == ()


def test_zeros_and_unknown_measures_do_no_harm() -> None:
    odd = WorkResult("dance", "floor", 1.0)
    assert judge(node("a", cpus(0.0), odd), node("b", cpus(0.0))) == []
