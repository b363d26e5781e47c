"""Seconds from what befalls a SLURM job to the first step after the checkpoint: a rank, a node, a hang.

Two nodes of a sandbox with three, one rank on each; they share this machine. `recovery-slurm` kills a rank,
`recovery-node` a node with all that runs on it, `recovery-hang` stops a rank by SIGSTOP.
"""

import getpass
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tests.benchmarks.recovery import (
    CULPRIT,
    Recovered,
    find_rank,
    kill_rank,
    make_program,
    measure_death,
    print_recovered,
)
from tests.benchmarks.slurm import HEAD, LAUNCH, SMALL, TORCHRUN, Bench
from tests.slurm.cluster.conftest import Sandbox, start_sandbox

NODES, ALLOCATED = 2, 3
PATIENCE: Mapping[str, float] = {"rank": 60.0, "node": 300.0, "hang": 120.0}
"""Seconds that a recovery may take: through the queue, and after a verdict, it is longer."""
TITLES = {
    "rank": "SIGKILL of a rank",
    "node": "Death of a node",
    "hang": "A rank that stands still (SIGSTOP)",
}
BY_HAND = "torchrun.sbatch by hand"


OWN_STORE = "TORCHELASTIC_USE_AGENT_STORE=False"
"""Without it, restarted ranks of several nodes meet the addresses of those before them (pytorch#135712)."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A way of running the job; by hand if it has no settings."""

    name: str
    settings: tuple[str, ...] | None = None


RANK_DIES = (
    Struck(f"{BY_HAND}, --max-restarts=3"),
    Struck(f"{BY_HAND}, --max-restarts=3, {OWN_STORE}"),
    Struck("launch agent=torchrun torchrun.max_restarts=3", ("agent=torchrun", "torchrun.max_restarts=3")),
    Struck("launch restarts=3, exec (start.warm=off)", ("agent=direct", "restarts=3", "start.warm=off")),
    Struck("launch restarts=3, warm", ("agent=direct", "restarts=3")),
    Struck("launch cluster.requeue.crash=3: through the queue", ("cluster.requeue.crash=3",)),
)
NODE_DIES = (
    Struck(f"{BY_HAND}, --requeue"),
    Struck("launch, no spare: through the queue", ("agent=direct",)),
    Struck("launch cluster.spares=1", ("cluster.spares=1",)),
)
HANGS = (
    Struck("launch agent=torchrun watch.on_hang=restart", ("agent=torchrun", "watch.on_hang=restart")),
    Struck("launch watch.on_hang=restart", ("agent=direct", "watch.on_hang=restart")),
)


def make_script(words: list[str], *, own_store: bool) -> str:
    """Return a job script as people write it, which restarts ranks, and is requeued if a node is lost."""
    options = "--nproc-per-node=1 --max-restarts=3 --redirects=3 --log-dir=logs"
    torchrun = TORCHRUN.replace("--nproc-per-node=1", options)
    store = f"export {OWN_STORE}\n" if own_store else ""
    return HEAD + store + torchrun.replace('program.py "$@"', shlex.join(words))


def bench_rank_death(folder: Path, rounds: int) -> None:
    """SIGKILL of a rank."""
    bench_struck(folder, rounds, RANK_DIES, "rank", lambda _, job: kill_rank(job))


def bench_node_death(folder: Path, rounds: int) -> None:
    """SIGKILL of slurmd and of all processes of the second node, which is then down."""
    bench_struck(folder, rounds, NODE_DIES, "node", kill_node)


def bench_hang_recovery(folder: Path, rounds: int) -> None:
    """SIGSTOP of a rank; the seconds hold those until the verdict, at least 20."""
    bench_struck(folder, rounds, HANGS, "hang", lambda _, job: stop_rank(job))


def bench_struck(
    folder: Path, rounds: int, ways: tuple[Struck, ...], kind: str, strike: Callable[[Sandbox, Path], float]
) -> None:
    """Run each way in turn, and print the seconds; a way that does not go on is told, and left out."""
    found: dict[str, list[Recovered]] = {way.name: [] for way in ways}
    failures: dict[str, str] = {}
    with start_sandbox("--no-accounting", f"--nodes={ALLOCATED}") as sandbox:
        for _, way in product(range(rounds), ways):
            try:
                found[way.name].append(
                    measure_way(sandbox, folder, way, partial(strike, sandbox), PATIENCE[kind])
                )
            except (RuntimeError, TimeoutError, LookupError) as error:
                failures[way.name] = str(error)
            print(
                f"{way.name}: {found[way.name][-1:] or failures[way.name][:60]}", file=sys.stderr, flush=True
            )
    print_recovered(f"{TITLES[kind]}, {NODES} nodes of SLURM", found)
    for name, reason in failures.items():
        print(f"\n{name} did not go on: {reason[-1500:]}")


def measure_way(
    sandbox: Sandbox, folder: Path, way: Struck, strike: Callable[[Path], float], patience: float
) -> Recovered:
    """Submit a job, strike, and wait for the next step; the cluster is whole and idle at the return."""
    job = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
    words = make_program(job)
    bench = Bench(sandbox, job)
    if way.settings is None:
        (job / "torchrun.sbatch").write_text(make_script(words, own_store=OWN_STORE in way.name))
        bench.submit("sbatch", f"-N{NODES}", "--requeue", "--open-mode=append", "torchrun.sbatch")
    else:
        bench.submit(*LAUNCH, f"nodes={NODES}", "cluster=slurm", *SMALL, *way.settings, "--", *words)
    try:
        return measure_death(job, partial(strike, job), lambda: is_idle(sandbox), patience)
    except TimeoutError as error:
        raise RuntimeError(f"{error}: {read_consoles(job)}") from error
    finally:
        sandbox.run("scancel", f"--user={getpass.getuser()}")
        sandbox.run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
        for name in (f"n{number}" for number in range(ALLOCATED)):
            with suppress(AssertionError):
                sandbox.break_it("start", name)
        bench.wait_idle()


def is_idle(sandbox: Sandbox) -> bool:
    """Tell whether no job is there that waits, runs or ends."""
    return not sandbox.run("squeue", "--noheader").strip()


def read_consoles(job: Path) -> str:
    """Return the end of what the job has printed itself."""
    paths = (*job.glob("by-hand-*.out"), *job.glob("runs/*/*/logs/slurm-*.out"))
    return "".join(path.read_text(errors="replace")[-1500:] for path in paths)


def kill_node(sandbox: Sandbox, job: Path) -> float:
    """Kill the node of the culprit rank; return when."""
    pid = find_rank(job, CULPRIT)
    lines = (line.split(maxsplit=2) for line in sandbox.list_processes())
    nodes: Mapping[int, str] = {int(words[0]): words[1] for words in lines}
    death = time.time()
    sandbox.break_it("kill", nodes[pid])
    return death


def stop_rank(job: Path) -> float:
    """SIGSTOP to the culprit; return when."""
    os.kill(find_rank(job, CULPRIT), signal.SIGSTOP)
    return time.time()
