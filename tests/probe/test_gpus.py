"""NVIDIA's GPUs: pynvml against a stub of the driver's library, the driver's files, and a made-up NVML.

The made-up one has pynvml's names; with it faults are followed up to the finding, and samples taken.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from launcher.doctor.job import judge_nodes
from launcher.doctor.model import Facts, Wanted
from launcher.probe import devices, nvml
from launcher.probe.node import read_node_facts
from launcher.probe.sysfs import Tree
from launcher.watch.model import GpuSample
from launcher.watch.ranks import GpuReader, read_planned_gpus
from tests.doctor.healthy import NODE

from .machine_trees import GPUS, put, spoilt, write_small

READ = """
import json, os, pathlib, sys
from launcher.probe.nvml import read_nvml
from launcher.probe.sysfs import Tree
for text in json.loads(sys.argv[1]):
    pathlib.Path(os.environ["NVML_STUB"]).write_text(text)
    tree = Tree()
    gpus = read_nvml(tree)
    found = gpus and [(g.index, g.pci, g.uuid, g.name, g.mig, g.node, g.memory_mib) for g in gpus]
    found = None if gpus is None else found or []
    print(json.dumps({"gpus": found, "warnings": tree.list_warnings()}))
"""
PROBE = """
import json, os, pathlib, sys
import launcher.probe.devices
from launcher.probe.machine import probe
launcher.probe.devices.NVIDIA_SIGNS = ("proc/self/status",)
if len(sys.argv) > 3:
    launcher.probe.devices.GPUS = sys.argv[3]
    launcher.probe.devices.DEVICE = sys.argv[4]
for text in json.loads(sys.argv[1]):
    pathlib.Path(os.environ["NVML_STUB"]).write_text(text)
    machine = probe("/", quick=sys.argv[2] == "quick")
    gpus = [(g.index, g.pci, g.uuid, g.node) for g in machine.gpus]
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


def ask(library: Path, program: str, texts: list[str], *args: str) -> list[Any]:
    """What a program prints that sees the stub's GPUs, for each text of them."""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB": str(library / "gpus")}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "error", "-c", program, json.dumps(texts), *args]
    done = subprocess.run(command, env=environ, check=True, capture_output=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_gpus_come_in_pci_order_with_mig_instances_and_memory(library: Path) -> None:
    long, mig = (
        "gpu 0 0 0 00010000:00:04.0 GPU-c - X",
        "gpu 0 {} 00000000:07:00.0 GPU-a MIG-2,-,MIG-1 NVIDIA A100",
    )
    lost, odd = "gpu 15 0 0 00000000:07:00.0 GPU-z - LOST", "gpu 0 0 0 nonsense GPU-z - ODD"
    texts = [
        f"init 0\n{A100}\n{H100}\n{long}",
        *(f"init 0\n{mig.format(kind)}" for kind in ("0 1", "0 0", "4 1")),
    ]
    texts += [f"init 0\n{lost}\n{A100}", f"init 0\n{odd}\n{A100}", "init 0"]
    texts += [f"init {code}\n{A100}" for code in (9, 18, 999)]
    ordered, on, off, failing, *bad, none, first, second, third = ask(library, READ, texts)
    assert ordered["gpus"] == [
        [1, "0000:07:00.0", "GPU-b", "NVIDIA H100 80GB HBM3", [], None, 81559],
        [0, "0000:0f:00.0", "GPU-a", "NVIDIA A100-SXM4-40GB", [], None, 0],
        [2, "10000:00:04.0", "GPU-c", "X", [], None, 0],
    ], "memory is NVML's, and none where it fails"
    assert [found["gpus"][0][4] for found in (on, off, failing)] == [["MIG-2", "MIG-1"], [], []]
    assert none == {"gpus": [], "warnings": []} and on["warnings"] == off["warnings"] == []
    for found in bad:
        assert [gpu[2] for gpu in found["gpus"]] == ["GPU-a"]
        assert "for its GPUs 0: left out" in found["warnings"][0]
    for failed in (first, second, third):
        assert failed["gpus"] is None and failed["warnings"][0].startswith("NVML fails with ")
        assert "GPUs are taken from /proc/driver/nvidia" in failed["warnings"][0]


def test_library_that_is_absent_is_no_warning(tmp_path: Path) -> None:
    if Tree().has("proc/driver/nvidia"):
        pytest.skip("this machine has the driver's library")
    assert ask(tmp_path, READ, [""]) == [{"gpus": None, "warnings": []}]


def test_real_root_takes_nvmls_gpus_in_pci_order_with_sysfs_locality(library: Path) -> None:
    tree = Tree()
    if tree.has(GPUS):
        pytest.skip("this machine has GPUs of its own")
    devices = [
        f"0000{name}" for name in reversed(tree.list_directory("sys/bus/pci/devices")) if len(name) == 12
    ]
    devices = devices[:2] or ["00000000:ff:01.0", "00000000:ff:00.0"]
    lines = [f"gpu 0 3 0 {device} GPU-{n} - X" for n, device in enumerate(devices)]
    out, failed = ask(library, PROBE, ["\n".join(["init 0", *lines]), "init 9"], "slow")
    expected = []
    for index, (n, device) in enumerate(reversed(list(enumerate(devices)))):
        here = f"sys/bus/pci/devices/{device[4:]}"
        node = tree.read_number(f"{here}/numa_node")
        expected.append([index, device[4:], f"GPU-{n}", node])
    assert out["gpus"] == expected and out["pynvml"]
    assert failed["gpus"] == []
    assert "a GPU driver is there (/proc/self/status) but no GPU was found" in failed["warnings"][1]


def test_quick_does_without_pynvml_where_the_files_know_all(library: Path, tmp_path: Path) -> None:
    put(tmp_path, f"{GPU}/information", "GPU UUID: \t GPU-1\nDevice Minor: \t 0")
    put(tmp_path, "nvidia0", "")
    places = str(tmp_path)[1:] + "/gpus/", f"{tmp_path}/nvidia"
    text = [f"init 0\n{A100}"]
    (quick,) = ask(library, PROBE, text, "quick", *places)
    assert [gpu[1:3] for gpu in quick["gpus"]] == [["0000:07:00.0", "GPU-1"]]
    assert not quick["pynvml"]
    slow, failing = ask(library, PROBE, [*text, "init 9"], "slow", *places)
    assert [gpu[1:3] for gpu in slow["gpus"]] == [["0000:0f:00.0", "GPU-a"]]
    assert [gpu[2] for gpu in failing["gpus"]] == ["GPU-1"], "the files stand in for NVML"
    put(tmp_path, f"{GPU}/information", "GPU UUID: \t GPU-????????-????\nDevice Minor: \t 0")
    (again,) = ask(library, PROBE, text, "quick", *places)
    assert [gpu[2] for gpu in again["gpus"]] == ["GPU-a"] and again["pynvml"], "nothing has opened it yet"
    assert not any("GPU UUID" in text for text in again["warnings"])
    root = write_small(tmp_path / "tree")
    (other,) = ask(library, PROBE.replace('probe("/"', f"probe({str(root)!r}"), text, "slow")
    assert [gpu[1] for gpu in other["gpus"]] == ["0000:07:00.0", "0000:47:00.0"] and not other["pynvml"]


PERSISTENCE = """
import json, os, pathlib, sys
from launcher.probe.node import read_node_facts
pathlib.Path(os.environ["NVML_STUB"]).write_text(json.loads(sys.argv[1])[0])
print(json.dumps([(gpu.pci, gpu.persistence) for gpu in read_node_facts().gpus]))
"""


def test_persistence_mode_is_read_where_a_gpu_tells_it(library: Path) -> None:
    silent, gone = "gpu 0 3 0 00000000:17:00.0 GPU-c - X", "gpu 15 3 0 00000000:27:00.0 GPU-d - H100"
    (found,) = ask(library, PERSISTENCE, [f"init 0\n{A100}\n{H100}\n{silent}\n{gone}"])
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
        told = devices.read_driver(tree), devices.read_driver(tree, only_whole=True)
    assert [None if gpus is None else [gpu.uuid for gpu in gpus] for gpus in told] == [found, enough]


def test_a_device_that_may_not_be_opened_is_not_the_jobs(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """access(2) says so where a device cgroup forbids it, to root too; a written-out machine has all."""

    def answer(path: str, mode: int) -> bool:
        assert mode == os.R_OK | os.W_OK
        return path != f"{files}/nvidia2"

    monkeypatch.setattr(os, "access", answer)
    assert [gpu.uuid for gpu in devices.read_driver(Tree()) or ()] == ["GPU-1", "GPU-0"]
    monkeypatch.setattr("launcher.probe.devices.GPUS", "proc/driver/nvidia/gpus/")
    put(files, f"tree/{GPUS}/0000:07:00.0/information", "GPU UUID: \t GPU-1\nDevice Minor: \t 99")
    assert [gpu.uuid for gpu in devices.read_driver(Tree(files / "tree")) or ()] == ["GPU-1"]


GONE = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
UNKNOWN = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
MISMATCH = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
HEALTHY: dict[str, Any] = {
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=81559 << 20, used=500 << 20),
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetGraphicsRunningProcesses": [],
    "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))],
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4,
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetTemperature": 31,
    "nvmlDeviceGetPowerUsage": 71500,
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetMigMode": (0, 0),
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetP2PStatus": 0,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
    "nvmlDeviceGetEnforcedPowerLimit": 700000,
    "nvmlDeviceGetPcieReplayCounter": 2,
    "nvmlDeviceGetSupportedEventTypes": 8,
    "nvmlDeviceRegisterEvents": None,
    "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
    "nvmlGpmSampleGet": lambda _, sample: sample,
}
CONSTANTS = (
    *("NVMLError", "NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU", "nvmlMemory_v2"),
    *("NVML_GPM_METRICS_GET_VERSION", "NVML_SUCCESS"),
)
Changes = dict[int, Any]
"""Answers of a function by GPU: a value, an error to raise, or a function of the arguments."""


def recover(action: int) -> list[SimpleNamespace]:
    """The answer of nvmlDeviceGetFieldValues with a recovery action."""
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=action))]


def hold(pid: int, mib: int) -> list[SimpleNamespace]:
    """The answer of nvmlDeviceGetComputeRunningProcesses with one process."""
    return [SimpleNamespace(pid=pid, usedGpuMemory=mib << 20)]


def make_node_nvml(
    changes: Mapping[str, Changes] | None = None, xids: Sequence[tuple[int, int]] = ()
) -> ModuleType:
    """NVML with eight GPUs, whose handles are their numbers; `changes` are by function, then by GPU.

    `xids` come one by one, each of a GPU. A GPM sample is a number, and there are eight SMs.
    """
    changes = changes or {}
    module: Any = ModuleType("pynvml_made_up")
    for name in CONSTANTS:
        setattr(module, name, getattr(pynvml, name))

    def read_link(_: int, link: int) -> int:
        if link >= 18:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    answers = {
        **HEALTHY,
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
        "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{gpu + 1:02X}:00.0"),
        "nvmlDeviceGetHandleByIndex": lambda gpu: gpu,
        "nvmlDeviceGetNvLinkState": read_link,
    }
    for name, value in answers.items():
        setattr(module, name, make_function(value, changes.get(name, {})))
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: 8
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12080
    events, samples = iter(xids), itertools.count(1)

    def wait(*_: object) -> SimpleNamespace:
        for gpu, xid in events:
            return SimpleNamespace(device=gpu, eventType=8, eventData=xid)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    def measure(request: Any) -> Any:
        request.metrics[0].value = 100.0 * (request.sample2 - request.sample1) / 8
        assert (request.version, request.numMetrics, request.metrics[0].metricId) == (1, 1, 2)
        return request

    module.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.removeprefix("GPU-"))
    module.nvmlDeviceGetHandleByPciBusId = lambda pci: int(pci[5:7], 16) - 1
    module.nvmlEventSetCreate, module.nvmlEventSetWait = lambda: "events", wait
    module.nvmlGpmSampleAlloc, module.nvmlGpmSampleFree = lambda: next(samples), lambda _: None
    module.nvmlGpmMetricsGet = measure
    module.c_nvmlGpmMetricsGet_t = lambda: SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0)])
    module.nvmlSystemGetProcessName = lambda _: "/usr/bin/python3 train.py --secret"
    return module  # type: ignore[no-any-return]  # Any above


def make_function(usual: Any, changes: Changes) -> Callable[..., Any]:
    """A function of NVML: each GPU gives the usual answer, or its own."""

    def answer(gpu: int, *arguments: Any, **_: Any) -> Any:
        value = changes.get(gpu, usual)
        if isinstance(value, Exception):
            raise value
        return value(gpu, *arguments) if callable(value) else value

    return answer


REAL = Tree("/")


def read(module: ModuleType, wanted: Any = None) -> Facts:
    """A node with these GPUs and nothing else that could be wrong."""
    return replace(NODE, **nvml.read_gpu_facts(REAL, module, wanted))


def judge(module: ModuleType, needed: int = 8) -> list[tuple[str, str]]:
    """Levels and texts of what is found on a node with these GPUs and nothing else that could be wrong."""
    found = judge_nodes((read(module),), Wanted(needed))
    return [(one.level, one.what) for one in found]


def test_healthy_gpus_are_read_whole_and_have_no_finding() -> None:
    facts = read(make_node_nvml())
    assert (len(facts.gpus), facts.lost_gpus, facts.cuda_driver, facts.unchecked) == (8, (), "12.8", ())
    assert facts.gpus == NODE.gpus
    assert judge(make_node_nvml()) == []


FULL = SimpleNamespace(total=80 << 30, used=70 << 30)
HALF: Any = lambda _, link: 1 if link < 9 else 0  # noqa: E731
FAULTS: dict[str, tuple[str, Any, str, str]] = {
    "recovery": ("nvmlDeviceGetFieldValues", recover(4), "error", "waits for recovery: drain and reset"),
    "ECC": ("nvmlDeviceGetTotalEccErrors", 3, "warning", "GPU 4 (0000:05:00.0): 3 uncorrected ECC errors"),
    "remapping": ("nvmlDeviceGetRemappedRows", (0, 1, 1, 0), "error", "waits to be remapped"),
    "no rows left": ("nvmlDeviceGetRemappedRows", (0, 9, 0, 1), "error", "could not be remapped"),
    "heat": ("nvmlDeviceGetCurrentClocksEventReasons", 0x40, "error", ": hw_thermal_slowdown"),
    "fell off": ("nvmlDeviceGetHandleByIndex", GONE, "error", "GPU 4 does not answer: GPU is lost"),
    "lost on the way": ("nvmlDeviceGetTemperature", GONE, "error", ") does not answer: GPU is lost"),
    "memory": ("nvmlDeviceGetMemoryInfo", FULL, "error", "70 GiB of 80 GiB are in use"),
    "links": ("nvmlDeviceGetNvLinkState", HALF, "error", "GPU 4 (0000:05:00.0): 9 of 36 NVLinks"),
    "peers": ("nvmlDeviceGetP2PStatus", 1, "warning", "reach the memory of GPU 0, 1, 2, 3, 5, 6, 7"),
    "width": ("nvmlDeviceGetCurrPcieLinkWidth", 4, "warning", "has a PCI link of x4"),
    "kind": ("nvmlDeviceGetName", "NVIDIA H200", "warning", "GPUs of several kinds"),
}
"""Function of NVML, what it answers for GPU 4, and the level and a part of the finding."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_nvml_tells_becomes_a_finding(name: str) -> None:
    function, answer, level, part = FAULTS[name]
    found = judge(make_node_nvml({function: {4: answer}}))
    assert [entry[0] for entry in found if part in entry[1]] == [level], found
    rest = [text for _, text in found if part not in text]
    assert rest == (["7 GPUs, and the job needs 8"] if "does not answer" in part else []), found


def test_who_holds_memory_is_named_without_path_and_arguments() -> None:
    """Arguments can hold secrets."""
    made = make_node_nvml(
        {
            "nvmlDeviceGetComputeRunningProcesses": {0: hold(77, 9000)},
            "nvmlDeviceGetGraphicsRunningProcesses": {0: hold(77, 9000), 1: hold(5, 100)},
        }
    )
    gpus = read(made).gpus
    found = [[(one.pid, one.name, one.memory_mib) for one in gpu.processes or ()] for gpu in gpus[:2]]
    assert found == [[(77, "python3", 9000)], [(5, "python3", 100)]]


def test_the_jobs_gpus_alone_are_looked_at() -> None:
    made = make_node_nvml({"nvmlDeviceGetTotalEccErrors": {0: 5}, "nvmlDeviceGetHandleByIndex": {7: GONE}})
    state = read(made, "1,2")
    assert [gpu.index for gpu in state.gpus] == [1, 2, 7], "the last has no address: it may be the job's"
    assert state.gpus[0].peers == (2,)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        *(("0,1,2,3", [0, 1, 2, 3]), ("6", [6]), ("GPU-5,GPU-2", [2, 5]), ("1,9,2", [1])),
        *((nothing, []) for nothing in ("", "-1", "NoDevFiles", "GPU-", "9" * 5000)),
        ("MIG-1", list(range(8))),
    ],
)
def test_gpus_of_other_jobs_are_left_alone(visible: str, indices: list[int]) -> None:
    """Where a cluster does not confine devices, NVML lists the whole node's."""
    state = read(make_node_nvml({"nvmlDeviceGetTotalEccErrors": {7: 5}}), visible)
    assert [gpu.index for gpu in state.gpus] == indices


def test_what_a_gpu_does_not_tell_is_not_judged() -> None:
    """As on a laptop's GPU, or with an old driver: each call may fail by itself."""
    kept = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo")
    names = [name for name in vars(make_node_nvml()) if name.startswith("nvmlDeviceGet") and name not in kept]
    silent: Any = {name: dict.fromkeys(range(8), UNKNOWN) for name in names}
    assert judge(make_node_nvml(silent)) == []


def test_a_gpu_that_is_divided_is_not_judged_by_what_others_use() -> None:
    divided: dict[str, Changes] = {
        "nvmlDeviceGetMigMode": {2: (1, 1)},
        "nvmlDeviceGetComputeRunningProcesses": {2: hold(1, 9)},
    }
    made = make_node_nvml(divided)
    state = read(made)
    assert (state.gpus[2].used_mib, state.gpus[2].processes) == (None, None)
    text = "memory in use and processes of GPU 2 not checked: it is divided into MIG instances"
    assert judge(made) == [("unknown", text)]


def test_a_driver_that_fails_is_an_error_and_none_is_none() -> None:
    made: Any = make_node_nvml()

    def fail() -> None:
        raise MISMATCH

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    made.nvmlInit = fail
    assert judge(made) == [("error", f"NVML fails with {str(MISMATCH).rstrip('.')}")]
    made.nvmlInit = refuse
    assert judge(made) == [("error", "0 GPUs, and the job needs 8")]
    assert judge(made, 0) == []


def test_a_driver_that_hangs_costs_its_time_limit_and_no_more() -> None:
    """NVML waits for a GPU that does not answer; it is in a child, which is given up."""
    made: Any = make_node_nvml()
    made.nvmlInit = signal.pause
    facts = read_node_facts(host="n1", nvml=made, patience=0.2)
    assert ("gpus", "NVML: no answer in 0.2 s") in [(one.check, one.reason) for one in facts.unchecked]
    assert facts.gpus == ()
    assert facts.memory_kib > 0
    found = judge_nodes((facts,), Wanted(8))
    assert [one.what for one in found if one.level == "error"] == ["NVML: no answer in 0.2 s"]


SAMPLED = {0: (3, "GPU-2", "0000:03:00.0"), 1: (5, "", "0000:06:00.0")}


def test_a_gpu_is_sampled_as_nvml_tells_of_it() -> None:
    sampler = nvml.GpuSampler(SAMPLED, make_node_nvml(xids=[(5, 79), (2, 31), (5, 79)]))
    first = sampler.sample()
    assert first[0] == GpuSample(
        index=3, utilization=0.97, sm_activity=None, memory_used=500 << 20, memory_total=81559 << 20,
        power=71.5, power_limit=700.0, temperature=31.0, sm_clock=345, max_sm_clock=1980,
        event_reasons=("sw_power_cap",), pcie_width=16, max_pcie_width=16, pcie_replays=2, xids=(31,),
    )  # fmt: skip
    assert (first[1].index, first[1].xids) == (5, (79, 79))
    assert sampler.sample()[0].sm_activity == 0.25, "two of eight between samples 1 and 3"


def test_what_a_sampled_gpu_does_not_tell_is_none() -> None:
    """As on a MIG instance, or with an old driver: each call may fail by itself."""
    kept = ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId")
    made: Any = make_node_nvml()
    for name in [name for name in vars(made) if name.startswith(("nvmlDevice", "nvmlGpm", "nvmlEvent"))]:
        setattr(made, name, getattr(made, name) if name in kept else fail)
    made.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: 0x40
    assert nvml.GpuSampler(SAMPLED, made).sample()[0] == GpuSample(3, event_reasons=("hw_thermal_slowdown",))
    for name in kept:
        setattr(made, name, fail)
    assert nvml.GpuSampler(SAMPLED, made).sample() == {}
    made.nvmlInit = fail
    assert nvml.GpuSampler(SAMPLED, made).sample() == {}


def fail(*_: object) -> None:
    raise UNKNOWN


def test_names_and_numbers_are_pynvmls() -> None:
    made = vars(make_node_nvml())
    odd = [name for name in made if name.startswith(("nvml", "NVML", "c_nvml")) and not hasattr(pynvml, name)]
    assert not odd
    assert (pynvml.nvmlEventTypeXidCriticalError, pynvml.NVML_GPM_METRIC_SM_UTIL) == (nvml.XID, nvml.SM_UTIL)
    known = {
        "applications_clocks_setting": "ApplicationsClocksSetting", "sw_power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown", "sync_boost": "SyncBoost", "sw_thermal_slowdown": "SwThermalSlowdown",
        "hw_thermal_slowdown": "HwThermalSlowdown", "hw_power_brake": "HwPowerBrakeSlowdown",
        "display_clock_setting": "DisplayClockSetting",
    }  # fmt: skip
    assert {getattr(pynvml, f"nvmlClocksEventReason{known[name]}"): name for name in known} == nvml.REASONS
    assert pynvml.c_nvmlGpmMetricsGet_t().metrics[0].nvmlReturn == pynvml.NVML_SUCCESS
    numbers = {
        "FI_DEV_GET_GPU_RECOVERY_ACTION": nvml.RECOVERY_ACTION,
        "MEMORY_ERROR_TYPE_UNCORRECTED": nvml.UNCORRECTED,
        "VOLATILE_ECC": nvml.VOLATILE,
        "P2P_CAPS_INDEX_WRITE": nvml.WRITE,
        "P2P_STATUS_OK": 0,
    }
    assert {name: getattr(pynvml, f"NVML_{name}") for name in numbers} == numbers
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED) == nvml.DEAD
    for number, action in enumerate(nvml.RECOVERY_ACTIONS):
        assert getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{action.upper()}", number) == number


def test_the_reader_gives_what_is_fresh_and_waits_for_nothing(tmp_path: Path) -> None:
    rest: dict[str, object] = {"cpus": "0", "worker_cpus": "0", "num_workers": 0, "omp_num_threads": 1}
    rest["memory"] = {"policy": "preferred", "nodes": "0"}
    gpu = {"index": 3, "uuid": "GPU-2", "pci": "0000:03:00.0"}
    plan = {"ranks": [{"local_rank": 0, "gpu": gpu, **rest}, {"local_rank": 1, "gpu": None, **rest}]}
    (tmp_path / "plan-n1.json").write_text(json.dumps(plan))
    assert read_planned_gpus(tmp_path, "n1") == {0: SAMPLED[0]}
    assert read_planned_gpus(tmp_path, "n2") == {}
    stuck, calls = threading.Event(), iter([{0: GpuSample(3)}])
    reader = GpuReader(lambda: lambda: next(calls, None) or (stuck.wait(60) and {}) or {}, 0.05)
    end = time.monotonic() + 30
    while not reader.last:
        assert time.monotonic() < end
        time.sleep(0.01)
    while reader.latest():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert reader.thread.is_alive(), "the driver does not answer"
    stuck.set()
    reader.thread.join(30)
    assert not reader.thread.is_alive()
    nothing = GpuReader(lambda: None, 1.0)
    nothing.thread.join(30)
    assert nothing.latest() == {}
