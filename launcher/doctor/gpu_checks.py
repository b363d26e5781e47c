"""The GPUs of one node by what NVML and the kernel's log tell: broken, throttled, or in others' use.

Sources: nvml.h; NVIDIA's "GPU Debug Guidelines", "GPU Memory Error Management" (its RMA criteria) and "XID
Errors".
"""

import math
from collections.abc import Iterator

from launcher.doctor.device_checks import GPUS
from launcher.doctor.finding import Finding, report_ok
from launcher.doctor.node_facts import GpuFacts, JudgeSettings, KernelXid, NodeFacts
from launcher.text import count_things, describe_time, format_size

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
COOL = "check fans, air and power supplies (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`); drain the node"
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


def label_gpu(gpu: GpuFacts) -> str:
    """Name a GPU for people."""
    place = gpu.pci or gpu.uuid
    return f"GPU {gpu.index}" + (f" ({place})" if place else "")


def check_answers(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """GPUs that do not answer, or that NVML does not list though the driver has them."""
    for gpu in (gpu for gpu in node.gpus if gpu.problem):
        yield Finding(
            "error",
            GPUS,
            f"{label_gpu(gpu)} does not answer: {gpu.problem}",
            "a rank that is given it fails at its first CUDA call",
            "`sudo dmesg | grep -i xid` may show why; drain and reboot the node",
        )
    if node.gpu_problem:
        yield Finding(
            "error",
            GPUS,
            node.gpu_problem,
            "CUDA asks the same driver, and fails or hangs likewise",
            "reboot the node: its driver was updated under it, or a GPU hangs (`sudo dmesg | grep -i nvrm`)",
        )
    if node.lost_gpus:
        yield Finding(
            "error",
            GPUS,
            f"the driver has {', '.join(node.lost_gpus)}, which NVML does not list",
            "it has fallen off the bus or could not be set up, and CUDA may number the rest otherwise",
            "`sudo dmesg | grep -i -e xid -e nvrm` may show why; drain and reboot the node",
        )


def check_recovery(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """What the driver (570 and later) wants done with a GPU."""
    told = [gpu for gpu in node.gpus if gpu.recovery_action is not None]
    found = [gpu for gpu in told if gpu.recovery_action != "none"]
    for gpu in found:
        action = gpu.recovery_action or ""
        yield Finding(
            "error",
            GPUS,
            f"{label_gpu(gpu)} waits for recovery: {action.replace('_', ' ')}",
            "the driver says that it is not fit for new work: programs fail on it, or run slower",
            ACTIONS.get(action, "drain the node and reboot it").format(index=gpu.index),
        )
    if told and not found:
        yield report_ok(GPUS, "the driver asks for no recovery")


def check_memory_errors(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """Uncorrected ECC errors, and rows that were remapped for them."""
    found = [finding for gpu in node.gpus for finding in list_memory_errors(gpu)]
    yield from found
    known = [gpu for gpu in node.gpus if gpu.ecc_uncorrected is not None or gpu.remap_failed is not None]
    if known and not found:
        yield report_ok(GPUS, "no uncorrected memory error, no remapping of rows pending or failed")


def list_memory_errors(gpu: GpuFacts) -> Iterator[Finding]:
    """The memory errors of one GPU."""
    name, why = label_gpu(gpu), "its memory has a defect: programs fail on it, or have wrong values"
    if gpu.remap_failed:
        yield Finding(
            "error",
            GPUS,
            f"{name}: a defect memory row could not be remapped",
            why,
            "drain the node; NVIDIA takes such a GPU back (RMA) after its field diagnostic",
        )
    if gpu.remap_pending:
        yield Finding(
            "error",
            GPUS,
            f"{name}: a defect memory row waits to be remapped",
            f"{why}, until the GPU is reset",
            ACTIONS["gpu_reset"].format(index=gpu.index),
        )
    if (gpu.remapped_uncorrectable or 0) > MOST_REMAPPED:
        yield Finding(
            "error",
            GPUS,
            f"{name}: {gpu.remapped_uncorrectable} memory rows were remapped for uncorrectable errors, more "
            f"than {MOST_REMAPPED}",
            "it has used up what it has of spare rows, so the next error cannot be mended",
            "drain the node; NVIDIA takes such a GPU back (RMA) after its field diagnostic",
        )
    if gpu.ecc_uncorrected:
        errors = count_things(gpu.ecc_uncorrected, "uncorrected ECC error")
        # Newer drivers say by the recovery action whether something is to be done about it.
        yield Finding(
            "warning" if gpu.recovery_action == "none" else "error",
            GPUS,
            f"{name}: {errors} since the driver was loaded",
            "a program was ended by each, and more may come",
            f"reset the GPU to have the rows remapped: {ACTIONS['gpu_reset'].format(index=gpu.index)}",
        )


def check_throttling(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """Clocks that the hardware holds down before there is any load."""
    known = [gpu for gpu in node.gpus if not gpu.problem and gpu.max_sm_clock]
    slowed = [(gpu, reason) for gpu in node.gpus for reason in gpu.clock_reasons if reason in SLOWED]
    warm = [gpu for gpu in node.gpus if "sw_thermal_slowdown" in gpu.clock_reasons]
    for gpu, reason in slowed:
        clock = f", {gpu.sm_clock} of {gpu.max_sm_clock} MHz" if gpu.sm_clock and gpu.max_sm_clock else ""
        heat = "" if gpu.temperature is None else f", {gpu.temperature} °C"
        yield Finding("error", GPUS, f"{label_gpu(gpu)}: {reason}{clock}{heat}", SLOWED[reason], COOL)
    for gpu in warm:
        heat = "" if gpu.temperature is None else f", {gpu.temperature} °C"
        yield Finding(
            "warning",
            GPUS,
            f"{label_gpu(gpu)}: sw_thermal_slowdown{heat}",
            "the driver lowers its clocks for heat before there is any load, and all ranks wait for its rank",
            COOL,
        )
    if known and not slowed and not warm:
        yield report_ok(GPUS, "no clock is held down")


def check_leftovers(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """Memory that somebody else's processes hold on the job's GPUs."""
    known = [gpu for gpu in node.gpus if gpu.used_mib is not None and gpu.memory_mib > 0]
    held = [gpu for gpu in known if (gpu.used_mib or 0) > USED_SHARE * gpu.memory_mib]
    for gpu in held:
        used = gpu.used_mib or 0
        holders = [
            f"{process.name or 'a process'} (process {process.pid})" for process in gpu.processes or ()
        ]
        by = f" by {', '.join(holders[:4])}" if holders else ", and NVML shows no process that holds it"
        yield Finding(
            "error" if used > HEAVY_SHARE * gpu.memory_mib else "warning",
            GPUS,
            f"{label_gpu(gpu)}: {format_size(used << 10)} of {format_size(gpu.memory_mib << 10)} are in use"
            f"{by}",
            "the program has that much less memory, and shares the GPU's time while they work",
            "end what an earlier job has left (`nvidia-smi`, kill), or ask for GPUs of one's own",
        )
    if known and not held:
        yield report_ok(GPUS, "nobody holds their memory")


def check_xids(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """XIDs of the kernel's log, each number of a GPU once."""
    gpus = {gpu.pci: gpu for gpu in node.gpus if gpu.pci}
    found = []
    for xid in {(xid.pci, xid.number): xid for xid in node.xids or ()}.values():
        count = sum((other.pci, other.number) == (xid.pci, xid.number) for other in node.xids or ())
        if xid.number not in QUIET_XIDS:
            found.append(judge_xid(xid, gpus.get(xid.pci), count))
    yield from found
    if node.gpus and node.xids is not None and not found:
        yield report_ok(GPUS, "no XID in the kernel's log")


def judge_xid(xid: KernelXid, gpu: GpuFacts | None, count: int) -> Finding:
    """The last of `count` XIDs of a number; `gpu` is None if it is none of the job's."""
    when = "" if xid.age is None or not math.isfinite(xid.age) else f", the last {describe_time(xid.age)} ago"
    times = f" {count} times" if count > 1 else ""
    name = label_gpu(gpu) if gpu else f"GPU at {xid.pci}, which is not of this job,"
    what = f"{name} had XID {xid.number}{times}{when}" + (f": {xid.text}" if xid.text else "")
    if xid.number in PROGRAM_XIDS:
        why = "a program did something that is not allowed, or met a memory error that was contained"
        return Finding("note", GPUS, what, why, "nothing, unless it comes again with other programs")
    level, why, fix = grade_xid(xid, gpu)
    return Finding(level if gpu else "note", GPUS, what, why, fix)


def grade_xid(xid: KernelXid, gpu: GpuFacts | None) -> tuple[str, str, str]:
    """Level, reason and fix of an XID that is not a program's."""
    index = gpu.index if gpu else "N"
    well = gpu is not None and gpu.recovery_action == "none" and not gpu.problem
    old = xid.age is not None and xid.age > RECENT
    if xid.number in REBOOT_XIDS:
        answers = gpu is not None and not gpu.problem
        why = "the GPU had fallen off the bus" + ("; it answers now" if answers else "")
        return "warning" if answers else "error", why, "reboot the node; if it comes again, have it repaired"
    if xid.number in RESET_XIDS:
        why = "after this XID the GPU needs a reset"
        if well:
            return "note", f"{why}, which the driver no longer asks for", "nothing, unless it comes again"
        return "warning" if old else "error", why, ACTIONS["gpu_reset"].format(index=index)
    if xid.number in LINK_XIDS:
        why = "an NVLink had errors: peer copies and collectives can fail or be slow"
        return "note" if well and old else "warning", why, "`nvidia-smi nvlink -e` counts them; reset the GPU"
    fix = "see NVIDIA's list, https://docs.nvidia.com/deploy/xid-errors"
    return "note", "the driver has reported an error of the GPU or of a program", fix
