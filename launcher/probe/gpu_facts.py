"""The state of the job's GPUs by NVML, for the checks of a node.

NVML may hang with a sick GPU, so this runs in a child process.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from launcher.doctor.model import GpuFacts, GpuProcess, Unchecked
from launcher.plan.devices import resolve_visible
from launcher.plan.model import Gpu
from launcher.probe.gpus import is_open, list_cards, read_amd, read_driver
from launcher.probe.nvml import Nvml, NvmlGpu, as_text
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
ABSENT = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED and NVML_ERROR_LIBRARY_NOT_FOUND."""
MOST_PROCESSES = 64
Wanted = Collection[str] | str | None
"""The job's GPUs: PCI addresses, or a value of CUDA_VISIBLE_DEVICES; None for all."""


def read_gpu_facts(tree: Tree, nvml: Any, wanted: Wanted = None) -> dict[str, Any]:  # noqa: ANN401 - pynvml
    """Read what `Facts` has of the GPUs, by the names of its fields.

    Without NVML (`nvml` is None, it fails, or the tree is another machine's) their names and places alone.
    """
    reason, code = "NVML is not there" if tree.is_real else "not in these files", None
    if nvml is not None and tree.is_real:
        try:
            nvml.nvmlInit()
            try:
                return _ask_nvml(tree, nvml, wanted)
            finally:
                nvml.nvmlShutdown()
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


def _ask_nvml(tree: Tree, module: Any, wanted: Wanted) -> dict[str, Any]:  # noqa: ANN401 - pynvml
    """Read what NVML says; raises NVMLError if it does not even count the GPUs."""
    nvml = Nvml(module)
    opened: dict[int, NvmlGpu] = {}
    gpus: list[GpuFacts] = []
    unchecked: list[Unchecked] = []
    for index in range(module.nvmlDeviceGetCount()):
        try:
            gpu = NvmlGpu(module, module.nvmlDeviceGetHandleByIndex(index))
        except module.NVMLError as error:
            gpus.append(GpuFacts(index, "", "", problem=str(error)))
            continue
        opened[index], facts = gpu, _read_gpu(gpu, index)
        mode = gpu.tell("nvmlDeviceGetMigMode")
        if mode and mode[0]:  # its memory and processes are not one job's
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


def _read_gpu(gpu: NvmlGpu, index: int) -> GpuFacts:
    """Read one GPU but for its peers."""
    # Version 2 does not count the driver's own part as used.
    version = getattr(gpu.module, "nvmlMemory_v2", None)
    memory = gpu.tell("nvmlDeviceGetMemoryInfo", version=version) if version else None
    memory = memory or gpu.tell("nvmlDeviceGetMemoryInfo")
    rows = gpu.tell("nvmlDeviceGetRemappedRows")
    links = [gpu.tell("nvmlDeviceGetNvLinkState", link) for link in range(MOST_LINKS)]
    links = [state for state in links if state is not None]
    persistence = gpu.tell("nvmlDeviceGetPersistenceMode")
    facts = GpuFacts(
        index=index,
        uuid=as_text(gpu.tell("nvmlDeviceGetUUID") or ""),
        name=as_text(gpu.tell("nvmlDeviceGetName") or ""),
        pci=gpu.read_pci(),
        memory_mib=int(memory.total) >> 20 if memory else 0,
        used_mib=int(memory.used) >> 20 if memory else None,
        processes=_read_processes(gpu),
        recovery_action=_read_recovery_action(gpu),
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


def _read_processes(gpu: NvmlGpu) -> tuple[GpuProcess, ...] | None:
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
        words = as_text(gpu.ask("nvmlSystemGetProcessName", pid) or "").split()
        used = found[pid].usedGpuMemory
        name = words[0].rpartition("/")[2][:64] if words else ""
        processes.append(GpuProcess(int(pid), name, None if used is None else int(used) >> 20))
    return tuple(processes)


def _read_recovery_action(gpu: NvmlGpu) -> str | None:
    """Return what the driver wants done with the GPU; None before driver 570."""
    values = gpu.tell("nvmlDeviceGetFieldValues", [RECOVERY_ACTION])
    if not values or values[0].nvmlReturn != 0:
        return None
    number = int(values[0].value.uiVal)
    return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else f"action {number}"


def _list_peers(opened: dict[int, NvmlGpu], index: int, gpus: tuple[GpuFacts, ...]) -> tuple[int, ...] | None:
    """Return the other GPUs whose memory a GPU reads and writes directly; None if it is not told."""
    if index not in opened:
        return None
    peers = []
    for other in (gpu.index for gpu in gpus if gpu.index != index and gpu.index in opened):
        handle = opened[other].handle
        states = [opened[index].tell("nvmlDeviceGetP2PStatus", handle, what) for what in (READ, WRITE)]
        if None in states:
            return None
        if states == [0, 0]:
            peers.append(other)
    return tuple(peers)


def _choose_visible(gpus: Sequence[GpuFacts], wanted: Wanted) -> tuple[GpuFacts, ...]:
    """Return the job's GPUs; those whose address NVML does not tell stay, since they may be among them.

    All if CUDA_VISIBLE_DEVICES names MIG instances.
    """
    if isinstance(wanted, str):
        known = tuple(Gpu(gpu.index, gpu.uuid, gpu.pci) for gpu in gpus)
        shown = resolve_visible(known, {"CUDA_VISIBLE_DEVICES": wanted})
        wanted = None if wanted.startswith("MIG") else {gpu.pci for gpu in shown.devices}
    return tuple(gpu for gpu in gpus if wanted is None or not gpu.pci or gpu.pci in wanted)
