"""What it costs to show what ranks print: 600,000 lines from two ranks through a pipe, beside torchrun."""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks.measure import Sample, measure_in_turn, print_table, time_call

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
    timed = {}
    for name, words, added in (("torchrun", TORCHRUN, 0), ("launch", LAUNCH, prefix)):
        for title, lines in (("no line", 0), ("the lines", LINES)):
            size = RANKS * lines * (WIDTH + added)
            timed[f"{name}, {title}"] = partial(time_output, folder, (*words, str(program), str(lines)), size)
    samples = measure_in_turn(timed, rounds)
    title = (
        f"{RANKS * LINES:,} lines, {RANKS * LINES * WIDTH / 1e6:.0f} MB, from {RANKS} ranks through a pipe"
    )
    print_table(title, samples, compare=False)
    print_more(*samples)


def print_more(*samples: Sample) -> None:
    """Print what the lines alone take, from samples of torchrun and launch, each without and with them.

    The quickest runs tell it best on a machine that does other things too: these only ever add time.
    """
    pairs = ((0, "torchrun", 1), (2, "launch", 3))
    lines = {name: subtract(samples[with_them], samples[without]) for without, name, with_them in pairs}
    more = [a - b for a, b in zip(lines["launch"], lines["torchrun"], strict=True)]
    torchrun, launch = (min(samples[b].times) - min(samples[a].times) for a, _, b in pairs)
    print(
        f"\nThe lines alone, quickest runs: {torchrun:.0f} ms under torchrun, {launch:.0f} ms under launch:"
    )
    print(f"{launch - torchrun:+.0f} ms; median of {len(more)} rounds {statistics.median(more):+.0f} ms.")


def subtract(sample: Sample, base: Sample) -> list[float]:
    """Differences of two samples, round by round."""
    return [a - b for a, b in zip(sample.times, base.times, strict=True)]


def time_output(folder: Path, words: Sequence[str], size: int) -> float:
    """Milliseconds of a module's run that prints so many bytes; raises RuntimeError if it does not."""
    counts: list[int] = []
    taken = time_call(lambda: counts.append(count_output(folder, words)))
    if counts != [size]:
        raise RuntimeError(f"{words[0]} showed {counts[0]} bytes, not {size}")
    return taken


def count_output(folder: Path, words: Sequence[str]) -> int:
    """Run a module, and return how many bytes came from its stdout; raises RuntimeError if it fails."""
    command = (sys.executable, "-m", *words)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        stdout = process.stdout
        count = sum(len(data) for data in iter(lambda: os.read(stdout.fileno(), CHUNK), b"")) if stdout else 0
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with {process.returncode}")
    return count
