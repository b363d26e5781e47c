"""One node by itself: its GPUs, paths, shared memory, memory, load and versions.

Each check gives findings on one matter: none if the node has nothing of the kind. Sources for GPUs: nvml.h;
NVIDIA's "GPU Debug Guidelines", "GPU Memory Error Management" (its RMA criteria) and "XID Errors".
"""

from collections.abc import Iterator
from itertools import chain

from launcher.doctor.model import Facts, Finding, GpuFacts, Wanted, found, or_ok, read_rules, read_tables
from launcher.text import describe_time, format_size

MOST_REMAPPED = 512
"""Rows remapped after uncorrectable errors from which on NVIDIA takes a GPU back ("RMA criteria")."""
USED_SHARE = 0.02
"""Share of a GPU's memory that may be in use on an idle one: 1.6 of 80 GiB; the driver's own has less."""
HEAVY_SHARE = 0.1
"""From here on a program that fills its GPUs fails for want of memory."""
RECENT = 86400.0
"""Seconds in which an XID that asks for a reset counts as an error if the driver does not tell its state."""
NEEDED = ("run directory", "working directory", "checkpoints", "data", "temporary directory")
"""Purposes of paths without which a program does not run; a home directory is not among them."""
WRITTEN = ("run directory", "checkpoints", "temporary directory")
"""Purposes of directories that the job writes to."""
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


def check_gpus(node: Facts, _: Wanted) -> Iterator[Finding]:
    """What NVML and the kernel's log tell: broken, throttled, in need of a reset."""
    for gpu in node.gpus:
        if gpu.problem:
            yield found("gpu.no_answer", "error", gpu=gpu.label, problem=gpu.problem)
    if node.gpu_problem:
        yield found("gpu.nvml", "error", problem=node.gpu_problem)
    if node.lost_gpus:
        yield found("gpu.lost", "error", gpus=node.lost_gpus)

    told = [(gpu, gpu.recovery_action) for gpu in node.gpus if gpu.recovery_action is not None]
    recoveries = []
    for gpu, action in told:
        if action != "none":
            values = {"action": action.replace("_", " "), "help": _advise(action, gpu)}
            recoveries.append(found("gpu.recovery", "error", gpu=gpu.label, **values))
    yield from or_ok(recoveries, "gpu.recovery", if_known=told)
    errors = chain.from_iterable(map(_list_memory_errors, node.gpus))
    known = [gpu for gpu in node.gpus if (gpu.ecc_uncorrected, gpu.remap_failed) != (None, None)]
    yield from or_ok(errors, "gpu.ecc", if_known=known)
    slowed = chain.from_iterable(map(_list_slowdowns, node.gpus))
    known = [gpu for gpu in node.gpus if gpu.max_sm_clock and not gpu.problem]
    yield from or_ok(slowed, "gpu.slowed", if_known=known)
    yield from or_ok(_judge_xids(node), "gpu.xid", if_known=node.gpus and node.xids is not None)


def _advise(action: str, gpu: GpuFacts | None) -> str:
    """Return what helps a GPU."""
    text: str = read_tables()["action"].get(action, "drain the node and reboot it")
    return text.format(index=gpu.index if gpu else "N")


def _list_memory_errors(gpu: GpuFacts) -> Iterator[Finding]:
    """Uncorrected ECC errors, and rows that were remapped for them."""
    reset = _advise("gpu_reset", gpu)
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
        if meaning := read_tables()["slowed"].get(reason):
            values = {"reason": reason, "state": clock + heat, "meaning": meaning}
            yield found("gpu.slowed", "error", gpu=gpu.label, **values)
    if "sw_thermal_slowdown" in gpu.clock_reasons:
        yield found("gpu.warm", "warning", gpu=gpu.label, state=heat)


def _judge_xids(node: Facts) -> Iterator[Finding]:
    """The last XID of each number and GPU; of a GPU that is none of the job's it is a note."""
    gpus, kinds = {gpu.pci: gpu for gpu in node.gpus if gpu.pci}, read_tables()["xid"]
    xids = [(xid, kinds.get(str(xid.number), "")) for xid in node.xids or ()]
    last = {(xid.pci, xid.number): (xid, kind) for xid, kind in xids if kind != "quiet"}
    for xid, kind in last.values():
        gpu = gpus.get(xid.pci)
        is_old = xid.age is not None and xid.age > RECENT
        is_well = gpu is not None and gpu.recovery_action == "none" and not gpu.problem
        is_back = gpu is not None and not gpu.problem
        rule, level = {
            "reboot": ("gpu.xid_back", "warning") if is_back else ("gpu.xid_off_the_bus", "error"),
            "reset": ("gpu.xid_reset", "warning" if is_old else "error"),
            "link": ("gpu.xid_link", "note" if is_well and is_old else "warning"),
            "program": ("gpu.xid_program", "note"),
        }.get(kind, ("gpu.xid", "note"))
        if kind == "reset" and is_well:
            rule, level = "gpu.xid_reset_done", "note"
        name = gpu.label if gpu else f"GPU at {xid.pci}, which is not of this job,"
        count = sum((other.pci, other.number) == (xid.pci, xid.number) for other in node.xids or ())
        times = f" {count} times" if count > 1 else ""
        when = "" if xid.age is None else f", the last {describe_time(xid.age)} ago"
        text, reset = f": {xid.text}" if xid.text else "", _advise("gpu_reset", gpu)
        values = {"number": xid.number, "history": times + when, "text": text, "reset": reset}
        yield found(rule, level if gpu else "note", gpu=name, **values)


def check_leftovers(node: Facts, _: Wanted) -> Iterator[Finding]:
    """Memory that somebody else's processes hold on the job's GPUs."""
    known = [gpu for gpu in node.gpus if gpu.used_mib is not None and gpu.memory_mib > 0]
    problems = []
    for gpu in known:
        used = gpu.used_mib or 0
        names = [f"{process.name or 'a process'} (process {process.pid})" for process in gpu.processes or ()]
        values = {"gpu": gpu.label, "used": used << 10, "size": gpu.memory_mib << 10}
        holders = f" by {', '.join(names[:4])}" if names else ", and NVML shows no process that holds it"
        level = "error" if used > HEAVY_SHARE * gpu.memory_mib else "warning"
        if used > USED_SHARE * gpu.memory_mib:
            problems.append(found("gpu.held", level, **values, holders=holders))
    yield from or_ok(problems, "gpu.held", if_known=known)


def rate_path(purpose: str) -> str:
    """Return the level of a path that cannot be used."""
    return "error" if purpose in NEEDED else "warning"


def check_needed_paths(node: Facts, wanted: Wanted) -> Iterator[Finding]:
    """Paths that do not answer, or are short of space; missing ones are judged over all nodes."""
    least = max(wanted.min_free_kib, FULL)
    for path in node.paths:
        name, free, inodes = f"{path.path} ({path.purpose})", path.free_kib, path.free_inodes
        if path.state in read_tables()["path"]:
            rule, detail = read_tables()["path"][path.state]
            room = "" if free is None else f" ({format_size(free)} free)"
            yield found(rule, rate_path(path.purpose), name=name, detail=path.detail or detail, room=room)
        elif path.state == "ok" and path.seconds > SLOW_PATH:
            yield found("paths.slow", "warning", name=name, seconds=path.seconds)
        is_written = path.state == "ok" and path.purpose in WRITTEN
        if is_written and free is not None and free < least:
            level = "error" if free < FULL else "warning"
            yield found("paths.space", level, name=name, free=free, least=least)
        if is_written and inodes is not None and inodes < INODES_LEAST:
            level = "error" if inodes < INODES_NONE else "warning"
            yield found("paths.inodes", level, name=name, files=inodes)
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
    driver, is_old = _read_version(node.driver), False
    if needed and offered:
        is_old = offered[0] < needed[0]
    elif needed and driver:
        is_old = driver < tuple(read_tables()["driver"].get(str(needed[0]), (0,)))
    values = {"torch": node.torch, "cuda": node.torch_cuda, "offered": node.cuda_driver or "of the driver"}
    if has_nvidia and not needed and not any(build in node.torch for build in ("rocm", "xpu")):
        yield found("versions.no_cuda", "warning", torch=node.torch)
    else:
        level = "error" if is_old else "ok"
        yield found("versions.driver_too_old", level, driver=node.driver or "unknown", **values)


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
