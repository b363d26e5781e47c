"""From the command line to the program's first line on the last rank, for each way of starting it.

`start-1`, `start-2` and `start-8` start a program that imports torch, with as many ranks; `start-bare` a
program without torch.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from launcher.text import count_things
from tests.benchmarks.measure import Sample, measure_in_turn, print_goals, print_table
from tests.benchmarks.output import measure_children
from tests.seam import clean_environ

FIRST_LINE = "import os, time\nopen(f'first-{os.environ.get(\"RANK\", 0)}', 'w').write(repr(time.time()))\n"
IMPORTS = "import torch\n"
GOALS = {1: None, 2: 0.5, 8: 0.25}
"""Of torchrun's time, for a warm start of a program that imports torch, by the number of ranks."""
BARE_GOAL = 0.35
"""The same for a program without torch."""
WARM = "launch, direct, warm"


def torchrun(ranks: int, *program: str) -> list[str]:
    """A command line of torchrun."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *program,
    ]


def accelerate(ranks: int, *program: str) -> list[str]:
    """A command line of accelerate, with all that it warns of when it is not said."""
    several = ["--multi_gpu"] if ranks > 1 else ["--cpu"]
    named = (
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        "--num_cpu_threads_per_process=1",
    )
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *several,
        f"--num_processes={ranks}",
        *named,
        *program,
    ]


def launch(ranks: int, *program: str, settings: Sequence[str] = ()) -> list[str]:
    """A command line of `launch`."""
    return [sys.executable, "-m", "launcher", f"nproc_per_node={ranks}", *settings, "--", *program]


WAYS: Mapping[str, Callable[..., list[str]]] = {
    "torchrun": torchrun,
    "accelerate launch": accelerate,
    "launch agent=torchrun": partial(launch, settings=("agent=torchrun",)),
    "launch, direct, exec (start.warm=off)": partial(launch, settings=("agent=direct", "start.warm=off")),
    WARM: partial(launch, settings=("agent=direct",)),
}
"""Each makes a command line of a number of ranks and the program's words."""


def time_first_line(
    command: Sequence[str], folder: Path, ranks: int, environ: Mapping[str, str] | None = None
) -> float:
    """Milliseconds from the command's start to the first line of the program on the last rank.

    Raises RuntimeError with its last words if the command fails.
    """
    marks = [folder / f"first-{rank}" for rank in range(ranks)]
    for mark in marks:
        mark.unlink(missing_ok=True)
    start = time.time()
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}")
    return 1e3 * (max(float(mark.read_text()) for mark in marks) - start)


def time_way(name: str, folder: Path, ranks: int, spent: list[float]) -> float:
    """Milliseconds of one way.

    The CPU time of all its processes, from its start to its end, is added to `spent`, in milliseconds.
    """
    command, before = WAYS[name](ranks, "program.py"), measure_children()
    taken = time_first_line(command, folder, ranks, make_environ())
    spent.append(1e3 * (measure_children() - before))
    return taken


def make_environ() -> dict[str, str]:
    """A user's environment, which keeps bytecode as Python does by itself."""
    environ = clean_environ()
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


def bench_start(folder: Path, rounds: int, ranks: int, *, imports: bool = True) -> None:
    """From the command line to the program's first line, or to the first after `import torch`."""
    (folder / "program.py").write_text((IMPORTS if imports else "") + FIRST_LINE)
    names = [name for name in WAYS if imports or name != "accelerate launch"]
    cpu: dict[str, list[float]] = {name: [] for name in names}
    things = {name: partial(time_way, name, folder, ranks, cpu[name]) for name in names}
    line = "first line after `import torch`" if imports else "first line of a program without torch"
    samples = measure_in_turn(things, rounds)
    print_table(f"Command line to the {line}, last of {count_things(ranks, 'rank')}", samples)
    print_goals(samples, {WARM: GOALS[ranks] if imports else BARE_GOAL})
    spent = [Sample(name, tuple(times[1:])) for name, times in cpu.items()]
    print_table("CPU time of all processes, from the start to the end", spent)
