"""What a rank's heartbeat costs: at the start, in steps and batches, and in memory."""

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.benchmarks.hook_cost import EMPTY, IMPORT, read_environ
from tests.benchmarks.measure import measure_in_turn, print_table, time_process
from tests.conftest import clean_environ

PROGRAM = Path(__file__).with_name("heartbeat_program.py")
MEMORY = """
import os
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rollup = open("/proc/self/smaps_rollup").read()
print(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")))
print(len(os.listdir("/proc/self/task")))
"""
"""Prints KiB and threads after all that the heartbeat starts has started."""


def bench_heartbeat(folder: Path, rounds: int) -> None:
    """All of them; programs with torch run a quarter of the rounds."""
    watched = read_environ({**clean_environ(), "LAUNCH_WATCH": str(folder), "RANK": "0", "WORLD_SIZE": "2"})
    environs = {
        "not watched": {name: value for name, value in watched.items() if name != "LAUNCH_WATCH"},
        "watched": watched,
    }
    few = max(1, rounds // 4)
    for title, command, times in (("-c pass", EMPTY, rounds), ("-c 'import torch'", IMPORT, few)):
        things = {name: partial(time_process, command, environ) for name, environ in environs.items()}
        print_table(f"A whole `python {title}` with the hook", measure_in_turn(things, times))
    print_calls(time_program(watched))
    memory = {name: [measure_memory(environ) for _ in range(few)] for name, environ in environs.items()}
    print("\nMemory in a process group of gloo, medians\n\n| | PSS, KiB | threads |\n|---|---|---|")
    for name, found in memory.items():
        size, threads = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"| {name} | {size:.0f} | {threads:.0f} |")


def time_program(environ: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    """Microseconds (without, with) of what the program does; raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environ, check=True, stdout=subprocess.PIPE, text=True
    )
    return {name: [(a, b) for a, b in pairs] for name, pairs in json.loads(done.stdout).items()}


def print_calls(times: dict[str, list[tuple[float, float]]]) -> None:
    """Print medians, and the median of the differences within pairs."""
    print("\nCPU time in one process, blocks of calls in turn, medians in microseconds\n")
    print("| | without | with a heartbeat | more |\n|---|---|---|---|")
    for name, pairs in times.items():
        without, watched = (statistics.median(column) for column in zip(*pairs, strict=True))
        more = statistics.median(b - a for a, b in pairs)
        print(f"| {name} | {without:.2f} | {watched:.2f} | {more:+.2f} |")


def measure_memory(environ: dict[str, str]) -> tuple[int, int]:
    """Return a rank's memory in KiB and its threads."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], env=environ, check=True, stdout=subprocess.PIPE, text=True
    )
    size, threads = done.stdout.split()
    return int(size), int(threads)
