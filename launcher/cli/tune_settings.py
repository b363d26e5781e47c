"""What `launch tune` may be asked, and what its trials have in common."""

import os
from typing import TYPE_CHECKING

from launcher.config.composition import resolve
from launcher.config.schema import LaunchConfig
from launcher.config.validation import FORMATS, check_choice, check_least
from launcher.errors import UsageError
from launcher.launch.job import Draft, draft_job
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS

if TYPE_CHECKING:
    from launcher.config.composition import Composed

OURS = (LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT, LAUNCH_METER)
"""Variables that a trial sets."""


def draft_search(composed: "Composed", words: tuple[str, ...] | None) -> Draft:
    """Check what is asked, and return what the trials have in common; raises LaunchError."""
    config = resolve(composed)
    check_settings(config)
    come_here(composed, config)
    draft = draft_job(composed, words, os.environ, "launch tune")
    for name in OURS:
        if name in draft.config.env:
            raise UsageError(f"env.{name} is set, which `launch tune` chooses: leave it out")
    return draft


def check_settings(config: LaunchConfig) -> None:
    """Raise UsageError for settings that mean nothing."""
    check_choice("format", config.format, FORMATS)
    check_least("tune.steps", config.tune.steps, 8)
    if config.run_dir is not None:
        raise UsageError(
            f"run_dir={config.run_dir}: `launch tune` makes a run directory of its own, leave it out"
        )
    for key in ("seconds", "timeout"):
        if not getattr(config.tune, key) > 0:
            raise UsageError(f"tune.{key}={getattr(config.tune, key):g}: give seconds, more than 0")


def come_here(composed: "Composed", config: LaunchConfig) -> None:
    """Have the trials run on this machine; raises UsageError for a job that is to run elsewhere."""
    nodes, kind = str(config.nodes), config.cluster.kind
    if nodes not in ("auto", "1", "1:1"):
        raise UsageError(f"nodes={nodes}: `launch tune` measures on one node, leave nodes out")
    if kind in ("slurm", "manual"):
        raise UsageError(
            f"cluster={kind}: `launch tune` runs the program here, again and again: run it on a node like"
            " those of the job, inside an allocation (`salloc`, then `srun -N1 -n1 launch tune …`)"
        )
    job = os.environ.get("SLURM_JOB_ID")
    if kind != "local" and job and "SLURMD_NODENAME" not in os.environ:
        raise UsageError(
            f"this shell belongs to SLURM job {job}, but is not on its nodes: `srun -N1 -n1 launch tune …`,"
            " or set cluster=local to measure here"
        )
    composed.tree.cluster.kind, composed.tree.nodes = "local", 1
