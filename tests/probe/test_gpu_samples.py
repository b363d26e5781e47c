"""Samples of GPUs through a made-up NVML, with pynvml's structures and constants."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from launcher.probe.nvml import REASONS, SM_UTIL, XID, GpuSampler, import_nvml
from launcher.watch.model import GpuSample
from launcher.watch.ranks import GpuReader, read_planned_gpus

GPUS = {0: (3, "GPU-aa", "0000:0a:00.0"), 1: (5, "", "0000:0b:00.0")}
PLAIN = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=70 << 30, total=80 << 30),
    "nvmlDeviceGetPowerUsage": 655250,
    "nvmlDeviceGetEnforcedPowerLimit": 700000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4 | 0x80,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPcieReplayCounter": 2,
    "nvmlDeviceGetSupportedEventTypes": XID,
    "nvmlDeviceRegisterEvents": None,
    "nvmlEventSetCreate": "events",
    "nvmlInit": None,
    "nvmlGpmSampleFree": None,
    "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
}


def fail(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def answer(value: object) -> Callable[..., object]:
    return lambda *_: value


def make_nvml(xids: list[tuple[str, int]] | None = None, **changed: Callable[..., object]) -> ModuleType:
    """NVML with two GPUs, whose handles are their PCI addresses; each GPM sample is a number of its own."""
    module: Any = ModuleType("fake")
    for name in (
        "NVMLError",
        "NVML_CLOCK_SM",
        "NVML_TEMPERATURE_GPU",
        "NVML_GPM_METRICS_GET_VERSION",
        "NVML_SUCCESS",
    ):
        setattr(module, name, getattr(pynvml, name))
    for name, value in PLAIN.items():
        setattr(module, name, answer(value))

    def metrics_get(request: Any) -> Any:
        request.metrics[0].value = 100.0 * (request.sample2 - request.sample1) / 8
        assert (request.version, request.numMetrics, request.metrics[0].metricId) == (1, 1, SM_UTIL)
        return request

    def wait(*_: object) -> SimpleNamespace:
        if not xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        handle, xid = xids.pop(0)
        return SimpleNamespace(device=handle, eventType=XID, eventData=xid)

    numbers = iter(range(1, 99))
    handles = {"GPU-aa": "0000:0a:00.0"}
    module.nvmlDeviceGetHandleByUUID = lambda uuid: handles[uuid]
    module.nvmlDeviceGetHandleByPciBusId = lambda pci: pci
    module.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(busId=handle)
    module.nvmlEventSetWait = wait
    module.nvmlGpmSampleAlloc = lambda: next(numbers)
    module.nvmlGpmSampleGet = lambda _, sample: sample
    module.nvmlGpmMetricsGet = metrics_get
    module.c_nvmlGpmMetricsGet_t = lambda: SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0)])
    for name, call in changed.items():
        setattr(module, name, call)
    return module  # type: ignore[no-any-return]  # Any above


def test_a_gpu_as_nvml_tells_of_it() -> None:
    xids = [("0000:0b:00.0", 79), ("0000:0a:00.0", 31), ("0000:0b:00.0", 79)]
    sampler = GpuSampler(GPUS, make_nvml(xids))
    first = sampler.sample()
    assert first[0] == GpuSample(
        index=3, utilization=0.97, sm_activity=None, memory_used=70 << 30, memory_total=80 << 30,
        power=655.25,
        power_limit=700.0, temperature=61.0, sm_clock=1755,
        max_sm_clock=1980,
        event_reasons=("sw_power_cap", "hw_power_brake"), pcie_width=8, max_pcie_width=16, pcie_replays=2,
        xids=(31,),
    )  # fmt: skip
    assert (first[1].index, first[1].xids) == (5, (79, 79))
    assert sampler.sample()[0].sm_activity == 0.25, "two of eight between samples 1 and 3"


def test_what_a_gpu_does_not_tell_is_none() -> None:
    """As on a MIG instance, or with an old driver: each call may fail by itself."""
    calls: Any = dict.fromkeys([*PLAIN, "nvmlDeviceGetPciInfo", "nvmlGpmSampleGet", "nvmlEventSetWait"], fail)
    del calls["nvmlInit"]
    nvml = make_nvml(**calls, nvmlDeviceGetCurrentClocksThrottleReasons=answer(0x40))
    assert GpuSampler(GPUS, nvml).sample()[0] == GpuSample(3, event_reasons=("hw_thermal_slowdown",))


@pytest.mark.parametrize(
    "nvml",
    [
        make_nvml(nvmlInit=fail),
        make_nvml(nvmlDeviceGetHandleByPciBusId=fail, nvmlDeviceGetHandleByUUID=fail),
    ],
)
def test_without_nvml_or_gpus_there_is_nothing(nvml: ModuleType) -> None:
    assert GpuSampler(GPUS, nvml).sample() == {}


def test_names_and_numbers_are_pynvmls() -> None:
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
    made = vars(make_nvml())
    assert not [
        name for name in made if name.startswith(("nvml", "NVML", "c_nvml")) and not hasattr(pynvml, name)
    ]
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.metrics[0].metricId = SM_UTIL
    assert request.metrics[0].nvmlReturn == nvml.NVML_SUCCESS


def test_the_reader_gives_what_is_fresh_and_waits_for_nothing(tmp_path: Path) -> None:
    plan = {
        "ranks": [
            {"local_rank": 0, "gpu": {"index": 3, "uuid": "GPU-aa", "pci": "0000:0a:00.0"}},
            {"local_rank": 1, "gpu": None},
        ]
    }
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
