"""What a rank leaves: its log files and the record of what was applied, and its line for people."""

import os
import time

from launcher.cpulist import format_cpulist
from launcher.files import open_append, open_below, open_own, write_whole
from launcher.protocol import LAUNCH_GC, LAUNCH_NIC, LOGS, PREFIX, name_applied_file, name_host, name_rank_log
from launcher.rank.affinity import Applied
from launcher.rank.entry import PlanEntry, dump_json
from launcher.rank.hook import is_hooked
from launcher.rank.identity import Identity

MAX_ITEM = 80
"""Characters of one item in the line for people; a list of CPUs or of allocator settings can be long."""
SUMMARIZED = (
    *(PREFIX, "CUDA_", "HIP_", "ROCR_", "NCCL_", "PYTORCH_", "LD_PRELOAD", "TORCHINDUCTOR_", "TRITON_"),
    *("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_", "RAYON_"),
)
"""Beginnings of the variables that plans set, and that the line for people sums up."""


def redirect_output(run_dir: str, identity: Identity) -> None:
    """Point stdout and stderr at `logs/ATTEMPT/rank-N.{out,err}`; raises OSError."""
    folder = open_below(run_dir, LOGS, str(identity.attempt))
    try:
        for descriptor, stream in ((1, "out"), (2, "err")):
            target = open_append(folder, name_rank_log(identity.rank, stream))
            os.dup2(target, descriptor)
            os.close(target)
    finally:
        os.close(folder)


def write_record(
    run_dir: str, identity: Identity, entry: PlanEntry, applied: Applied, environ: dict[str, str]
) -> None:
    """Write `rank-N.applied.json`, whose `pid` stays the program's, since the shim execs; raises OSError."""
    record = {
        "schema": 1,
        "host": name_host(environ),
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "attempt": identity.attempt,
        "pid": os.getpid(),
        "agent": os.getppid(),
        "time": time.time(),
        "has_terminal": identity.has_terminal,
        "cpus": format_cpulist(applied.cpus),
        "memory": {"policy": applied.policy, "nodes": format_cpulist(applied.nodes)},
        "gpu": entry.gpu,
        "num_workers": entry.num_workers,
        "env": entry.env,
        "problems": applied.problems,
    }
    folder = open_own(run_dir)
    try:
        write_whole(folder, name_applied_file(identity.rank), dump_json(record).encode() + b"\n")
    finally:
        os.close(folder)


def describe_rank(identity: Identity, entry: PlanEntry, applied: Applied, environ: dict[str, str]) -> str:
    """Return the one line for people: what this rank has, `environ` being its program's environment.

    Variables that launch does not know are shown as they are.
    """
    memory = f"{applied.policy} node {format_cpulist(applied.nodes)}" if applied.nodes else applied.policy
    gc = environ.get(LAUNCH_GC, "default").partition(",")[0] if is_hooked(environ) else "default"
    named = {
        "nic": environ.get(LAUNCH_NIC),
        "workers": str(entry.num_workers),
        "threads": environ.get("OMP_NUM_THREADS"),
        "gc": gc if gc != "default" else "",
        "allocator": environ.get("PYTORCH_CUDA_ALLOC_CONF") or environ.get("PYTORCH_ALLOC_CONF"),
        "malloc": entry.env.get("LD_PRELOAD", "").partition(":")[0].rpartition("/")[2],
    }
    parts = [f"rank {identity.rank}", f"cpus {format_cpulist(applied.cpus) or 'unknown'}", f"memory {memory}"]
    parts += [f"gpu {entry.gpu_label}"] if entry.gpu_label else []
    parts += entry.notes
    parts += [f"{name} {value}" for name, value in named.items() if value]
    parts += [f"{name}={value}" for name, value in entry.env.items() if not name.startswith(SUMMARIZED)]
    return "launch-rank: " + ", ".join(shorten_text(part) for part in parts)


def shorten_text(text: str, limit: int = MAX_ITEM) -> str:
    """Return a text on one line, harmless on a terminal, the middle of a long one left out."""
    if len(text) > 2 * limit:
        text = text[:limit] + text[-limit:]
    shown = text if text.isprintable() else repr(text)[1:-1]
    half = (limit - 1) // 2
    return shown if len(shown) <= limit else f"{shown[:half]}…{shown[-half:]}"
