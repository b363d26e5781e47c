"""A made-up NVML of a node's GPUs: pynvml's names, errors and shapes of answers, healthy unless changed."""

from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]

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
}
CONSTANTS = ("NVMLError", "NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU", "nvmlMemory_v2")
Changes = dict[int, Any]
"""Answers of a function by GPU: a value, an error to raise, or a function of the arguments."""


def recover(action: int) -> list[SimpleNamespace]:
    """The answer of nvmlDeviceGetFieldValues with a recovery action."""
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=action))]


def hold(pid: int, mib: int) -> list[SimpleNamespace]:
    """The answer of nvmlDeviceGetComputeRunningProcesses with one process."""
    return [SimpleNamespace(pid=pid, usedGpuMemory=mib << 20)]


def make_node_nvml(
    changes: Mapping[str, Changes] | None = None, count: int = 8, links: int = 18
) -> ModuleType:
    """NVML with `count` GPUs, whose handles are their numbers; `changes` are by function, then by GPU."""
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
