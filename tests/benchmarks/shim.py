"""From a rank's start to its program's first instruction: `launch-rank`, numa-set.sh and bare execs."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from launcher.plan.model import Request, plan_to_json
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.jobs import HERE
from tests.benchmarks.measure import measure_in_turn, print_table, time_process
from tests.seam import clean_environ

SHIM = HERE.parents[1] / "launcher" / "rank" / "__main__.py"
LAUNCH_RANK = str(Path(sys.executable).with_name("launch-rank"))
RANKS = 8
NVIDIA_SMI_MS = 50
"""What nvidia-smi takes at the least."""
MARK = struct.Struct("@q")


def bench_shim(folder: Path, rounds: int) -> None:
    """One rank, and eight at once; the goal is 15 ms more than the program alone with a plan at hand."""
    if shutil.which("cc") is None:
        print("\nshim: not measured, there is no C compiler")
        return
    program = str(compile_program("first.c", folder))
    ways = {name: way for name, way in list_ways(folder, program).items() if shutil.which(way[0][0])}
    things = {name: partial(time_first, *way) for name, way in ways.items()}
    things["`python -c pass`, the whole process"] = partial(time_process, (sys.executable, "-c", "pass"))
    print_table(
        "One rank, from its start to the program's first instruction", measure_in_turn(things, rounds)
    )
    many = {name: partial(time_first, *way, ranks=RANKS) for name, way in ways.items()}
    samples = measure_in_turn(many, max(1, rounds // 2))
    print_table(f"{RANKS} ranks at once, to the first instruction of the last", samples)


def list_ways(folder: Path, program: str) -> dict[str, tuple[Sequence[str], Mapping[str, str]]]:
    """Return command lines with their variables, the bare program first."""
    planless, python = clean_environ(), sys.executable
    (folder / "plan.json").write_text(
        json.dumps(plan_to_json(plan(probe("/"), Request(nproc_per_node=RANKS))))
    )
    planned = {**planless, "LAUNCH_PLAN": str(folder / "plan.json")}
    execute = f"import os; os.execv({program!r}, [{program!r}])"
    # What numa-set.sh finds: an nvidia-smi that takes its time, and a GPU's numa_node.
    (folder / "bin").mkdir()
    compile_program("nvidia_smi.c", folder / "bin")
    device = folder / "sys/bus/pci/devices/0000:07:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("0\n")
    path = f"{folder / 'bin'}{os.pathsep}{planless['PATH']}"
    scripts = {**planless, "PATH": path, "SYSFS": str(folder / "sys")}
    script = ("bash", str(HERE / "numa-set.sh"), program)
    ways: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
        "the program alone": ((program,), planless),
        "`python -c` that execs it": ((python, "-c", execute), planless),
        "the shim as `launch` starts it": ((python, "-I", "-S", str(SHIM), program), planned),
        "`launch-rank`, plan at hand": ((LAUNCH_RANK, program), planned),
        "`launch-rank` without a plan": ((LAUNCH_RANK, program), planless),
    }
    if shutil.which("numactl"):
        for name, ms in (("at once", "0"), (f"after {NVIDIA_SMI_MS} ms", str(NVIDIA_SMI_MS))):
            ways[f"numa-set.sh, nvidia-smi answering {name}"] = script, {**scripts, "NVIDIA_SMI_MS": ms}
    return ways


def compile_program(name: str, folder: Path) -> Path:
    """Compile one of the C programs here, statically if there is a static C library."""
    program = folder / name.removesuffix(".c").replace("_", "-")
    command = ["cc", "-O2", "-o", str(program), str(HERE / name)]
    if subprocess.run([*command, "-static"], capture_output=True, check=False).returncode:
        subprocess.run(command, check=True)
    return program


def time_first(command: Sequence[str], environ: Mapping[str, str], ranks: int = 1) -> float:
    """Milliseconds from before the first rank's start to the first instruction of the last rank's program.

    Each rank runs `command`, which ends up as the compiled first.c; raises RuntimeError if one does not.
    """
    reading, writing = os.pipe()
    start = time.monotonic_ns()
    processes = []
    for rank in map(str, range(ranks)):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        processes.append(
            subprocess.Popen(command, env={**environ, **names}, stdout=writing, stderr=subprocess.DEVNULL)
        )
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        marks = [int(mark) for (mark,) in MARK.iter_unpack(stream.read())]
    codes = [process.wait() for process in processes]
    if any(codes) or len(marks) != ranks:
        raise RuntimeError(f"{command} ended with {codes} and {len(marks)} marks")
    return (max(marks) - start) / 1e6
