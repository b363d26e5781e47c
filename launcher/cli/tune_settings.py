"""What `launch tune` may be asked, and what its trials have in common."""

import os
from typing import TYPE_CHECKING

from launcher.cli.run import specify_job
from launcher.config.composition import read_values
from launcher.config.run_path import choose_run_path
from launcher.errors import UsageError
from launcher.launch.job import JobSpec
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS

if TYPE_CHECKING:
    from launcher.config.composition import Composed

OURS = (LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT, LAUNCH_METER)
"""Variables that a trial sets."""


def specify_search(composed: "Composed", program: tuple[str, ...] | None) -> JobSpec:
    """Check what is asked, and return what the trials have in common; raises LaunchError."""
    measure_here(composed)
    run_path = choose_run_path(composed, program, suffix="-tune")
    spec = specify_job(composed, program, run_path, os.environ, "launch tune")
    for name in OURS:
        if name in spec.config.env:
            raise UsageError(f"env.{name} is set, which `launch tune` chooses: leave it out")
    return spec


def measure_here(composed: "Composed") -> None:
    """Have the trials run on this machine; raises UsageError for a job that is to run elsewhere."""
    values = read_values(composed, ("nodes", "cluster.kind", "run_dir", "new_run_dir"))
    nodes, kind = str(values["nodes"]), str(values["cluster.kind"])
    for key in ("run_dir", "new_run_dir"):
        if values[key] is not None:
            raise UsageError(
                f"{key}={values[key]}: `launch tune` makes a run directory of its own, leave it out"
            )
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
