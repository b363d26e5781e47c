"""How all benchmarks run a job: start it by a tool with settings, wait, read its run directory."""

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.seam import clean_environ, find_processes
from tests.slurm.cluster.conftest import Sandbox

HERE = Path(__file__).parent
WAYS: Mapping[str, Mapping[str, Sequence[str]]] = tomllib.loads((HERE / "jobs.toml").read_text())
"""Tables of ways to run a job: the tool, then its settings."""
CLUSTER = ("nproc_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_task=1", "cluster.mem=1G")
SCRIPT = f"""\
#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=1G
#SBATCH --output=by-hand-%j.out
#SBATCH --requeue
#SBATCH --open-mode=append

echo $EPOCHREALTIME > begun
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE
srun --kill-on-bad-exit=1 --wait=60 {sys.executable} -m torch.distributed.run \\
    --nnodes="$SLURM_NNODES" --nproc-per-node=1 --max-restarts=3 --redirects=3 --log-dir=logs \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-endpoint="$first":$((20000 + SLURM_JOB_ID % 10000)) \\
"""
"""slurm/torchrun.sbatch, cut to the sandbox; the program follows."""
LOGS = ("runs/*/*/logs/*/rank-{}.out", "logs/**/{}/stdout.log")
"""What `launch` and torchrun write of a rank: a file for each start."""


def make_command(way: Sequence[str], program: Sequence[str], ranks: int = 1, nodes: int = 0) -> list[str]:
    """Return the command line that runs a program; with `nodes` on SLURM, one rank on each."""
    tool, *settings = way
    python = [sys.executable, "-m"]
    if tool == "launch":
        where = ["cluster=slurm", f"nodes={nodes}", *CLUSTER] if nodes else [f"nproc_per_node={ranks}"]
        return [*python, "launcher", *where, *settings, "--", *program]
    if tool == "sbatch":
        return ["sbatch", f"-N{nodes}", *settings, "by-hand.sbatch"]
    if tool == "torchrun":
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [*python, *torchrun, *settings, *program]
    quiet = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    kind = "--multi_gpu" if ranks > 1 else "--cpu"
    words = (kind, f"--num_processes={ranks}", "--num_cpu_threads_per_process=1", *quiet)
    return [*python, "accelerate.commands.launch", *words, *settings, *program]


def make_environ() -> dict[str, str]:
    """Return a user's environment, which keeps bytecode as Python does by itself."""
    environ = clean_environ()
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


def read_state(folder: Path) -> dict[str, Any]:
    """Return what the watch says of the job that runs in a folder; empty if there is nothing."""
    for path in folder.glob("runs/*/*/watch/job.json"):
        with contextlib.suppress(OSError, ValueError):
            state: dict[str, Any] = json.loads(path.read_text())
            return state
    return {}


@dataclass(slots=True)
class Job:
    """A started job, or the command that has submitted it."""

    process: "subprocess.Popen[str]"
    folder: Path
    sandbox: Sandbox | None
    lines: list[tuple[float, str]] = field(default_factory=list)
    """What the command has printed, with the time of each line."""

    @property
    def is_over(self) -> bool:
        """Whether the command has ended, and on SLURM the job."""
        ended = self.process.poll() is not None
        return ended and not (self.sandbox and self.sandbox.run("squeue", "--noheader").strip())

    def read_rank(self, rank: int = 0) -> list[str]:
        """Return what a rank has printed, by starts."""
        paths = (path for pattern in LOGS for path in sorted(self.folder.glob(pattern.format(rank))))
        return [path.read_text(errors="replace") for path in paths]

    def find_rank(self, rank: int) -> int:
        """Return a rank's PID: as `launch` has recorded it, or as its variables tell under torchrun."""
        for path in self.folder.glob(f"runs/*/*/rank-{rank}.applied.json"):
            return int(json.loads(path.read_text())["pid"])
        for pid, words in find_processes(str(self.folder)).items():
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environ and "torch.distributed.run" not in words:
                return pid
        raise LookupError(f"rank {rank} is not found")

    def find_line(self, pattern: str) -> tuple[float, str] | None:
        """Return the first line with a text, and when it came."""
        return next((line for line in self.lines if re.search(pattern, line[1])), None)

    def await_true(self, check: Callable[[], object], patience: float) -> float:
        """Wait until something is true; return when that was (s since the epoch).

        Raises TimeoutError if it does not come, or the job is over, which is asked for once a second.
        """
        end, ask = time.monotonic() + patience, time.monotonic() + 1
        while not check():
            now = time.monotonic()
            if now > end or (now > ask and self.is_over and not check()):
                said = "".join(line for _, line in self.lines[-20:])
                raise TimeoutError(
                    f"{'the job is over' if now <= end else f'not in {patience:.0f} s'}: {said}"
                )
            ask = now + 1 if now > ask else ask
            time.sleep(0.005)
        return time.time()

    def wait(self, limit: float = 300) -> None:
        """Wait until the job is over; raises RuntimeError if its command fails, TimeoutError."""
        end = time.monotonic() + limit
        while not self.is_over:
            if time.monotonic() > end:
                raise TimeoutError(f"not over after {limit:.0f} s")
            time.sleep(0.02 if self.sandbox is None else 0.1)
        if self.process.returncode:
            said = "".join(line for _, line in self.lines[-20:])
            raise RuntimeError(f"exit code {self.process.returncode}: {self.process.args!r}\n{said}")


@contextlib.contextmanager
def start_job(
    folder: Path,
    command: Sequence[str],
    sandbox: Sandbox | None = None,
    program: Sequence[str] = (),
) -> Iterator[Job]:
    """Start a job in a folder; whatever is left of it at the end is killed. `program` is what sbatch runs."""
    folder.mkdir(parents=True, exist_ok=True)
    if sandbox:
        (folder / "by-hand.sbatch").write_text(f"{SCRIPT}    {shlex.join(program)}\n")
    mark = f"LAUNCH_TEST_MARK={uuid.uuid4()}"
    base = sandbox.environ if sandbox else make_environ()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**base, **dict([mark.split("=")])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    job = Job(process, folder, sandbox)

    def read() -> None:
        for line in process.stdout or ():
            job.lines.append((time.time(), line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield job
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        if sandbox:
            manifests = [json.loads(path.read_text()) for path in folder.glob("runs/*/*/manifest.json")]
            ids = [str(one["slurm"]["job_id"]) for one in manifests if one.get("slurm")]
            ids += re.findall(r"Submitted batch job (\d+)", "".join(line for _, line in job.lines))
            for words in (["--signal=KILL", "--full"], []):
                with contextlib.suppress(AssertionError):  # the job is over
                    sandbox.run("scancel", *words, *ids)
        for pid in find_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        reader.join(5)


# Paired timing: A and B in turn, so that a machine whose speed drifts slows both


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one thing, in milliseconds."""

    name: str
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def list_cells(self, base: "Sample") -> list[str]:
        cells = [self.name, *(f"{time:.1f}" for time in (min(self.times), self.median, max(self.times)))]
        if base is self:
            return [*cells, "", ""]
        extra = statistics.median(a - b for a, b in zip(self.times, base.times, strict=True))
        return [*cells, f"{extra:+.1f}", f"{self.median / base.median:.2f}"]


def print_head(title: str, *names: str) -> None:
    """Print the head of a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|", flush=True)


def print_row(*cells: object) -> None:
    """Print a row of it."""
    print(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |", flush=True)


def measure_in_turn(things: Mapping[str, Callable[[], float]], rounds: int) -> list[Sample]:
    """Call each in turn for `rounds` rounds after one that does not count; each returns milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in things}
    for number in range(rounds + 1):
        for name, thing in things.items():
            taken = thing()
            if number:
                times[name].append(taken)
    return [Sample(name, tuple(values)) for name, values in times.items()]


def time_call(thing: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    thing()
    return 1e3 * (time.perf_counter() - start)


def time_process(command: Sequence[str], environ: Mapping[str, str] | None = None) -> float:
    """Milliseconds of a whole process, its output thrown away; raises CalledProcessError where it fails."""
    sink = subprocess.DEVNULL
    return time_call(lambda: subprocess.run(command, env=environ, check=True, stdout=sink, stderr=sink))


def measure_children() -> float:
    """CPU seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def print_table(title: str, samples: Sequence[Sample]) -> None:
    """Print times, with differences and ratios to the first row, pair by pair."""
    print_head(title, "ms", "min", "median", "max", "more than the first", "ratio")
    for sample in samples:
        print_row(*sample.list_cells(samples[0]))
