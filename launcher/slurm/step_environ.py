"""Which of a job's variables its steps, and the ranks in them, get to see; for sbatch see sbatchenv.py."""

from collections.abc import Mapping

from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_RENDEZVOUS, LAUNCH_SECRETS

OPTIONS = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PMI_", "PMIX_", "PMI2_")
"""Beginnings of the variables that srun takes for options, or an MPI library for its own process manager.

They are from outside: of the shell that submitted, of a job script's own request, of an mpirun. An `srun`
that finds `SLURM_CPUS_PER_TASK` beside other words refuses from 23.11 on, and before it ignores them.
"""
KEPT = (
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_CLUSTERS",
    "SLURM_CLUSTER_NAME",
    "SLURM_WORKING_CLUSTER",
    "SLURM_JWT",
    "SLURM_SACK_SOCKET",
    "SLURM_NNODES",
    "SLURM_JOBID",
    "SLURM_RESTART_COUNT",
)
"""Exceptions: where SLURM is, who asks it, and which job this is."""
DESCRIBING = ("SLURM_JOB_", "SLURM_ARRAY_", "SLURM_SUBMIT_")
"""Beginnings of the variables that tell of the job, and that programs read; srun takes none for an option."""
OURS = (LAUNCH_SECRETS, LAUNCH_RENDEZVOUS, LAUNCH_ATTEMPT)
"""Variables from the head to the tasks, which no rank gets to see."""


def clean_for_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which srun does what its words say and nothing else."""
    return {name: value for name, value in environ.items() if not is_option(name)}


def is_option(name: str) -> bool:
    """Tell whether a variable would change what srun or an MPI library does."""
    return name.startswith(OPTIONS) and name not in KEPT and not name.startswith(DESCRIBING)


def drop_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a task's environment without what the head has told it alone."""
    return {name: value for name, value in environ.items() if name not in OURS}
