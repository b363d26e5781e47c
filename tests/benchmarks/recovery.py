"""Seconds from what happens to a job to the first step after its checkpoint: a rank, a node, a hang.

`recovery` has two ranks on one machine; the others one rank on each of two nodes of a sandbox with three.
`recovery` and `recovery-slurm` kill a rank, `recovery-node` a node with all that runs on it, `recovery-hang`
stops a rank by SIGSTOP; its seconds hold those until the verdict.
"""

import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

from tests.benchmarks.jobs import WAYS, Job, make_command, print_head, print_row, start_job
from tests.programs.start_program import PROGRAM, SMALL, read_losses
from tests.slurm.cluster.conftest import Sandbox, start_sandbox

CULPRIT, CHECKPOINT, DEATH = 1, 10, 15
"""The rank that dies; steps from a checkpoint to the next, and the step of the death."""
PATIENCE: Mapping[str, float] = {"recovery-node": 300.0}
"""Seconds that a recovery may take, if not 120."""
RESUMED = re.compile(r"^start +at step \d+, resumed from [^\n]*\n(?:.*\n)*?step (\d+)/", re.MULTILINE)


def bench_recovery(folder: Path, rounds: int, kind: str) -> None:
    """Run each way of a table in turn, and print the seconds; one that does not go on is told."""
    found: dict[str, list[float]] = {name: [] for name in WAYS[kind]}
    failures: dict[str, str] = {}
    is_local = kind == "recovery"
    with nullcontext() if is_local else start_sandbox("--no-accounting", "--nodes=3") as sandbox:
        for _ in range(rounds):
            for name in WAYS[kind]:
                with tempfile.TemporaryDirectory(prefix="job-", dir=folder) as place:
                    try:
                        found[name].append(measure_way(kind, name, Path(place), sandbox))
                    except (RuntimeError, TimeoutError, LookupError) as error:
                        failures[name] = str(error)
                told = found[name][-1:] or failures[name][:60]
                print(f"{name}: {told}", file=sys.stderr, flush=True)
    title = f"{kind}: from the death to the first step after the checkpoint"
    print_head(title, "s", "min", "median", "max", "of the first")
    base = next((statistics.median(times) for times in found.values() if times), 1.0)
    for name, times in found.items():
        cells = ["not measured", "", "", ""]
        if times:
            middle = statistics.median(times)
            cells = [f"{min(times):.1f}", f"{middle:.1f}", f"{max(times):.1f}", f"{middle / base:.2f}"]
        print_row(name, *cells)
    for name, reason in failures.items():
        print(f"\n{name} did not go on: {reason[-1500:]}")


def measure_way(kind: str, name: str, folder: Path, sandbox: Sandbox | None) -> float:
    """Start the bundled program, strike some steps after a checkpoint, and wait for the next step."""
    options = SMALL | {"steps": "1000000", "checkpoint-every": str(CHECKPOINT)}
    options["checkpoint-dir"] = str(folder / "checkpoints")
    words = [*PROGRAM, *(f"--{key}={value}" for key, value in options.items())]
    command = make_command(WAYS[kind][name], words, ranks=2, nodes=2 if sandbox else 0)
    try:
        with start_job(folder, command, sandbox, words) as job:
            job.await_true(lambda: max(map(newest_step, job.read_rank()), default=0) >= DEATH, 120)
            death = strike(kind, job)
            # torchrun's agents may write a restart into the file of the start before it.
            return (
                job.await_true(lambda: any(map(RESUMED.search, job.read_rank())), PATIENCE.get(kind, 120))
                - death
            )
    finally:
        if sandbox:
            for node in ("n0", "n1", "n2"):
                with suppress(AssertionError):
                    sandbox.break_it("start", node)
            sandbox.wait_empty()


def newest_step(text: str) -> int:
    return max(read_losses(text), default=0)


def strike(kind: str, job: Job) -> float:
    """Let happen to the culprit what the kind says; return when."""
    pid = job.find_rank(CULPRIT)
    death = time.time()
    if kind == "recovery-node":
        assert job.sandbox is not None
        lines = (line.split(maxsplit=2) for line in job.sandbox.list_processes())
        nodes = {int(words[0]): words[1] for words in lines}
        death = time.time()
        job.sandbox.break_it("kill", nodes[pid])
    else:
        os.kill(pid, signal.SIGSTOP if kind == "recovery-hang" else signal.SIGKILL)
    return death
