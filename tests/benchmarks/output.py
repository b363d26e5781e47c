"""What it costs to show what ranks print: 600,000 lines from two ranks through a pipe, beside torchrun."""

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks.measure import measure_in_turn, print_table, time_call

RANKS, LINES, WIDTH = 2, 300_000, 85
"""Ranks, lines of each, and bytes of a line with its newline: 51 MB in all."""
PROGRAM = f"""
import sys
for number in range(int(sys.argv[1])):
    print(str(number).rjust({WIDTH - 1}))
"""
CHUNK = 1 << 16
TORCHRUN = ("torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
LAUNCH = ("launcher", f"nproc_per_node={RANKS}", "logs.console=all", "--")


def bench_output(folder: Path, rounds: int) -> None:
    """The whole command, from its start to the last byte that its reader has, with the lines and without."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    prefix = len(f"[{os.uname().nodename}:0] ")
    timed, cpu = {}, dict[str, list[float]]()
    for name, words, added in (("torchrun", TORCHRUN, 0), ("launch", LAUNCH, prefix)):
        for what, lines in (("no line", 0), ("the lines", LINES)):
            command, size = (*words, str(program), str(lines)), RANKS * lines * (WIDTH + added)
            spent = cpu[f"{name}, {what}"] = []
            timed[f"{name}, {what}"] = partial(time_output, folder, command, size, spent)
    samples = measure_in_turn(timed, rounds)
    title = (
        f"{RANKS * LINES:,} lines, {RANKS * LINES * WIDTH / 1e6:.0f} MB, from {RANKS} ranks through a pipe"
    )
    print_table(title, samples, compare=False)
    print_more("elapsed time", [sample.times for sample in samples])
    print_more("CPU time", [values[1:] for values in cpu.values()])


def print_more(kind: str, columns: Sequence[Sequence[float]]) -> None:
    """Print what the lines alone take, of torchrun and launch, each without and with them, in milliseconds.

    The quickest runs tell it best on a machine that does other things too: these only ever add time.
    """
    torchrun, launch = (min(columns[at + 1]) - min(columns[at]) for at in (0, 2))
    more = [d - c - (b - a) for a, b, c, d in zip(*columns, strict=True)]
    print(f"\nThe lines alone, {kind} of the quickest runs: {torchrun:.0f} ms by torchrun, {launch:.0f} ms")
    print(f"by launch, {launch - torchrun:+.0f} ms; in the median round {statistics.median(more):+.0f} ms.")


def time_output(folder: Path, words: Sequence[str], size: int, spent: list[float]) -> float:
    """Milliseconds of a module's run that prints so many bytes; raises RuntimeError if it does not.

    The CPU time of all its processes is added to `spent`, in milliseconds.
    """
    counts, before = list[int](), measure_children()
    taken = time_call(lambda: counts.append(count_output(folder, words)))
    spent.append(1e3 * (measure_children() - before))
    if counts != [size]:
        raise RuntimeError(f"{words[0]} showed {counts[0]} bytes, not {size}")
    return taken


def measure_children() -> float:
    """CPU seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def count_output(folder: Path, words: Sequence[str]) -> int:
    """Run a module, and return how many bytes came from its stdout; raises RuntimeError if it fails."""
    command = (sys.executable, "-m", *words)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        stdout = process.stdout
        count = sum(len(data) for data in iter(lambda: os.read(stdout.fileno(), CHUNK), b"")) if stdout else 0
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with {process.returncode}")
    return count
