"""Ranks that a launcher has bound one by one, as the launchers' variables tell of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

from tests.rank.start_shim import COMMAND

SHOW = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
PROGRAM = (sys.executable, "-I", "-S", "-c", SHOW)
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}


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
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
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
