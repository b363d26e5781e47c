"""CPUs and memory for the GPUs that are asked for: their share of the partition's nodes."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from launcher.errors import SchedulerError
from launcher.slurm.inventory import NodeKind
from launcher.slurm.notation import Gpus, read_gpus, read_time
from launcher.slurm.sbatch_options import AUTO, Resources

if TYPE_CHECKING:
    from launcher.config.schema import ClusterConfig

FEATURE = re.compile(r"[\w.-]+")
"""A constraint that is one feature; what is more, SLURM alone can judge."""
CPU_OPTIONS = ("exclusive", "cpus-per-gpu", "mincpus")
MEM_OPTIONS = ("mem-per-cpu", "mem-per-gpu")
"""Options of `cluster.additional` that take the place of what would be filled in."""
MEM_VARIABLES = ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU")


def fill_in(
    cluster: "ClusterConfig", nproc: int | None, kinds: tuple[NodeKind, ...], environ: Mapping[str, str]
) -> Resources:
    """Return what to ask for on each node, so that it fits on every node with enough GPUs.

    `nproc` is the number of ranks, None where that is the GPUs'. Without `kinds` (sinfo failed) what is
    `auto` is left to SLURM.
    """
    given = {str(name).replace("_", "-") for name, value in cluster.additional.items() if value is not None}
    suited = match_features(kinds, cluster.constraint)
    gpus = choose_gpus(cluster.gpus_per_node, nproc, suited, environ, given)
    fitting = tuple(kind for kind in suited if gpus is None or kind.count_gpus(gpus.kind) >= gpus.count)
    cpus, mem = cluster.cpus_per_task, cluster.mem
    if cpus == AUTO:
        single = is_single_threaded(cluster.additional, environ)
        cpus = None if given & {*CPU_OPTIONS} else share_cpus(fitting, gpus, single=single)
    if mem == AUTO:
        left = given & {*MEM_OPTIONS} or any(name in environ for name in MEM_VARIABLES)
        mem = None if left else share_memory(fitting, gpus)
    texts = [None if value is None else str(value) for value in (gpus, cpus, mem)]
    return Resources(*texts)


def match_features(kinds: tuple[NodeKind, ...], constraint: str | None) -> tuple[NodeKind, ...]:
    """Return the nodes with the feature that a plain constraint names; all where none has it."""
    if constraint is None or not FEATURE.fullmatch(constraint):
        return kinds
    return tuple(kind for kind in kinds if constraint in kind.features) or kinds


def choose_gpus(
    asked: object, nproc: int | None, kinds: tuple[NodeKind, ...], environ: Mapping[str, str], given: set[str]
) -> Gpus | None:
    """Return the GPUs of each node: as asked, else one for each rank, else all; None leaves it to SLURM."""
    if asked is not None and asked != AUTO:
        return read_gpus("cluster.gpus_per_node", asked)
    if asked is None or "gres" in given:
        return None
    if text := environ.get("SBATCH_GPUS_PER_NODE"):
        return read_gpus("SBATCH_GPUS_PER_NODE", text)
    counts = [kind.count_gpus() for kind in kinds if kind.count_gpus()]
    if not counts:
        return None
    if nproc is None:
        return Gpus(None, min(counts))
    return Gpus(None, min(nproc, max(counts)))


def is_single_threaded(additional: Mapping[str, object], environ: Mapping[str, str]) -> bool:
    """Tell whether SLURM is to count cores rather than their threads."""
    options = {str(name).replace("_", "-"): str(value) for name, value in additional.items()}
    threads = options.get("threads-per-core", environ.get("SBATCH_THREADS_PER_CORE"))
    hint = options.get("hint", environ.get("SBATCH_HINT"))
    return threads == "1" or hint == "nomultithread"


def share_cpus(kinds: tuple[NodeKind, ...], gpus: Gpus | None, *, single: bool) -> int | None:
    """Return the GPUs' share of a node's CPUs, the least of all nodes; all of them where none are asked for.

    A share is of whole cores, since SLURM gives no less.
    """
    found = []
    for kind in kinds:
        threads = max(1, kind.cpus // kind.cores)
        whole = kind.cores if single else kind.cpus
        share = find_share(kind, gpus)
        cores = max(1, math.floor(kind.cores * share))
        found.append(whole if share == 1 else cores * (1 if single else threads))
    return min(found, default=None)


def share_memory(kinds: tuple[NodeKind, ...], gpus: Gpus | None) -> str | None:
    """Return the GPUs' share of a node's memory, the least of all nodes; 0, all of it, for whole nodes."""
    if all(find_share(kind, gpus) == 1 for kind in kinds):
        return "0" if kinds else None
    return f"{min(math.floor(kind.memory_mib * find_share(kind, gpus)) for kind in kinds)}M"


def find_share(kind: NodeKind, gpus: Gpus | None) -> Fraction:
    """Return the part of a node that belongs to the GPUs that are asked for; 1 where none are."""
    have = kind.count_gpus()
    return Fraction(min(gpus.count, have), have) if gpus and gpus.count and have else Fraction(1)


def check_limits(
    cluster: "ClusterConfig", nodes: int, filled: Resources, kinds: tuple[NodeKind, ...]
) -> None:
    """Raise SchedulerError for what SLURM as a rule would leave in the queue for ever: nodes, CPUs, time."""
    if not kinds:
        return
    asked = read_gpus("cluster.gpus_per_node", filled.gpus_per_node or 0)
    names = sorted({kind.partition for kind in kinds})
    fitting = [kind for kind in kinds if kind.count_gpus(asked.kind) >= asked.count] or list(kinds)
    have = max(sum(kind.count for kind in fitting if kind.partition == name) for name in names)
    where = f"partition {', '.join(names)}"
    if nodes > have:
        wanted = f" with {asked} GPUs" if asked.count else ""
        raise SchedulerError(
            f"nodes={nodes}, and {where} has {have}{wanted}: set nodes={have}, or another partition"
        )
    most = max(kind.cpus for kind in fitting)
    if int(filled.cpus_per_task or 1) > most:
        raise SchedulerError(
            f"cluster.cpus_per_task={filled.cpus_per_task}, and nodes of {where} have {most} CPUs"
        )
    limit = max(kind.time_limit for kind in kinds)
    if cluster.time is not None and read_time("cluster.time", cluster.time) > limit:
        raise SchedulerError(
            f"cluster.time={cluster.time} is over the limit of {where}, {format_minutes(limit)}: ask for"
            " less, since a job that comes to its limit is requeued and goes on"
        )


def format_minutes(minutes: float) -> str:
    """Write a time limit as SLURM does."""
    hours, rest = divmod(round(minutes), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{rest:02}:00" if days else f"{hours:02}:{rest:02}:00"
