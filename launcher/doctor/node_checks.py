"""One node by itself: its GPUs, paths, shared memory, memory, load and versions, in the order of the report.

Each check gives findings on one matter: none if the node has nothing of the kind, or the doctor tells it.
"""

from collections.abc import Iterator

from launcher.doctor.device_checks import GPUS
from launcher.doctor.finding import Finding, report_ok
from launcher.doctor.gpu_checks import (
    check_answers,
    check_leftovers,
    check_memory_errors,
    check_recovery,
    check_throttling,
    check_xids,
)
from launcher.doctor.limit_checks import LIMITS, SHM, WHY_SHM, check_shm
from launcher.doctor.memory_checks import MEMORY
from launcher.doctor.node_facts import JudgeSettings, NodeFacts, PathFacts
from launcher.text import count_things, format_size

PATHS = "paths"
VERSIONS = "versions"
LOAD = "load"
MATTERS = {"GPU": GPUS, "XID": GPUS, "path": PATHS, "torch": VERSIONS}
"""Subjects of what was not checked, by a word of it."""
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
SHM_NONE = 16 << 10
"""Free KiB of /dev/shm with which NCCL does not start: it makes segments of 9.2 MiB (`nccl-*`)."""
MEMORY_LOW, MEMORY_NONE = 0.1, 0.02
"""Shares of memory that are free, from which on little, and nothing, can be had."""
LOAD_HEAVY, LOAD_LIGHT = 0.5, 0.1
"""Shares of the job's CPUs that others use."""
LEAST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""The oldest driver for each major version of CUDA. Source: CUDA's release notes, "CUDA Toolkit and Minimum
Required NVIDIA Driver Version for CUDA Minor Version Compatibility"."""


def check_needed_path(node: NodeFacts, settings: JudgeSettings) -> Iterator[Finding]:
    """Paths that do not answer, or do not let the job in; missing ones are judged over all nodes."""
    for path in node.paths:
        yield from judge_path_answer(path)
        if path.state == "ok" and path.purpose in WRITTEN:
            yield from judge_space(path, settings)
    answered = [path for path in node.paths if path.state == "ok"]
    if answered and len(answered) == len(node.paths):
        slowest = max(path.seconds for path in answered)
        yield report_ok(PATHS, f"{count_things(len(answered), 'path')} answered within {slowest:.2g} s")


def judge_path_answer(path: PathFacts) -> Iterator[Finding]:
    """Whether a path answers."""
    level = "error" if path.purpose in NEEDED else "warning"
    name = f"{path.path} ({path.purpose})"
    if path.state == "stuck":
        yield Finding(
            level,
            PATHS,
            f"{name}: {path.detail or 'no answer'}",
            "the file system hangs: whatever touches it waits, and cannot be killed",
            "see whether its server answers (`mount`, `sudo dmesg | tail`); remount it or reboot the node",
        )
    elif path.state == "denied":
        why = "the program fails when it first uses it"
        yield Finding(
            level, PATHS, f"{name}: {path.detail or 'denied'}", why, "correct its owner or its mode"
        )
    elif path.state == "read_only":
        yield Finding(
            level,
            PATHS,
            f"{name} is on a read-only file system",
            "nothing can be written; the kernel remounts a disk so when it has errors",
            "name another directory; `sudo dmesg | grep -i remount` shows whether the disk has failed",
        )
    elif path.state == "failed":
        free = "" if path.free_kib is None else f" ({format_size(path.free_kib)} free)"
        yield Finding(
            level,
            PATHS,
            f"{name}: {path.detail or 'failed'}{free}",
            "the program would meet the same error",
            "free space or quota there, or remount it (`df -h`, `df -i`, `sudo dmesg | tail`)",
        )
    elif path.state == "ok" and path.seconds > SLOW_PATH:
        yield Finding(
            "warning",
            PATHS,
            f"{name} answered after {path.seconds:.1f} s",
            "every import and every file that is opened there takes its time, and all ranks wait for it",
            "see what loads its server, or keep data and environment on the node's own disk",
        )


def judge_space(path: PathFacts, settings: JudgeSettings) -> Iterator[Finding]:
    """Space and inodes of a directory that is written to."""
    name = f"{path.path} ({path.purpose})"
    fix = "remove what is no longer needed there, or name another directory"
    free, inodes = path.free_kib, path.free_inodes
    if free is not None and free < max(settings.min_free_kib, FULL):
        yield Finding(
            "error" if free < FULL else "warning",
            PATHS,
            f"{name} has {format_size(free)} free, less than {format_size(max(settings.min_free_kib, FULL))}",
            "logs, caches and checkpoints are cut off when it is full: `No space left on device`",
            fix,
        )
    if inodes is not None and inodes < INODES_LEAST:
        yield Finding(
            "error" if inodes < INODES_NONE else "warning",
            PATHS,
            f"{name} can hold {count_things(inodes, 'more file')} (inodes)",
            "no file can be made when none is left, however much space there is",
            fix,
        )


def check_node_shm(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """Size and free space of /dev/shm."""
    if node.shm_kib is None:
        return
    if node.free_shm_kib is not None and node.free_shm_kib < SHM_NONE:
        yield Finding(
            "error",
            LIMITS,
            f"{SHM} has {format_size(node.shm_kib)}, of which {format_size(node.free_shm_kib)} are free",
            WHY_SHM,
            "remove what dead jobs have left there (`ls -la /dev/shm`); docker: --shm-size or --ipc=host",
        )
    else:
        yield check_shm(node.shm_kib, node.free_shm_kib)


def check_free_memory(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """Memory that is free before the job has begun."""
    free, size = node.free_memory_kib, node.memory_kib
    if free is None or size <= 0:
        return
    said = f"{format_size(free)} of {format_size(size)} are free"
    if free >= MEMORY_LOW * size:
        yield report_ok(MEMORY, said)
        return
    yield Finding(
        "error" if free < MEMORY_NONE * size else "warning",
        MEMORY,
        said,
        "other processes hold the rest, and the kernel ends a process when nothing is left",
        "end what earlier jobs have left (`ps --sort=-rss -eo rss,user,pid,comm | head`); `ls /dev/shm /tmp`",
    )


def check_load(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """What others do on the job's CPUs."""
    if node.load is None:
        return
    said = f"others use {node.load:.0%} of the job's {count_things(node.cpus, 'CPU')}"
    if node.load < LOAD_LIGHT:
        yield report_ok(LOAD, said)
        return
    yield Finding(
        "warning" if node.load >= LOAD_HEAVY else "note",
        LOAD,
        said,
        "a rank that shares its CPUs launches kernels late, and all others wait for it",
        "see what runs there (`top -H`); ask for CPUs of one's own (SLURM: --exclusive)",
    )


def check_versions(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """Whether the driver is new enough for torch's CUDA, and torch's build fits the GPUs.

    Within a major version of CUDA every minor one runs ("minor version compatibility").
    """
    nvidia = bool(node.driver or node.cuda_driver)
    if not node.torch or not (node.gpus or nvidia):
        return
    needed = read_version(node.torch_cuda)
    said = f"torch {node.torch}, driver {node.driver or 'unknown'}"
    if node.cuda_driver:
        said += f" with CUDA {node.cuda_driver}"
    if nvidia and not needed and not any(build in node.torch for build in ("rocm", "xpu")):
        yield Finding(
            "warning",
            VERSIONS,
            f"torch {node.torch} is no build for CUDA, and there are GPUs",
            "torch.cuda.is_available() is false: the program runs on CPUs, or fails",
            "install a build for CUDA: https://pytorch.org/get-started/locally",
        )
    elif needed and is_too_old(node, needed[0]):
        yield Finding(
            "error",
            VERSIONS,
            f"{said}: older than the CUDA {node.torch_cuda} that torch was built for",
            "`The NVIDIA driver on your system is too old`: no GPU can be used",
            f"update the driver, or install torch for CUDA {node.cuda_driver or 'of the driver'} or older",
        )
    else:
        yield report_ok(VERSIONS, said)


def is_too_old(node: NodeFacts, major: int) -> bool:
    """Whether the driver cannot run programs of a major version of CUDA; false if that is not known."""
    offered = read_version(node.cuda_driver)
    if offered:
        return offered[0] < major
    driver, least = read_version(node.driver), LEAST_DRIVERS.get(major)
    return bool(driver and least and driver < least)


def read_version(text: str) -> tuple[int, ...]:
    """The numbers of a version; empty for what is none."""
    parts = text.split(".")
    known = all(part.isascii() and part.isdecimal() and len(part) < 9 for part in parts)
    return tuple(int(part) for part in parts) if text and known else ()


def check_unread(node: NodeFacts, _: JudgeSettings) -> Iterator[Finding]:
    """What could not be checked."""
    for text in node.unchecked:
        matter, colon, reason = text.partition(": ")
        subject = next((subject for word, subject in MATTERS.items() if word in matter), "preflight")
        yield Finding("unknown", subject, f"{matter} not checked{colon}{reason}")


GPU_CHECKS = (check_answers, check_recovery, check_memory_errors, check_throttling, check_xids)
BUSY_CHECKS = (check_leftovers, check_load)
"""What others do at the moment: a matter of the job's start."""
SETTING_CHECKS = (check_needed_path, check_free_memory, check_versions, check_unread)
NODE_CHECKS = (
    *GPU_CHECKS,
    check_leftovers,
    *SETTING_CHECKS[:1],
    check_node_shm,
    *SETTING_CHECKS[1:],
    check_load,
)
"""All, in the order of the report."""


def check_node(node: NodeFacts, settings: JudgeSettings) -> tuple[Finding, ...]:
    """Make every check of one node."""
    return tuple(finding for check in NODE_CHECKS for finding in check(node, settings))
