"""How the costs grow with the machine."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launcher.plan.json_form import plan_to_json
from launcher.plan.model import Machine, Plan, Request
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.first import compile_program, find_missing, time_first
from tests.benchmarks.machines import describe_size, write_tree
from tests.benchmarks.measure import measure_in_turn, time_call, time_process
from tests.benchmarks.probing import EMPTY, list_cold
from tests.benchmarks.shim import SHIM
from tests.conftest import clean_environ

SIZES = (8, 32, 128, 256, 512, 1024)


def bench_growth(folder: Path, rounds: int) -> None:
    """Probe, plan and shim on machines of 8 to 1024 CPUs."""
    program = None if find_missing("cc") else str(compile_program("first.c", folder))
    plans = {size: folder / f"plan-{size}.json" for size in SIZES}
    things: dict[str, Callable[[], float]] = {"nothing": partial(time_process, EMPTY)}
    if program:
        things["bare"] = partial(time_first, (program,), clean_environ())
    gpus = {}
    for size in SIZES:
        root = write_tree(describe_size(size), folder)
        machine = probe(root)
        made = plan(machine, Request())
        gpus[size] = len(machine.gpus)
        write_shared(made, plans[size])
        things |= list_things(size, root, machine, made)
        if program:
            things[f"shim {size}"] = partial(time_shim, program, plans[size])
    medians = {sample.name: sample.median for sample in measure_in_turn(things, rounds)}
    print_growth(medians, gpus, plans, find_missing("cc"))


def list_things(size: int, root: Path, machine: Machine, made: Plan) -> dict[str, Callable[[], float]]:
    """What is measured on a machine, but for the shim."""
    return {
        f"cold {size}": partial(time_process, list_cold(root)),
        f"probe {size}": lambda: time_call(lambda: probe(root)),
        f"plan {size}": lambda: time_call(lambda: plan(machine, Request())),
        f"values {size}": lambda: time_call(lambda: plan_to_json(made)),
    }


def write_shared(made: Plan, path: Path) -> None:
    """Write a plan whose local rank 0 is this machine's, so that the kernel takes it."""
    data = plan_to_json(made)
    mine = plan_to_json(plan(probe("/"), Request(nproc_per_node=1)))
    data["ranks"] = [*list(mine["ranks"]), *list(data["ranks"])[1:]]  # type: ignore[call-overload]  # JSON's lists
    path.write_text(json.dumps(data))


def time_shim(program: str, plan_path: Path) -> float:
    """Milliseconds to the program's first instruction through the shim with a plan at hand."""
    environ = {**clean_environ(), "LAUNCH_PLAN": str(plan_path)}
    return time_first((sys.executable, "-I", "-S", str(SHIM), program), environ)


def print_growth(
    medians: dict[str, float], gpus: dict[int, int], plans: dict[int, Path], missing: str
) -> None:
    """Print a table, a row for each size."""
    print("\nGrowth with the machine, medians in ms\n")
    print(
        "| CPUs | GPUs | new process that probes and plans | more than `python -I -S -c pass` "
        "| probe, warm | plan, warm | JSON values, warm | plan's JSON, KB "
        "| shim with that plan at hand, more than the bare exec |"
    )
    print("|---" * 9 + "|")
    for size, path in plans.items():
        cold, *warm = (medians[f"{what} {size}"] for what in ("cold", "probe", "plan", "values"))
        shim = missing or f"{medians[f'shim {size}'] - medians['bare']:+.1f}"
        cells = [f"{cold:.1f}", f"{cold - medians['nothing']:+.1f}", *(f"{ms:.1f}" for ms in warm)]
        cells += [f"{path.stat().st_size / 1e3:.0f}", shim]
        print(f"| {size} | {gpus[size]} | {' | '.join(cells)} |")
    print(
        "\n`launch-rank` without a plan reads `/` alone: what it would cost on such a machine is seen in "
        "the new process, which does the same on the size's tree. A file of sysfs takes longer to read."
    )
