"""From the command line to the program's first line, through `launch` and through torchrun."""

import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.measure import measure_in_turn, print_table

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


def bench_start(folder: Path, rounds: int, ranks: int = 2) -> None:
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
