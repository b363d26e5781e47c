"""What `launch`, the shim and the hook in the rank's interpreter agree on: variables, and names of files.

The shim imports this module at every rank's start, so it needs `os` alone. The hook runs in the user's
interpreter, which may not have this package: it writes the names out. The texts below the names are those of
docs/environment-variables.md.
"""

import os
from _collections_abc import Iterable, Mapping  # `collections.abc` costs a millisecond

PREFIX = "LAUNCH_"

# Users may set these, for `launch` or for `launch-rank` by itself.
LAUNCH_BINDING = "LAUNCH_BINDING"
"""`exclusive | numa | socket | l3 | none`: The binding that launch-rank plans if it has no plan at hand.
Read by launch-rank."""
LAUNCH_GC = "LAUNCH_GC"
"""`default | synchronized | disabled | frozen, then [,warmup=N][,every=N][,log]`: The policy for garbage
collection in the rank's interpreter; a user's own wins over the group gc. Read by launch, launch-rank and
the hook in the rank's interpreter."""
LAUNCH_LOADER_DEFAULT = "LAUNCH_LOADER_DEFAULT"
"""`0 | 1`: With 1, a DataLoader(...) without num_workers gets LAUNCH_NUM_WORKERS of them. Read by launch,
launch-rank and the hook in the rank's interpreter."""
LAUNCH_NIC = "LAUNCH_NIC"
"""`NAME`: The RDMA device next to the rank's GPU, for instance mlx5_0; a user's own wins. Read by launch,
launch-rank and the program."""
LAUNCH_NUM_WORKERS = "LAUNCH_NUM_WORKERS"
"""`N`: DataLoader workers of each rank; a user's own wins, and the plan leaves cores for as many. Read by
launch, launch-rank, the hook in the rank's interpreter and the program."""
LAUNCH_PLAN = "LAUNCH_PLAN"
"""`FILE`: A plan as `launch plan format=json` prints it; without it, launch-rank plans the node itself. Read
by launch-rank."""
LAUNCH_QUIET = "LAUNCH_QUIET"
"""`1`: launch-rank prints neither its line on the placement nor advice about the plan. Read by
launch-rank."""
LAUNCH_RUN_DIR = "LAUNCH_RUN_DIR"
"""`DIR`: The run directory, for the program, and what `{run_dir}` in its arguments stands for. Read by
launch-rank and the program."""
LAUNCH_STRICT = "LAUNCH_STRICT"
"""`1`: launch-rank ends with status 3 if the placement cannot be applied. Read by launch-rank."""

_OF_USERS = frozenset(globals())

# Users do not set these.
LAUNCH_ATTEMPT = "LAUNCH_ATTEMPT"
"""Number of this start's first attempt, after those of earlier starts into the same run directory."""
LAUNCH_FIT = "LAUNCH_FIT"
"""What `launch fit` asks of the program's interpreter: its file for the result, the GPU to pretend."""
LAUNCH_MEMORY = "LAUNCH_MEMORY"
"""The run directory, into which the rank's hook writes the peak of its memory at the rank's end."""
LAUNCH_METER = "LAUNCH_METER"
"""What `launch tune` measures in a rank: the folder for records, steps and seconds."""
LAUNCH_NODE_ORDER = "LAUNCH_NODE_ORDER"
"""The nodes of a SLURM job in the order of their ranks, as its first node tells the others."""
LAUNCH_PARENT = "LAUNCH_PARENT"
"""PID of the process that starts the ranks: a rank that finds another parent ends at once."""
LAUNCH_RANK_PLAN = "LAUNCH_RANK_PLAN"
"""The rank's part of the plan, and what launch-rank replaced, for a launch-rank inside the rank."""
LAUNCH_RECORD_DIR = "LAUNCH_RECORD_DIR"
"""The run directory, into which launch-rank writes the rank's logs and the record of its placement."""
LAUNCH_RENDEZVOUS = "LAUNCH_RENDEZVOUS"
"""Where the nodes of a SLURM job meet, as its first node tells the others."""
LAUNCH_RUN_ID = "LAUNCH_RUN_ID"
"""The run's identifier, unique among the runs of its name: the last part of the run directory."""
LAUNCH_SECRETS = "LAUNCH_SECRETS"
"""Values that are kept out of every file, from the submission to the job's first node."""
LAUNCH_TERMINAL = "LAUNCH_TERMINAL"
"""The pseudo-terminal of a job's one rank, and which of its streams 0, 1 and 2 lead to it."""
LAUNCH_WARM = "LAUNCH_WARM"
"""The socket over which the warm process is asked for ranks, and the modules that it imports before."""
LAUNCH_WATCH = "LAUNCH_WATCH"
"""A folder on the node's memory or disk, in which each rank's hook keeps its heartbeat."""
OWN_VARIABLES = tuple(name for name in dict(globals()) if name.startswith(PREFIX) and name not in _OF_USERS)

RANK_PLAN_KEYS = "local_rank gpu cpus worker_cpus memory num_workers omp_num_threads nic"
"""What of its plan a rank's program can ask for (`launcher.rank_plan`); LAUNCH_RANK_PLAN has more."""
LOGS = "logs"
"""The folder of logs in a run directory; a rank's are in `logs/ATTEMPT`."""


def name_applied_file(rank: int | str) -> str:
    """Return the name of a rank's record in the run directory; `*` for a pattern of all."""
    return f"rank-{rank}.applied.json"


def name_memory_file(rank: int | str) -> str:
    """Return the name of a rank's measured memory in the run directory; `*` for a pattern of all."""
    return f"rank-{rank}.memory.json"


def name_plan_file(host: str) -> str:
    """Return the name of a node's plan in the run directory; `*` for a pattern of all."""
    return f"plan-{host}.json"


def parse_plan_file(name: str) -> str:
    """Return the node whose plan a file of this name holds."""
    return name.removeprefix("plan-").removesuffix(".json")


def name_rank_log(rank: int, stream: str) -> str:
    """Return the name of a rank's log, of which `stream` is `out` or `err`."""
    return f"rank-{rank}.{stream}"


def name_host(environ: Mapping[str, str]) -> str:
    """Return this node's name in a job: SLURM's name for it, else the kernel's."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


def find_user_set(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return those of these variables that somebody has set.

    torchrun sets OMP_NUM_THREADS=1 by itself if there are several ranks: that is nobody's choice.
    """
    chosen = {name: environ[name] for name in names if name in environ}
    if "TORCHELASTIC_RUN_ID" in environ and chosen.get("OMP_NUM_THREADS") == "1":
        del chosen["OMP_NUM_THREADS"]
    return chosen
