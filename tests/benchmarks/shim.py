"""One node's ranks through `launch-rank`, beside numa-set.sh's mechanics and bare execs."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.plan.json_form import plan_to_json
from launcher.plan.model import Request
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.first import HERE, compile_program, find_missing, time_first
from tests.benchmarks.measure import measure_in_turn, print_table, time_process
from tests.seam import clean_environ

SHIM = HERE.parents[1] / "launcher" / "rank" / "__main__.py"
LAUNCH_RANK = str(Path(sys.executable).with_name("launch-rank"))
RANKS = 8
NVIDIA_SMI_MS = 50
"""What nvidia-smi takes at the least."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of starting the program."""

    command: tuple[str, ...]
    environ: Mapping[str, str]


def bench_shim(folder: Path, rounds: int) -> None:
    """From a rank's start to its program's first instruction, alone and with eight at once."""
    title = "One rank, from its start to the program's first instruction; with a plan at hand the goal is +15"
    missing = find_missing("cc")
    if missing:
        print_table(title, [], missing={"all": missing})
        return
    program = str(compile_program("first.c", folder))
    ways, missing_rows = list_ways(folder, program)
    things = {name: partial(time_first, way.command, way.environ) for name, way in ways.items()}
    whole = {"`python -c pass`, the whole process": partial(time_process, (sys.executable, "-c", "pass"))}
    print_table(title, measure_in_turn({**things, **whole}, rounds), missing=missing_rows)
    many: dict[str, Callable[[], float]] = {
        name: partial(time_first, way.command, way.environ, RANKS) for name, way in ways.items()
    }
    samples = measure_in_turn(many, max(1, rounds // 2))
    print_table(f"{RANKS} ranks at once, to the first instruction of the last", samples, missing=missing_rows)


def list_ways(folder: Path, program: str) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways of starting the program, the bare exec first, and why this machine lacks some."""
    planless = clean_environ()
    planned = {**planless, "LAUNCH_PLAN": str(write_plan(folder / "plan.json"))}
    python = sys.executable
    execute = f"import os; os.execv({program!r}, [{program!r}])"
    plain = {
        "the program alone": Way((program,), planless),
        "`python -I -S -c` that execs it": Way((python, "-I", "-S", "-c", execute), planless),
        "`python -c` that execs it": Way((python, "-c", execute), planless),
        "the shim as `launch` starts it": Way((python, "-I", "-S", str(SHIM), program), planned),
    }
    installed = {
        "`launch-rank`, plan at hand": Way((LAUNCH_RANK, program), planned),
        "`launch-rank` without a plan": Way((LAUNCH_RANK, program), planless),
    }
    scripts = list_scripts(folder, program, planless)
    lacking = {name: find_missing(LAUNCH_RANK) for name in installed}
    lacking |= {name: find_missing("bash", "numactl") for name in scripts}
    ways = plain | installed | scripts
    return (
        {name: way for name, way in ways.items() if not lacking.get(name)},
        {name: why for name, why in lacking.items() if why},
    )


def list_scripts(folder: Path, program: str, environ: Mapping[str, str]) -> dict[str, Way]:
    """What people have today."""
    script = ("bash", str(HERE / "numa-set.sh"), program)
    at_once, usual = (make_script_environ(folder, environ, ms) for ms in (0, NVIDIA_SMI_MS))
    return {
        "`numactl` alone": Way(("numactl", "--cpunodebind=0", "--membind=0", program), environ),
        "numa-set.sh, nvidia-smi answering at once": Way(script, at_once),
        f"numa-set.sh, nvidia-smi answering after {NVIDIA_SMI_MS} ms": Way(script, usual),
    }


def write_plan(path: Path) -> Path:
    """Write a plan of this machine for `RANKS` ranks."""
    path.write_text(json.dumps(plan_to_json(plan(probe("/"), Request(nproc_per_node=RANKS)))))
    return path


def make_script_environ(folder: Path, environ: Mapping[str, str], milliseconds: int) -> dict[str, str]:
    """What numa-set.sh finds: an nvidia-smi that takes its time, and a GPU's numa_node."""
    (folder / "bin").mkdir(exist_ok=True)
    compile_program("nvidia_smi.c", folder / "bin")
    device = folder / "sys" / "bus" / "pci" / "devices" / "0000:07:00.0"
    device.mkdir(parents=True, exist_ok=True)
    (device / "numa_node").write_text("0\n")
    return {
        **environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{environ['PATH']}",
        "SYSFS": str(folder / "sys"),
        "NVIDIA_SMI_MS": str(milliseconds),
    }
