"""SLURM: what `launch` costs beside a script by hand, on a sandbox cluster of its own.

The nodes are all this machine: several of them start one after another where it has few cores.
"""

import getpass
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher.text import count_things
from tests.benchmarks.measure import measure_in_turn, print_goals, print_table, time_call
from tests.benchmarks.start import FIRST_LINE, IMPORTS, make_environ
from tests.slurm.cluster.conftest import Sandbox, start_sandbox

SIZES = (1, 2, 4, 8)
"""Nodes, with one rank on each."""
LAUNCH = (sys.executable, "-m", "launcher")
SMALL = ("nproc_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_task=1", "cluster.mem=1G")
PATIENCE = 120.0
"""Seconds that a job has."""
PROGRAM = FIRST_LINE
HEAD = """\
#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=1G
#SBATCH --output=by-hand-%j.out

echo $EPOCHREALTIME > begun
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
"""
TORCHRUN = f"""\
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE

srun --kill-on-bad-exit=1 --wait=60 {sys.executable} -m torch.distributed.run \\
    --nnodes="$SLURM_NNODES" \\
    --nproc-per-node=1 \\
    --rdzv-backend=c10d \\
    --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\
    program.py "$@"
"""
BY_HAND = {"torchrun": HEAD + TORCHRUN}
"""The form of slurm/torchrun.sbatch, cut to the sandbox."""

COMPARED: Mapping[str, tuple[str, ...]] = {
    "torchrun": ("agent=torchrun", "agent=direct"),
}
"""Settings of `launch` that are held against a script by hand; the last has the goal."""
GOALS = {"torchrun": 0.5}
"""Of the time by hand."""
BEGUN = "cluster.setup=['echo $EPOCHREALTIME > begun']"
"""The job's first instruction, as in the scripts."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A cluster, and a folder to submit from."""

    sandbox: Sandbox
    folder: Path
    submitted: list[str] = field(default_factory=list)

    def submit(self, *command: str) -> None:
        """Run a command that submits a job; raises RuntimeError."""
        environ = self.sandbox.environ
        done = subprocess.run(
            command, cwd=self.folder, env=environ, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}")

    def time_submission(self, *command: str) -> float:
        """Milliseconds of a command that submits a job, which goes again before it runs."""
        taken = time_call(lambda: self.submit(*command))
        self.sandbox.run("scancel", f"--user={getpass.getuser()}", "--state=PENDING")
        return taken

    def time_start(self, nodes: int, *command: str) -> float:
        """Milliseconds from the job's first instruction to the program's first line on the last rank."""
        marks = [self.folder / f"first-{rank}" for rank in range(nodes)]
        for mark in (*marks, self.folder / "begun"):
            mark.unlink(missing_ok=True)
        self.submit(*command)
        self.wait_idle()
        if not all(mark.exists() for mark in marks):
            logs = (*self.folder.glob("by-hand-*.out"), *self.folder.glob("runs/*/*/logs/slurm-*.out"))
            raise RuntimeError(max(logs, key=lambda path: path.stat().st_mtime).read_text())
        begun = float((self.folder / "begun").read_text())
        return 1e3 * (max(float(mark.read_text()) for mark in marks) - begun)

    def wait_idle(self) -> None:
        """Wait until no job is left; raises TimeoutError."""
        end = time.monotonic() + PATIENCE
        while self.sandbox.run("squeue", "--noheader").strip():
            if time.monotonic() > end:
                raise TimeoutError(self.sandbox.run("squeue"))
            time.sleep(0.1)


def bench_slurm(folder: Path, rounds: int) -> None:
    """Submission, and starts of a program without torch; half as many rounds on 4 nodes and on 8."""
    with prepare(folder, FIRST_LINE) as bench:
        bench_submission(bench, 2 * rounds)
        for agent in BY_HAND:
            bench_job_starts(bench, agent, rounds, "first line of a program without torch")


def bench_slurm_start(folder: Path, rounds: int) -> None:
    """Starts of a program that imports torch."""
    with prepare(folder, IMPORTS + FIRST_LINE) as bench:
        for agent in BY_HAND:
            bench_job_starts(bench, agent, rounds, "first line after `import torch`")


@contextmanager
def prepare(folder: Path, program: str) -> Iterator[Bench]:
    """A cluster, with the program and the job scripts in a folder."""
    (folder / "program.py").write_text(program)
    for name, script in BY_HAND.items():
        (folder / f"{name}.sbatch").write_text(script)
    with start_sandbox("--no-accounting", f"--nodes={max(SIZES)}") as sandbox:
        sandbox.environ.update(make_environ(), SLURM_CONF=str(sandbox.conf))
        sandbox.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        yield Bench(sandbox, folder)


def bench_submission(bench: Bench, rounds: int) -> None:
    """From the command line to the job's number, and a dry run for many nodes."""
    later, program = "--begin=now+1hour", ("--", "program.py")
    launch = (*LAUNCH, "nodes=2", *SMALL, "+cluster.additional.begin=now+1hour", *program)
    dry = (*LAUNCH, "nodes=1000", *SMALL, "dry_run=true", *program)
    things = {
        "sbatch of a script by hand": lambda: bench.time_submission(
            "sbatch", later, "-N2", "torchrun.sbatch"
        ),
        "launch nodes=2": lambda: bench.time_submission(*launch),
        "launch nodes=1000 dry_run=true": lambda: time_call(lambda: bench.submit(*dry)),
    }
    print_table("Command line to the job's number", measure_in_turn(things, rounds))


def bench_job_starts(bench: Bench, agent: str, rounds: int, line: str) -> None:
    """From the job's first instruction to a line of the program, beside a script by hand, by nodes."""
    for nodes in SIZES:
        things: dict[str, Callable[[], float]] = {
            f"{agent}.sbatch by hand": partial(
                bench.time_start, nodes, "sbatch", f"-N{nodes}", f"{agent}.sbatch"
            )
        }
        for setting in COMPARED[agent]:
            words = ("cluster=slurm", f"nodes={nodes}", *SMALL, BEGUN, setting, "--", "program.py")
            things[f"launch {setting}"] = partial(bench.time_start, nodes, *LAUNCH, *words)
        samples = measure_in_turn(things, rounds if nodes < 4 else -(-rounds // 2))
        print_table(f"Job's start to the {line}, last of {count_things(nodes, 'node')}", samples)
        print_goals(samples, {f"launch {COMPARED[agent][-1]}": GOALS[agent]})
