"""What `launch`, the shim and the hook in the rank's interpreter agree on: variables, and names of files.

The shim imports this module at every rank's start, so it needs `os` alone. The hook runs in the user's
interpreter, which may not have this package: it writes the names out, and a test compares them with these.
"""

import os
from _collections_abc import Iterable, Mapping  # `collections.abc` costs a millisecond

PREFIX = "LAUNCH_"
LAUNCH_ATTEMPT = "LAUNCH_ATTEMPT"
LAUNCH_BINDING = "LAUNCH_BINDING"
LAUNCH_FIT = "LAUNCH_FIT"
LAUNCH_GC = "LAUNCH_GC"
LAUNCH_LOADER_DEFAULT = "LAUNCH_LOADER_DEFAULT"
LAUNCH_MEMORY = "LAUNCH_MEMORY"
LAUNCH_METER = "LAUNCH_METER"
LAUNCH_NIC = "LAUNCH_NIC"
LAUNCH_NODE_ORDER = "LAUNCH_NODE_ORDER"
LAUNCH_NUM_WORKERS = "LAUNCH_NUM_WORKERS"
LAUNCH_PARENT = "LAUNCH_PARENT"
LAUNCH_PLAN = "LAUNCH_PLAN"
LAUNCH_QUIET = "LAUNCH_QUIET"
LAUNCH_RANK_PLAN = "LAUNCH_RANK_PLAN"
LAUNCH_RECORD_DIR = "LAUNCH_RECORD_DIR"
LAUNCH_RENDEZVOUS = "LAUNCH_RENDEZVOUS"
LAUNCH_RUN_DIR = "LAUNCH_RUN_DIR"
LAUNCH_RUN_ID = "LAUNCH_RUN_ID"
LAUNCH_SECRETS = "LAUNCH_SECRETS"
LAUNCH_STRICT = "LAUNCH_STRICT"
LAUNCH_TERMINAL = "LAUNCH_TERMINAL"
LAUNCH_WARM = "LAUNCH_WARM"
LAUNCH_WATCH = "LAUNCH_WATCH"

LAUNCHER = "launch"
SLURM_JOB = "launch's processes in a SLURM job"
SHIM = "launch-rank"
HOOK = "the hook in the rank's interpreter"
PROGRAM = "the program"


class ProtocolVariable:
    """One variable: a row of `VARIABLES`, from which its documentation is made."""

    __slots__ = ("form", "is_settable", "meaning", "name", "read_by", "set_by")

    def __init__(
        self,
        name: str,
        form: str,
        meaning: str,
        *,
        set_by: str,
        read_by: tuple[str, ...],
        is_settable: bool = False,
    ) -> None:
        self.name = name
        self.form = form
        """What its value looks like: `FILE`, `N`, `1`, `default | POLICY[,warmup=N]`."""
        self.meaning = meaning
        """One sentence."""
        self.set_by = set_by
        """What sets it by itself; empty if only users do."""
        self.read_by = read_by
        self.is_settable = is_settable
        """A user may set it, for `launch` or for `launch-rank` by itself."""


VARIABLES = (
    ProtocolVariable(
        LAUNCH_ATTEMPT,
        "N",
        "Number of this start's first attempt, after those of earlier starts into the same run directory.",
        set_by=LAUNCHER,
        read_by=(SLURM_JOB, SHIM),
    ),
    ProtocolVariable(
        LAUNCH_BINDING,
        "exclusive | numa | socket | l3 | none",
        "The binding that launch-rank plans if it has no plan at hand.",
        set_by="",
        read_by=(SHIM,),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_FIT,
        "JSON",
        "What `launch fit` asks of the program's interpreter: its file for the result, the GPU to pretend.",
        set_by=LAUNCHER,
        read_by=(SHIM, HOOK),
    ),
    ProtocolVariable(
        LAUNCH_GC,
        "default | synchronized | disabled | frozen, then [,warmup=N][,every=N][,log]",
        "The policy for garbage collection in the rank's interpreter; a user's own wins over the group gc.",
        set_by=SHIM,
        read_by=(LAUNCHER, SHIM, HOOK),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_LOADER_DEFAULT,
        "0 | 1",
        "1: a DataLoader(...) without num_workers gets LAUNCH_NUM_WORKERS of them.",
        set_by=SHIM,
        read_by=(LAUNCHER, SHIM, HOOK),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_MEMORY,
        "DIR",
        "The run directory, into which the rank's hook writes the peak of its memory at the rank's end.",
        set_by=SHIM,
        read_by=(SHIM, HOOK),
    ),
    ProtocolVariable(
        LAUNCH_METER,
        "JSON",
        "What `launch tune` measures in a rank: the folder for records, steps and seconds.",
        set_by=LAUNCHER,
        read_by=(SHIM, HOOK),
    ),
    ProtocolVariable(
        LAUNCH_NIC,
        "NAME",
        "The RDMA device next to the rank's GPU, for instance mlx5_0; a user's own wins.",
        set_by=SHIM,
        read_by=(LAUNCHER, SHIM, PROGRAM),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_NODE_ORDER,
        "n0,n2,n[5-7]",
        "The nodes of a SLURM job in the order of their ranks, as its first node tells the others.",
        set_by=SLURM_JOB,
        read_by=(SLURM_JOB,),
    ),
    ProtocolVariable(
        LAUNCH_NUM_WORKERS,
        "N",
        "DataLoader workers of each rank; a user's own wins, and the plan leaves cores for as many.",
        set_by=SHIM,
        read_by=(LAUNCHER, SHIM, HOOK, PROGRAM),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_PARENT,
        "N",
        "PID of the process that starts the ranks: a rank that finds another parent ends at once.",
        set_by=LAUNCHER,
        read_by=(SHIM,),
    ),
    ProtocolVariable(
        LAUNCH_PLAN,
        "FILE",
        "A plan as `launch plan format=json` prints it; without it, launch-rank plans the node itself.",
        set_by=LAUNCHER,
        read_by=(SHIM,),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_QUIET,
        "1",
        "launch-rank prints neither its line on the placement nor advice about the plan.",
        set_by="",
        read_by=(SHIM,),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_RANK_PLAN,
        "JSON",
        "The rank's part of the plan, and what launch-rank replaced, for a launch-rank inside the rank.",
        set_by=SHIM,
        read_by=(LAUNCHER, SHIM, HOOK, PROGRAM),
    ),
    ProtocolVariable(
        LAUNCH_RECORD_DIR,
        "DIR",
        "The run directory, into which launch-rank writes the rank's logs and the record of its placement.",
        set_by=LAUNCHER,
        read_by=(SHIM,),
    ),
    ProtocolVariable(
        LAUNCH_RENDEZVOUS,
        "HOST:PORT",
        "Where the nodes of a SLURM job meet, as its first node tells the others.",
        set_by=SLURM_JOB,
        read_by=(SLURM_JOB,),
    ),
    ProtocolVariable(
        LAUNCH_RUN_DIR,
        "DIR",
        "The run directory, for the program, and what `{run_dir}` in its arguments stands for.",
        set_by=LAUNCHER,
        read_by=(SHIM, PROGRAM),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_RUN_ID,
        "TEXT",
        "The run's identifier, unique among the runs of its name: the last part of the run directory.",
        set_by=LAUNCHER,
        read_by=(PROGRAM,),
    ),
    ProtocolVariable(
        LAUNCH_SECRETS,
        "JSON",
        "Values that are kept out of every file, from the submission to the job's first node.",
        set_by=LAUNCHER,
        read_by=(SLURM_JOB,),
    ),
    ProtocolVariable(
        LAUNCH_STRICT,
        "1",
        "launch-rank ends with status 3 if the placement cannot be applied.",
        set_by=LAUNCHER,
        read_by=(SHIM,),
        is_settable=True,
    ),
    ProtocolVariable(
        LAUNCH_TERMINAL,
        "STREAMS:PATH",
        "The pseudo-terminal of a job's one rank, and which of its streams 0, 1 and 2 lead to it.",
        set_by=LAUNCHER,
        read_by=(SHIM,),
    ),
    ProtocolVariable(
        LAUNCH_WARM,
        "JSON",
        "The socket over which the warm process is asked for ranks, and the modules that it imports before.",
        set_by=LAUNCHER,
        read_by=(HOOK,),
    ),
    ProtocolVariable(
        LAUNCH_WATCH,
        "DIR",
        "A folder on the node's memory or disk, in which each rank's hook keeps its heartbeat.",
        set_by=LAUNCHER,
        read_by=(SHIM, HOOK),
    ),
)
OWN_VARIABLES = tuple(each.name for each in VARIABLES if each.set_by and not each.is_settable)
"""Those that no user sets."""

RANK_PLAN_KEYS = (
    "local_rank",
    "gpu",
    "cpus",
    "worker_cpus",
    "memory",
    "num_workers",
    "omp_num_threads",
    "nic",
)
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
