"""Starting the shim as launchers and containers do, and hearing what the kernel gave it."""

import ctypes
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SHIM = Path(__file__).parents[2] / "launcher" / "rank" / "__main__.py"
COMMAND = (sys.executable, "-I", "-S", str(SHIM))
TELL = """
import json, os, sys
from launcher.rank.affinity import get_mempolicy
policy, nodes = get_mempolicy()
print(json.dumps({"cpus": sorted(os.sched_getaffinity(0)), "policy": policy, "nodes": sorted(nodes),
                  "argv": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ)}))
"""
ECHO = ("echo", "ran")
ALLOWED = sorted(os.sched_getaffinity(0))
SHOW = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
PROGRAM = (sys.executable, "-I", "-S", "-c", SHOW)
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}


def write_plan(folder: Path, cpus: str, nodes: str = "0", **extra: object) -> Path:
    rank = {
        "local_rank": 0,
        "gpu": None,
        "cpus": cpus,
        "worker_cpus": cpus,
        "memory": {"policy": "preferred", "nodes": nodes},
        "num_workers": 3,
        "env": {"OMP_NUM_THREADS": "5"},
        **extra,
    }
    path = folder / "plan.json"
    path.write_text(json.dumps({"schema": 1, "machine": {}, "ranks": [rank], "warnings": []}))
    return path


def run_shim(
    *words: str, preexec: Callable[[], None] | None = None, wrap: Sequence[str] = (), **variables: str
) -> "subprocess.CompletedProcess[str]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LAUNCH_", "OMP_"))}
    environ = {**kept, "PYTHONPATH": str(SHIM.parents[2]), "LOCAL_RANK": "0", **variables}
    return subprocess.run(
        [*wrap, *COMMAND, *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=preexec,
        check=False,
    )


def tell(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def run_words(words: list[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": os.environ["PATH"], "LOCAL_RANK": "0", **variables}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)


def start_bound(
    cpus: list[set[int]],
    variables: Callable[[int], dict[str, str]],
    command: tuple[str, ...] = (*COMMAND, *PROGRAM),
    name: str = "",
) -> list[tuple[set[int], str]]:
    """Start a rank on each set of CPUs from one parent, as a launcher does: what each got and said."""
    code = f"""
import ctypes, os, json, subprocess, sys
if {name!r}:
    ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)
sets, environs = json.loads(sys.argv[1])
ranks = [
    subprocess.Popen({command!r}, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                     preexec_fn=lambda: os.sched_setaffinity(0, cpus))
    for cpus, environ in zip(sets, environs)
]
print(json.dumps([rank.communicate() for rank in ranks]))
"""
    quiet = {"PATH": os.environ["PATH"], "LAUNCH_GC": "default"}
    environs = [{**quiet, **variables(rank)} for rank in range(len(cpus))]
    words = [sys.executable, "-c", code, json.dumps([[sorted(one) for one in cpus], environs])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
    return [(set(json.loads(out)), err) for out, err in json.loads(done.stdout)]


def by_srun(kind: str, entries: str) -> Callable[[int], dict[str, str]]:
    bind = {"SLURM_CPU_BIND_TYPE": kind, "SLURM_CPU_BIND_LIST": entries}
    return lambda rank: {**STEP, **bind, "SLURM_LOCALID": str(rank), "SLURM_PROCID": str(rank)}


def by_open_mpi(rank: int) -> dict[str, str]:
    names = {"LOCAL_RANK": str(rank), "RANK": str(rank), "LOCAL_SIZE": "2"}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}


def by_hydra(rank: int) -> dict[str, str]:
    return {"MPI_LOCALRANKID": str(rank), "PMI_RANK": str(rank), "MPI_LOCALNRANKS": "2"}


def by_agent(rank: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}


def by_hand(rank: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}


CALLS = {
    "x86_64": {
        "sched_setaffinity": 203,
        "sched_getaffinity": 204,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "prlimit64": 302,
    },
    "aarch64": {
        "sched_setaffinity": 122,
        "sched_getaffinity": 123,
        "set_mempolicy": 237,
        "get_mempolicy": 236,
        "prlimit64": 261,
    },
}
"""System call numbers by machine."""
KNOWN = os.uname().machine in CALLS
EPERM, ENOSYS = 1, 38
LOAD, EQUALS, RETURN, ALLOW, FAIL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
"""BPF's operations as far as needed, and seccomp's answers (linux/seccomp.h)."""


def forbid(*names: str, error: int = EPERM) -> None:
    """Make system calls fail with an error in this process from now on, and after its exec."""
    numbers = [CALLS[os.uname().machine][name] for name in names]
    steps = [(LOAD, 0, 0, 0)]
    steps += [(EQUALS, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | error)]
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    for option, value in ((38, ctypes.c_ulong(1)), (22, ctypes.c_ulong(2))):
        if libc.prctl(option, value, ctypes.c_char_p(program) if option == 22 else zero, zero, zero):
            raise OSError(ctypes.get_errno(), "the filter cannot be installed")
