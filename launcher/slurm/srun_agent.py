"""`agent=srun`, each rank a task: what it cannot do, the step's words, and its environment."""

import json
from collections.abc import Mapping
from dataclasses import replace

from launcher.errors import UsageError
from launcher.protocol import LAUNCH_AGENT, LAUNCH_BINDING, LAUNCH_PLAN, LAUNCH_REQUEST
from launcher.slurm.srun_command import Step, render_step
from launcher.slurm.step_environ import clean_for_step, drop_ours

GPUS = ("auto", "gpu")
"""Values of `nproc_per_node` that stand for the job's GPUs on a node."""
RANK_OPTIONS = {"distribution": "block", "input": "none", "quiet": None, "verbose": True}
"""Ranks are numbered node by node as torchrun numbers them, and read nothing. srun tells of tasks that ended
with 0 only if it is verbose."""
STALE = (
    "LOCAL_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    LAUNCH_PLAN,
    LAUNCH_BINDING,
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
    own = {**step.options, **({"verbose": None} if step.options.get("quiet") else {})}
    return render_step(replace(step, options={**RANK_OPTIONS, **own, **count}))


def build_environ(
    environ: Mapping[str, str], told: Mapping[str, str], wishes: Mapping[str, object]
) -> dict[str, str]:
    """Return srun's environment: the user's, what the shim is told, and what is asked of the placement."""
    kept = {name: value for name, value in drop_ours(clean_for_step(environ)).items() if name not in STALE}
    own = {LAUNCH_AGENT: "srun", LAUNCH_REQUEST: json.dumps(wishes)}
    return {"PYTHONUNBUFFERED": "1", **kept, **own, **told}
