"""`agent=srun`, each rank a task: the step's words and environment, and what srun tells of its tasks."""

import json
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from launcher.errors import UsageError
from launcher.launch.slurm.environ import drop_ours, scrub_environ
from launcher.launch.slurm.step import Step, render_step

GPUS = ("auto", "gpu")
"""Values of `nproc_per_node` that stand for the job's GPUs on a node."""
RANK_OPTIONS = {"distribution": "block", "input": "none"}
"""Ranks are numbered node by node as torchrun numbers them, and read nothing."""
STALE = (
    "LOCAL_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    "LAUNCH_PLAN",
    "LAUNCH_BINDING",
)
"""Variables that would tell the shim, or the program, of another launcher's agent or plan."""
UNUSED = (
    "max_restarts",
    "monitor_interval",
    "rdzv_backend",
    "rdzv_conf",
    "local_addr",
    "event_log_handler",
    "signals_to_handle",
)
"""Options of `torchrun` for its agent and its rendezvous, of which there are none here."""
TASKS = re.compile(r"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
"""How tasks ended; `_task_finish` in SLURM's src/srun/libsrun/launch.c. One line can tell of several."""
LOST = re.compile(r"srun: error: Node failure on (?P<hosts>\S+)")
"""A node that slurmctld has given up; src/api/step_launch.c."""
EXITED = re.compile(r"Exited with exit code (\d+)")
OUT_OF_MEMORY = "Out Of Memory"
CORE = " (core dumped)"
CANCELLED = " CANCELLED AT "
"""In what slurmstepd says of a step that was ended from outside, or by srun."""
ENDED = "Terminated"
"""The word on tasks that srun itself has ended because another one failed."""
NOISE = "cluster configuration lacks support for cpu binding"
"""What --cpu-bind=none is told, even --quiet, where no TaskPlugin could bind."""


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How tasks ended, by one line of srun's."""

    tasks: tuple[int, ...]
    """Their ranks."""
    exitcode: int
    """As subprocess gives it: -n for signal n."""
    memory: bool = False
    """SLURM says that they came to the job's memory limit."""


def refuse_options(torchrun: Mapping[str, object], min_nodes: int, max_nodes: int) -> None:
    """Raise UsageError for what needs torchrun's agent."""
    if min_nodes != max_nodes:
        raise UsageError(
            f"nodes={min_nodes}:{max_nodes} with agent=srun: only torchrun's agent goes on with fewer nodes,"
            f" set nodes={max_nodes}, or agent=torchrun"
        )
    name = next((name for name in UNUSED if torchrun.get(name)), None)
    if name:
        given, fix = f"torchrun.{name}={torchrun[name]}", "leave it out"
        if name == "max_restarts":
            fix = "cluster.requeue.crash=N starts a failed job again"
        raise UsageError(f"{given} with agent=srun: it is for torchrun's agent, {fix}")


def count_ranks(nproc_per_node: object, environ: Mapping[str, str]) -> int:
    """Return the ranks of each node: a number as given, else the job's GPUs there; raises UsageError."""
    text = str(nproc_per_node)
    if text in GPUS:
        text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    elif text == "cpu":
        text = environ.get("SLURM_CPUS_ON_NODE", "")
    if text.isascii() and text.isdecimal() and 0 < len(text) < 6 and int(text):
        return int(text)
    raise UsageError(
        f"nproc_per_node={nproc_per_node} with agent=srun, and SLURM does not tell of GPUs in this job: set"
        " nproc_per_node=N, or ask for cluster.gpus_per_node=N"
    )


def render_ranks(step: Step, ranks: int) -> tuple[str, ...]:
    """Return srun's command line for `ranks` tasks on each node; see `render_step`.

    All of them see all of the job's CPUs and GPUs on their node, which the shim deals out.
    """
    count = {"ntasks": step.nodes * ranks, "ntasks-per-node": ranks}
    return render_step(replace(step, options={**RANK_OPTIONS, **step.options, **count}))


def build_environ(
    environ: Mapping[str, str], told: Mapping[str, str], wishes: Mapping[str, object]
) -> dict[str, str]:
    """Return srun's environment: the user's, what the shim is told, and what is asked of the placement."""
    kept = {name: value for name, value in drop_ours(scrub_environ(environ)).items() if name not in STALE}
    own = {"LAUNCH_AGENT": "srun", "LAUNCH_REQUEST": json.dumps(wishes)}
    return {"PYTHONUNBUFFERED": "1", **kept, **own, **told}


def parse_end(line: str) -> TaskEnd | None:
    """Read how tasks ended out of a line of srun's stderr; None where it tells something else."""
    found = TASKS.match(line)
    if not found:
        return None
    how = found["how"].strip().removesuffix(CORE)
    exited = EXITED.fullmatch(how)
    try:
        tasks = tuple(expand_tasks(found["tasks"]))
        if how == OUT_OF_MEMORY:
            return TaskEnd(tasks, -signal.SIGKILL, memory=True)
        return TaskEnd(tasks, int(exited[1]) if exited else -number_signal(how))
    except ValueError:
        return None


def expand_tasks(text: str) -> Iterator[int]:
    """Give the numbers of `0-3,7`; raises ValueError."""
    for part in text.split(","):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def number_signal(words: str) -> int:
    """Return the signal that strsignal(3) has these words for; raises ValueError.

    srun does not set a locale, and this interpreter asks the same library.
    """
    for number in signal.valid_signals():
        if signal.strsignal(number) == words:
            return int(number)
    raise ValueError(words)


def parse_lost(line: str) -> str:
    """Return the list of nodes that a line of srun's stderr says are lost; empty for any other line."""
    found = LOST.match(line)
    return found["hosts"] if found else ""


def is_accounted(line: str, before: Iterable[str]) -> bool:
    """Tell whether a line says what the nodes' records say better, where there is a task of ours on each.

    A task that was killed left no record. That srun has the others ended is no news after the first end.
    """
    if found := TASKS.match(line):
        how = found["how"].strip()
        return how == ENDED or bool(EXITED.fullmatch(how))
    return CANCELLED in line and any(map(TASKS.match, before))


def is_noise(line: str) -> bool:
    """Tell whether a line of srun's stderr is of no use to anybody."""
    return NOISE in line
