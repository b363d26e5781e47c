"""Limits of the job: shared memory, descriptors, locked memory, processes."""

from collections.abc import Iterator

from launcher.doctor.facts import CAP_IPC_LOCK, CAP_SYS_RESOURCE
from launcher.doctor.finding import Case, Finding, report_ok, report_unchecked
from launcher.text import count_things, format_size

LIMITS = "limits"
SHM = "/dev/shm"  # noqa: S108  # it is spoken of, not written to
WHY_SHM = "DataLoader workers and NCCL pass data through it; when it is full, workers die with a bus error"
SHM_LEAST = 1 << 20
"""Size in KiB that NCCL's documentation asks for in containers (`--shm-size=1g`)."""
SHM_FREE = 256 << 10
"""Free part of it below which leftovers are told."""
HARD = "root raises it: limits.conf, docker --ulimit nofile, LimitNOFILE of slurmd"
FILES_LEAST = 4096
"""Descriptors that leave room for batches of a few hundred tensors: four times the usual default."""
THREADS_EACH = 64
"""Threads of one process, generously: OpenMP's, autograd's, NCCL's, the pin-memory thread's."""


def judge_shm(case: Case) -> Iterator[Finding]:
    """Size of /dev/shm, through which DataLoader workers and NCCL hand data over."""
    size = case.machine.limits.shm_kib
    if size is None:
        yield report_unchecked(case, LIMITS, SHM, "no such mount was found")
    else:
        yield check_shm(size, case.health.shm_free_kib)


def check_shm(size: int, free: int | None) -> Finding:
    """Judge the size and free space of /dev/shm in KiB."""
    if size < SHM_LEAST:
        return Finding(
            "warning",
            LIMITS,
            f"{SHM} has {format_size(size)}",
            WHY_SHM,
            "docker: --shm-size=1g or more, or --ipc=host; Kubernetes: an emptyDir with medium: Memory; "
            "else: sudo mount -o remount,size=50% /dev/shm",
        )
    if free is not None and free < SHM_FREE:
        return Finding(
            "warning",
            LIMITS,
            f"{SHM} has {format_size(size)}, of which {format_size(free)} are free",
            WHY_SHM,
            "remove what dead jobs have left there (`ls -la /dev/shm`: torch_*, nccl-*)",
        )
    rest = "" if free is None else f", {format_size(free)} free"
    return report_ok(LIMITS, f"{SHM}: {format_size(size)}{rest}")


def judge_files(case: Case) -> Iterator[Finding]:
    """Open files, of which ranks may have as many as the hard limit says: the shim raises theirs to it.

    Source: PyTorch's notes on multiprocessing, sharing strategy `file_descriptor`.
    """
    files = case.health.files
    if files is None:
        yield report_unchecked(case, LIMITS, "open files", "proc/self/limits does not show them")
    elif files.hard is not None and files.hard < FILES_LEAST:
        yield Finding(
            "warning",
            LIMITS,
            f"a rank may open {files.hard} files (the hard limit)",
            "each tensor that a DataLoader worker hands over holds one: beyond, `Too many open files` or "
            "`received 0 items of ancdata`",
            HARD,
        )
    else:
        hard_limit = "unlimited" if files.hard is None else str(files.hard)
        yield report_ok(LIMITS, f"open files of a rank: {hard_limit}")


def judge_locked(case: Case) -> Iterator[Finding]:
    """Locked memory, which RDMA needs. Source: NCCL's troubleshooting (`--ulimit memlock=-1`)."""
    locked, nics = case.health.locked, case.machine.nics
    if not nics:
        return
    if locked is None:
        yield report_unchecked(case, LIMITS, "locked memory", "proc/self/limits does not show it")
    elif locked.soft is not None and not case.health.capabilities >> CAP_IPC_LOCK & 1:
        yield Finding(
            "warning",
            LIMITS,
            f"a process may lock {format_size(locked.soft >> 10)}, and there are RDMA devices "
            f"({nics[0].name})",
            "they lock the memory that they register: NCCL fails with `Cannot allocate memory`, or uses TCP",
            "ulimit -l unlimited; docker: --ulimit memlock=-1; SLURM: LimitMEMLOCK=infinity for slurmd and "
            "PropagateResourceLimitsExcept=MEMLOCK",
        )
    else:
        yield report_ok(LIMITS, "locked memory: unlimited, as RDMA needs it")


def judge_processes(case: Case) -> Iterator[Finding]:
    """Processes and threads, of the user (RLIMIT_NPROC) and of the cgroup (pids.max)."""
    health, ranks = case.health, case.plan.ranks
    needed = sum(THREADS_EACH + rank.omp_num_threads + rank.num_workers * THREADS_EACH for rank in ranks)
    lifted = health.capabilities >> CAP_SYS_RESOURCE & 1
    users = None if health.processes is None or lifted else health.processes.soft
    limits = {"the user (ulimit -u)": users, "the cgroup (pids.max)": health.pids_max}
    low = {owner: limit for owner, limit in limits.items() if limit is not None and limit < needed}
    for owner, limit in low.items():
        yield Finding(
            "warning",
            LIMITS,
            f"{owner} may have {limit} processes and threads; {count_things(len(ranks), 'rank')} with "
            f"workers can need {needed}",
            "a rank that cannot start a thread dies with `Resource temporarily unavailable`",
            "ulimit -u unlimited" if users == limit else "docker: --pids-limit=-1; Kubernetes: podPidsLimit",
        )
    if health.processes is None and health.pids_max is None:
        yield report_unchecked(case, LIMITS, "processes", "proc/self/limits does not show them")
    elif not low:
        lowest = min((limit for limit in (users, health.pids_max) if limit is not None), default=None)
        yield report_ok(LIMITS, f"processes: {'unlimited' if lowest is None else lowest}, {needed} wanted")
