"""What a rank leaves in the run directory: its log files and the record of what was applied."""

import os
import time

from launcher.cpulist import format_cpulist
from launcher.rank.apply import Applied
from launcher.rank.identity import Identity
from launcher.rank.plain_json import format_json
from launcher.rank.share import Share

LONGEST = 80
"""Characters of one item in the line for people; a list of CPUs or of allocator settings can be long."""


def redirect_output(run_dir: str, identity: Identity) -> None:
    """Point stdout and stderr at `logs/ATTEMPT/rank-N.{out,err}`; raises OSError."""
    folder = f"{run_dir}/logs/{identity.attempt}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for stream, ending in ((1, "out"), (2, "err")):
        path = f"{folder}/rank-{identity.rank}.{ending}"
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(target, stream)
        os.close(target)


def write_records(run_dir: str, identity: Identity, share: Share, applied: Applied) -> None:
    """Write `rank-N.applied.json`, and the plan of the node where this rank keeps it; raises OSError."""
    write_json(f"{run_dir}/rank-{identity.rank}.applied.json", describe_applied(identity, share, applied))
    if share.plan is not None:
        write_json(f"{run_dir}/plan-{name_host()}.json", share.plan)


def write_json(path: str, value: dict[str, object]) -> None:
    """Write a file for its owner alone, whole or not at all; raises OSError."""
    draft = f"{path}.{os.uname().nodename}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(format_json(value) + "\n")
    os.replace(draft, path)


def name_host() -> str:
    """Return this node's name in a job: SLURM's name for it, else the kernel's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def describe_applied(identity: Identity, share: Share, applied: Applied) -> dict[str, object]:
    """Return the record of one rank; `pid` stays the program's, since the shim execs."""
    return {
        "schema": 1,
        "host": name_host(),
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "attempt": identity.attempt,
        "pid": os.getpid(),
        "agent": os.getppid(),
        "time": time.time(),
        "cpus": format_cpulist(applied.cpus),
        "memory": {"policy": applied.policy, "nodes": format_cpulist(applied.nodes)},
        "gpu": share.gpu,
        "num_workers": share.num_workers,
        "env": share.env,
        "problems": applied.problems,
    }


def describe_line(identity: Identity, share: Share, applied: Applied) -> str:
    """Return the one line for people: what this rank has now."""
    memory = f"{applied.policy} node {format_cpulist(applied.nodes)}" if applied.nodes else applied.policy
    cpus = format_cpulist(applied.cpus) or "unknown"
    parts = [f"rank {identity.rank}", f"cpus {cpus}", f"memory {memory}"]
    parts += [f"gpu {share.gpu_place}"] if share.gpu_place else []
    parts += share.notes
    parts += [f"{name}={value}" for name, value in share.env.items()]
    return "launch-rank: " + ", ".join(shorten(part) for part in parts)


def shorten(text: str) -> str:
    """Return a text that stays on its line, and leaves room for others there."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"
