"""What the hook in a rank's interpreter costs: at the start, in the import of torch, in an optimizer step."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from launcher.rank.interpreter_hook import FOLDER
from tests.benchmarks.measure import measure_in_turn, print_table, time_process
from tests.benchmarks.shim import LAUNCH_RANK
from tests.conftest import clean_environ

PROGRAM = Path(__file__).with_name("hook_program.py")
EMPTY = (sys.executable, "-c", "pass")
IMPORT = (sys.executable, "-c", "import torch")
POLICIES = {"every 50 steps": "synchronized,warmup=30,every=50", "never": "synchronized,warmup=30,every=0"}
"""What LAUNCH_GC says, by when it collects."""

Pairs = list[tuple[float, float]]


def bench_hook(folder: Path, rounds: int) -> None:
    """All of them; imports of torch take a quarter of the rounds."""
    own = folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").touch()
    for title, extra in (("", {}), (", with an empty sitecustomize of the user's", {"PYTHONPATH": str(own)})):
        print_start(f"A whole `python -c pass`{title}", EMPTY, extra, rounds)
    print_start("A whole `python -c 'import torch'`", IMPORT, {}, max(1, rounds // 4))
    times = {when: time_optimizers(folder, value) for when, value in POLICIES.items()}
    print_steps(times)


def print_start(title: str, command: tuple[str, ...], extra: Mapping[str, str], rounds: int) -> None:
    """Time a process without and with the hook."""
    hooked = read_environ({**clean_environ(), **extra})
    environs = {"without the hook": drop_hook(hooked), "with it": hooked}
    things = {name: partial(time_process, command, environ) for name, environ in environs.items()}
    print_table(title, measure_in_turn(things, rounds))


def read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What `launch-rank` hands to a program; raises CalledProcessError, or RuntimeError without a hook."""
    command, quiet = (LAUNCH_RANK, "env", "-0"), {**environ, "LAUNCH_QUIET": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(command, env=quiet, check=True, stdout=subprocess.PIPE)
    entries = (entry.partition(b"=") for entry in done.stdout.split(b"\0") if entry)
    handed = {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}
    if FOLDER not in handed.get("PYTHONPATH", "").split(os.pathsep):
        raise RuntimeError("launch-rank puts no hook into the program's interpreter: nothing to measure")
    return handed


def drop_hook(environ: Mapping[str, str]) -> dict[str, str]:
    """The same variables without the hook, as an interpreter has them after it."""
    entries = [entry for entry in environ["PYTHONPATH"].split(os.pathsep) if entry != FOLDER]
    rest = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return {**rest, "PYTHONPATH": os.pathsep.join(entries)} if entries else rest


def time_optimizers(folder: Path, policy: str, *words: str) -> dict[str, Pairs]:
    """Microseconds of steps (without, with) the hook in one process; or raise RuntimeError."""
    report = folder / "steps.json"
    environ = read_environ({**clean_environ(), "LAUNCH_GC": policy})
    subprocess.run([sys.executable, str(PROGRAM), *words, str(report)], env=environ, check=True)
    found = json.loads(report.read_text())
    if not found["hooks"]:
        raise RuntimeError(
            f"LAUNCH_GC={policy} registers no hook with torch's optimizers: nothing to measure"
        )
    return {name: [(without, hooked) for without, hooked in pairs] for name, pairs in found["times"].items()}


def print_steps(times: Mapping[str, Mapping[str, Pairs]]) -> None:
    """Print medians, and the median of the differences within pairs."""
    print("\nAn optimizer's step in one process, blocks of 100 steps in turn, medians in microseconds\n")
    print("| optimizer | collected | without the hook | with it | more |\n|---|---|---|---|---|")
    for when, optimizers in times.items():
        for name, pairs in optimizers.items():
            without, hooked = (statistics.median(column) for column in zip(*pairs, strict=True))
            more = statistics.median(b - a for a, b in pairs)
            print(f"| {name} | {when} | {without:.1f} | {hooked:.1f} | {more:+.2f} |")
