"""From the command line to the program's first line on the last rank, for each way to start it; the memory.

`start-1`, `start-2` and `start-8` start a program that imports torch with as many ranks, `start-bare` one
without torch. `slurm` does so from the job's first instruction, and times the submission.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from tests.benchmarks.jobs import WAYS, Job, make_command, make_environ, start_job
from tests.benchmarks.measure import (
    Sample,
    measure_children,
    measure_in_turn,
    print_goals,
    print_head,
    print_row,
    print_table,
    time_call,
)
from tests.slurm.cluster.conftest import Sandbox, start_sandbox

FIRST = "import os, time\nopen(f'first-{os.environ.get(\"RANK\", 0)}', 'w').write(repr(time.time()))\n"
IMPORTS = "import torch\n"
WAITS = "import pathlib\nwhile not pathlib.Path('done').exists():\n    time.sleep(0.05)\n"
GOALS = {1: None, 2: 0.5, 8: 0.25}
"""Of torchrun's time, by the number of ranks."""
BARE_GOAL = 0.35
SIZES = (1, 2, 4, 8)
"""Nodes, with one rank on each."""


def time_first_line(folder: Path, way: Sequence[str], ranks: int, spent: list[float]) -> float:
    """Milliseconds from the command's start to the program's first line on the last rank.

    The CPU time of all its processes, from its start to its end, is added to `spent`, in milliseconds.
    """
    begun, before = time.time(), measure_children()
    with start_job(folder, make_command(way, ["program.py"], ranks)) as job:
        job.wait()
    spent.append(1e3 * (measure_children() - before))
    return 1e3 * (read_last(folder, ranks) - begun)


def read_last(folder: Path, ranks: int) -> float:
    """When the last rank came to its first line; the marks are removed."""
    marks = [folder / f"first-{rank}" for rank in range(ranks)]
    last = max(float(mark.read_text()) for mark in marks)
    for mark in marks:
        mark.unlink()
    return last


def bench_start(folder: Path, rounds: int, ranks: int, *, imports: bool = True) -> None:
    (folder / "program.py").write_text((IMPORTS if imports else "") + FIRST)
    ways = {name: way for name, way in WAYS["start"].items() if imports or way[0] != "accelerate"}
    spent: dict[str, list[float]] = {name: [] for name in ways}

    def time_way(name: str) -> float:
        return time_first_line(folder, ways[name], ranks, spent[name])

    samples = measure_in_turn({name: partial(time_way, name) for name in ways}, rounds)
    line = "first line after `import torch`" if imports else "first line of a program without torch"
    print_table(f"Command line to the {line}, last of {ranks} ranks", samples)
    print_goals(samples, {"launch": GOALS[ranks] if imports else BARE_GOAL})
    cpu = [Sample(name, tuple(times[1:])) for name, times in spent.items()]
    print_table("CPU time of all processes, from the start to the end", cpu)


def bench_start_memory(folder: Path, rounds: int, ranks: int = 8) -> None:
    """A node's proportional set size (PSS) after `import torch`."""
    (folder / "program.py").write_text(IMPORTS + FIRST + WAITS)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, way in WAYS["start"].items():
            if way[0] == "accelerate":
                continue
            with start_job(folder, make_command(way, ["program.py"], ranks)) as job:
                marks = [folder / f"first-{rank}" for rank in range(ranks)]
                job.await_true(lambda marks=marks: all(mark.exists() for mark in marks), 120)  # type: ignore[misc]
                found.setdefault(name, []).append(measure_pss(job))
                (folder / "done").touch()
                job.wait()
            (folder / "done").unlink()
            read_last(folder, ranks)
    base = statistics.median(next(iter(found.values())))
    print_head(f"Memory of a node with {ranks} ranks, PSS", "", "MB", "of the first")
    for name, values in found.items():
        print_row(name, f"{statistics.median(values):.0f}", f"{statistics.median(values) / base:.2f}")


def measure_pss(job: Job) -> float:
    """MB of a command and of all below it."""
    whole = psutil.Process(job.process.pid)
    return sum(one.memory_full_info().pss for one in (whole, *whole.children(recursive=True))) / 1e6


def bench_slurm(folder: Path, rounds: int) -> None:
    """Submission, and starts of a program that imports torch, beside a script by hand."""
    (folder / "program.py").write_text(IMPORTS + FIRST)
    with start_sandbox("--no-accounting", f"--nodes={max(SIZES)}") as sandbox:
        sandbox.environ.update(make_environ(), SLURM_CONF=str(sandbox.conf))
        sandbox.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        later = "+cluster.additional.begin=now+1hour"
        dry = ["launch", "dry_run=true"]
        things = {
            "sbatch of a script by hand": ["sbatch", "--begin=now+1hour"],
            "launch nodes=2": ["launch", later],
            "launch nodes=1000 dry_run=true": dry,
        }

        def submit(way: Sequence[str]) -> None:
            command = make_command(way, ["program.py"], nodes=1000 if way is dry else 2)
            with start_job(folder, command, sandbox=sandbox, program=["program.py"]) as job:
                job.process.wait(60)

        timed = {name: partial(time_call, partial(submit, way)) for name, way in things.items()}
        print_table("Command line to the job's number", measure_in_turn(timed, rounds))
        for nodes in SIZES:
            ways: dict[str, Callable[[], float]] = {
                name: partial(time_job, sandbox, folder, way, nodes) for name, way in WAYS["slurm"].items()
            }
            samples = measure_in_turn(ways, rounds)
            print_table(f"Job's start to the line after `import torch`, last of {nodes} nodes", samples)
            print_goals(samples, {"launch": GOALS[2]})


def time_job(sandbox: Sandbox, folder: Path, way: Sequence[str], nodes: int) -> float:
    """Milliseconds from the job's first instruction to the program's first line on the last rank."""
    begun = "cluster.setup=['echo $EPOCHREALTIME > begun']"
    whole = [*way, *([begun] if way[0] == "launch" else [])]
    command = make_command(whole, ["program.py"], nodes=nodes)
    with start_job(folder, command, sandbox=sandbox, program=["program.py"]) as job:
        job.wait()
    return 1e3 * (read_last(folder, nodes) - float((folder / "begun").read_text()))
