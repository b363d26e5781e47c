"""The two ways to read NVIDIA GPUs, NVML and the driver's files, against each other and against torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from launcher.plan.model import Gpu
from launcher.probe.gpus import sort_gpus
from launcher.probe.machine import probe
from launcher.probe.nvidia_gpus import (
    GPUS,
    has_mig,
    list_cards,
    read_bound,
    read_driver,
    read_nvml,
    read_persistence,
)
from launcher.probe.sysfs import Tree
from tests.gpu.context import Context
from tests.gpu.programs.show_device import describe_device
from tests.gpu.records import Recorder


def run(context: Context) -> None:
    """Compare what each of them says."""
    record, tree = context.record, Tree()
    by_nvml = sort_gpus(read_nvml(tree))
    record.check("NVML shows a GPU", bool(by_nvml), "; ".join(tree.list_warnings()) or "it shows none")
    with record.part("the driver's files"):
        compare_files(record, by_nvml)
    with record.part("the probe"):
        compare_probes(record, by_nvml)
    with record.part("torch"):
        compare_torch(record, by_nvml)


def compare_files(record: Recorder, by_nvml: Sequence[Gpu]) -> None:
    """Compare with /proc/driver/nvidia and sysfs, as far as they are there."""
    tree = Tree()
    bound = read_bound(tree)
    if bound:
        same(
            record,
            "sysfs has NVML's PCI addresses",
            [gpu.pci for gpu in sort_gpus(bound)],
            [gpu.pci for gpu in by_nvml],
        )
    else:
        record.leave_out(
            "sysfs has NVML's PCI addresses",
            "no device is bound to the driver in /sys/bus/pci/drivers/nvidia",
        )
    cards = list_cards(tree)
    if cards is None:
        record.leave_out("/proc/driver/nvidia tells what NVML tells", f"there is no /{GPUS}")
        return
    compare_cards(record, sort_gpus(read_driver(tree)), by_nvml)
    same(record, "both tell whether there are MIG instances", has_mig(tree), any(gpu.mig for gpu in by_nvml))
    for pci, fields in cards:
        record.row(
            "/proc/driver/nvidia", pci=pci, **{name.replace(" ", "_"): text for name, text in fields.items()}
        )


def compare_cards(record: Recorder, by_files: Sequence[Gpu], by_nvml: Sequence[Gpu]) -> None:
    """Compare addresses and UUIDs; the driver writes question marks for a UUID until a GPU is opened."""
    same(
        record,
        "/proc/driver/nvidia has NVML's PCI addresses",
        [gpu.pci for gpu in by_files],
        [gpu.pci for gpu in by_nvml],
    )
    if not all(gpu.uuid for gpu in by_files):
        record.leave_out("/proc/driver/nvidia has NVML's UUIDs", "the driver does not tell them yet")
        return
    same(
        record,
        "/proc/driver/nvidia has NVML's UUIDs",
        [gpu.uuid for gpu in by_files],
        [gpu.uuid for gpu in by_nvml],
    )


def compare_probes(record: Recorder, by_nvml: Sequence[Gpu]) -> None:
    """Compare the probe with NVML, and with the quick probe, which asks the files first."""
    machine = probe("/")
    same(
        record,
        "the probe has NVML's GPUs",
        [(gpu.uuid, gpu.pci) for gpu in machine.gpus],
        [(gpu.uuid, gpu.pci) for gpu in by_nvml],
    )
    quick = probe("/", quick=True)
    # The files do not tell the memory, and may spell the name otherwise.
    plain = [[replace(gpu, name="", memory_mib=0) for gpu in each.gpus] for each in (quick, machine)]
    same(record, "the quick probe has the same", plain[0], plain[1])
    persistence = dict(read_persistence())
    for gpu in machine.gpus:
        device = Path("/sys/bus/pci/devices", gpu.pci)
        node = device / "numa_node"
        record.row(
            "GPUs by the probe",
            uuid=gpu.uuid,
            pci=gpu.pci,
            name=gpu.name,
            memory_mib=gpu.memory_mib,
            mig=" ".join(gpu.mig) or "none",
            node=gpu.node,
            numa_node_in_sysfs=node.read_text().strip() if node.exists() else "no such file",
            local_cpus=len(gpu.local_cpus),
            path=" ".join(gpu.path),
            persistence=persistence.get(gpu.pci),
        )
    for warning in machine.warnings:
        record.row("Warnings of the probe", warning=warning)


def compare_torch(record: Recorder, by_nvml: Sequence[Gpu]) -> None:
    """Compare with torch, where all GPUs are visible and MIG is off."""
    if not torch.cuda.is_available():
        record.check("torch sees the GPUs", False, f"torch {torch.__version__} finds no CUDA")
        return
    by_uuid = {gpu.uuid: gpu for gpu in by_nvml}
    for device in map(describe_device, range(torch.cuda.device_count())):
        gpu = by_uuid.get(f"GPU-{device['uuid']}")
        if gpu is None:
            record.check("NVML has torch's GPU", any(gpu.mig for gpu in by_nvml), str(device))
            continue
        same(record, "torch and NVML have one PCI address for a UUID", device["pci"], gpu.pci)
        same(record, "torch and NVML have one name for a UUID", device["name"], gpu.name)
        share = device["memory_mib"] / max(1, gpu.memory_mib)
        said = f"{share:.3f} of {gpu.memory_mib} MiB"
        record.check("torch has nearly the memory that NVML has", 0.9 < share <= 1, said)


def same(record: Recorder, name: str, found: object, expected: object) -> None:
    """Record whether two things are equal, and both where they are not."""
    record.check(name, found == expected, f"{found} against {expected}")
