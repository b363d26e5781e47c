"""Programs with DataLoaders, run by the shim as a rank of `launch` is, on the real torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

from launcher.cpulist import format_cpulist
from tests.rank.start_shim import ALLOWED, run_shim, write_plan

OWN, ALL = ALLOWED[:1], ALLOWED[:2]
HEAD = f"""
import inspect, json, os, sys, warnings
import multiprocessing
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

OWN, ALL = {OWN}, {ALL}

class Places(Dataset):
    "Tells on which CPUs it is read."
    def __init__(self, length=4):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(index)
        cpus = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
        return [os.getpid(), index, sorted(set.union(*map(set, cpus)))]

class Lines(IterableDataset):
    def __iter__(self):
        return iter(range(5))

def keep(batch):
    return batch

def look(loader):
    "Where each worker is, all of its threads, and where this process."
    rows = [row for batch in loader for row in batch]
    workers = {{row[0]: row[2] for row in rows}}
    assert os.getpid() not in workers
    return [sorted(workers.values()), sorted(os.sched_getaffinity(0))]

def count_warnings(workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Places(), collate_fn=keep, num_workers=workers)
        rows = len(list(loader))
    assert rows == 4
    return [[os.path.basename(entry.filename), str(entry.message)[:32]] for entry in caught]

def note(**values):
    print("NOTE", json.dumps(values), flush=True)

def catch(action):
    try:
        return action()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
"""
"""What every program below has before its own lines."""


def run_program(
    folder: Path, lines: str, *, workers: int = 2, default: bool = True, worker_cpus: str = "", **more: str
) -> "subprocess.CompletedProcess[str]":
    """Run a program as the only rank on the first allowed CPU, its workers on the first two."""
    env = {"LAUNCH_NUM_WORKERS": str(workers), **({"LAUNCH_LOADER_DEFAULT": "1"} if default else {})}
    cpus = worker_cpus or format_cpulist(set(ALL))
    plan = write_plan(folder, str(OWN[0]), worker_cpus=cpus, num_workers=workers, env=env)
    program = folder / "program.py"
    program.write_text(HEAD + lines)
    words = (sys.executable, "-W", "error::UserWarning", str(program))
    return run_shim(*words, preexec=lambda: os.sched_setaffinity(0, ALL), LAUNCH_PLAN=str(plan), **more)


def read_notes(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    """Return what a program noted; it must have ended well, with nothing but the shim's line on stderr."""
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    lines = [line.removeprefix("NOTE ") for line in done.stdout.splitlines() if line.startswith("NOTE ")]
    notes: dict[str, object] = {}
    for line in lines:
        notes |= json.loads(line)
    return notes
