"""What a rank leaves in the run directory: its log files and the record of what was applied."""

import os
import time

from launcher.cpulist import format_cpulist
from launcher.files import open_append, open_below, open_own, write_whole
from launcher.protocol import (
    LAUNCH_GC,
    LAUNCH_NIC,
    LOGS,
    PREFIX,
    name_applied_file,
    name_host,
    name_plan_file,
    name_rank_log,
)
from launcher.rank.affinity import AppliedPlacement
from launcher.rank.identity import Identity
from launcher.rank.interpreter_hook import is_hooked
from launcher.rank.plain_json import dump_json
from launcher.rank.plan_entry import PlanEntry

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


def write_records(
    run_dir: str, identity: Identity, entry: PlanEntry, applied: AppliedPlacement, environ: dict[str, str]
) -> None:
    """Write `rank-N.applied.json`, and the node's plan if this rank keeps it; raises OSError."""
    folder = open_own(run_dir)
    try:
        record = make_applied_record(identity, entry, applied, name_host(environ))
        write_whole(folder, name_applied_file(identity.rank), dump_json(record).encode() + b"\n")
        if entry.plan is not None:
            name = name_plan_file(name_host(environ))
            write_whole(folder, name, dump_json(entry.plan).encode() + b"\n")
    finally:
        os.close(folder)


def make_applied_record(
    identity: Identity, entry: PlanEntry, applied: AppliedPlacement, host: str
) -> dict[str, object]:
    """Return the record of one rank; `pid` stays the program's, since the shim execs."""
    return {
        "schema": 1,
        "host": host,
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


def describe_line(
    identity: Identity, entry: PlanEntry, applied: AppliedPlacement, environ: dict[str, str]
) -> str:
    """Return the one line for people: what this rank has, `environ` being its program's environment."""
    memory = f"{applied.policy} node {format_cpulist(applied.nodes)}" if applied.nodes else applied.policy
    cpus = format_cpulist(applied.cpus) or "unknown"
    parts = [f"rank {identity.rank}", f"cpus {cpus}", f"memory {memory}"]
    parts += [f"gpu {entry.gpu_label}"] if entry.gpu_label else []
    parts += entry.notes
    parts += summarize_variables(entry, environ)
    return "launch-rank: " + ", ".join(shorten_text(part) for part in parts)


def summarize_variables(entry: PlanEntry, environ: dict[str, str]) -> list[str]:
    """Say in a few words what the variables mean; those that launch does not know are shown as they are."""
    threads, nic = environ.get("OMP_NUM_THREADS"), environ.get(LAUNCH_NIC)
    policy = environ.get(LAUNCH_GC, "default").partition(",")[0] if is_hooked(environ) else "default"
    allocator = environ.get("PYTORCH_CUDA_ALLOC_CONF") or environ.get("PYTORCH_ALLOC_CONF")
    malloc = entry.env.get("LD_PRELOAD", "").partition(":")[0].rpartition("/")[2]
    return [
        *([f"nic {nic}"] if nic else []),
        f"workers {entry.num_workers}",
        *([f"threads {threads}"] if threads else []),
        *([f"gc {policy}"] if policy != "default" else []),
        *([f"allocator {allocator}"] if allocator else []),
        *([f"malloc {malloc}"] if malloc else []),
        *(f"{name}={value}" for name, value in entry.env.items() if not name.startswith(SUMMARIZED)),
    ]


def shorten_text(text: str, limit: int = MAX_ITEM) -> str:
    """Return a text on one line, harmless on a terminal, the middle of a long one left out."""
    if len(text) > 2 * limit:
        text = text[:limit] + text[-limit:]
    shown = text if text.isprintable() else repr(text)[1:-1]
    half = (limit - 1) // 2
    return shown if len(shown) <= limit else f"{shown[:half]}…{shown[-half:]}"
