"""Which rank this process is, by the variables of its launcher, and its entry of the plan.

The plan is the file in LAUNCH_PLAN, or is made here and now.

JSON is read by the interpreter's own C scanner: the `json` package costs 14 ms of every rank's start.
"""

import sys
from _collections_abc import Mapping  # `collections.abc` costs a millisecond
from _json import encode_basestring_ascii as quote
from _json import make_encoder, make_scanner
from types import ModuleType

from launcher.cpulist import parse_cpulist
from launcher.files import LARGEST, read_file
from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_PLAN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
MIN_PORT, MAX_PORT = 10240, 32767
"""Ports above those of system services, and below those that the kernel gives to clients (ip(7))."""
HIDDEN_GPUS = (
    "RANK and the like are not set: this task sees fewer GPUs than the node has tasks, so that there may be "
    "no cuda:LOCAL_RANK: use srun --gpus-per-node, not --gpus-per-task"
)


class Identity:
    """A rank's numbers."""

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
        # SLURM's local rank in a batch script is 0, and that of no rank.
        is_batch = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
        families = FAMILIES[:-1] if is_batch else FAMILIES
        for local_rank, rank, size in families:
            if is_number(environ.get(local_rank, "")):
                self.family = local_rank
                self.local_rank = int(environ[local_rank])
                self.rank = read_number(environ, rank, self.local_rank)
                # Job scripts set `LOCAL_RANK=$SLURM_LOCALID` for the program and leave LOCAL_WORLD_SIZE out:
                # then the variables of another launcher tell that count this rank the same. A size of 1 tells
                # nothing: a launcher that is started once a node, and tells its ranks no size, inherits that.
                sizes = [
                    _read_size(environ, other)
                    for name, _, other in families
                    if environ.get(name) == str(self.local_rank)
                ]
                larger = (found for found in sizes if found is not None and found > 1)
                self.local_world_size = _read_size(environ, size) or next(larger, None)
                return

    def list_variables(self, environ: dict[str, str]) -> tuple[dict[str, str], str]:
        """Return torchrun's variables for a task of srun's that nothing has made a rank, or why it gets none.

        They are those that torch.distributed reads: by TORCHELASTIC_RUN_ID, frameworks would take another way
        than under srun. MASTER_ADDR is the step's first node, which has rank 0. MASTER_PORT differs between
        jobs and steps that may share a node, as long as there are ports.
        """
        ranks, nodes = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_STEP_NUM_NODES", "")
        size = self.local_world_size
        if "RANK" in environ or self.family != SRUN_LOCAL_RANK:
            return {}, ""
        if not is_number(ranks) or not is_number(nodes) or not size:
            return {}, ""
        visible = [entry for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
        if 0 < len(visible) < size:
            return {}, HIDDEN_GPUS if self.local_rank == 0 else ""
        rank, port_range = str(self.rank), MAX_PORT - MIN_PORT + 1
        salt = read_number(environ, "SLURM_JOB_ID") * 7919 + read_number(environ, "SLURM_STEP_ID") * 101
        host = find_first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
        kept = ("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
        variables = {
            **{"MASTER_ADDR": host, "MASTER_PORT": str(MIN_PORT + salt % port_range)},
            **{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "ROLE_NAME": "default"},
            **{"RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks},
            **{"LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(size)},
            **{"GROUP_RANK": environ.get("SLURM_NODEID", "0"), "GROUP_WORLD_SIZE": nodes},
        }
        own = {name: environ[name] for name in kept if environ.get(name)}
        return {name: value for name, value in {**variables, **own}.items() if value}, ""


def is_number(text: str) -> bool:
    """Tell whether a variable holds a plain number, of no more digits than a count of ranks has."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def read_number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return the number in a variable."""
    text = environ.get(name, "")
    return int(text) if is_number(text) else default


def _read_size(environ: dict[str, str], name: str) -> int | None:
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


def find_first_host(text: str) -> str:
    """Return the first node of SLURM's list of them: `rack1n08` of `rack[1-2]n[08-10],login`."""
    host, rest = "", text
    while rest:
        before, bracket, rest = rest.partition("[")
        if not bracket or "," in before:
            return host + before.partition(",")[0]
        numbers, _, rest = rest.partition("]")
        host += before + numbers.partition(",")[0].partition("-")[0]
        if rest.startswith(","):
            break
    return host


class PlacementError(Exception):
    """There is no usable placement for this rank; the text says why."""


class PlanEntry:
    """One entry of the plan's `ranks`, which the shim applies."""

    def __init__(self, raw: dict[str, object]) -> None:
        """Read the entry; raises KeyError, TypeError, ValueError or AttributeError if it is not one."""
        self.raw = raw
        memory, env, gpu = raw["memory"], raw["env"], raw["gpu"]
        if not isinstance(memory, dict) or not isinstance(env, dict):
            raise TypeError("memory and env are objects")
        self.cpus = parse_cpulist(str(raw["cpus"]))
        self.policy = str(memory["policy"])
        self.nodes = parse_cpulist(str(memory.get("nodes", "")))
        self.num_workers = int(str(raw["num_workers"]))
        self.env = {str(name): str(value) for name, value in env.items()}
        if any(not name or "=" in name or "\0" in name + value for name, value in self.env.items()):
            raise ValueError("env has what no environment can hold")
        self.gpu: str | None = None
        self.gpu_label = ""
        """Index and PCI address, for people."""
        if isinstance(gpu, dict):
            self.gpu = str(gpu["uuid"])
            self.gpu_label = f"{gpu.get('index', '?')} {gpu.get('pci', '')}".rstrip()
        self.notes: list[str] = []
        """How it came to be, in a few words, if that is not the usual way."""
        self.problems: list[str] = []
        """In what it falls short for this rank."""
        self.advice: list[str] = []
        """Warnings of a plan that was made here, which are the same for all ranks of the node."""


def find_entry(identity: Identity, environ: dict[str, str], argv: list[str]) -> PlanEntry:
    """Return this rank's entry, for the program `argv`; raises PlacementError."""
    if path := environ.get(LAUNCH_PLAN):
        return select_entry(identity, read_plan_file(path), path)
    # 8 ms for `dataclasses`, which needs it for classes without a docstring.
    sys.modules.setdefault("inspect", _LazyModule("inspect"))
    from launcher.rank.standalone import make_entry

    return make_entry(identity, environ, argv)


class _LazyModule(ModuleType):
    """Stands for a module until one of its names is looked up."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(__import__(self.__name__), name)


def select_entry(identity: Identity, plan: dict[str, object], source: str) -> PlanEntry:
    """Take this rank's entry out of a plan; `source` is for messages. Raises PlacementError."""
    try:
        ranks = plan["ranks"]
        if not isinstance(ranks, list):
            raise TypeError("ranks is a list")
        for raw in ranks:
            if raw["local_rank"] == identity.local_rank:
                return PlanEntry(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlacementError(f"the plan {source} is not as expected ({error!r})") from None
    raise PlacementError(
        f"the plan {source} has {len(ranks)} ranks, none of them local rank {identity.local_rank}: "
        "set LOCAL_WORLD_SIZE to the ranks of this node, or give the plan as many (nproc_per_node)"
    )


def read_plan_file(path: str) -> dict[str, object]:
    """Read a plan as `launch plan format=json` prints it; raises PlacementError.

    Another user's file is refused: its variables would be the program's, LD_PRELOAD among them.
    """
    try:
        plan = load_json(read_file(path, LARGEST, follow=True, own=True).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlacementError(f"LAUNCH_PLAN={path} cannot be read ({reason})") from None
    if not isinstance(plan, dict):
        raise PlacementError(f"LAUNCH_PLAN={path} is not a plan")
    return plan


class _ScannerSettings:
    """The attributes of `json.JSONDecoder` that the scanner reads."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = parse_constant = float
    parse_int = int


def load_json(text: str) -> object:
    """Read one JSON value; raises ValueError."""
    text = text.strip()
    settings: Any = _ScannerSettings  # the stub of `make_scanner` asks for a scanner here
    try:
        value, end = make_scanner(settings)(text, 0)
    except (StopIteration, SystemError):  # without the package, the scanner cannot say what is wrong
        import json

        return json.loads(text)
    if end != len(text):
        raise ValueError(f"not JSON after character {end}")
    return value


def dump_json(value: object) -> str:
    """Write a value of JSON's own types, and of no other, as `json.dumps` does."""
    settings: Any = (None, None, quote, None, ": ", ", ", False, False, True)
    return "".join(make_encoder(*settings)(value, 0))
