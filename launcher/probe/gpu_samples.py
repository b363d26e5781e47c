"""What NVML says of the ranks' GPUs while they work: use, memory, power, clocks, link, errors.

NVML makes no CUDA context. SM activity comes from its GPM counters, from Hopper on; on older GPUs DCGM has it
(its exporter's DCGM_FI_PROF_SM_ACTIVE). Each value is asked for by itself: what a GPU, a driver or a MIG
instance does not tell is None.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from launcher.probe.nvidia_gpus import as_text
from launcher.probe.pci import normalise_pci
from launcher.watch.watch_model import GpuSample

REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clock_setting",
}
"""nvmlClocksEventReasons of nvml.h, without idle (0x1): an idle GPU's clocks say nothing."""
XID = 0x8
"""nvmlEventTypeXidCriticalError."""
SM_UTIL = 2
"""NVML_GPM_METRIC_SM_UTIL: percentage of SMs that were busy, as DCGM's SM_ACTIVE."""
MOST_EVENTS = 64
"""XIDs that are taken at once, and kept of a GPU."""
T = TypeVar("T")
GpuName = tuple[int, str, str]
"""Index, UUID (perhaps empty) and PCI address of a GPU, as the plan has them."""


class GpuSampler:
    """Samples GPUs by NVML; NVML stays open, since XIDs are told to those who listen alone."""

    def __init__(self, gpus: Mapping[int, GpuName], nvml: ModuleType | None) -> None:
        """`gpus` are the ranks', by local rank; `nvml` is pynvml, or None if there is none."""
        self.nvml: Any = nvml
        self.names = gpus
        self.handles: dict[int, Any] = {}
        """By local rank."""
        self.xids: dict[str, list[int]] = {}
        """By PCI address."""
        self.events: Any = None
        self.before: dict[int, Any] = {}
        """The last GPM sample, by local rank."""
        if nvml is not None:
            self.open()

    def open(self) -> None:
        """Open NVML and the GPUs; what fails is left out."""
        nvml = self.nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        for local_rank, name in self.names.items():
            handle = self.find_handle(name)
            if handle is not None:
                self.handles[local_rank] = handle
        self.events = self.ask(nvml.nvmlEventSetCreate)
        for handle in self.handles.values() if self.events is not None else ():
            if (self.ask(nvml.nvmlDeviceGetSupportedEventTypes, handle) or 0) & XID:
                self.ask(nvml.nvmlDeviceRegisterEvents, handle, XID, self.events)

    def find_handle(self, name: GpuName) -> Any:  # noqa: ANN401 - a pointer of ctypes
        """Return NVML's handle of a GPU, by UUID, else by its place: CUDA may number GPUs otherwise."""
        _, uuid, pci = name
        handle = self.ask(self.nvml.nvmlDeviceGetHandleByUUID, uuid) if uuid else None
        if handle is None and pci:
            handle = self.ask(self.nvml.nvmlDeviceGetHandleByPciBusId, pci)
        return handle

    def ask(self, call: Callable[..., T], *arguments: object) -> T | None:
        """Return NVML's answer; None if it has none."""
        try:
            return call(*arguments)
        except self.nvml.NVMLError:
            return None

    def sample(self) -> dict[int, GpuSample]:
        """Sample all GPUs, by local rank; those that NVML does not know are left out."""
        if not self.handles:
            return {}
        self.take_events()
        return {
            local_rank: self.sample_gpu(local_rank, handle) for local_rank, handle in self.handles.items()
        }

    def sample_gpu(self, local_rank: int, handle: object) -> GpuSample:
        """Sample one GPU."""
        nvml, ask = self.nvml, self.ask
        rates, memory = (
            ask(nvml.nvmlDeviceGetUtilizationRates, handle),
            ask(nvml.nvmlDeviceGetMemoryInfo, handle),
        )
        clocks = (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
        clock, max_clock = (ask(call, handle, nvml.NVML_CLOCK_SM) for call in clocks)
        powers = (nvml.nvmlDeviceGetPowerUsage, nvml.nvmlDeviceGetEnforcedPowerLimit)
        power, limit = (convert_unit(ask(call, handle), 1e-3) for call in powers)
        return GpuSample(
            index=self.names[local_rank][0],
            utilization=convert_unit(rates.gpu, 0.01) if rates else None,
            sm_activity=self.measure_sm_activity(local_rank, handle),
            memory_used=int(memory.used) if memory else None,
            memory_total=int(memory.total) if memory else None,
            power=power,
            power_limit=limit,
            temperature=convert_unit(
                ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU), 1.0
            ),
            sm_clock=clock,
            max_sm_clock=max_clock,
            event_reasons=self.list_reasons(handle),
            pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            max_pcie_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            pcie_replays=ask(nvml.nvmlDeviceGetPcieReplayCounter, handle),
            xids=tuple(self.xids.get(self.find_pci(handle), ())),
        )

    def list_reasons(self, handle: object) -> tuple[str, ...]:
        """Return why clocks are low; drivers before 535 know the function by its older name."""
        bits = self.ask(self.nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if bits is None:
            bits = self.ask(self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return tuple(name for bit, name in REASONS.items() if (bits or 0) & bit)

    def measure_sm_activity(self, local_rank: int, handle: object) -> float | None:
        """Return the share of SMs that were busy since the last call; None at first, or without GPM."""
        nvml = self.nvml
        support = self.ask(nvml.nvmlGpmQueryDeviceSupport, handle)
        if not support or not support.isSupportedDevice:
            return None
        sample = self.ask(nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return None
        if self.ask(nvml.nvmlGpmSampleGet, handle, sample) is None:
            self.ask(nvml.nvmlGpmSampleFree, sample)
            return None
        before, self.before[local_rank] = self.before.get(local_rank), sample
        if before is None:
            return None
        share = self.compare_gpm(before, sample)
        self.ask(nvml.nvmlGpmSampleFree, before)
        return share

    def compare_gpm(self, before: object, after: object) -> float | None:
        """Return SM_UTIL between two GPM samples."""
        nvml = self.nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = before, after
        request.metrics[0].metricId = SM_UTIL
        answer = self.ask(nvml.nvmlGpmMetricsGet, request)
        if answer is None or answer.metrics[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return convert_unit(answer.metrics[0].value, 0.01)

    def take_events(self) -> None:
        """Take the XIDs that have come; NVML ends with a timeout when there is none."""
        for _ in range(MOST_EVENTS if self.events is not None else 0):
            event = self.ask(self.nvml.nvmlEventSetWait, self.events, 0)
            if event is None:
                return
            if event.eventType & XID:
                known = self.xids.setdefault(self.find_pci(event.device), [])
                known.append(int(event.eventData))
                del known[:-MOST_EVENTS]

    def find_pci(self, handle: object) -> str:
        """Return a handle's PCI address; empty if NVML does not tell."""
        info = self.ask(self.nvml.nvmlDeviceGetPciInfo, handle)
        return (normalise_pci(as_text(info.busId)) or "") if info else ""


def convert_unit(value: float | None, unit: float) -> float | None:
    """Return a value in another unit, rounded to what NVML knows; None stays None."""
    return None if value is None else round(float(value) * unit, 6)


def import_nvml() -> ModuleType | None:
    """Return pynvml; None if it is not installed."""
    try:
        return import_module("pynvml")
    except ImportError:
        return None
