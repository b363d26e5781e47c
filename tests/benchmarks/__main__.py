"""`python -m tests.benchmarks`: start-up through `launch` and through torchrun, the shim, probe and plan."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from launcher.plan.codec import plan_to_json
from launcher.plan.model import Request
from launcher.plan.planner import plan
from launcher.probe.machine import probe
from tests.benchmarks.measure import measure_in_turn, print_table, time_call
from tests.lab.fsroot import materialize

LAB = Path(__file__).parents[1] / "lab" / "machines"
SHIM = Path(__file__).parents[2] / "launcher" / "rank" / "__main__.py"
FIRST_LINE = (
    "import time\nopen(f'first-{__import__(\"os\").environ[\"RANK\"]}', 'w').write(repr(time.time()))\n"
)


def time_first_line(command: list[str], folder: Path, ranks: int) -> float:
    """Milliseconds from the command's start to the first line of the program on the last rank."""
    marks = [folder / f"first-{rank}" for rank in range(ranks)]
    for mark in marks:
        mark.unlink(missing_ok=True)
    start = time.time()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return 1e3 * (max(float(mark.read_text()) for mark in marks) - start)


def bench_start(folder: Path, ranks: int, rounds: int) -> None:
    """From the command line to the program's first line."""
    program = folder / "program.py"
    program.write_text(FIRST_LINE)
    python = sys.executable
    torchrun = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(program),
    ]
    launch = [python, "-m", "launcher", f"nproc_per_node={ranks}", "--", str(program)]
    things = {
        f"torchrun, {ranks} ranks": lambda: time_first_line(torchrun, folder, ranks),
        f"launch, {ranks} ranks": lambda: time_first_line(launch, folder, ranks),
    }
    print_table("Command line to the first line of the user's program", measure_in_turn(things, rounds))


def bench_shim(folder: Path, rounds: int) -> None:
    """The shim with a plan at hand, beside what any Python costs."""
    plan_path = folder / "plan.json"
    plan_path.write_text(json.dumps(plan_to_json(plan(probe("/"), Request(nproc_per_node=1)))))
    environ = {**os.environ, "LAUNCH_PLAN": str(plan_path), "LOCAL_RANK": "0", "LAUNCH_QUIET": "1"}
    planless = {name: value for name, value in environ.items() if name != "LAUNCH_PLAN"}
    shim = [sys.executable, "-I", "-S", str(SHIM), "/bin/true"]
    things = {
        "python -c pass": lambda: time_process([sys.executable, "-c", "pass"], environ),
        "/bin/true": lambda: time_process(["/bin/true"], environ),
        "the shim, then /bin/true": lambda: time_process(shim, environ),
        "the shim without a plan at hand": lambda: time_process(shim, planless),
    }
    print_table("One rank's shim", measure_in_turn(things, rounds))


def time_process(command: list[str], environ: dict[str, str]) -> float:
    """Milliseconds of a whole process."""
    return time_call(lambda: subprocess.run(command, env=environ, check=True))


def bench_parts(folder: Path, rounds: int) -> None:
    """Probe and plan, in a process that has them loaded."""
    write_tree: Callable[[object, Path], object] = materialize
    write_tree(json.loads((LAB / "dgx-a100.json").read_text()), folder / "dgx")
    here, dgx = probe("/"), probe(folder / "dgx")
    things = {
        "probe of this machine": lambda: time_call(lambda: probe("/")),
        "plan of this machine, 2 ranks": lambda: time_call(lambda: plan(here, Request(nproc_per_node=2))),
        "probe of a DGX A100's tree, 256 CPUs": lambda: time_call(lambda: probe(folder / "dgx")),
        "plan of a DGX A100, 8 ranks": lambda: time_call(lambda: plan(dgx, Request())),
    }
    print_table("Probe and plan", measure_in_turn(things, rounds), compare=False)


def main() -> None:
    """Run all benchmarks."""
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, Python {platform.python_version()}, torch {version('torch')}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench_start(folder, ranks=2, rounds=10)
        bench_shim(folder, rounds=40)
        bench_parts(folder, rounds=20)


if __name__ == "__main__":
    main()
