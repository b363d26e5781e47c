"""On a machine with NVIDIA GPUs: NVML and the driver's files tell the same."""

from dataclasses import replace

import pytest

from launcher.probe.gpus import sort_gpus
from launcher.probe.machine import probe
from launcher.probe.nvidia_gpus import read_driver
from launcher.probe.sysfs import Tree

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _need_gpu() -> None:
    if not Tree().list_directory("proc/driver/nvidia/gpus"):
        pytest.skip("no NVIDIA GPU: /proc/driver/nvidia/gpus is empty or missing")


def test_nvml_and_proc_agree() -> None:
    by_nvml = probe("/").gpus
    assert by_nvml
    # The files do not tell the memory, and may spell the name otherwise.
    tree = Tree()
    by_files = sort_gpus(read_driver(tree))
    assert [(gpu.uuid, gpu.pci) for gpu in by_files] == [(gpu.uuid, gpu.pci) for gpu in by_nvml]
    quick = probe("/", quick=True).gpus
    assert [replace(gpu, name="", memory_mib=0) for gpu in quick] == [
        replace(gpu, name="", memory_mib=0) for gpu in by_nvml
    ]


def test_gpus_are_where_they_can_be_planned_for() -> None:
    machine = probe("/")
    online = {cpu.id for cpu in machine.cpus}
    for index, gpu in enumerate(machine.gpus):
        assert gpu.index == index
        assert gpu.uuid.startswith("GPU-")
        assert gpu.local_cpus <= online
        assert gpu.memory_mib > 0
        assert not gpu.path or gpu.path[0].startswith("pci")
        assert gpu.node is None or gpu.node in {node.id for node in machine.nodes}
