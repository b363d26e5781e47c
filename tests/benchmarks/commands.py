"""Whole commands (`--help`, `plan`, `status`, `logs`), probe and plan in milliseconds, and ranks' output."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from launcher.plan.model import Request
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.jobs import make_command, make_environ, start_job
from tests.benchmarks.measure import measure_in_turn, print_table, time_call, time_process
from tests.plan.lab_machines import fsroot, load
from tests.seam import LAUNCH

RANKS, LINES, WIDTH = 2, 300_000, 85
"""Ranks, lines of each, and bytes of a line with its newline: 51 MB in all."""
PRINTS = f"import sys\nfor number in range(int(sys.argv[1])):\n    print(str(number).rjust({WIDTH - 1}))\n"


def bench_commands(folder: Path, rounds: int) -> None:
    """Each in turn, beside an empty Python; the machine is a DGX H100's tree (224 CPUs, 8 GPUs)."""
    root = folder / "dgx-h100"
    fsroot.materialize(load("dgx-h100"), root)
    with start_job(folder, make_command(["launch", "new_run_dir=run"], ["true"])) as job:
        job.wait()
    words = (["--help"], ["plan", f"machine.root={root}", "format=json"], ["status", "run"], ["logs", "run"])
    things = {"`python -c pass`": partial(time_process, (sys.executable, "-c", "pass"))}
    for verb in words:
        name = f"`launch {' '.join(verb)}`".replace(str(root), "TREE")
        command = [*LAUNCH, *(str(folder / word) if word == "run" else word for word in verb)]
        things[name] = partial(time_process, command, make_environ())
    print_table("Whole commands", measure_in_turn(things, rounds))
    here, dgx = probe("/"), probe(root)
    warm: dict[str, Callable[[], float]] = {
        "probe of a DGX H100's tree": lambda: time_call(lambda: probe(root)),
        "plan of a DGX H100, 8 ranks (the goal is 5)": lambda: time_call(lambda: plan(dgx, Request())),
        "probe of this machine": lambda: time_call(lambda: probe("/")),
        "plan of this machine, 2 ranks": lambda: time_call(lambda: plan(here, Request(nproc_per_node=2))),
    }
    print_table("In a process that has done it before", measure_in_turn(warm, rounds), compare=False)


def bench_output(folder: Path, rounds: int) -> None:
    """The whole command, from its start to the last byte that its reader has, with the lines and without."""
    program = folder / "program.py"
    program.write_text(PRINTS)
    prefix = len(f"[{os.uname().nodename}:0] ")
    timed = {}
    for way, added in ((("torchrun",), 0), (("launch", "logs.console=all"), prefix)):
        for what, lines in (("no line", 0), ("the lines", LINES)):
            command = make_command(way, [str(program), str(lines)], RANKS)
            size = RANKS * lines * (WIDTH + added)
            timed[f"{way[0]}, {what}"] = partial(time_output, folder, command, size)
    samples = measure_in_turn(timed, rounds)
    megabytes = RANKS * LINES * WIDTH / 1e6
    print_table(
        f"{RANKS * LINES:,} lines, {megabytes:.0f} MB, from {RANKS} ranks through a pipe",
        samples,
        compare=False,
    )
    # Other work on the machine only ever adds time: the quickest runs tell the cost of the lines best.
    torchrun, launch = (min(samples[at + 1].times) - min(samples[at].times) for at in (0, 2))
    print(
        f"\nThe lines alone, in the quickest runs: {torchrun:.0f} ms by torchrun, {launch:.0f} ms by launch"
    )


def time_output(folder: Path, command: Sequence[str], size: int) -> float:
    """Milliseconds of a command that prints so many bytes; raises RuntimeError if it does not."""

    def count() -> None:
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            number = process.stdout.fileno()
            found = sum(len(data) for data in iter(lambda: os.read(number, 1 << 16), b""))
        if process.returncode or found != size:
            raise RuntimeError(
                f"{command} ended with {process.returncode}, and showed {found} bytes, not {size}"
            )

    return time_call(count)
