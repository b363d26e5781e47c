"""On a real GPU: what the plan says is what the program finds. Run by `make test-gpu`."""

import json
import os
from pathlib import Path

import pytest

from launcher.probe.machine import probe
from tests.seam import start, write_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe("/").gpus, reason="no NVIDIA GPU that NVML or /proc/driver/nvidia shows"),
]
SHOW = """
import json, os, torch
device = torch.cuda.get_device_properties(torch.cuda.current_device())
found = {"uuid": f"GPU-{device.uuid}", "pci": device.pci_bus_id, "count": torch.cuda.device_count()}
found |= {"cpus": sorted(os.sched_getaffinity(0)), "order": os.environ["CUDA_DEVICE_ORDER"]}
print(json.dumps(found), flush=True)
"""


def run_shown(folder: Path, *words: str, **variables: str) -> tuple[dict[str, object], dict[str, object]]:
    """Run SHOW on one rank; return what it found, and the rank's plan."""
    with start(folder, "nproc_per_node=1", *words, "--", write_program(folder, SHOW), **variables) as started:
        assert started.wait(120) == 0, started.read()
        run = started.run_dir()
    found = json.loads((run / "logs" / "0" / "rank-0.out").read_text().splitlines()[-1])
    (plan,) = run.glob("plan-*.json")
    return found, json.loads(plan.read_text())["ranks"][0]


def test_the_rank_has_the_gpu_and_cores_of_its_plan(tmp_path: Path) -> None:
    found, planned = run_shown(tmp_path)
    assert isinstance(planned["gpu"], dict)
    assert found["uuid"] == planned["gpu"]["uuid"]
    assert found["pci"] == int(planned["gpu"]["pci"].split(":")[1], 16)
    assert set(found["cpus"]) <= os.sched_getaffinity(0)  # type: ignore[call-overload]
    assert found["order"] == "PCI_BUS_ID"


@pytest.mark.parametrize("form", ["index", "uuid", "prefix"])
def test_visible_devices_reach_the_same_gpu_in_every_form(tmp_path: Path, form: str) -> None:
    gpu = probe("/").gpus[-1]
    visible = {"index": str(gpu.index), "uuid": gpu.uuid, "prefix": gpu.uuid[:12]}[form]
    found, planned = run_shown(tmp_path, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert isinstance(planned["gpu"], dict)
    assert found["uuid"] == planned["gpu"]["uuid"] == gpu.uuid


def test_own_devices_shows_one(tmp_path: Path) -> None:
    found, planned = run_shown(tmp_path, "devices=own")
    assert found["count"] == 1
    assert isinstance(planned["gpu"], dict)
    assert found["uuid"] == planned["gpu"]["uuid"]
