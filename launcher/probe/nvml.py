"""NVIDIA's GPUs by NVML, through pynvml, for the probe, the checks of a node and the watcher.

NVML makes no CUDA context. Each value is asked for by itself: what a GPU, a driver or a MIG instance does not
tell is None. SM activity comes from its GPM counters, from Hopper on; on older GPUs DCGM has it (its
exporter's DCGM_FI_PROF_SM_ACTIVE).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from launcher.doctor.model import GpuFacts, GpuProcess, Unchecked
from launcher.plan.devices import resolve_visible
from launcher.plan.model import Gpu
from launcher.probe.devices import is_open, list_cards, read_amd, read_driver, sort_gpus
from launcher.probe.sysfs import Tree, normalise_pci

if TYPE_CHECKING:
    from launcher.watch.model import GpuSample

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
DEAD = (15, 16)
"""NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED."""
XID = 0x8
"""nvmlEventTypeXidCriticalError."""
SM_UTIL = 2
"""NVML_GPM_METRIC_SM_UTIL: percentage of SMs that were busy, as DCGM's SM_ACTIVE."""
MOST_EVENTS = 64
"""XIDs that are taken at once, and kept of a GPU."""
GpuName = tuple[int, str, str]
"""Index, UUID (perhaps empty) and PCI address of a GPU, as the plan has them."""


def import_nvml() -> ModuleType | None:
    """Return pynvml; None if it is not installed. It is loaded only if it is asked for: that takes 40 ms."""
    try:
        import pynvml  # type: ignore[import-untyped]  # it ships no types
    except ImportError:
        return None
    return pynvml  # type: ignore[no-any-return]


class Nvml:
    """NVML, or a GPU of it: functions, each of which may have no answer."""

    def __init__(self, module: Any, handle: Any = None) -> None:  # noqa: ANN401 - pynvml, which has no types
        self.module = module
        self.handle = handle
        self.problem = ""
        """What NVML says if a GPU does not answer at all."""

    def ask(self, name: str, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - ctypes structures
        """Return a function's answer; None if it has none."""
        try:
            return getattr(self.module, name)(*arguments, **named)
        except self.module.NVMLError as error:
            if error.value in DEAD:
                self.problem = str(error)
        except Exception:
            return None  # what an older pynvml lacks, and what pynvml raises for an older driver's library
        return None

    def tell(self, name: str, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - ctypes structures
        """Return the answer of a function that takes the GPU first; None if it has none."""
        return self.ask(name, self.handle, *arguments, **named)

    def read_pci(self) -> str:
        """Return its PCI address in sysfs form; empty if NVML does not tell."""
        info = self.tell("nvmlDeviceGetPciInfo")
        return (normalise_pci(info.busId) or "") if info else ""

    def read_text(self, what: str) -> str:
        """Return its `Name` or `UUID`; empty if NVML does not tell."""
        return str(self.tell(f"nvmlDeviceGet{what}") or "")

    def has_mig(self) -> bool:
        """Whether it is divided into MIG instances."""
        mode = self.tell("nvmlDeviceGetMigMode")
        return bool(mode and mode[0])

    def read_readings(self) -> dict[str, Any]:
        """Return what a check and a sample both have, by the names of their fields."""
        sm_clock = self.module.NVML_CLOCK_SM
        return {
            "sm_clock": self.tell("nvmlDeviceGetClockInfo", sm_clock),
            "max_sm_clock": self.tell("nvmlDeviceGetMaxClockInfo", sm_clock),
            "temperature": self.tell("nvmlDeviceGetTemperature", self.module.NVML_TEMPERATURE_GPU),
            "power": convert_unit(self.tell("nvmlDeviceGetPowerUsage"), 1e-3),
            "pcie_width": self.tell("nvmlDeviceGetCurrPcieLinkWidth"),
            "max_pcie_width": self.tell("nvmlDeviceGetMaxPcieLinkWidth"),
        }

    def read_clock_reasons(self) -> tuple[str, ...]:
        """Return why clocks are low; drivers before 535 know the function by its older name."""
        bits = self.tell("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self.tell("nvmlDeviceGetCurrentClocksThrottleReasons")
        return tuple(name for bit, name in REASONS.items() if (bits or 0) & bit)


def convert_unit(value: float | None, unit: float) -> float | None:
    """Return a value in another unit, rounded to what NVML knows; None stays None."""
    return None if value is None else round(float(value) * unit, 6)


@contextlib.contextmanager
def open_nvml(module: Any) -> Iterator[Nvml]:  # noqa: ANN401 - pynvml
    """Open NVML for a while; raises NVMLError."""
    module.nvmlInit()
    try:
        yield Nvml(module)
    finally:
        module.nvmlShutdown()


def read_nvml(tree: Tree) -> tuple[Gpu, ...] | None:
    """The GPUs that NVML lists, in PCI bus order and without their place; None if it cannot be asked.

    That it fails is noted in `tree`; that it is not installed is not. A GPU that does not answer, as after
    it has fallen off the bus, is left out. MIG instances are in NVML's order.
    """
    module: Any = import_nvml()
    if module is None:
        return None
    gpus = []
    try:
        with open_nvml(module):
            for index in range(module.nvmlDeviceGetCount()):
                handle = Nvml(module).ask("nvmlDeviceGetHandleByIndex", index)
                gpu = Nvml(module, handle)
                pci = gpu.read_pci() if handle is not None else ""
                if not pci:
                    text = (
                        "NVML does not answer for its GPUs {items}: left out, and CUDA may number others so"
                    )
                    tree.add_warning(text, index)
                    continue
                memory = gpu.tell("nvmlDeviceGetMemoryInfo")  # none of its own if it is the CPU's too (GB10)
                count = gpu.tell("nvmlDeviceGetMaxMigDeviceCount") if gpu.has_mig() else 0
                slots = [gpu.tell("nvmlDeviceGetMigDeviceHandleByIndex", slot) for slot in range(count or 0)]
                mig = [Nvml(module, handle).read_text("UUID") for handle in slots if handle is not None]
                uuid, name = gpu.read_text("UUID"), gpu.read_text("Name")
                size = int(memory.total) >> 20 if memory else 0
                gpus.append(Gpu(index, uuid, pci, None, name=name, mig=tuple(mig), memory_mib=size))
    except module.NVMLError_LibraryNotFound:
        return None
    except module.NVMLError as error:
        text = "NVML fails with {value}: GPUs are taken from /proc/driver/nvidia, without MIG instances"
        tree.add_warning(text, value=str(error))
        return None
    return sort_gpus(gpus)


class GpuSampler:
    """Samples the ranks' GPUs while they work; NVML stays open, since XIDs come to those who listen alone."""

    def __init__(self, names: Mapping[int, GpuName], module: Any) -> None:  # noqa: ANN401 - pynvml
        """Open NVML and the GPUs, which are given by local rank; what fails is left out."""
        self.nvml = Nvml(module)
        self.names = names
        self.gpus: dict[int, Nvml] = {}
        """By local rank."""
        self.xids: dict[str, list[int]] = {}
        """By PCI address."""
        self.before: dict[int, Any] = {}
        """The last GPM sample, by local rank."""
        self.events: Any = None
        try:
            module.nvmlInit()
        except module.NVMLError:
            return
        for local_rank, (_, uuid, pci) in names.items():
            # By UUID, else by its place: CUDA may number GPUs otherwise.
            handle = self.nvml.ask("nvmlDeviceGetHandleByUUID", uuid) if uuid else None
            if handle is None and pci:
                handle = self.nvml.ask("nvmlDeviceGetHandleByPciBusId", pci)
            if handle is not None:
                self.gpus[local_rank] = Nvml(module, handle)
        self.events = self.nvml.ask("nvmlEventSetCreate")
        for gpu in self.gpus.values() if self.events is not None else ():
            if (gpu.tell("nvmlDeviceGetSupportedEventTypes") or 0) & XID:
                gpu.tell("nvmlDeviceRegisterEvents", XID, self.events)

    def sample(self) -> dict[int, GpuSample]:
        """Sample all GPUs, by local rank; those that NVML does not know are left out."""
        self._take_events()
        return {local_rank: self._sample_gpu(local_rank, gpu) for local_rank, gpu in self.gpus.items()}

    def _sample_gpu(self, local_rank: int, gpu: Nvml) -> GpuSample:
        from launcher.watch.model import GpuSample  # the probe does without the watcher

        rates, memory = gpu.tell("nvmlDeviceGetUtilizationRates"), gpu.tell("nvmlDeviceGetMemoryInfo")
        return GpuSample(
            index=self.names[local_rank][0],
            utilization=convert_unit(rates.gpu, 0.01) if rates else None,
            sm_activity=self._measure_sm_activity(local_rank, gpu),
            memory_used=int(memory.used) if memory else None,
            memory_total=int(memory.total) if memory else None,
            power_limit=convert_unit(gpu.tell("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            event_reasons=gpu.read_clock_reasons(),
            pcie_replays=gpu.tell("nvmlDeviceGetPcieReplayCounter"),
            xids=tuple(self.xids.get(gpu.read_pci(), ())),
            **gpu.read_readings(),
        )

    def _measure_sm_activity(self, local_rank: int, gpu: Nvml) -> float | None:
        """Return the share of SMs that were busy since the last call; None at first, or without GPM."""
        support = gpu.tell("nvmlGpmQueryDeviceSupport")
        sample = self.nvml.ask("nvmlGpmSampleAlloc") if support and support.isSupportedDevice else None
        if sample is None:
            return None
        if gpu.tell("nvmlGpmSampleGet", sample) is None:
            self.nvml.ask("nvmlGpmSampleFree", sample)
            return None
        before, self.before[local_rank] = self.before.get(local_rank), sample
        if before is None:
            return None
        nvml = self.nvml.module
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = before, sample
        request.metrics[0].metricId = SM_UTIL
        answer = self.nvml.ask("nvmlGpmMetricsGet", request)
        self.nvml.ask("nvmlGpmSampleFree", before)
        if answer is None or answer.metrics[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return convert_unit(answer.metrics[0].value, 0.01)

    def _take_events(self) -> None:
        """Take the XIDs that have come; NVML ends with a timeout when there is none."""
        for _ in range(MOST_EVENTS if self.events is not None else 0):
            event = self.nvml.ask("nvmlEventSetWait", self.events, 0)
            if event is None:
                return
            if event.eventType & XID:
                known = self.xids.setdefault(Nvml(self.nvml.module, event.device).read_pci(), [])
                known.append(int(event.eventData))
                del known[:-MOST_EVENTS]


RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION of nvml.h."""
RECOVERY_ACTIONS = (
    *("none", "gpu_reset", "node_reboot", "drain_p2p"),
    *("drain_and_reset", "recover_imex_domain", "bus_reset", "system_reboot"),
)
"""nvmlDeviceGpuRecoveryAction_t, by number."""
UNCORRECTED, VOLATILE = 1, 0
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, and NVML_VOLATILE_ECC: since the driver was loaded."""
READ, WRITE = 0, 1
"""nvmlGpuP2PCapsIndex_t; pynvml has the first as a tuple."""
MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of the newest nvml.h; older GPUs refuse the numbers that they do not have."""
ABSENT = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED and NVML_ERROR_LIBRARY_NOT_FOUND."""
MOST_PROCESSES = 64


def read_gpu_facts(tree: Tree, nvml: Any, wanted: str | None = None) -> dict[str, Any]:  # noqa: ANN401 - pynvml
    """Read what `Facts` has of the GPUs, by the names of its fields.

    `wanted` is the job's CUDA_VISIBLE_DEVICES. Without NVML (`nvml` is None, it fails, or the tree is another
    machine's) their names and places alone.
    """
    reason, code = "NVML is not there" if tree.is_real else "not in these files", None
    if nvml is not None and tree.is_real:
        try:
            with open_nvml(nvml) as opened:
                return _ask_nvml(tree, opened, wanted)
        except nvml.NVMLError as error:
            reason, code = f"NVML fails with {str(error).rstrip('.')}", error.value
    shown = read_driver(tree) or read_amd(tree)
    named = [GpuFacts(index, gpu.uuid, gpu.name, gpu.pci, gpu.memory_mib) for index, gpu in enumerate(shown)]
    gpus = _choose_visible(named, wanted)
    is_amd = bool(shown) and shown[0].vendor == "amd"
    # Without GPUs there is nothing amiss about a driver that is not there.
    problem = "" if code is None or is_amd or (code in ABSENT and not gpus) else reason
    unchecked = Unchecked("gpu_state", "NVML does not know AMD's GPUs" if is_amd else reason)
    return {"gpus": gpus, "gpu_problem": problem, "unchecked": (unchecked,) if gpus else ()}


def _ask_nvml(tree: Tree, nvml: Nvml, wanted: str | None) -> dict[str, Any]:
    """Read what NVML says; raises NVMLError if it does not even count the GPUs."""
    module = nvml.module
    opened: dict[int, Nvml] = {}
    gpus: list[GpuFacts] = []
    unchecked: list[Unchecked] = []
    for index in range(module.nvmlDeviceGetCount()):
        try:
            gpu = Nvml(module, module.nvmlDeviceGetHandleByIndex(index))
        except module.NVMLError as error:
            gpus.append(GpuFacts(index, "", "", problem=str(error)))
            continue
        opened[index], facts = gpu, _read_state(gpu, index)
        if gpu.has_mig():  # its memory and processes are not one job's
            facts = replace(facts, used_mib=None, processes=None)
            unchecked.append(Unchecked("gpu_memory", "it is divided into MIG instances", str(index)))
        gpus.append(facts)
    chosen = _choose_visible(gpus, wanted)
    listed = {gpu.pci for gpu in gpus}
    cards = list_cards(tree) or ()
    version = nvml.ask("nvmlSystemGetCudaDriverVersion_v2") or nvml.ask("nvmlSystemGetCudaDriverVersion")
    return {
        "gpus": tuple(replace(gpu, peers=_list_peers(opened, gpu.index, chosen)) for gpu in chosen),
        "lost_gpus": tuple(pci for pci, card in cards if is_open(tree, card) and pci not in listed),
        # What libcuda offers, a compatibility package's if that is found first.
        "cuda_driver": f"{version // 1000}.{version % 1000 // 10}" if version else "",
        "unchecked": tuple(unchecked),
    }


def _read_state(gpu: Nvml, index: int) -> GpuFacts:
    """Read one GPU but for its peers."""
    # Version 2 does not count the driver's own part as used.
    version = getattr(gpu.module, "nvmlMemory_v2", None)
    memory = gpu.tell("nvmlDeviceGetMemoryInfo", version=version) if version else None
    memory = memory or gpu.tell("nvmlDeviceGetMemoryInfo")
    rows = gpu.tell("nvmlDeviceGetRemappedRows")
    links = [gpu.tell("nvmlDeviceGetNvLinkState", link) for link in range(MOST_LINKS)]
    links = [state for state in links if state is not None]
    persistence = gpu.tell("nvmlDeviceGetPersistenceMode")
    # What the driver wants done with the GPU; before driver 570 it does not tell.
    fields = gpu.tell("nvmlDeviceGetFieldValues", [RECOVERY_ACTION])
    action = int(fields[0].value.uiVal) if fields and fields[0].nvmlReturn == 0 else None
    actions = dict(enumerate(RECOVERY_ACTIONS))
    facts = GpuFacts(
        index=index,
        uuid=gpu.read_text("UUID"),
        name=gpu.read_text("Name"),
        pci=gpu.read_pci(),
        memory_mib=int(memory.total) >> 20 if memory else 0,
        used_mib=int(memory.used) >> 20 if memory else None,
        processes=_read_processes(gpu),
        recovery_action=None if action is None else actions.get(action, f"action {action}"),
        ecc_uncorrected=gpu.tell("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        remapped_uncorrectable=rows[1] if rows else None,
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
        clock_reasons=gpu.read_clock_reasons(),
        nvlinks=sum(state == 1 for state in links) if links else None,
        max_nvlinks=len(links) or None,
        persistence=None if persistence is None else bool(persistence),
        **gpu.read_readings(),
    )
    return replace(facts, problem=gpu.problem)


def _read_processes(gpu: Nvml) -> tuple[GpuProcess, ...] | None:
    """Return the processes with compute and graphics contexts, each once; None if NVML does not tell.

    Their names are without path and arguments, which can hold secrets.
    """
    compute = gpu.tell("nvmlDeviceGetComputeRunningProcesses")
    if compute is None:
        return None
    graphics = gpu.tell("nvmlDeviceGetGraphicsRunningProcesses") or ()
    found = {one.pid: one for one in (*graphics[:MOST_PROCESSES], *compute[:MOST_PROCESSES])}
    processes = []
    for pid in sorted(found):
        words = (gpu.ask("nvmlSystemGetProcessName", pid) or "").split()
        used = found[pid].usedGpuMemory
        name = words[0].rpartition("/")[2][:64] if words else ""
        processes.append(GpuProcess(int(pid), name, None if used is None else int(used) >> 20))
    return tuple(processes)


def _list_peers(opened: dict[int, Nvml], index: int, gpus: Sequence[GpuFacts]) -> tuple[int, ...] | None:
    """Return the other GPUs whose memory a GPU reads and writes directly; None if it is not told."""
    peers = {}
    for other in (gpu.index for gpu in gpus if gpu.index != index and {gpu.index, index} <= opened.keys()):
        handle = opened[other].handle
        peers[other] = [opened[index].tell("nvmlDeviceGetP2PStatus", handle, what) for what in (READ, WRITE)]
    is_told = index in opened and all(None not in states for states in peers.values())
    return tuple(other for other, states in peers.items() if states == [0, 0]) if is_told else None


def _choose_visible(gpus: Sequence[GpuFacts], wanted: str | None) -> tuple[GpuFacts, ...]:
    """Return the job's GPUs by CUDA_VISIBLE_DEVICES: all if it is None or names MIG instances.

    Those whose address NVML does not tell stay, since they may be among them.
    """
    if wanted is None or wanted.startswith("MIG"):
        return tuple(gpus)
    known = tuple(Gpu(gpu.index, gpu.uuid, gpu.pci) for gpu in gpus)
    shown = {gpu.pci for gpu in resolve_visible(known, {"CUDA_VISIBLE_DEVICES": wanted}).devices}
    return tuple(gpu for gpu in gpus if not gpu.pci or gpu.pci in shown)
