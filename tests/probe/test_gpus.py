"""NVIDIA's GPUs: pynvml against a stub of the driver's library, in processes of their own; the files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.probe.devices import read_driver
from launcher.probe.sysfs import Tree

from .machine_trees import GPUS, put, spoilt, write_small

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
import launcher.probe.devices
from launcher.probe.machine import probe
launcher.probe.devices.NVIDIA_SIGNS = ("proc/self/status",)
if len(sys.argv) > 2:
    launcher.probe.devices.GPUS = sys.argv[2]
    launcher.probe.devices.DEVICE = sys.argv[3]
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
    gpu = "gpu 0 {} 00000000:07:00.0 GPU-a MIG-2,-,MIG-1 NVIDIA A100"
    on, off, failing = (ask(library, f"init 0\n{gpu.format(kind)}") for kind in ("0 1", "0 0", "4 1"))
    assert [found["gpus"][0][4] for found in (on, off, failing)] == [["MIG-2", "MIG-1"], [], []]
    assert on["warnings"] == off["warnings"] == []
    assert "MIG instances of GPUs 0000:07:00.0" in failing["warnings"][0]


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
    put(tmp_path, f"{GPU}/information", "GPU UUID: \t GPU-????????-????\nDevice Minor: \t 0")
    again = ask(library, f"init 0\n{A100}", PROBE, "quick", *places)
    assert [gpu[2] for gpu in again["gpus"]] == ["GPU-a"] and again["pynvml"], "nothing has opened it yet"
    assert not any("GPU UUID" in text for text in again["warnings"])


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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs in files that stand for the real root's, with their devices."""
    for minor, bus in enumerate(("0f", "07", "47")):
        text = f"Model: \t\t X\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}"
        put(tmp_path, f"gpus/0000:{bus}:00.0/information", text)
        put(tmp_path, f"nvidia{minor}", "")
    monkeypatch.setattr("launcher.probe.devices.GPUS", f"{tmp_path}/gpus/"[1:])
    monkeypatch.setattr("launcher.probe.devices.CAPABILITIES", f"{tmp_path}/capabilities"[1:])
    monkeypatch.setattr("launcher.probe.devices.DEVICE", f"{tmp_path}/nvidia")
    monkeypatch.setattr("launcher.probe.devices.BOUND", "proc/nothing/")
    return tmp_path


ALL = ["GPU-1", "GPU-0", "GPU-2"]
DRIVER: dict[str, tuple[dict[str, str | None], list[str] | None, list[str] | None]] = {
    "all can be opened": ({}, ALL, ALL),
    "one has no device": ({"nvidia0": None}, ["GPU-1", "GPU-2"], ["GPU-1", "GPU-2"]),
    "the job has none": ({f"nvidia{minor}": None for minor in range(3)}, [], []),
    "its device is unknown": ({f"{GPU}/information": "GPU UUID: GPU-1", "nvidia1": None}, ALL, ALL),
    "no UUID": ({f"{GPU}/information": "GPU UUID: GPU-???\nDevice Minor: 1"}, ["", "GPU-0", "GPU-2"], None),
    "MIG's files alone": ({"capabilities/gpu0/mig": "", "capabilities/mig/config": "1"}, ALL, ALL),
    "an instance": ({"capabilities/gpu1/mig/gi3/access": "DeviceFileMinor: 30"}, ALL, None),
    "excluded": (
        {f"{GPU}/information": "GPU UUID: GPU-???\nGPU Excluded: Yes"},
        ["GPU-0", "GPU-2"],
        ["GPU-0", "GPU-2"],
    ),
    "no files": ({"gpus": None}, None, None),
}
"""Files that differ, the UUIDs by the driver's files, and by them if they suffice."""


@pytest.mark.parametrize("name", DRIVER)
def test_the_drivers_files_show_what_the_job_may_open(name: str, files: Path) -> None:
    edits, found, enough = DRIVER[name]
    tree = Tree()
    with spoilt(files, edits):
        told = read_driver(tree), read_driver(tree, only_whole=True)
    assert [None if gpus is None else [gpu.uuid for gpu in gpus] for gpus in told] == [found, enough]


def test_a_device_that_may_not_be_opened_is_not_the_jobs(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """access(2) says so where a device cgroup forbids it, to root too; a written-out machine has all."""

    def answer(path: str, mode: int) -> bool:
        assert mode == os.R_OK | os.W_OK
        return path != f"{files}/nvidia2"

    monkeypatch.setattr(os, "access", answer)
    assert [gpu.uuid for gpu in read_driver(Tree()) or ()] == ["GPU-1", "GPU-0"]
    monkeypatch.setattr("launcher.probe.devices.GPUS", "proc/driver/nvidia/gpus/")
    put(files, f"tree/{GPUS}/0000:07:00.0/information", "GPU UUID: \t GPU-1\nDevice Minor: \t 99")
    assert [gpu.uuid for gpu in read_driver(Tree(files / "tree")) or ()] == ["GPU-1"]
