"""The variables that sbatch, steps and tasks get to see, and the port where the tasks meet."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.launch.job import list_ports
from launcher.protocol import (
    LAUNCH_ATTEMPT,
    LAUNCH_NODE_ORDER,
    LAUNCH_RENDEZVOUS,
    LAUNCH_SECRETS,
    name_host,
)
from launcher.slurm.commands import expand_hosts

WHERE_SLURM_IS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""They say where SLURM is, and who asks it, and stay in every environment."""
STEP_OPTION = re.compile("SLURM_(?!JOB_|ARRAY_|SUBMIT_)|(SBATCH|SALLOC|SRUN|PMI[X2]?)_")
"""Beginnings of the variables that srun takes for options, or an MPI library for its own process manager.

They are from outside: of the shell that submitted, of a job script's own request, of an mpirun. An `srun`
that finds `SLURM_CPUS_PER_TASK` beside other words refuses from 23.11 on, and before it ignores them.
SLURM_JOB_* and the like tell of the job, and programs read them; srun takes none of these for an option.
"""
KEPT_BY_STEPS = re.compile("SLURM_(CLUSTER_NAME|WORKING_CLUSTER|NNODES|JOBID|RESTART_COUNT)")
"""Exceptions beside WHERE_SLURM_IS: they say which job this is."""
TASK_VARIABLES = (LAUNCH_SECRETS, LAUNCH_RENDEZVOUS, LAUNCH_ATTEMPT, LAUNCH_NODE_ORDER)
"""Variables from the batch script's process to the tasks; no rank gets them."""


def clean_for_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which srun does what its words say and nothing else."""
    return {
        name: value
        for name, value in environ.items()
        if not STEP_OPTION.match(name) or name in WHERE_SLURM_IS or KEPT_BY_STEPS.fullmatch(name)
    }


def drop_task_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a task's environment without the variables that are for the task alone."""
    return {name: value for name, value in environ.items() if name not in TASK_VARIABLES}


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """One task's place in the step."""

    host: str
    node_rank: int
    """Its number in the order of the nodes' ranks; without an order, in SLURM's own."""
    nodes: int
    """Of the step."""
    attempt: int
    endpoint: str
    step: str
    """`JOB.STEP`."""


def read_task_identity(environ: Mapping[str, str]) -> TaskIdentity:
    """Read the variables; a task that is started by hand is the only one of its job."""
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    host, hosts = name_host(environ), expand_hosts(environ.get(LAUNCH_NODE_ORDER, ""))
    return TaskIdentity(
        host,
        hosts.index(host) if host in hosts else int(environ.get("SLURM_NODEID", "0")),
        int(environ.get("SLURM_STEP_NUM_NODES", "1")),
        int(environ.get(LAUNCH_ATTEMPT, "0")),
        environ.get(LAUNCH_RENDEZVOUS, "localhost:0"),
        f"{job}.{step}",
    )


def list_job_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the job's nodes in SLURM's order; none if the variables name none."""
    try:
        return expand_hosts(environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""))
    except ValueError:
        return ()


def count_gpus(environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs the job has on each node, as SLURM counts them; None if it does not tell."""
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return int(text) if text.isascii() and text.isdecimal() else None


STRIDE, TRIAL, RESTART = 7919, 1009, 101
"""Primes, so that neighbouring jobs, the candidates of one job, and its attempts are far from each other."""
TRIALS = 5
"""Candidates that are tried; each costs a step."""

PORT_TAKEN = 199
"""Exit code of a task whose host cannot serve the rendezvous at the port that was chosen."""


def pick_port(job_id: int, attempt: int, trial: int, local: tuple[int, int], restart: int = 0) -> int:
    """Return a candidate: outside of the kernel's own ports, another one for every job that may share a node.

    A start after the first one has others. All of SLURM's jobs of some 20,000 in a row have different ones.
    If the kernel leaves no range that is worth the name, ports from LOWEST on are taken all the same.
    """
    ports, trial = list_ports(*local), trial + TRIALS * restart
    return ports[(job_id * STRIDE + attempt * RESTART + trial * TRIAL) % len(ports)]
