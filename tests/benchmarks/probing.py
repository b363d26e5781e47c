"""Probe and plan: in a new process, in one that has them loaded, and as a whole command."""

import subprocess
import sys
from functools import partial
from pathlib import Path

from launcher.plan.json_form import plan_to_json
from launcher.plan.model import Request
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.first import HERE
from tests.benchmarks.machines import write_tree
from tests.benchmarks.measure import Sample, measure_in_turn, print_table, time_call, time_process
from tests.plan.lab_machines import load

EMPTY = (sys.executable, "-I", "-S", "-c", "pass")


def list_cold(root: Path) -> tuple[str, ...]:
    """The command line of cold.py."""
    return (sys.executable, "-I", "-S", str(HERE / "cold.py"), str(root))


def run_cold(root: Path) -> dict[str, float]:
    """Milliseconds of each part of one new process that probes and plans."""
    out = subprocess.run(list_cold(root), check=True, capture_output=True, text=True).stdout
    return {name: float(ms) for name, ms in (line.split("\t") for line in out.splitlines())}


def bench_probe(folder: Path, rounds: int) -> None:
    """A machine of 224 CPUs and 8 GPUs, and this one."""
    root = write_tree(load("dgx-h100"), folder)
    whole = {
        "`python -I -S -c pass`": partial(time_process, EMPTY),
        "import, probe and plan": partial(time_process, list_cold(root)),
    }
    title = "A new process on a DGX H100's tree (224 CPUs, 8 GPUs); the goal is at most 60"
    print_table(title, measure_in_turn(whole, rounds))
    runs = [run_cold(root) for _ in range(rounds + 1)][1:]
    parts = [Sample(name, tuple(run[name] for run in runs)) for name in runs[0]]
    print_table("Its parts, by its own clock", parts, compare=False)
    here, dgx = probe("/"), probe(root)
    made = plan(dgx, Request())
    warm = {
        "probe of a DGX H100's tree": lambda: time_call(lambda: probe(root)),
        "plan of a DGX H100, 8 ranks (the goal is at most 5)": lambda: time_call(
            lambda: plan(dgx, Request())
        ),
        "its JSON values": lambda: time_call(lambda: plan_to_json(made)),
        "probe of this machine": lambda: time_call(lambda: probe("/")),
        "plan of this machine, 2 ranks": lambda: time_call(lambda: plan(here, Request(nproc_per_node=2))),
    }
    print_table("In a process that has done it before", measure_in_turn(warm, rounds), compare=False)


def bench_command(folder: Path, rounds: int) -> None:
    """The whole of `launch plan`, beside what importing Hydra takes."""
    root = write_tree(load("dgx-h100"), folder)
    python = sys.executable
    show = (python, "-m", "launcher", "plan", f"machine.root={root}", "format=json")
    things = {
        '`python -c "import hydra"`': partial(time_process, (python, "-c", "import hydra")),
        "`launch plan machine.root=TREE format=json`": partial(time_process, show),
        "`python -c pass`": partial(time_process, (python, "-c", "pass")),
    }
    print_table("`launch plan` of a DGX H100's tree, the whole command", measure_in_turn(things, rounds))
