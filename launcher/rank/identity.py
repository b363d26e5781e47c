"""Which rank this process is, from the variables of the launcher that started it."""

LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
)
"""Where torchrun, srun, Open MPI, Intel MPI or MPICH, and HPE PALS put the local rank, in order of trust."""
RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID")
LOCAL_WORLD_SIZE = (
    "LOCAL_WORLD_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
)


class Identity:
    """A rank's numbers."""

    __slots__ = ("attempt", "local_rank", "local_world_size", "rank")

    def __init__(self, environ: dict[str, str]) -> None:
        """Read them; a single process with no such variables is rank 0 of 1."""
        local_rank = first_number(environ, LOCAL_RANK)
        rank = first_number(environ, RANK)
        size = first_number(environ, LOCAL_WORLD_SIZE)
        self.local_rank = local_rank or 0
        self.rank = self.local_rank if rank is None else rank
        self.local_world_size = 1 if local_rank is None else size
        """Ranks on this node; None where the launcher does not tell."""
        self.attempt = count_attempts(environ)
        """Restarts of the worker group so far, over all starts into the same run directory."""


def count_attempts(environ: dict[str, str]) -> int:
    """Restarts of torchelastic within this start, after those of earlier starts (`LAUNCH_ATTEMPT`)."""
    earlier = first_number(environ, ("LAUNCH_ATTEMPT",)) or 0
    return earlier + (first_number(environ, ("TORCHELASTIC_RESTART_COUNT",)) or 0)


def first_number(environ: dict[str, str], names: tuple[str, ...]) -> int | None:
    """First variable that holds a number; SLURM's `4(x2)` and `4,3` count as their first number."""
    for name in names:
        digits = environ.get(name, "").split("(")[0].split(",")[0]
        if digits.isdecimal():
            return int(digits)
    return None
