"""Rules of thumb that the planner and the doctor share, with their sources."""

from collections.abc import Iterator, Mapping

BINDERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that have OpenMP bind threads by itself: never set, and warned of."""
SYSTEM_CORES = 4
"""Cores of a node beside those of ranks and workers, in the book's rule `gpus * (num_workers + 1) + 4`."""
MIN_CORES_PER_RANK = 4
"""Cores of a rank at least: its process, two DataLoader workers, one more for communication threads."""
MEMORY_SHARE = 0.5
"""Part of the memory and of /dev/shm that DataLoader workers may take."""
FILES_RANK, FILES_WORKER = 512, 64
"""Descriptors of a rank's process: for libraries, GPUs and NCCL's sockets, with room; for each worker 6 for
its queues and its end, and one for each tensor of the two batches ahead, 29 in each. PyTorch's notes on
multiprocessing (sharing strategy `file_descriptor`); counted with torch 2.13: 8 more for each worker at 2
tensors a batch, 29 at 20."""
WORKLOADS = {"text": 2, "vision": 4, "video": 8, "none": 0}
"""DataLoader workers for each rank by what they do: 2 for text, 3 to 4 and sometimes more for images.

Source: S. Bekman, Machine Learning Engineering Open Book. The files of the group `dataloader` agree."""
OFF_VALUES = ("", "0", "false", "no", "off", "none", "disabled")
"""Values by which a variable does nothing."""
BINDS = (
    "importing torch then shrinks a rank to one core or few, and its DataLoader workers inherit that; the "
    "plan binds each rank already"
)
"""Source: libgomp's and LLVM's manuals; OMP_PLACES and GOMP_CPU_AFFINITY turn OMP_PROC_BIND on. Tried with
torch 2.13: with any of the three, one of two CPUs is left."""
DEVICES = ("all", "own", "spread")
"""What ranks see of the job's GPUs, as `devices` names it."""
MAX_RANKS = 4096
"""Ranks of a node: several times the threads of the largest; a slip of the finger must not fill memory."""
KMP_TYPES = ("balanced", "compact", "explicit", "logical", "physical", "scatter")
"""Words of KMP_AFFINITY that bind; `none` is what it does without one (LLVM's OpenMP runtime reference)."""


def count_system_cores(ranks: int) -> float:
    """Cores of a node for communication and the system: four for eight GPUs, fewer for fewer ranks.

    Source: S. Bekman, Machine Learning Engineering Open Book, chapter on CPUs.
    """
    return min(SYSTEM_CORES, ranks / 2)


def count_node_cores(ranks: int, workers: int) -> int:
    """Cores that a node needs for as many ranks, with as many DataLoader workers each."""
    return ranks * (workers + 1) + -int(-count_system_cores(ranks) // 1)


def count_rank_cores(workers: int) -> int:
    """Cores that a rank should have for its process, its DataLoader workers and communication threads."""
    return max(MIN_CORES_PER_RANK, workers + 2)


def find_binders(environ: Mapping[str, str]) -> Iterator[str]:
    """Names of the variables that have OpenMP bind a rank's threads a second time."""
    values = {name: environ.get(name, "").strip().lower() for name in BINDERS}
    refused = values["OMP_PROC_BIND"] in OFF_VALUES[1:]
    for name, value in values.items():
        if name == "KMP_AFFINITY":
            acts = not {word.strip() for word in value.split(",")}.isdisjoint(KMP_TYPES)
        elif name == "GOMP_CPU_AFFINITY":  # a 0 in it is a CPU
            acts = bool(value) and not refused
        else:
            acts = value not in OFF_VALUES and not refused
        if acts:
            yield name
