"""pynvml against a stub of the driver's library, in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.probe.sysfs import Tree

from .machine_trees import GPUS, put, write_small

READ = """
import dataclasses, json, sys
from launcher.probe.nvml import read_nvml
from launcher.probe.sysfs import Tree
tree = Tree()
gpus = read_nvml(tree)
found = None if gpus is None else [(g.index, g.pci, g.uuid, g.name, g.mig, g.node) for g in gpus]
print(json.dumps({"gpus": found, "warnings": tree.list_warnings()}))
"""
SIZES = """
import json
from launcher.probe.nvml import read_nvml
from launcher.probe.sysfs import Tree
print(json.dumps([gpu.memory_mib for gpu in read_nvml(Tree())]))
"""
PROBE = """
import json, sys
import launcher.probe.gpus
from launcher.probe.machine import probe
launcher.probe.gpus.NVIDIA_SIGNS = ("proc/self/status",)
if len(sys.argv) > 2:
    launcher.probe.gpus.GPUS = sys.argv[2]
    launcher.probe.gpus.DEVICE = sys.argv[3]
machine = probe("/", quick=sys.argv[1] == "quick")
gpus = [(g.index, g.pci, g.uuid, g.node, sorted(g.local_cpus)) for g in machine.gpus]
print(json.dumps({"gpus": gpus, "warnings": machine.warnings, "pynvml": "pynvml" in sys.modules}))
"""
GPU = "gpus/0000:07:00.0"
A100 = "gpu 0 0 0 00000000:0F:00.0 GPU-a - NVIDIA A100-SXM4-40GB"
H100 = "gpu 0 3 0 00000000:07:00.0 GPU-b - NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stub library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stub of NVML with")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    target = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return folder


def ask(library: Path, text: str, program: str = READ, *args: str) -> Any:
    """What a program prints that sees the stub's GPUs."""
    put(library, "gpus", text)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB": str(library / "gpus")}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "error", "-c", program, *args]
    return json.loads(subprocess.run(command, env=environ, check=True, capture_output=True).stdout)


def test_gpus_come_with_sysfs_addresses_in_their_order(library: Path) -> None:
    long = "gpu 0 0 0 00010000:00:04.0 GPU-c - X"
    assert ask(library, f"init 0\n{A100}\n{H100}\n{long}") == {
        "gpus": [
            [1, "0000:07:00.0", "GPU-b", "NVIDIA H100 80GB HBM3", [], None],
            [0, "0000:0f:00.0", "GPU-a", "NVIDIA A100-SXM4-40GB", [], None],
            [2, "10000:00:04.0", "GPU-c", "X", [], None],
        ],
        "warnings": [],
    }


def test_mig_instances_keep_the_drivers_order_and_skip_empty_slots(library: Path) -> None:
    gpu = "gpu 0 0 1 00000000:07:00.0 GPU-a MIG-2,-,MIG-1 NVIDIA A100"
    assert ask(library, f"init 0\n{gpu}")["gpus"][0][4] == ["MIG-2", "MIG-1"]


def test_instances_are_of_no_account_while_mig_is_off(library: Path) -> None:
    gpu = "gpu 0 0 0 00000000:07:00.0 GPU-a MIG-2,MIG-1 NVIDIA A100"
    assert ask(library, f"init 0\n{gpu}") == {
        "gpus": [[0, "0000:07:00.0", "GPU-a", "NVIDIA A100", [], None]],
        "warnings": [],
    }


def test_mig_that_fails_is_told(library: Path) -> None:
    out = ask(library, "init 0\ngpu 0 4 1 00000000:07:00.0 GPU-a MIG-1 NVIDIA A100")
    assert out["gpus"][0][4] == []
    assert "MIG instances of GPUs 0000:07:00.0" in out["warnings"][0]


@pytest.mark.parametrize(
    "bad", ["gpu 15 0 0 00000000:07:00.0 GPU-z - LOST", "gpu 0 0 0 nonsense GPU-z - ODD"]
)
def test_gpu_that_cannot_be_read_is_left_out_and_told(bad: str, library: Path) -> None:
    out = ask(library, f"init 0\n{bad}\n{A100}")
    assert [gpu[2] for gpu in out["gpus"]] == ["GPU-a"]
    assert "for its GPUs 0: left out" in out["warnings"][0]


@pytest.mark.parametrize("code", [9, 18, 999])
def test_library_that_fails_is_told(code: int, library: Path) -> None:
    out = ask(library, f"init {code}\n{A100}")
    assert out["gpus"] is None
    assert out["warnings"][0].startswith("NVML fails with ")
    assert "GPUs are taken from /proc/driver/nvidia" in out["warnings"][0]


def test_memory_is_nvmls_and_none_where_it_fails(library: Path) -> None:
    assert ask(library, f"init 0\n{A100}\n{H100}", SIZES) == [81559, 0]


def test_no_gpus_is_an_answer(library: Path) -> None:
    assert ask(library, "init 0") == {"gpus": [], "warnings": []}


def test_library_that_is_absent_is_no_warning(tmp_path: Path) -> None:
    if Tree().has("proc/driver/nvidia"):
        pytest.skip("this machine has the driver's library")
    assert ask(tmp_path, "init 0") == {"gpus": None, "warnings": []}


def test_real_root_takes_nvmls_gpus_in_pci_order_with_sysfs_locality(library: Path) -> None:
    tree = Tree()
    devices = [
        f"0000{name}" for name in reversed(tree.list_directory("sys/bus/pci/devices")) if len(name) == 12
    ]
    devices = devices[:2] or ["00000000:ff:01.0", "00000000:ff:00.0"]
    lines = [f"gpu 0 3 0 {device} GPU-{n} - X" for n, device in enumerate(devices)]
    out = ask(library, "\n".join(["init 0", *lines]), PROBE, "slow")
    online = tree.read_list("sys/devices/system/cpu/online") or frozenset()
    expected = []
    for index, (n, device) in enumerate(reversed(list(enumerate(devices)))):
        here = f"sys/bus/pci/devices/{device[4:]}"
        node = tree.read_number(f"{here}/numa_node")
        near = (tree.read_list(f"{here}/local_cpulist") or frozenset()) & online
        expected.append([index, device[4:], f"GPU-{n}", node, sorted(near)])
    assert out["gpus"] == expected
    assert out["pynvml"]


def test_driver_without_any_gpu_is_told(library: Path) -> None:
    if Tree().has(GPUS):
        pytest.skip("this machine has GPUs of its own")
    out = ask(library, "init 9", PROBE, "slow")
    assert out["gpus"] == []
    assert "a GPU driver is there (/proc/self/status) but no GPU was found" in out["warnings"][1]


def test_quick_does_without_pynvml_where_the_files_know_all(library: Path, tmp_path: Path) -> None:
    put(tmp_path, f"{GPU}/information", "GPU UUID: \t GPU-1\nDevice Minor: \t 0")
    put(tmp_path, "nvidia0", "")
    places = str(tmp_path)[1:] + "/gpus/", f"{tmp_path}/nvidia"
    quick = ask(library, f"init 0\n{A100}", PROBE, "quick", *places)
    assert [gpu[1:3] for gpu in quick["gpus"]] == [["0000:07:00.0", "GPU-1"]]
    assert not quick["pynvml"]
    slow = ask(library, f"init 0\n{A100}", PROBE, "slow", *places)
    assert [gpu[1:3] for gpu in slow["gpus"]] == [["0000:0f:00.0", "GPU-a"]]


def test_quick_asks_nvml_where_a_gpu_has_no_uuid_yet(library: Path, tmp_path: Path) -> None:
    put(tmp_path, f"{GPU}/information", "GPU UUID: \t GPU-????????-????\nDevice Minor: \t 0")
    put(tmp_path, "nvidia0", "")
    out = ask(library, f"init 0\n{A100}", PROBE, "quick", str(tmp_path)[1:] + "/gpus/", f"{tmp_path}/nvidia")
    assert [gpu[2] for gpu in out["gpus"]] == ["GPU-a"]
    assert out["pynvml"]
    assert not any("GPU UUID" in text for text in out["warnings"])


def test_files_in_place_of_nvml_leave_out_what_may_not_be_opened(library: Path, tmp_path: Path) -> None:
    put(tmp_path, f"{GPU}/information", "GPU UUID: \t GPU-1\nDevice Minor: \t 0")
    put(tmp_path, "gpus/0000:47:00.0/information", "GPU UUID: \t GPU-2\nDevice Minor: \t 1")
    put(tmp_path, "nvidia1", "")
    out = ask(library, "init 9", PROBE, "slow", str(tmp_path)[1:] + "/gpus/", f"{tmp_path}/nvidia")
    assert [gpu[2] for gpu in out["gpus"]] == ["GPU-2"]


def test_another_root_never_asks_nvml(library: Path, tmp_path: Path) -> None:
    root = write_small(tmp_path / "tree")
    out = ask(library, f"init 0\n{A100}", PROBE.replace('probe("/"', f"probe({str(root)!r}"), "slow")
    assert [gpu[1] for gpu in out["gpus"]] == ["0000:07:00.0", "0000:47:00.0"]
    assert not out["pynvml"]


PERSISTENCE = """
import json
from launcher.probe.node import read_node_facts
print(json.dumps([(gpu.pci, gpu.persistence) for gpu in read_node_facts().gpus]))
"""


def test_persistence_mode_is_read_where_a_gpu_tells_it(library: Path) -> None:
    silent, gone = "gpu 0 3 0 00000000:17:00.0 GPU-c - X", "gpu 15 3 0 00000000:27:00.0 GPU-d - H100"
    found = ask(library, f"init 0\n{A100}\n{H100}\n{silent}\n{gone}", PERSISTENCE)
    assert found == [["0000:0f:00.0", False], ["0000:07:00.0", True], ["0000:17:00.0", None], ["", None]]
