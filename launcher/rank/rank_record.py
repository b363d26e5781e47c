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
from launcher.rank.apply import Applied
from launcher.rank.assignment import Share
from launcher.rank.identity import Identity
from launcher.rank.interpreter_hook import is_hooked
from launcher.rank.plain_json import format_json

LONGEST = 80
"""Characters of one item in the line for people; a list of CPUs or of allocator settings can be long."""

KNOWN = (
    *(PREFIX, "CUDA_", "HIP_", "ROCR_", "NCCL_", "PYTORCH_", "LD_PRELOAD", "TORCHINDUCTOR_", "TRITON_"),
    *("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_", "RAYON_"),
)
"""Beginnings of the variables that plans set, and that the line for people sums up."""


def redirect_output(run_dir: str, identity: Identity) -> None:
    """Point stdout and stderr at `logs/ATTEMPT/rank-N.{out,err}`; raises OSError."""
    folder = open_below(run_dir, LOGS, str(identity.attempt))
    try:
        for stream, ending in ((1, "out"), (2, "err")):
            target = open_append(folder, name_rank_log(identity.rank, ending))
            os.dup2(target, stream)
            os.close(target)
    finally:
        os.close(folder)


def write_records(run_dir: str, identity: Identity, share: Share, applied: Applied) -> None:
    """Write `rank-N.applied.json`, and the plan of the node where this rank keeps it; raises OSError."""
    folder = open_own(run_dir)
    try:
        record = describe_applied(identity, share, applied)
        write_whole(folder, name_applied_file(identity.rank), format_json(record).encode() + b"\n")
        if share.plan is not None:
            name = name_plan_file(name_host(os.environ))
            write_whole(folder, name, format_json(share.plan).encode() + b"\n")
    finally:
        os.close(folder)


def describe_applied(identity: Identity, share: Share, applied: Applied) -> dict[str, object]:
    """Return the record of one rank; `pid` stays the program's, since the shim execs."""
    return {
        "schema": 1,
        "host": name_host(os.environ),
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "attempt": identity.attempt,
        "pid": os.getpid(),
        "agent": os.getppid(),
        "time": time.time(),
        "has_terminal": identity.has_terminal,
        "cpus": format_cpulist(applied.cpus),
        "memory": {"policy": applied.policy, "nodes": format_cpulist(applied.nodes)},
        "gpu": share.gpu,
        "num_workers": share.num_workers,
        "env": share.env,
        "problems": applied.problems,
    }


def describe_line(identity: Identity, share: Share, applied: Applied, environ: dict[str, str]) -> str:
    """Return the one line for people: what this rank has, `environ` being its program's environment."""
    memory = f"{applied.policy} node {format_cpulist(applied.nodes)}" if applied.nodes else applied.policy
    cpus = format_cpulist(applied.cpus) or "unknown"
    parts = [f"rank {identity.rank}", f"cpus {cpus}", f"memory {memory}"]
    parts += [f"gpu {share.gpu_place}"] if share.gpu_place else []
    parts += share.notes
    parts += describe_settings(share, environ)
    return "launch-rank: " + ", ".join(shorten(part) for part in parts)


def describe_settings(share: Share, environ: dict[str, str]) -> list[str]:
    """Say in a few words what the variables come to; those that launch does not know stand as they are."""
    threads, nic = environ.get("OMP_NUM_THREADS"), environ.get(LAUNCH_NIC)
    policy = environ.get(LAUNCH_GC, "default").partition(",")[0] if is_hooked(environ) else "default"
    allocator = environ.get("PYTORCH_CUDA_ALLOC_CONF") or environ.get("PYTORCH_ALLOC_CONF")
    malloc = share.env.get("LD_PRELOAD", "").partition(":")[0].rpartition("/")[2]
    return [
        *([f"nic {nic}"] if nic else []),
        f"workers {share.num_workers}",
        *([f"threads {threads}"] if threads else []),
        *([f"gc {policy}"] if policy != "default" else []),
        *([f"allocator {allocator}"] if allocator else []),
        *([f"malloc {malloc}"] if malloc else []),
        *(f"{name}={value}" for name, value in share.env.items() if not name.startswith(KNOWN)),
    ]


def shorten(text: str, most: int = LONGEST) -> str:
    """Return a text on one line, harmless on a terminal, the middle of a long one left out."""
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]
    shown = text if text.isprintable() else repr(text)[1:-1]
    half = (most - 1) // 2
    return shown if len(shown) <= most else f"{shown[:half]}…{shown[-half:]}"
