"""Which rank this process is, from the variables of the launcher that started it."""

from launcher.protocol import LAUNCH_AGENT, LAUNCH_ATTEMPT

SRUN_LOCAL_RANK = "SLURM_LOCALID"
"""srun's variable for a task's number on the node."""
FAMILIES = (
    ("LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE"),
    ("LOCAL_RANK", "RANK", "LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("PALS_LOCAL_RANKID", "PALS_RANKID", "PALS_LOCAL_SIZE"),
    (SRUN_LOCAL_RANK, "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables of local rank, rank and ranks of the node: torchrun's and accelerate's, DeepSpeed's, Open MPI's,
Intel MPI's or MPICH's, HPE PALS's, srun's.

Local rank and rank come from one family. SLURM is last, since what runs inside its jobs inherits its
variables.
"""


class Identity:
    """A rank's numbers."""

    __slots__ = ("attempt", "family", "has_terminal", "local_rank", "local_world_size", "rank")

    def __init__(self, environ: dict[str, str]) -> None:
        """Read them; a single process with no such variables is rank 0 of 1."""
        self.attempt = read_number(environ, LAUNCH_ATTEMPT) + read_number(
            environ, "TORCHELASTIC_RESTART_COUNT"
        )
        """Restarts of the worker group so far, over all starts into the same run directory."""
        self.has_terminal = False
        """Its output goes to a pseudo-terminal of the launcher's rather than to its log."""
        self.family = ""
        """The variable that the local rank comes from; empty if there is none."""
        self.rank, self.local_rank = 0, 0
        self.local_world_size: int | None = 1
        """Ranks on this node; None if no launcher tells."""
        for local_rank, rank, size in FAMILIES[-1:] if is_srun_rank(environ) else FAMILIES:
            if is_number(environ.get(local_rank, "")) and not is_batch_shell(environ, local_rank):
                self.family = local_rank
                self.local_rank = int(environ[local_rank])
                self.rank = read_number(environ, rank, self.local_rank)
                self.local_world_size = read_size(environ, size) or find_other_size(environ, self.local_rank)
                return


def is_srun_rank(environ: dict[str, str]) -> bool:
    """Tell whether srun's tasks are the ranks by LAUNCH_AGENT, and no agent is in between."""
    return (
        environ.get(LAUNCH_AGENT) == "srun"
        and "TORCHELASTIC_RUN_ID" not in environ
        and "SLURM_STEP_ID" in environ
        and is_number(environ.get(SRUN_LOCAL_RANK, ""))
    )


def is_number(text: str) -> bool:
    """Tell whether a variable holds a plain number, of no more digits than a count of ranks has."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def read_number(environ: dict[str, str], name: str, default: int = 0) -> int:
    """Return the number in a variable."""
    text = environ.get(name, "")
    return int(text) if is_number(text) else default


def is_batch_shell(environ: dict[str, str], name: str) -> bool:
    """Tell whether SLURM's variable is the batch script's own 0, which is no rank of a step."""
    return name == SRUN_LOCAL_RANK and "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ


def find_other_size(environ: dict[str, str], local_rank: int) -> int | None:
    """Return the ranks of this node from another launcher's variables that count this rank the same.

    Job scripts set `LOCAL_RANK=$SLURM_LOCALID` for the program and leave LOCAL_WORLD_SIZE out. A size of 1
    tells nothing: a launcher that is started once a node, and tells its ranks no size, inherits that.
    """
    for name, _, size in FAMILIES:
        if environ.get(name) == str(local_rank) and not is_batch_shell(environ, name):
            found = read_size(environ, size)
            if found is not None and found > 1:
                return found
    return None


def read_size(environ: dict[str, str], name: str) -> int | None:
    """Return the ranks of this node; SLURM's list, `2(x3),1`, has an entry for each node of the step."""
    sizes: list[int] = []
    for part in environ.get(name, "").split(","):
        size, _, times = part.partition("(x")
        count = times.removesuffix(")") if times else "1"
        if not is_number(size) or not is_number(count) or int(count) > 1 << 17:
            return None
        sizes += [int(size)] * int(count)
    node = read_number(environ, "SLURM_NODEID") if len(sizes) > 1 else 0
    return sizes[node] if node < len(sizes) else None
