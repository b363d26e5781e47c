"""Whole commands (`--help`, `plan`, `status`, `logs`), and probe and plan, in milliseconds."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launcher.plan.model import Request
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.jobs import make_command, make_environ, start_job
from tests.benchmarks.measure import measure_in_turn, print_table, time_call, time_process
from tests.plan.lab_machines import fsroot, load
from tests.seam import LAUNCH


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
