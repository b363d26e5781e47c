"""Which node of the job a task is, from what SLURM and the head have told it."""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_RENDEZVOUS, name_host


@dataclass(frozen=True, slots=True)
class Place:
    """One task's place in the step."""

    host: str
    node_rank: int
    nodes: int
    """Of the step."""
    attempt: int
    endpoint: str
    step: str
    """`JOB.STEP`."""


def read_place(environ: Mapping[str, str]) -> Place:
    """Read the variables; a task that is started by hand is the only one of its job."""
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    return Place(
        name_host(environ),
        int(environ.get("SLURM_NODEID", "0")),
        int(environ.get("SLURM_STEP_NUM_NODES", "1")),
        int(environ.get(LAUNCH_ATTEMPT, "0")),
        environ.get(LAUNCH_RENDEZVOUS, "localhost:0"),
        f"{job}.{step}",
    )
