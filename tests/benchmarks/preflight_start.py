"""Preflight: what it adds to the start of a SLURM job, on a sandbox whose nodes are all this machine."""

from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.measure import measure_in_turn, print_table
from tests.benchmarks.slurm import LAUNCH, PROGRAM, Bench
from tests.slurm.cluster.conftest import start_sandbox

NODES = 4
WHOLE = ("nproc_per_node=1", "cluster.gpus_per_node=0")
"""All of a node's CPUs and memory."""
KINDS = ("off", "light", "deep")


def bench_preflight_start(folder: Path, rounds: int) -> None:
    """From the job's start to the program's first line on the last rank, without and with checks."""
    (folder / "program.py").write_text(PROGRAM)
    with start_sandbox("--no-accounting", f"--nodes={NODES}") as sandbox:
        bench = Bench(sandbox, folder)
        things = {f"preflight={kind}, {NODES} nodes": time_kind(bench, kind) for kind in KINDS}
        print_table("Job's start to the program's first line, agent=srun", measure_in_turn(things, rounds))


def time_kind(bench: Bench, kind: str) -> Callable[[], float]:
    """What times a start with checks of a kind."""
    mark = "cluster.setup=['echo $EPOCHREALTIME > begun']"
    words = (f"nodes={NODES}", "cluster=slurm", "agent=srun", f"preflight={kind}", *WHOLE, mark)
    return lambda: bench.time_start(NODES, *LAUNCH, *words, "--", "program.py")
