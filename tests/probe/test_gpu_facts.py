"""GPUs through a made-up NVML, whose names are pynvml's: faults up to the finding, and samples."""

import itertools
import json
import signal
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
from launcher.doctor.model import Facts, GpuProcess, Unchecked, Wanted
from launcher.probe import nvml as nvml_module
from launcher.probe.node import read_node_facts
from launcher.probe.nvml import (
    DEAD,
    REASONS,
    RECOVERY_ACTIONS,
    SM_UTIL,
    XID,
    GpuSampler,
    import_nvml,
    read_gpu_facts,
)
from launcher.probe.sysfs import Tree
from launcher.watch.model import GpuSample
from launcher.watch.ranks import GpuReader, read_planned_gpus
from tests.doctor.healthy import NODE

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
    "nvmlDeviceGetSupportedEventTypes": XID,
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
    changes: Mapping[str, Changes] | None = None,
    count: int = 8,
    links: int = 18,
    xids: Sequence[tuple[int, int]] = (),
) -> ModuleType:
    """NVML with `count` GPUs, whose handles are their numbers; `changes` are by function, then by GPU.

    `xids` come one by one, each of a GPU. A GPM sample is a number, and there are eight SMs.
    """
    changes = changes or {}
    module: Any = ModuleType("pynvml_made_up")
    for name in CONSTANTS:
        setattr(module, name, getattr(pynvml, name))

    def read_link(_: int, link: int) -> int:
        if link >= links:
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
    module.nvmlDeviceGetCount = lambda: count
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12080
    events, samples = iter(xids), itertools.count(1)

    def wait(*_: object) -> SimpleNamespace:
        for gpu, xid in events:
            return SimpleNamespace(device=gpu, eventType=XID, eventData=xid)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    def measure(request: Any) -> Any:
        request.metrics[0].value = 100.0 * (request.sample2 - request.sample1) / 8
        assert (request.version, request.numMetrics, request.metrics[0].metricId) == (1, 1, SM_UTIL)
        return request

    module.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.removeprefix("GPU-"))
    module.nvmlDeviceGetHandleByPciBusId = lambda pci: int(pci[5:7], 16) - 1
    module.nvmlEventSetCreate, module.nvmlEventSetWait = lambda: "events", wait
    module.nvmlGpmSampleAlloc, module.nvmlGpmSampleFree = lambda: next(samples), lambda _: None
    module.nvmlGpmMetricsGet = measure
    module.c_nvmlGpmMetricsGet_t = lambda: SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0)])
    module.nvmlSystemGetProcessName = lambda _: b"/usr/bin/python3 train.py --secret"
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


def read(nvml: ModuleType, wanted: Any = None) -> Facts:
    """A node with these GPUs and nothing else that could be wrong."""
    return replace(NODE, **read_gpu_facts(REAL, nvml, wanted))


def judge(nvml: ModuleType, needed: int = 8) -> list[tuple[str, str]]:
    """Levels and texts of what is found on a node with these GPUs and nothing else that could be wrong."""
    found = judge_nodes((read(nvml),), Wanted(needed))
    return [(one.level, one.what) for one in found]


def test_healthy_gpus_are_read_whole_and_have_no_finding() -> None:
    facts = read(make_node_nvml())
    assert (len(facts.gpus), facts.lost_gpus, facts.cuda_driver, facts.unchecked) == (8, (), "12.8", ())
    assert facts.gpus == NODE.gpus
    assert judge(make_node_nvml()) == []


FAULTS: dict[str, tuple[str, Changes, str, str]] = {
    "recovery": (
        "nvmlDeviceGetFieldValues",
        {4: recover(4)},
        "error",
        "GPU 4 (0000:05:00.0) waits for recovery: drain and reset",
    ),
    "ECC": (
        "nvmlDeviceGetTotalEccErrors",
        {4: 3},
        "warning",
        "GPU 4 (0000:05:00.0): 3 uncorrected ECC errors",
    ),
    "remapping": ("nvmlDeviceGetRemappedRows", {4: (0, 1, 1, 0)}, "error", "waits to be remapped"),
    "no rows left": ("nvmlDeviceGetRemappedRows", {4: (0, 9, 0, 1)}, "error", "could not be remapped"),
    "heat": (
        "nvmlDeviceGetCurrentClocksEventReasons",
        {4: 0x40},
        "error",
        "GPU 4 (0000:05:00.0): hw_thermal_slowdown",
    ),
    "fell off": ("nvmlDeviceGetHandleByIndex", {4: GONE}, "error", "GPU 4 does not answer: GPU is lost"),
    "lost on the way": (
        "nvmlDeviceGetTemperature",
        {4: GONE},
        "error",
        "GPU 4 (0000:05:00.0) does not answer: GPU is lost",
    ),
    "memory": (
        "nvmlDeviceGetMemoryInfo",
        {4: SimpleNamespace(total=80 << 30, used=70 << 30)},
        "error",
        "70 GiB of 80 GiB are in use",
    ),
    "links": (
        "nvmlDeviceGetNvLinkState",
        {4: lambda _, link: 1 if link < 9 else 0},
        "error",
        "GPU 4 (0000:05:00.0): 9 of 36 NVLinks",
    ),
    "peers": (
        "nvmlDeviceGetP2PStatus",
        {4: 1},
        "warning",
        "GPU 4 (0000:05:00.0) cannot reach the memory of GPU 0, 1, 2, 3, 5, 6, 7",
    ),
    "width": (
        "nvmlDeviceGetCurrPcieLinkWidth",
        {4: 4},
        "warning",
        "GPU 4 (0000:05:00.0) has a PCI link of x4",
    ),
    "kind": ("nvmlDeviceGetName", {4: b"NVIDIA H200"}, "warning", "GPUs of several kinds"),
}
"""Function of NVML, what it answers for a GPU, and the level and a part of the finding."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_nvml_tells_becomes_a_finding(name: str) -> None:
    function, changes, level, part = FAULTS[name]
    found = judge(make_node_nvml({function: changes}))
    assert [entry[0] for entry in found if part in entry[1]] == [level], found
    rest = [text for _, text in found if part not in text]
    assert rest == (["7 GPUs, and the job needs 8"] if "does not answer" in part else []), found


def test_who_holds_memory_is_named_without_path_and_arguments() -> None:
    """Arguments can hold secrets."""
    nvml = make_node_nvml(
        {
            "nvmlDeviceGetComputeRunningProcesses": {0: hold(77, 9000)},
            "nvmlDeviceGetGraphicsRunningProcesses": {0: hold(77, 9000), 1: hold(5, 100)},
        }
    )
    gpus = read(nvml).gpus
    assert gpus[0].processes == (GpuProcess(77, "python3", 9000),)
    assert gpus[1].processes == (GpuProcess(5, "python3", 100),)


def test_the_jobs_gpus_alone_are_looked_at() -> None:
    nvml = make_node_nvml({"nvmlDeviceGetTotalEccErrors": {0: 5}, "nvmlDeviceGetHandleByIndex": {7: GONE}})
    state = read(nvml, {"0000:02:00.0", "0000:03:00.0"})
    assert [gpu.index for gpu in state.gpus] == [1, 2, 7], "the last has no address: it may be the job's"
    assert state.gpus[0].peers == (2,)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        ("6", [6]),
        ("GPU-5,GPU-2", [2, 5]),
        ("1,9,2", [1]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("GPU-", []),
        ("9" * 5000, []),
        ("MIG-GPU-1/1/0", list(range(8))),
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
    nvml = make_node_nvml(
        {
            "nvmlDeviceGetMigMode": {2: (1, 1)},
            "nvmlDeviceGetComputeRunningProcesses": {2: hold(1, 9)},
        }
    )
    state = read(nvml)
    assert (state.gpus[2].used_mib, state.gpus[2].processes) == (None, None)
    assert judge(nvml) == [
        (
            "unknown",
            "memory in use and processes of GPU 2 not checked: it is divided into MIG instances",
        )
    ]


def test_a_driver_that_fails_is_an_error_and_none_is_none() -> None:
    nvml: Any = make_node_nvml()

    def fail() -> None:
        raise MISMATCH

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    nvml.nvmlInit = fail
    assert judge(nvml) == [("error", f"NVML fails with {str(MISMATCH).rstrip('.')}")]
    nvml.nvmlInit = refuse
    assert judge(nvml) == [("error", "0 GPUs, and the job needs 8")]
    assert judge(nvml, 0) == []


def test_a_driver_that_hangs_costs_its_time_limit_and_no_more() -> None:
    """NVML waits for a GPU that does not answer; it is in a child, which is given up."""
    nvml: Any = make_node_nvml()
    nvml.nvmlInit = signal.pause
    facts = read_node_facts(host="n1", nvml=nvml, patience=0.2)
    assert Unchecked("gpus", "NVML: no answer in 0.2 s") in facts.unchecked
    assert facts.gpus == ()
    assert facts.memory_kib > 0
    found = judge_nodes((facts,), Wanted(8))
    assert [one.what for one in found if one.level == "error"] == ["NVML: no answer in 0.2 s"]


GPUS = {0: (3, "GPU-2", "0000:03:00.0"), 1: (5, "", "0000:06:00.0")}


def test_a_gpu_is_sampled_as_nvml_tells_of_it() -> None:
    sampler = GpuSampler(GPUS, make_node_nvml(xids=[(5, 79), (2, 31), (5, 79)]))
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
    nvml: Any = make_node_nvml()
    for name in [name for name in vars(nvml) if name.startswith(("nvmlDevice", "nvmlGpm", "nvmlEvent"))]:
        setattr(nvml, name, getattr(nvml, name) if name in kept else fail)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: 0x40
    assert GpuSampler(GPUS, nvml).sample()[0] == GpuSample(3, event_reasons=("hw_thermal_slowdown",))
    for name in kept:
        setattr(nvml, name, fail)
    assert GpuSampler(GPUS, nvml).sample() == {}
    nvml.nvmlInit = fail
    assert GpuSampler(GPUS, nvml).sample() == {}


def fail(*_: object) -> None:
    raise UNKNOWN


def test_names_and_numbers_are_pynvmls() -> None:
    made = vars(make_node_nvml())
    odd = [name for name in made if name.startswith(("nvml", "NVML", "c_nvml")) and not hasattr(pynvml, name)]
    assert not odd
    nvml = import_nvml()
    assert nvml is not None and nvml is pynvml
    assert (nvml.nvmlEventTypeXidCriticalError, nvml.NVML_GPM_METRIC_SM_UTIL) == (XID, SM_UTIL)
    known = {
        "applications_clocks_setting": "ApplicationsClocksSetting", "sw_power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown", "sync_boost": "SyncBoost", "sw_thermal_slowdown": "SwThermalSlowdown",
        "hw_thermal_slowdown": "HwThermalSlowdown", "hw_power_brake": "HwPowerBrakeSlowdown",
        "display_clock_setting": "DisplayClockSetting",
    }  # fmt: skip
    assert {getattr(pynvml, f"nvmlClocksEventReason{known[name]}"): name for name in known} == REASONS
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.metrics[0].metricId = SM_UTIL
    assert request.metrics[0].nvmlReturn == nvml.NVML_SUCCESS
    assert pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == nvml_module.RECOVERY_ACTION
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED) == DEAD
    numbers = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    assert numbers == (nvml_module.UNCORRECTED, nvml_module.VOLATILE)
    assert (pynvml.NVML_P2P_CAPS_INDEX_WRITE, pynvml.NVML_P2P_STATUS_OK) == (nvml_module.WRITE, 0)
    for number, action in enumerate(RECOVERY_ACTIONS):
        assert getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{action.upper()}", number) == number


def test_the_reader_gives_what_is_fresh_and_waits_for_nothing(tmp_path: Path) -> None:
    rest: dict[str, object] = {"cpus": "0", "worker_cpus": "0", "num_workers": 0, "omp_num_threads": 1}
    rest["memory"] = {"policy": "preferred", "nodes": "0"}
    gpu = {"index": 3, "uuid": "GPU-2", "pci": "0000:03:00.0"}
    plan = {"ranks": [{"local_rank": 0, "gpu": gpu, **rest}, {"local_rank": 1, "gpu": None, **rest}]}
    (tmp_path / "plan-n1.json").write_text(json.dumps(plan))
    assert read_planned_gpus(tmp_path, "n1") == {0: GPUS[0]}
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
