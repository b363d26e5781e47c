"""The state of the job's GPUs by NVML, which makes no CUDA context.

Each value is asked for by itself: what a GPU, a driver or a MIG instance does not tell is None. NVML may hang
with a sick GPU, so this runs in a child process.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

from launcher.doctor.model import GpuFacts, GpuProcess, Unchecked
from launcher.probe.gpu_samples import REASONS, convert_unit
from launcher.probe.gpus import read_amd, sort_gpus
from launcher.probe.nvidia_gpus import as_text, is_open, list_cards, read_driver
from launcher.probe.pci import format_pci, parse_pci
from launcher.probe.sysfs import Tree

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
DEAD = (15, 16)
"""NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED."""
ABSENT = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED and NVML_ERROR_LIBRARY_NOT_FOUND."""
MOST_PROCESSES = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuState:
    """All of a node's GPUs, and what goes with them."""

    gpus: tuple[GpuFacts, ...] = ()
    lost: tuple[str, ...] = ()
    """PCI addresses of GPUs that the driver has and this process may open, but NVML does not list."""
    cuda_driver: str = ""
    problem: str = ""
    """Why NVML tells nothing though the driver is there."""
    unchecked: tuple[Unchecked, ...] = ()
    vendor: str = ""
    """`nvidia` or `amd` for GPUs by the drivers' files."""


class GpuInquiry:
    """Asks NVML about one GPU, and notes if it does not answer at all."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self.nvml: Any = nvml
        self.handle = handle
        self.problem = ""

    def ask(self, name: str, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - ctypes structures
        """Return the answer of a function of NVML about this GPU; None if it has none."""
        try:
            return getattr(self.nvml, name)(self.handle, *arguments, **named)
        except self.nvml.NVMLError as error:
            if getattr(error, "value", None) in DEAD:
                self.problem = str(error)
        except (AttributeError, TypeError, ValueError, LookupError):  # An older pynvml, or an odd driver.
            return None
        return None

    def read_memory(self) -> tuple[int, int | None]:
        """Return total and used memory in MiB; the driver's own part is not counted as used if it is told."""
        version = getattr(self.nvml, "nvmlMemory_v2", None)
        found = self.ask("nvmlDeviceGetMemoryInfo", version=version) if version else None
        found = found or self.ask("nvmlDeviceGetMemoryInfo")
        return (int(found.total) >> 20, int(found.used) >> 20) if found else (0, None)

    def read_processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes with compute and graphics contexts, each once; None if NVML does not tell."""
        kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        lists = [self.ask(kind) for kind in kinds]
        if lists[0] is None:
            return None
        found = {one.pid: one for some in reversed(lists) for one in (some or ())[:MOST_PROCESSES]}
        return tuple(self.describe_process(found[pid]) for pid in sorted(found))

    def describe_process(self, process: Any) -> GpuProcess:  # noqa: ANN401 - a structure of ctypes
        """Return a process with its name, without path and arguments."""
        try:
            name = as_text(self.nvml.nvmlSystemGetProcessName(process.pid))
        except (self.nvml.NVMLError, AttributeError, ValueError):
            name = ""
        words = name.split()
        used = process.usedGpuMemory
        return GpuProcess(
            pid=int(process.pid),
            name=words[0].rpartition("/")[2][:64] if words else "",
            memory_mib=None if used is None else int(used) >> 20,
        )

    def read_recovery_action(self) -> str | None:
        """Return what the driver wants done with the GPU; None before driver 570."""
        values = self.ask("nvmlDeviceGetFieldValues", [RECOVERY_ACTION])
        if not values or values[0].nvmlReturn != 0:
            return None
        number = int(values[0].value.uiVal)
        return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else f"action {number}"

    def read_clock_reasons(self) -> tuple[str, ...]:
        """Return why clocks are low; drivers before 535 know the function by its older name."""
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return tuple(name for bit, name in REASONS.items() if (bits or 0) & bit)

    def count_nvlinks(self) -> tuple[int | None, int | None]:
        """Return how many NVLinks are active, and how many there are; None for a GPU without."""
        states = [self.ask("nvmlDeviceGetNvLinkState", link) for link in range(MOST_LINKS)]
        known = [state for state in states if state is not None]
        return (sum(state == 1 for state in known), len(known)) if known else (None, None)

    def has_mig(self) -> bool:
        """Whether the GPU is divided: its memory and processes are then not one job's."""
        mode = self.ask("nvmlDeviceGetMigMode")
        return bool(mode and mode[0])


def read_gpu_state(
    tree: Tree, nvml: ModuleType | None, wanted: Collection[str] | str | None = None
) -> GpuState:
    """Read the GPUs with the `wanted` PCI addresses, or all; without NVML their names and places alone.

    `wanted` may also be a value of CUDA_VISIBLE_DEVICES.
    """
    if nvml is None or not tree.is_real:
        return describe_files(tree, wanted, "NVML is not there" if tree.is_real else "not in these files")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return describe_nvml_failure(tree, wanted, error)
    try:
        return ask_nvml(tree, nvml, wanted)
    except nvml.NVMLError as error:
        return describe_nvml_failure(tree, wanted, error)
    finally:
        nvml.nvmlShutdown()


def describe_nvml_failure(tree: Tree, wanted: Collection[str] | str | None, error: Exception) -> GpuState:
    """Describe the GPUs without NVML, which has failed: without GPUs there is nothing amiss about that."""
    reason = f"NVML fails with {str(error).rstrip('.')}"
    found = describe_files(tree, wanted, reason)
    absent = getattr(error, "value", None) in ABSENT and not found.gpus
    return found if absent or found.vendor == "amd" else replace(found, problem=reason)


def describe_files(tree: Tree, wanted: Collection[str] | str | None, reason: str) -> GpuState:
    """Describe the GPUs of the drivers' files, whose state is not checked for the reason given."""
    shown = sort_gpus(read_driver(tree)) or read_amd(tree)
    gpus = tuple(
        GpuFacts(index, gpu.uuid, gpu.name, gpu.pci, gpu.memory_mib) for index, gpu in enumerate(shown)
    )
    gpus = choose_visible_gpus(gpus, wanted)
    if gpus and shown[0].vendor == "amd":
        reason = "NVML does not know AMD's GPUs"
    unchecked = (Unchecked("gpu_state", reason),) if gpus else ()
    return GpuState(gpus, unchecked=unchecked, vendor=shown[0].vendor if shown else "")


def ask_nvml(tree: Tree, nvml: Any, wanted: Collection[str] | str | None) -> GpuState:  # noqa: ANN401 - a module
    """Read what NVML says; raises NVMLError if it does not even count the GPUs."""
    handles: dict[int, Any] = {}
    gpus: list[GpuFacts] = []
    divided: list[Unchecked] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu, inquiry = read_gpu_facts(nvml, index)
        if inquiry and inquiry.has_mig():
            gpu = replace(gpu, used_mib=None, processes=None)
            divided.append(Unchecked("gpu_memory", "it is divided into MIG instances", str(index)))
        if inquiry:
            handles[index] = inquiry.handle
        gpus.append(gpu)
    chosen = choose_visible_gpus(tuple(gpus), wanted)
    chosen = tuple(replace(gpu, peers=list_peers(nvml, handles, gpu.index, chosen)) for gpu in chosen)
    opened = [pci for pci, fields in list_cards(Tree(tree.prefix or "/")) or () if is_open(tree, fields)]
    lost = tuple(pci for pci in opened if pci not in {gpu.pci for gpu in gpus})
    return GpuState(chosen, lost, read_cuda_driver(nvml), unchecked=tuple(divided))


def choose_visible_gpus(
    gpus: tuple[GpuFacts, ...], wanted: Collection[str] | str | None
) -> tuple[GpuFacts, ...]:
    """Return the job's GPUs; those whose address NVML does not tell stay, since they may be among them."""
    wanted = list_visible(gpus, wanted) if isinstance(wanted, str) else wanted
    return tuple(gpu for gpu in gpus if wanted is None or not gpu.pci or gpu.pci in wanted)


def list_visible(gpus: Sequence[GpuFacts], visible: str) -> frozenset[str]:
    """Return the PCI addresses of the GPUs that CUDA_VISIBLE_DEVICES names; all if it names MIG instances.

    As CUDA has it, what follows an entry that names no GPU does not count (CUDA Programming Guide).
    """
    found: set[str] = set()
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith("MIG"):
            return frozenset(gpu.pci for gpu in gpus)
        named = [
            gpu
            for gpu in gpus
            if (name.isascii() and name.isdecimal() and int(name[:9]) == gpu.index)
            or (len(name) > len("GPU-") and gpu.uuid.startswith(name))
        ]
        if len(named) != 1:
            break
        found.add(named[0].pci)
    return frozenset(found)


def read_gpu_facts(nvml: Any, index: int) -> tuple[GpuFacts, GpuInquiry | None]:  # noqa: ANN401 - a module
    """Read one GPU but for its peers; without an inquiry if NVML cannot open it."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return GpuFacts(index, "", "", problem=str(error)), None
    inquiry = GpuInquiry(nvml, handle)
    ask = inquiry.ask
    total, used = inquiry.read_memory()
    rows = ask("nvmlDeviceGetRemappedRows")
    active, links = inquiry.count_nvlinks()
    facts = GpuFacts(
        index=index,
        uuid=as_text(ask("nvmlDeviceGetUUID") or ""),
        name=as_text(ask("nvmlDeviceGetName") or ""),
        pci=read_address(ask("nvmlDeviceGetPciInfo")),
        memory_mib=total,
        used_mib=used,
        processes=inquiry.read_processes(),
        recovery_action=inquiry.read_recovery_action(),
        ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        remapped_uncorrectable=rows[1] if rows else None,
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
        clock_reasons=inquiry.read_clock_reasons(),
        sm_clock=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_sm_clock=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        temperature=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power=convert_unit(ask("nvmlDeviceGetPowerUsage"), 1e-3),
        nvlinks=active,
        max_nvlinks=links,
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_pcie_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
    )
    return replace(facts, problem=inquiry.problem), inquiry


def read_address(info: Any) -> str:  # noqa: ANN401 - a structure of ctypes
    """Return a GPU's PCI address in sysfs form; empty if it is not told."""
    try:
        return format_pci(parse_pci(as_text(info.busId))) if info else ""
    except (ValueError, AttributeError):
        return ""


def list_peers(
    nvml: Any,  # noqa: ANN401 - a module
    handles: dict[int, Any],
    index: int,
    gpus: tuple[GpuFacts, ...],
) -> tuple[int, ...] | None:
    """Return the other GPUs whose memory a GPU reads and writes directly; None if it is not told."""
    others = [gpu.index for gpu in gpus if gpu.index != index and gpu.index in handles]
    if index not in handles:
        return None
    inquiry = GpuInquiry(nvml, handles[index])
    states = {
        other: [inquiry.ask("nvmlDeviceGetP2PStatus", handles[other], what) for what in (READ, WRITE)]
        for other in others
    }
    if any(None in state for state in states.values()):
        return None
    return tuple(other for other, state in states.items() if state == [0, 0])


def read_cuda_driver(nvml: Any) -> str:  # noqa: ANN401 - a module
    """Return the CUDA version that libcuda offers, a compatibility package's if that is found first."""
    call: Callable[[], int]
    for name in ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"):
        try:
            call = getattr(nvml, name)
            number = int(call())
        except (nvml.NVMLError, AttributeError, ValueError):
            continue
        return f"{number // 1000}.{number % 1000 // 10}"
    return ""
