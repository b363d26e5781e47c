"""On a machine with NVIDIA GPUs: NVML and the driver's files tell the same."""

from dataclasses import replace

import pytest

from launcher.probe.machine import probe
from launcher.probe.sysfs import Tree

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _need_gpu() -> None:
    if not Tree().list_names("proc/driver/nvidia/gpus"):
        pytest.skip("no NVIDIA GPU: /proc/driver/nvidia/gpus is empty or missing")


def test_nvml_and_proc_agree() -> None:
    by_nvml, by_files = probe("/"), probe("/", use_nvml=False)
    assert by_nvml.gpus
    theirs = {gpu.pci: gpu for gpu in by_files.gpus}
    for gpu in by_nvml.gpus:
        found = theirs[gpu.pci]
        assert found.uuid == gpu.uuid
        assert replace(found, index=gpu.index, name=gpu.name, mig=gpu.mig) == gpu


def test_gpus_are_where_they_can_be_planned_for() -> None:
    machine = probe("/")
    online = {cpu.id for cpu in machine.cpus}
    for index, gpu in enumerate(machine.gpus):
        assert gpu.index == index
        assert gpu.uuid.startswith("GPU-")
        assert gpu.local_cpus <= online
        assert gpu.node is None or gpu.node in {node.id for node in machine.nodes}
