"""Facts of a node of eight GPUs that has nothing to mend, until a test changes one thing."""

from dataclasses import replace
from typing import Any

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import (
    GpuFacts,
    GpuProcess,
    JudgeSettings,
    NicFacts,
    NodeFacts,
    NodeFinding,
    PathFacts,
)
from launcher.doctor.node_judgement import judge_nodes

SETTINGS = JudgeSettings(gpus=8)
NOON = 1_790_000_000.0
GPU = GpuFacts(
    index=0,
    uuid="GPU-0",
    name="NVIDIA H100 80GB HBM3",
    pci="0000:00:00.0",
    memory_mib=81559,
    used_mib=500,
    processes=(),
    recovery_action="none",
    ecc_uncorrected=0,
    remapped_uncorrectable=0,
    remap_pending=False,
    remap_failed=False,
    clock_reasons=("sw_power_cap",),
    sm_clock=345,
    max_sm_clock=1980,
    temperature=31,
    power=71.5,
    nvlinks=18,
    max_nvlinks=18,
    pcie_width=16,
    max_pcie_width=16,
)
PATHS = (
    PathFacts("/home/u/runs/x", "run directory", "ok", 0.004, 900 << 20, 10_000_000),
    PathFacts("/home/u/code", "working directory", "ok", 0.002, 900 << 20, 10_000_000),
    PathFacts("/tmp", "temporary directory", "ok", 0.001, 400 << 20, None),
    PathFacts("/data", "data", "ok", 0.003, 0, 0),
)
NODE = NodeFacts(
    host="n1",
    node_rank=0,
    time=NOON,
    asked=NOON - 1.5,
    answered=NOON + 0.5,
    gpus=tuple(
        replace(
            GPU,
            index=index,
            uuid=f"GPU-{index}",
            pci=f"0000:{index + 1:02x}:00.0",
            peers=tuple(other for other in range(8) if other != index),
        )
        for index in range(8)
    ),
    nics=tuple(NicFacts(f"mlx5_{number}:1", "ACTIVE", 400.0, 3) for number in range(8)),
    paths=PATHS,
    xids=(),
    driver="570.124.06",
    cuda_driver="12.8",
    torch="2.8.0+cu128",
    torch_cuda="12.8",
    kernel="6.8.0",
    boot_id="boot-1",
    cpus=192,
    memory_kib=2 << 30,
    free_memory_kib=1900 << 20,
    shm_kib=1 << 30,
    free_shm_kib=1 << 30,
    load=0.01,
    seconds=0.4,
)


def make_nodes(count: int) -> tuple[NodeFacts, ...]:
    """Healthy nodes, `n1` and so on."""
    return tuple(
        replace(NODE, host=f"n{number}", node_rank=number - 1, boot_id=f"boot-{number}")
        for number in range(1, count + 1)
    )


def change_gpu(node: NodeFacts, index: int, **changes: Any) -> NodeFacts:
    """A node with one GPU changed."""
    gpus = tuple(replace(gpu, **changes) if gpu.index == index else gpu for gpu in node.gpus)
    return replace(node, gpus=gpus)


def change_nic(node: NodeFacts, number: int, **changes: Any) -> NodeFacts:
    """A node with one port changed."""
    nics = tuple(replace(nic, **changes) if at == number else nic for at, nic in enumerate(node.nics))
    return replace(node, nics=nics)


def change_path(node: NodeFacts, purpose: str, /, **changes: Any) -> NodeFacts:
    """A node with one path changed."""
    paths = tuple(replace(path, **changes) if path.purpose == purpose else path for path in node.paths)
    return replace(node, paths=paths)


def hold(mib: int, name: str = "python") -> dict[str, Any]:
    """The changes of a GPU of which a process holds memory."""
    return {"used_mib": mib, "processes": (GpuProcess(4711, name, mib),)}


def judge_one(node: NodeFacts, settings: JudgeSettings = SETTINGS) -> list[Finding]:
    """The findings of a job of one node."""
    return [one.finding for one in judge_nodes((node,), settings)]


def list_found(found: tuple[NodeFinding, ...]) -> list[tuple[str, str, str]]:
    """Findings as host, level and what."""
    return [(one.host, one.finding.level, one.finding.what) for one in found]
