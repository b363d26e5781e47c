"""From the command line to the program's first line on the last rank, for each way to start it; the memory.

`start-1`, `start-2` and `start-8` start a program that imports torch with as many ranks, `start-bare` one
without torch. `slurm` does so from the job's first instruction, and times the submission.
"""

import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from launcher.plan.model import Request, plan_to_json
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.jobs import (
    HERE,
    WAYS,
    Job,
    Sample,
    make_command,
    make_environ,
    measure_children,
    measure_in_turn,
    print_head,
    print_row,
    print_table,
    start_job,
    time_call,
    time_process,
)
from tests.seam import clean_environ
from tests.slurm.cluster.conftest import Sandbox, start_sandbox

FIRST = "import os, time\nopen(f'first-{os.environ.get(\"RANK\", 0)}', 'w').write(repr(time.time()))\n"
IMPORTS = "import torch\n"
WAITS = "import pathlib\nwhile not pathlib.Path('done').exists():\n    time.sleep(0.05)\n"
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
            title = f"Job's start to the line after `import torch`, last of {nodes} nodes"
            print_table(title, measure_in_turn(ways, rounds))


def time_job(sandbox: Sandbox, folder: Path, way: Sequence[str], nodes: int) -> float:
    """Milliseconds from the job's first instruction to the program's first line on the last rank."""
    begun = "cluster.setup=['echo $EPOCHREALTIME > begun']"
    whole = [*way, *([begun] if way[0] == "launch" else [])]
    command = make_command(whole, ["program.py"], nodes=nodes)
    with start_job(folder, command, sandbox=sandbox, program=["program.py"]) as job:
        job.wait()
    return 1e3 * (read_last(folder, nodes) - float((folder / "begun").read_text()))


# From a rank's start to its program's first instruction: `launch-rank`, numa-set.sh and bare execs

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
