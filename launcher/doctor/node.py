"""One node by itself: its GPUs, paths, shared memory, memory, load and versions.

Each check gives findings on one matter: none if the node has nothing of the kind. Sources for GPUs: nvml.h;
NVIDIA's "GPU Debug Guidelines", "GPU Memory Error Management" (its RMA criteria) and "XID Errors".
"""

import math
from collections.abc import Iterator

from launcher.doctor.model import Facts, Finding, GpuFacts, Wanted, found, read_rules
from launcher.text import describe_time, format_size

ACTIONS = {
    "gpu_reset": "sudo nvidia-smi --gpu-reset -i {index}, with no process on the GPU; else reboot the node",
    "bus_reset": "reboot the node: the GPU needs a reset of its PCI bus",
    "node_reboot": "reboot the node",
    "system_reboot": "reboot the whole system, with all nodes of the NVLink domain",
    "drain_p2p": "end all programs that use peer access between GPUs; reset the GPU if it stays so",
    "drain_and_reset": "drain the node, then sudo nvidia-smi --gpu-reset -i {index}",
    "recover_imex_domain": "restart nvidia-imex on all nodes of the NVLink domain",
}
"""What helps, by nvmlDeviceGpuRecoveryAction_t."""
MOST_REMAPPED = 512
"""Rows remapped after uncorrectable errors from which on NVIDIA takes a GPU back ("RMA criteria")."""
SLOWED = {
    "hw_slowdown": "the hardware holds the clocks down, by a half or more: heat, or too little power",
    "hw_thermal_slowdown": "it is too hot, and the hardware holds the clocks down by a half or more",
    "hw_power_brake": "the power supply asks it to use less, and the clocks are held down by a half or more",
}
"""Clock event reasons that make it far too slow; `idle` and `sw_power_cap` are normal."""
USED_SHARE = 0.02
"""Share of a GPU's memory that may be in use on an idle one: 1.6 of 80 GiB; the driver's own has less."""
HEAVY_SHARE = 0.1
"""From here on a program that fills its GPUs fails for want of memory."""
REBOOT_XIDS = frozenset({79})
RESET_XIDS = frozenset({48, 64, 95, 119, 120, 140, 143})
"""Uncorrected memory errors, a failed remapping, a GSP that does not answer: a reset is asked for."""
LINK_XIDS = frozenset({74})
PROGRAM_XIDS = frozenset({13, 31, 94})
"""Of a program that has failed; the GPU is as before."""
QUIET_XIDS = frozenset({43, 63})
"""A program that was ended, and a remapping that has gone well."""
RECENT = 86400.0
"""Seconds in which an XID that asks for a reset counts as an error if the driver does not tell its state."""
NEEDED = ("run directory", "working directory", "checkpoints", "data", "temporary directory")
"""Purposes of paths without which a program does not run; a home directory is not among them."""
WRITTEN = ("run directory", "checkpoints", "temporary directory")
"""Purposes of directories that the job writes to."""
PATH_STATES = {
    "stuck": ("paths.stuck", "no answer"),
    "denied": ("paths.denied", "denied"),
    "read_only": ("paths.read_only", ""),
    "failed": ("paths.failed", "failed"),
}
"""Rule for each state of a path that does not answer, and its detail if there is none."""
FULL = 16 << 10
"""Free KiB of a directory with which no log and no checkpoint is written."""
INODES_LEAST, INODES_NONE = 1000, 16
"""Free inodes: a compiler cache makes some hundred files; with the second, not even all ranks have a log."""
SLOW_PATH = 2.0
"""Seconds in which a path has answered, but of which every import and every file has its share."""
SHM_LEAST = 1 << 20
"""Size of /dev/shm in KiB that NCCL's documentation asks for in containers (`--shm-size=1g`)."""
SHM_FREE = 256 << 10
"""Free part of it below which leftovers are told."""
SHM_NONE = 16 << 10
"""Free KiB of it with which NCCL does not start: it makes segments of 9.2 MiB (`nccl-*`)."""
MEMORY_LOW, MEMORY_NONE = 0.1, 0.02
"""Shares of memory that are free, from which on little, and nothing, can be had."""
LOAD_HEAVY, LOAD_LIGHT = 0.5, 0.1
"""Shares of the job's CPUs that others use."""
LEAST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""The oldest driver for each major version of CUDA. Source: CUDA's release notes, "CUDA Toolkit and Minimum
Required NVIDIA Driver Version for CUDA Minor Version Compatibility"."""


def check_gpus(node: Facts, _: Wanted) -> Iterator[Finding]:
    """What NVML and the kernel's log tell: broken, throttled, in need of a reset."""
    for gpu in node.gpus:
        if gpu.problem:
            yield found("gpu.no_answer", "error", gpu=gpu.label, problem=gpu.problem)
    if node.gpu_problem:
        yield found("gpu.nvml", "error", problem=node.gpu_problem)
    if node.lost_gpus:
        yield found("gpu.lost", "error", gpus=node.lost_gpus)

    told = [gpu for gpu in node.gpus if gpu.recovery_action is not None]
    waiting = [gpu for gpu in told if gpu.recovery_action != "none"]
    for gpu in waiting:
        action = gpu.recovery_action or ""
        help_text = ACTIONS.get(action, "drain the node and reboot it").format(index=gpu.index)
        yield found("gpu.recovery", "error", gpu=gpu.label, action=action.replace("_", " "), help=help_text)
    if told and not waiting:
        yield found("gpu.recovery", "ok")

    errors = [finding for gpu in node.gpus for finding in _list_memory_errors(gpu)]
    yield from errors
    if not errors and any(
        gpu.ecc_uncorrected is not None or gpu.remap_failed is not None for gpu in node.gpus
    ):
        yield found("gpu.ecc", "ok")

    slowed = [finding for gpu in node.gpus for finding in _list_slowdowns(gpu)]
    yield from slowed
    if not slowed and any(gpu.max_sm_clock and not gpu.problem for gpu in node.gpus):
        yield found("gpu.slowed", "ok")

    xids = [*_judge_xids(node)]
    yield from xids
    if node.gpus and node.xids is not None and not xids:
        yield found("gpu.xid", "ok")


def _list_memory_errors(gpu: GpuFacts) -> Iterator[Finding]:
    """Uncorrected ECC errors, and rows that were remapped for them."""
    reset = ACTIONS["gpu_reset"].format(index=gpu.index)
    if gpu.remap_failed:
        yield found("gpu.remap_failed", "error", gpu=gpu.label)
    if gpu.remap_pending:
        yield found("gpu.remap_pending", "error", gpu=gpu.label, reset=reset)
    rows = gpu.remapped_uncorrectable or 0
    if rows > MOST_REMAPPED:
        yield found("gpu.remapped", "error", gpu=gpu.label, rows=rows, most=MOST_REMAPPED)
    if gpu.ecc_uncorrected:
        # Newer drivers say by the recovery action whether something is to be done about it.
        level = "warning" if gpu.recovery_action == "none" else "error"
        yield found("gpu.ecc", level, gpu=gpu.label, errors=gpu.ecc_uncorrected, reset=reset)


def _list_slowdowns(gpu: GpuFacts) -> Iterator[Finding]:
    """Clocks that are held down before there is any load."""
    clock = f", {gpu.sm_clock} of {gpu.max_sm_clock} MHz" if gpu.sm_clock and gpu.max_sm_clock else ""
    heat = "" if gpu.temperature is None else f", {gpu.temperature} °C"
    for reason in gpu.clock_reasons:
        if reason in SLOWED:
            values = {"gpu": gpu.label, "reason": reason, "state": clock + heat, "meaning": SLOWED[reason]}
            yield found("gpu.slowed", "error", **values)
    if "sw_thermal_slowdown" in gpu.clock_reasons:
        yield found("gpu.warm", "warning", gpu=gpu.label, state=heat)


def _judge_xids(node: Facts) -> Iterator[Finding]:
    """The last XID of each number and GPU; of a GPU that is none of the job's it is a note."""
    gpus = {gpu.pci: gpu for gpu in node.gpus if gpu.pci}
    last = {(xid.pci, xid.number): xid for xid in node.xids or () if xid.number not in QUIET_XIDS}
    for xid in last.values():
        gpu = gpus.get(xid.pci)
        is_old = xid.age is not None and xid.age > RECENT
        is_well = gpu is not None and gpu.recovery_action == "none" and not gpu.problem
        rule, level = "gpu.xid", "note"
        if xid.number in PROGRAM_XIDS:
            rule = "gpu.xid_program"
        elif xid.number in REBOOT_XIDS and gpu and not gpu.problem:
            rule, level = "gpu.xid_back", "warning"
        elif xid.number in REBOOT_XIDS:
            rule, level = "gpu.xid_off_the_bus", "error"
        elif xid.number in RESET_XIDS and is_well:
            rule = "gpu.xid_reset_done"
        elif xid.number in RESET_XIDS:
            rule, level = "gpu.xid_reset", "warning" if is_old else "error"
        elif xid.number in LINK_XIDS:
            rule, level = "gpu.xid_link", "note" if is_well and is_old else "warning"
        count = sum((other.pci, other.number) == (xid.pci, xid.number) for other in node.xids or ())
        is_known = xid.age is not None and math.isfinite(xid.age)
        when = f", the last {describe_time(xid.age or 0.0)} ago" if is_known else ""
        times = f" {count} times" if count > 1 else ""
        yield found(
            rule,
            level if gpu else "note",
            gpu=gpu.label if gpu else f"GPU at {xid.pci}, which is not of this job,",
            number=xid.number,
            history=f"{times}{when}",
            text=f": {xid.text}" if xid.text else "",
            reset=ACTIONS["gpu_reset"].format(index=gpu.index if gpu else "N"),
        )


def check_leftovers(node: Facts, _: Wanted) -> Iterator[Finding]:
    """Memory that somebody else's processes hold on the job's GPUs."""
    known = [gpu for gpu in node.gpus if gpu.used_mib is not None and gpu.memory_mib > 0]
    held = [gpu for gpu in known if (gpu.used_mib or 0) > USED_SHARE * gpu.memory_mib]
    for gpu in held:
        used = gpu.used_mib or 0
        names = [f"{process.name or 'a process'} (process {process.pid})" for process in gpu.processes or ()]
        yield found(
            "gpu.held",
            "error" if used > HEAVY_SHARE * gpu.memory_mib else "warning",
            gpu=gpu.label,
            used=used << 10,
            size=gpu.memory_mib << 10,
            holders=f" by {', '.join(names[:4])}" if names else ", and NVML shows no process that holds it",
        )
    if known and not held:
        yield found("gpu.held", "ok")


def rate_path(purpose: str) -> str:
    """Return the level of a path that cannot be used."""
    return "error" if purpose in NEEDED else "warning"


def check_needed_paths(node: Facts, wanted: Wanted) -> Iterator[Finding]:
    """Paths that do not answer, or are short of space; missing ones are judged over all nodes."""
    least = max(wanted.min_free_kib, FULL)
    for path in node.paths:
        name, free, inodes = f"{path.path} ({path.purpose})", path.free_kib, path.free_inodes
        if path.state in PATH_STATES:
            rule, detail = PATH_STATES[path.state]
            room = "" if free is None else f" ({format_size(free)} free)"
            yield found(rule, rate_path(path.purpose), name=name, detail=path.detail or detail, room=room)
        elif path.state == "ok" and path.seconds > SLOW_PATH:
            yield found("paths.slow", "warning", name=name, seconds=path.seconds)
        if path.state != "ok" or path.purpose not in WRITTEN:
            continue
        if free is not None and free < least:
            yield found(
                "paths.space", "error" if free < FULL else "warning", name=name, free=free, least=least
            )
        if inodes is not None and inodes < INODES_LEAST:
            yield found(
                "paths.inodes", "error" if inodes < INODES_NONE else "warning", name=name, files=inodes
            )
    answered = [path for path in node.paths if path.state == "ok"]
    if answered and len(answered) == len(node.paths):
        yield found("paths.slow", "ok", paths=len(answered), seconds=max(path.seconds for path in answered))


def check_shm(node: Facts, _: Wanted) -> Iterator[Finding]:
    """Size and free space of /dev/shm."""
    size, free = node.shm_kib, node.free_shm_kib
    if size is None:
        return
    if free is not None and free < SHM_NONE:
        yield found("limits.shm_full", "error", size=size, free=free)
    elif size < SHM_LEAST:
        yield found("limits.shm_small", "warning", size=size)
    elif free is not None and free < SHM_FREE:
        yield found("limits.shm_full", "warning", size=size, free=free)
    else:
        yield found("limits.shm" if free is None else "limits.shm_full", "ok", size=size, free=free)


def check_free_memory(node: Facts, _: Wanted) -> Iterator[Finding]:
    """Memory that is free before the job has begun."""
    free, size = node.free_memory_kib, node.memory_kib
    if free is not None and size > 0:
        low = "error" if free < MEMORY_NONE * size else "warning"
        yield found("memory.free", "ok" if free >= MEMORY_LOW * size else low, free=free, size=size)


def check_load(node: Facts, _: Wanted) -> Iterator[Finding]:
    """What others do on the job's CPUs."""
    if node.load is not None:
        busy = "warning" if node.load >= LOAD_HEAVY else "note"
        yield found("load.others", "ok" if node.load < LOAD_LIGHT else busy, load=node.load, cpus=node.cpus)


def check_versions(node: Facts, _: Wanted) -> Iterator[Finding]:
    """Whether the driver is new enough for torch's CUDA, and torch's build fits the GPUs.

    Within a major version of CUDA every minor one runs ("minor version compatibility").
    """
    has_nvidia = bool(node.driver or node.cuda_driver)
    if not node.torch or not (node.gpus or has_nvidia):
        return
    needed, offered = _read_version(node.torch_cuda), _read_version(node.cuda_driver)
    driver = _read_version(node.driver)
    is_old = False
    if needed and offered:
        is_old = offered[0] < needed[0]
    elif needed and driver:
        is_old = driver < LEAST_DRIVERS.get(needed[0], (0,))
    with_cuda = f" with CUDA {node.cuda_driver}" if node.cuda_driver else ""
    values = {"torch": node.torch, "cuda": node.torch_cuda, "offered": node.cuda_driver or "of the driver"}
    values["driver"] = (node.driver or "unknown") + with_cuda
    if has_nvidia and not needed and not any(build in node.torch for build in ("rocm", "xpu")):
        yield found("versions.no_cuda", "warning", torch=node.torch)
    else:
        yield found("versions.driver_too_old", "error" if is_old else "ok", **values)


def _read_version(text: str) -> tuple[int, ...]:
    """The numbers of a version; empty for what is none."""
    parts = text.split(".")
    known = all(part.isascii() and part.isdecimal() and len(part) < 9 for part in parts)
    return tuple(int(part) for part in parts) if text and known else ()


def check_unread(node: Facts, _: Wanted) -> Iterator[Finding]:
    """What could not be checked; nodes may name checks that this version does not know."""
    for one in node.unchecked:
        rule = f"unchecked.{one.check}"
        if rule in read_rules():
            yield found(rule, "unknown", reason=one.reason, of=one.of)
        else:
            yield found("unchecked.other", "unknown", reason=one.reason, of=one.check)


CHECKS = (
    *(check_gpus, check_leftovers, check_needed_paths, check_shm),
    *(check_free_memory, check_versions, check_unread, check_load),
)
"""All, in the order of the report."""
