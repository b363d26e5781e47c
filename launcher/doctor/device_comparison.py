"""GPUs and NICs of a job's nodes beside each other: fewer, others or slower ones than the rest."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median, median_low

from launcher.doctor.device_checks import GPUS, report_narrow_link
from launcher.doctor.finding import Finding
from launcher.doctor.gpu_checks import label_gpu
from launcher.doctor.node_comparison import compare_nodes_by, find_majority, name_nodes
from launcher.doctor.node_facts import GpuFacts, JudgeSettings, NicFacts, NodeFacts, NodeFinding
from launcher.text import count_things

NICS = "NICs"
SLOWEST = "the job is as fast as its slowest GPU, and fits if it fits into the smallest"
DOWNED = 20
"""Times that a link has gone down since the boot that are many, if it is ten times the others' median too:
starting the switches and the node takes a few."""


def compare_gpu_count(nodes: Sequence[NodeFacts], settings: JudgeSettings) -> Iterator[NodeFinding]:
    """Nodes with fewer GPUs than the job needs, or than the others have."""
    counts = [sum(not gpu.problem for gpu in node.gpus) for node in nodes]
    most = max(counts, default=0)
    for node, count in zip(nodes, counts, strict=True):
        unread = bool(node.gpu_problem) or any(text.startswith("GPUs: ") for text in node.unchecked)
        if settings.gpus is not None and count < settings.gpus and not unread:
            what = f"{count_things(count, 'GPU')}, and the job needs {settings.gpus}"
        elif settings.gpus is None and count < most and not unread:
            fuller = [other for other, number in zip(nodes, counts, strict=True) if number == most]
            what = f"{count_things(count, 'GPU')}, and {name_nodes(fuller)} {most}"
        else:
            continue
        yield NodeFinding(
            node.host,
            Finding(
                "error",
                GPUS,
                what,
                "ranks without a GPU fail at once, and the others wait for them",
                "`nvidia-smi` and `sudo dmesg | grep -i xid` show whether one was lost; drain the node",
            ),
        )


def compare_kinds(nodes: Sequence[NodeFacts], _: JudgeSettings) -> Iterator[NodeFinding]:
    """GPUs of another kind or memory size than on most nodes, or beside others in a node."""
    yield from compare_nodes_by(
        nodes,
        describe_gpu_kinds,
        "the kind of the GPUs",
        Finding(
            "warning", GPUS, "", SLOWEST, "ask for nodes of one kind (SLURM: --constraint, --gres=gpu:TYPE:N)"
        ),
    )
    for node in nodes if len({describe_gpu_kinds(node) for node in nodes}) == 1 else ():  # else it is told
        if len({gpu.name for gpu in node.gpus if gpu.name}) > 1:
            yield NodeFinding(
                node.host,
                Finding(
                    "warning",
                    GPUS,
                    f"GPUs of several kinds: {describe_gpu_kinds(node)}",
                    SLOWEST,
                    "choose those of one kind (CUDA_VISIBLE_DEVICES)",
                ),
            )


def describe_gpu_kinds(node: NodeFacts) -> str:
    """The kinds of a node's GPUs, with their memory in GiB."""
    kinds = {f"{gpu.name} ({gpu.memory_mib >> 10} GiB)": None for gpu in node.gpus if gpu.name}
    return ", ".join(sorted(kinds))


def compare_links(nodes: Sequence[NodeFacts], _: JudgeSettings) -> Iterator[NodeFinding]:
    """NVLinks that are down, peers that cannot be reached, and narrow PCI links.

    A GPU is held against the others of its kind in the whole job: a board without NVLink bridges has links
    that are all down. Among fewer than four GPUs nothing tells the usual from the defect: a warning.
    """
    gpus = [(node, gpu) for node in nodes for gpu in node.gpus if not gpu.problem]
    active: dict[str, Counter[int]] = {}
    widths: dict[str, Counter[int]] = {}
    for gpu in [one for _, one in gpus]:
        active.setdefault(gpu.name, Counter()).update([] if gpu.nvlinks is None else [gpu.nvlinks])
        widths.setdefault(gpu.name, Counter()).update([gpu.pcie_width or 0])
    reached = [share for node, gpu in gpus if (share := measure_reach(node, gpu)) is not None]
    usual = median_low(reached) if reached else 0.0
    for place, gpu in gpus:
        links, width = judge_nvlinks(gpu, active[gpu.name]), judge_width(gpu, widths[gpu.name])
        for finding in filter(None, (links, judge_peers(place, gpu, usual), width)):
            yield NodeFinding(place.host, finding)


def judge_nvlinks(gpu: GpuFacts, active: Counter[int]) -> Finding | None:
    """A GPU with fewer active NVLinks than others of its kind; `active` counts GPUs by their active links."""
    if gpu.nvlinks is None or gpu.nvlinks >= max(active):
        return None
    count, more = active.total(), sum(active[links] for links in active if links > gpu.nvlinks)
    return Finding(
        "error" if count >= 4 and 4 * more >= 3 * count else "warning",
        GPUS,
        f"{label_gpu(gpu)}: {gpu.nvlinks} of {gpu.max_nvlinks} NVLinks are active, and {max(active)} of "
        "others of its kind",
        "collectives fail, or go over PCI at a tenth of the speed, and all ranks wait",
        "`nvidia-smi nvlink -s`; see whether nvidia-fabricmanager runs; reset the GPUs or reboot the node",
    )


def measure_reach(node: NodeFacts, gpu: GpuFacts) -> float | None:
    """Return the share of the node's other GPUs that a GPU reaches directly; None if that is not known."""
    return len(gpu.peers) / (len(node.gpus) - 1) if gpu.peers is not None and len(node.gpus) > 1 else None


def judge_peers(node: NodeFacts, gpu: GpuFacts, usual: float) -> Finding | None:
    """A GPU that reaches a smaller share of its node's GPUs than most do."""
    share = measure_reach(node, gpu)
    if share is None or share >= usual:
        return None
    lost = [str(other.index) for other in node.gpus if other.index not in (*(gpu.peers or ()), gpu.index)]
    return Finding(
        "warning",
        GPUS,
        f"{label_gpu(gpu)} cannot reach the memory of GPU {', '.join(lost)} directly, as others do",
        "what ranks exchange is copied through main memory",
        "`nvidia-smi topo -p2p r`; on PCI, ACS and the IOMMU forbid it (NCCL's troubleshooting guide)",
    )


def judge_width(gpu: GpuFacts, widths: Counter[int]) -> Finding | None:
    """A PCI link with fewer lanes than the GPU has: a note if most of its kind have no more either."""
    width, full = gpu.pcie_width or 0, gpu.max_pcie_width or 0
    if not 0 < width < full:
        return None
    better = sum(count for lanes, count in widths.items() if lanes > width)
    level = "warning" if 2 * better >= widths.total() else "note"
    return report_narrow_link(label_gpu(gpu), width, full, level)


def compare_nics(nodes: Sequence[NodeFacts], _: JudgeSettings) -> Iterator[NodeFinding]:
    """Ports that are missing, down or slower than the port of the same name on other nodes.

    It is an error if most nodes have it otherwise, and a warning if only some have.
    """
    counted = [nic.link_downed for node in nodes for nic in node.nics if nic.link_downed is not None]
    many = max(DOWNED, 10 * median(counted)) if counted else DOWNED
    for name in {name: None for node in nodes for name in (nic.name for nic in node.nics)}:
        having = [(node, nic) for node in nodes for nic in node.nics if nic.name == name]
        if 2 * len(having) > len(nodes):
            with_it = {id(node) for node, _ in having}
            for node in nodes:
                if id(node) not in with_it:
                    yield NodeFinding(node.host, report_missing_port(name, len(having)))
        active = [nic.rate_gbps for _, nic in having if nic.state == "ACTIVE"]
        for node, nic in having:
            for finding in (judge_port(nic, active, len(having)), judge_flapping(nic, many)):
                if finding:
                    yield NodeFinding(node.host, finding)


def report_missing_port(name: str, count: int) -> Finding:
    """The finding of a port that this node does not have."""
    return Finding(
        "error",
        NICS,
        f"there is no {name}, which {count_things(count, 'other node')} have",
        "NCCL has fewer rails than on the other nodes: it fails, or the node is slower than they are",
        "`ibstat`, `lspci | grep -i mellanox`; drain the node",
    )


def judge_port(nic: NicFacts, rates: Sequence[float], count: int) -> Finding | None:
    """One port against `count` of its name, of which the active ones have `rates`; None if all is well."""
    why = "what it does not carry the node's other ports carry, or nothing, and all nodes wait"
    fix = "check cable, transceiver and switch port (`ibstat`, `iblinkinfo`, `mlxlink -d DEVICE`)"
    if nic.state == "INIT":
        said = f"{nic.name} is INIT: its link is up, and no subnet manager has set it up"
        fix = "start opensm, or the switch's subnet manager"
        return Finding("error" if 2 * len(rates) > count else "warning", NICS, said, why, fix)
    if nic.state and nic.state != "ACTIVE" and rates:
        said = f"{nic.name} is {nic.state}, and ACTIVE on {count_things(len(rates), 'other node')}"
        return Finding("error" if 2 * len(rates) > count else "warning", NICS, said, why, fix)
    most: float | None = find_majority(rates)
    usual = most or max(rates, default=0.0)
    if nic.state == "ACTIVE" and 0 < nic.rate_gbps < usual:
        said = f"{nic.name} has {nic.rate_gbps:g} Gb/s, and {usual:g} on other nodes"
        return Finding("error" if most and 2 * nic.rate_gbps <= most else "warning", NICS, said, why, fix)
    return None


def judge_flapping(nic: NicFacts, many: float) -> Finding | None:
    """A port whose link has gone down `many` times since the boot."""
    if nic.link_downed is None or nic.link_downed < many:
        return None
    return Finding(
        "warning",
        NICS,
        f"the link of {nic.name} has gone down {nic.link_downed} times since the boot",
        "when it goes down during the job, collectives wait or fail",
        "check cable and transceiver; `mlxlink -d DEVICE -c` counts the link's errors",
    )
