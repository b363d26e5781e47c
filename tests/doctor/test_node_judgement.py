"""Faults of nodes before a job: each is a healthy node with one thing changed, and gives one finding."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from launcher.doctor.node_facts import JudgeSettings, KernelXid, NodeFacts
from launcher.doctor.node_judgement import judge_nodes
from tests.doctor.healthy_node import (
    NODE,
    NOON,
    SETTINGS,
    change_gpu,
    change_nic,
    change_path,
    hold,
    judge_one,
    list_found,
    make_nodes,
)

GIB = 1 << 20


def had_xid(number: int, age: float = 60.0, pci: str = "0000:04:00.0") -> NodeFacts:
    return replace(NODE, xids=(KernelXid(pci, number, "pid=1, name=python", age),))


FAULTS = {
    "a GPU too few": (replace(NODE, gpus=NODE.gpus[:7]), "error", "7 GPUs, and the job needs 8"),
    "a GPU that is lost": (
        change_gpu(NODE, 3, problem="GPU is lost"),
        "error",
        "GPU 3 (0000:04:00.0) does not answer: GPU is lost",
    ),
    "a GPU that NVML leaves out": (
        replace(NODE, lost_gpus=("0000:09:00.0",)),
        "error",
        "0000:09:00.0, which NVML does not list",
    ),
    "recovery": (
        change_gpu(NODE, 2, recovery_action="gpu_reset"),
        "error",
        "GPU 2 (0000:03:00.0) waits for recovery: gpu reset",
    ),
    "recovery of a new kind": (
        change_gpu(NODE, 2, recovery_action="action 9"),
        "error",
        "waits for recovery: action 9",
    ),
    "ECC with an older driver": (
        change_gpu(NODE, 1, ecc_uncorrected=2, recovery_action=None),
        "error",
        "GPU 1 (0000:02:00.0): 2 uncorrected ECC errors",
    ),
    "ECC, and the driver is content": (
        change_gpu(NODE, 1, ecc_uncorrected=1),
        "warning",
        "1 uncorrected ECC error since",
    ),
    "remapping failed": (change_gpu(NODE, 0, remap_failed=True), "error", "could not be remapped"),
    "remapping pending": (change_gpu(NODE, 0, remap_pending=True), "error", "waits to be remapped"),
    "too many remapped": (change_gpu(NODE, 0, remapped_uncorrectable=513), "error", "513 memory rows"),
    "power brake": (
        change_gpu(NODE, 7, clock_reasons=("hw_power_brake",)),
        "error",
        "GPU 7 (0000:08:00.0): hw_power_brake, 345 of 1980 MHz, 31 °C",
    ),
    "heat": (
        change_gpu(NODE, 7, clock_reasons=("sw_thermal_slowdown",), temperature=88),
        "warning",
        "sw_thermal_slowdown, 88 °C",
    ),
    "a leftover": (
        change_gpu(NODE, 5, **hold(60 << 10)),
        "error",
        "60 GiB of 79.6 GiB are in use by python (process 4711)",
    ),
    "a small leftover": (change_gpu(NODE, 5, **hold(3 << 10)), "warning", "3 GiB of 79.6 GiB are in use"),
    "memory that nobody shows": (change_gpu(NODE, 5, used_mib=40 << 10), "error", "NVML shows no process"),
    "fell off the bus": (
        replace(had_xid(79), gpus=tuple(gpu for gpu in NODE.gpus if gpu.index != 3)),
        "error",
        "7 GPUs, and the job needs 8",
    ),
    "XID 79, back again": (had_xid(79), "warning", "GPU 3 (0000:04:00.0) had XID 79, the last 1 min 0 s ago"),
    "XID 95, unknown state": (change_gpu(had_xid(95), 3, recovery_action=None), "error", "had XID 95"),
    "XID 95 of last week, unknown state": (
        change_gpu(had_xid(95, 6e5), 3, recovery_action=None),
        "warning",
        "had XID 95",
    ),
    "XID 95, reset since": (had_xid(95), "note", "had XID 95"),
    "XID 74": (had_xid(74), "warning", "had XID 74"),
    "a program's XID": (had_xid(31), "note", "had XID 31"),
    "XID of another job's GPU": (
        had_xid(48, pci="0000:77:00.0"),
        "note",
        "GPU at 0000:77:00.0, which is not of this job, had XID 48",
    ),
    "NVLinks down": (
        change_gpu(NODE, 6, nvlinks=12),
        "error",
        "12 of 18 NVLinks are active, and 18 of others",
    ),
    "a peer out of reach": (
        change_gpu(NODE, 6, peers=(0, 1, 2, 3, 4, 5)),
        "warning",
        "GPU 6 (0000:07:00.0) cannot reach the memory of GPU 7",
    ),
    "a narrow PCI link": (
        change_gpu(NODE, 6, pcie_width=8),
        "warning",
        "GPU 6 (0000:07:00.0) has a PCI link of x8, and can do x16",
    ),
    "GPUs of two kinds": (change_gpu(NODE, 6, name="NVIDIA A100"), "warning", "GPUs of several kinds"),
    "a subnet manager missing": (change_nic(NODE, 2, state="INIT"), "warning", "mlx5_2:1 is INIT"),
    "a link that flaps": (
        change_nic(NODE, 2, link_downed=412),
        "warning",
        "mlx5_2:1 has gone down 412 times",
    ),
    "a stuck path": (
        change_path(NODE, "data", state="stuck", detail="no answer in 5 s"),
        "error",
        "/data (data): no answer in 5 s",
    ),
    "a stuck home": (
        change_path(NODE, "data", purpose="home", state="stuck"),
        "warning",
        "/data (home): no answer",
    ),
    "a slow path": (change_path(NODE, "data", seconds=4.2), "warning", "/data (data) answered after 4.2 s"),
    "a path that is missing": (
        change_path(NODE, "data", state="missing"),
        "error",
        "/data (data) is missing on the node",
    ),
    "no permission": (
        change_path(NODE, "run directory", state="denied", detail="Permission denied"),
        "error",
        "/home/u/runs/x (run directory): Permission denied",
    ),
    "read-only": (
        change_path(NODE, "temporary directory", state="read_only"),
        "error",
        "is on a read-only file system",
    ),
    "stale handle": (
        change_path(NODE, "data", state="failed", detail="Stale file handle"),
        "error",
        "Stale file handle",
    ),
    "disk nearly full": (
        change_path(NODE, "run directory", free_kib=500 << 10),
        "warning",
        "has 500 MiB free, less than 1 GiB",
    ),
    "disk full": (change_path(NODE, "run directory", free_kib=8), "error", "has 8 KiB free"),
    "few inodes": (change_path(NODE, "run directory", free_inodes=300), "warning", "can hold 300 more files"),
    "no inodes": (
        change_path(NODE, "run directory", free_inodes=1),
        "error",
        "can hold 1 more file (inodes)",
    ),
    "small /dev/shm": (
        replace(NODE, shm_kib=64 << 10, free_shm_kib=64 << 10),
        "warning",
        "/dev/shm has 64 MiB",
    ),
    "full /dev/shm": (replace(NODE, free_shm_kib=0), "error", "/dev/shm has 1 TiB, of which 0 KiB are free"),
    "memory taken": (replace(NODE, free_memory_kib=100 * GIB), "warning", "100 GiB of 2 TiB are free"),
    "no memory": (replace(NODE, free_memory_kib=10 * GIB), "error", "10 GiB of 2 TiB are free"),
    "CPUs of others": (replace(NODE, load=0.8), "warning", "others use 80% of the job's 192 CPUs"),
    "some load": (replace(NODE, load=0.2), "note", "others use 20%"),
    "driver too old": (
        replace(NODE, driver="470.57.02", cuda_driver="11.4"),
        "error",
        "older than the CUDA 12.8 that torch was built for",
    ),
    "driver too old, by its own number": (
        replace(NODE, driver="470.57.02", cuda_driver=""),
        "error",
        "driver 470.57.02: older than the CUDA 12.8",
    ),
    "no CUDA in torch": (
        replace(NODE, torch="2.8.0+cpu", torch_cuda=""),
        "warning",
        "torch 2.8.0+cpu is no build for CUDA",
    ),
    "not root": (
        replace(NODE, xids=None, unchecked=("XIDs: for root alone",)),
        "unknown",
        "XIDs not checked: for root alone",
    ),
}
"""Facts, and the level and a part of the one finding that tells the fault."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_values(name: str) -> None:
    node, level, part = FAULTS[name]
    found = judge_one(node)
    hits = [finding for finding in found if part in finding.what]
    assert [finding.level for finding in hits] == [level], found
    worse = ("error", "warning")[: 1 if level == "error" else 2] if level != "unknown" else ()
    others = [finding for finding in found if finding not in hits and finding.level in worse]
    extra = {"a GPU that is lost": "7 GPUs, and the job needs 8"}.get(name)
    assert [finding.what for finding in others] == ([extra] if extra else [])
    for finding in hits:
        assert level == "unknown" or (finding.why and finding.fix and "{" not in finding.fix), finding


def test_a_healthy_node_and_healthy_nodes_have_no_finding() -> None:
    assert judge_one(NODE) == []
    assert judge_nodes(make_nodes(6), SETTINGS) == ()
    assert judge_nodes(make_nodes(2)) == ()
    assert judge_nodes(()) == ()


HARMLESS = {
    "no NVLink bridges": replace(NODE, gpus=tuple(replace(gpu, nvlinks=0) for gpu in NODE.gpus)),
    "no peer access anywhere": replace(NODE, gpus=tuple(replace(gpu, peers=()) for gpu in NODE.gpus)),
    "CUDA of a newer minor version": replace(NODE, cuda_driver="12.2", driver="535.104.05"),
    "a compatibility package": replace(NODE, driver="470.57.02"),
    "ROCm": replace(NODE, driver="", cuda_driver="", torch="2.8.0+rocm6.4", torch_cuda=""),
    "XIDs of programs that were ended": replace(had_xid(43), xids=(*had_xid(43).xids, *had_xid(63).xids)),  # type: ignore[misc]
    "nothing known": replace(
        NodeFacts("n1", 0, NOON), gpus=tuple(replace(gpu, used_mib=None) for gpu in NODE.gpus)
    ),
    "more GPUs than needed": replace(NODE, gpus=(*NODE.gpus, replace(NODE.gpus[0], index=8, pci=""))),
    "a second port that nobody uses": replace(
        NODE, nics=(*NODE.nics, replace(NODE.nics[0], name="mlx5_0:2", state="DOWN", rate_gbps=10.0))
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_wrong_and_is_not_passes(name: str) -> None:
    found = judge_one(HARMLESS[name])
    assert [finding for finding in found if finding.level in ("error", "warning")] == []


def spoil_one(change: Callable[[NodeFacts], NodeFacts], count: int = 4) -> tuple[NodeFacts, ...]:
    """Nodes of which the third is changed."""
    nodes = list(make_nodes(count))
    nodes[2] = change(nodes[2])
    return tuple(nodes)


BESIDE = {
    "GPUs": (lambda node: replace(node, gpus=node.gpus[:6]), "error", "6 GPUs, and n1, n2, n4 8"),
    "no GPU at all": (lambda node: replace(node, gpus=()), "error", "0 GPUs, and n1, n2, n4 8"),
    "kind": (
        lambda node: replace(
            node, gpus=tuple(replace(gpu, name="NVIDIA A100", memory_mib=40960) for gpu in node.gpus)
        ),
        "warning",
        "the kind of the GPUs is NVIDIA A100 (40 GiB), and NVIDIA H100 80GB HBM3 (79 GiB) on 3 of 4 nodes",
    ),
    "driver": (
        lambda node: replace(node, driver="550.54.15"),
        "warning",
        "the NVIDIA driver is 550.54.15, and 570.124.06 on 3 of 4 nodes",
    ),
    "torch": (
        lambda node: replace(node, torch="2.7.1+cu128"),
        "warning",
        "torch is 2.7.1+cu128, and 2.8.0+cu128 on 3",
    ),
    "CUDA": (
        lambda node: replace(node, cuda_driver="12.9"),
        "warning",
        "the driver's CUDA is 12.9, and 12.8 on 3",
    ),
    "ahead": (
        lambda node: replace(node, time=NOON + 62.5),
        "error",
        "its clock is at least 62.0 s ahead of the other nodes'",
    ),
    "behind": (
        lambda node: replace(node, time=NOON - 9.0),
        "warning",
        "its clock is at least 7.5 s behind the other nodes'",
    ),
    "NIC down": (
        lambda node: change_nic(node, 4, state="DOWN", rate_gbps=10.0),
        "error",
        "mlx5_4:1 is DOWN, and ACTIVE on 3 other nodes",
    ),
    "NIC gone": (
        lambda node: replace(node, nics=node.nics[:7]),
        "error",
        "there is no mlx5_7:1, which 3 other nodes have",
    ),
    "NIC rate": (
        lambda node: change_nic(node, 4, rate_gbps=200.0),
        "error",
        "mlx5_4:1 has 200 Gb/s, and 400 on other nodes",
    ),
    "path": (
        lambda node: change_path(node, "data", state="missing"),
        "error",
        "/data (data) is missing, and is there on n1, n2, n4",
    ),
    "memory": (
        lambda node: replace(node, free_memory_kib=700 * GIB),
        "warning",
        "700 GiB are free, and 1.86 TiB on the others",
    ),
    "NVLinks of a whole node": (
        lambda node: replace(node, gpus=tuple(replace(gpu, nvlinks=0) for gpu in node.gpus)),
        "error",
        "GPU 0 (0000:01:00.0): 0 of 18 NVLinks are active",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_node_that_differs_from_the_others_is_named(name: str) -> None:
    change, level, part = BESIDE[name]
    found = [
        entry for entry in list_found(judge_nodes(spoil_one(change))) if entry[1] in ("error", "warning")
    ]
    assert {host for host, _, _ in found} == {"n3"}, found
    assert [entry[1] for entry in found if part in entry[2]] == [level], found


def test_without_a_majority_the_job_is_warned_and_no_node_is_blamed() -> None:
    one, two = make_nodes(2)
    found = list_found(judge_nodes((one, replace(two, driver="550.54.15"))))
    assert found == [("", "warning", "the NVIDIA driver differs: 570.124.06 on n1; 550.54.15 on n2")]
    rates = judge_nodes((one, change_nic(two, 0, rate_gbps=200.0)))
    assert list_found(rates) == [("n2", "warning", "mlx5_0:1 has 200 Gb/s, and 400 on other nodes")]
    down = judge_nodes((one, change_nic(two, 0, state="DOWN")))
    assert list_found(down) == [("n2", "warning", "mlx5_0:1 is DOWN, and ACTIVE on 1 other node")]


def test_a_path_that_is_missing_everywhere_makes_no_node_sick() -> None:
    nodes = tuple(change_path(node, "data", state="missing") for node in make_nodes(3))
    found = list_found(judge_nodes(nodes))
    assert found == [("", "error", "/data (data) is missing on all nodes")]


def test_the_first_nodes_clock_can_be_the_wrong_one() -> None:
    """All others are 40 s ahead of it: it is 40 s behind."""
    first, *others = make_nodes(4)
    found = judge_nodes((first, *(replace(node, time=NOON + 40.5) for node in others)))
    assert list_found(found) == [("n1", "error", "its clock is at least 40.0 s behind the other nodes'")]
    two = judge_nodes((first, replace(others[0], time=NOON + 40.5)))
    assert list_found(two) == [("n2", "error", "its clock is at least 40.0 s ahead of n1's")]


def test_a_clock_is_judged_by_what_asking_allows_alone() -> None:
    """It may be ahead by all that went by until the answer had come, or behind by what starting took."""
    for moment in (NOON - 1.5, NOON + 0.5, NOON + 1.4, NOON - 2.4):
        assert judge_nodes((NODE, replace(NODE, host="n2", time=moment, boot_id="2"))) == ()
    unanswered = replace(NODE, host="n2", time=NOON + 3600, answered=None, boot_id="2")
    assert judge_nodes((NODE, unanswered)) == ()


def test_what_no_node_could_check_is_told_once() -> None:
    nodes = tuple(replace(node, unchecked=("XIDs: for root alone",)) for node in make_nodes(5))
    assert [one.host for one in judge_nodes(nodes)] == [""]
    some = (*nodes[:2], *make_nodes(5)[2:])
    assert [one.host for one in judge_nodes(some)] == ["n1", "n2"]


def test_nodes_of_one_machine_are_not_told_of_each_others_checks() -> None:
    """As on the sandbox, where all nodes check at once on the same CPUs."""
    nodes = tuple(replace(node, load=0.9, boot_id="same") for node in make_nodes(3))
    assert judge_nodes(nodes) == ()
    assert judge_nodes((replace(NODE, load=0.9),)) != ()


def test_a_thousand_nodes_are_judged_without_comparing_each_with_each() -> None:
    """Eight thousand GPUs: pairs of them would take minutes, and the test's time limit would end it."""
    nodes = spoil_one(lambda node: change_gpu(node, 1, nvlinks=4), 1000)
    assert [(one.host, one.finding.level) for one in judge_nodes(nodes)] == [("n3", "error")]


def test_free_space_that_the_job_wants_is_its_own_setting() -> None:
    wanted = JudgeSettings(8, min_free_kib=2000 * GIB)
    levels = [finding.level for finding in judge_one(NODE, wanted)]
    assert levels == ["warning", "warning"], "the run directory and the temporary one"
