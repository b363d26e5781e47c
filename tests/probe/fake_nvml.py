"""A made-up NVML of a node's GPUs: pynvml's names, errors and shapes of answers, healthy unless changed."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]

from launcher.probe.nvml import SM_UTIL, XID

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
