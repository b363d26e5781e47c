"""What the cluster's nodes have, by one call of sinfo, and the GPUs' share of CPUs and memory to ask for."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from launcher.errors import SchedulerError, UsageError
from launcher.slurm.commands import run_slurm
from launcher.slurm.notation import Gpus, parse_gpus, parse_time_limit

if TYPE_CHECKING:
    from launcher.config.settings import ClusterConfig

AUTO = "auto"
SINFO_FIELDS = ("%P", "%D", "%c", "%z", "%m", "%G", "%t", "%l", "%f", "%B")
"""Partition, nodes, CPUs, S:C:T, memory, gres, state, time limit, features, MaxCPUsPerNode."""
GRES = re.compile(r"(?:gres/)?gpu(?::(?P<type>[^:,()]+))??(?::(?P<count>\d+))?(?:\([^()]*\))?")
"""`gpu:a100:8(S:0-1)`, `gpu:8`."""
FEATURE = re.compile(r"[\w.-]+")
"""A constraint that is one feature; what is more, SLURM alone can judge."""
CPU_OPTIONS = ("cpus-per-gpu", "mincpus")
MEM_OPTIONS = ("mem-per-cpu", "mem-per-gpu")
"""Options of `cluster.additional` that take the place of what would be filled in."""
MEM_VARIABLES = ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU")


@dataclass(frozen=True, slots=True)
class Resources:
    """Of each node; None leaves it to SLURM."""

    gpus_per_node: str | None
    cpus_per_task: str | None
    mem: str | None


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of one partition that are alike."""

    partition: str
    is_default: bool
    count: int
    cpus: int
    """Hardware threads that a job may have of a node."""
    cores: int
    memory_mib: int
    gpus: tuple[tuple[str | None, int], ...]
    """Type and number."""
    state: str
    """SLURM's short word, `idle`, `down*`."""
    time_limit: float
    """Minutes."""
    features: tuple[str, ...]

    def count_gpus(self, kind: str | None = None) -> int:
        """GPUs of a node, of one type if one is named."""
        return sum(n for name, n in self.gpus if kind is None or (name or "").lower() == kind.lower())

    def describe(self) -> str:
        """In words, for errors."""
        gpus = ", ".join(f"gpu:{name}:{n}" if name else f"gpu:{n}" for name, n in self.gpus) or "no GPUs"
        return f"{self.cpus} CPUs, {self.memory_mib} MiB, {gpus}"


def select_kinds(kinds: Sequence[NodeKind], partition: str | None) -> tuple[NodeKind, ...]:
    """Return the nodes of a partition, of several joined by commas, or of the default one."""
    names = partition.split(",") if partition is not None else ()
    return tuple(kind for kind in kinds if kind.partition in names or (partition is None and kind.is_default))


def ask_sinfo(environ: Mapping[str, str], clusters: str | None) -> tuple[NodeKind, ...]:
    """Ask for the nodes of all partitions; raises SchedulerError.

    Lines of another shape, such as `CLUSTER: name`, are passed over.
    """
    argv = ["sinfo", "--all", "--exact", "--noheader", f"--format={'|'.join(SINFO_FIELDS)}"]
    text = run_slurm([*argv, f"--clusters={clusters}"] if clusters else argv, environ)
    rows = (line.split("|") for line in text.splitlines())
    return tuple(kind for row in rows if len(row) == len(SINFO_FIELDS) and (kind := parse_line(row)))


def parse_line(cells: list[str]) -> NodeKind | None:
    """Read one line; None for a partition without nodes, or if a number is none."""
    partition, count, cpus, shape, memory, gres, state, limit, features, max_cpus = (
        cell.strip() for cell in cells
    )
    try:
        numbers = [int(text.rstrip("+")) for text in (count, cpus, memory)]
        sockets, cores, threads = (int(text.rstrip("+")) for text in shape.split(":"))
        minutes = parse_time_limit("sinfo", limit)
    except (ValueError, UsageError):
        return None
    if not numbers[0]:
        return None
    allowed = min(numbers[1], int(max_cpus)) if max_cpus.isdecimal() else numbers[1]
    return NodeKind(
        partition=partition.rstrip("*"),
        is_default=partition.endswith("*"),
        count=numbers[0],
        cpus=allowed,
        cores=min(sockets * cores, math.ceil(allowed / threads)),
        memory_mib=numbers[2],
        gpus=parse_gres(gres),
        state=state,
        time_limit=minutes,
        features=tuple(name for name in features.split(",") if name != "(null)"),
    )


def parse_gres(text: str) -> tuple[tuple[str | None, int], ...]:
    """Return the GPUs in a node's generic resources, `gpu:a100:8(S:0-1),nvme:1`."""
    pieces = re.split(r",(?![^()]*\))", text)
    found = (GRES.fullmatch(piece) for piece in pieces)
    return tuple((match["type"], int(match["count"] or 1)) for match in found if match)


def fill_auto_resources(
    cluster: "ClusterConfig", nproc: int | None, kinds: tuple[NodeKind, ...], environ: Mapping[str, str]
) -> Resources:
    """Return what to ask for on each node, so that it fits on every node with enough GPUs.

    `nproc` is the number of ranks, None if that is the GPUs'. Without `kinds` (sinfo failed) what is
    `auto` is left to SLURM.
    """
    additional_names = {
        str(name).replace("_", "-") for name, value in cluster.additional.items() if value is not None
    }
    suited = match_features(kinds, cluster.constraint)
    gpus = choose_gpus(cluster.gpus_per_node, nproc, suited, environ, additional_names)
    fitting = tuple(kind for kind in suited if gpus is None or kind.count_gpus(gpus.kind) >= gpus.count)
    cpus, mem = cluster.cpus_per_task, cluster.mem
    if cpus == AUTO:
        single = is_single_threaded(cluster.additional, environ)
        is_whole = cluster.exclusive or additional_names & {*CPU_OPTIONS}
        cpus = None if is_whole else share_cpus(fitting, gpus, single=single)
    if mem == AUTO:
        is_left_to_slurm = additional_names & {*MEM_OPTIONS} or any(name in environ for name in MEM_VARIABLES)
        mem = None if is_left_to_slurm else share_memory(fitting, gpus)
    texts = [None if value is None else str(value) for value in (gpus, cpus, mem)]
    return Resources(*texts)


def match_features(kinds: tuple[NodeKind, ...], constraint: str | None) -> tuple[NodeKind, ...]:
    """Return the nodes with the feature that a plain constraint names; all nodes if none has it."""
    if constraint is None or not FEATURE.fullmatch(constraint):
        return kinds
    return tuple(kind for kind in kinds if constraint in kind.features) or kinds


def choose_gpus(
    wanted: object,
    nproc: int | None,
    kinds: tuple[NodeKind, ...],
    environ: Mapping[str, str],
    additional_names: set[str],
) -> Gpus | None:
    """Return the GPUs of each node: as asked, else one for each rank, else all; None leaves it to SLURM."""
    if wanted is not None and wanted != AUTO:
        return parse_gpus("cluster.gpus_per_node", wanted)
    if wanted is None or "gres" in additional_names:
        return None
    if text := environ.get("SBATCH_GPUS_PER_NODE"):
        return parse_gpus("SBATCH_GPUS_PER_NODE", text)
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
    """Return the GPUs' share of a node's CPUs, the least of all nodes; all of them if none are asked for.

    A share is of whole cores, since SLURM gives no less.
    """
    found = []
    for kind in kinds:
        threads = max(1, kind.cpus // kind.cores)
        whole = kind.cores if single else kind.cpus
        share = find_gpu_share(kind, gpus)
        cores = max(1, math.floor(kind.cores * share))
        found.append(whole if share == 1 else cores * (1 if single else threads))
    return min(found, default=None)


def share_memory(kinds: tuple[NodeKind, ...], gpus: Gpus | None) -> str | None:
    """Return the GPUs' share of a node's memory, the least of all nodes; 0, all of it, for whole nodes."""
    if all(find_gpu_share(kind, gpus) == 1 for kind in kinds):
        return "0" if kinds else None
    return f"{min(math.floor(kind.memory_mib * find_gpu_share(kind, gpus)) for kind in kinds)}M"


def find_gpu_share(kind: NodeKind, gpus: Gpus | None) -> Fraction:
    """Return the part of a node that belongs to the GPUs that are asked for; 1 if none are."""
    have = kind.count_gpus()
    return Fraction(min(gpus.count, have), have) if gpus and gpus.count and have else Fraction(1)


def check_limits(
    cluster: "ClusterConfig", nodes: int, filled: Resources, kinds: tuple[NodeKind, ...]
) -> None:
    """Raise SchedulerError for what SLURM as a rule would leave in the queue for ever: nodes, CPUs, time."""
    if not kinds:
        return
    wanted = parse_gpus("cluster.gpus_per_node", filled.gpus_per_node or 0)
    names = sorted({kind.partition for kind in kinds})
    fitting = [kind for kind in kinds if kind.count_gpus(wanted.kind) >= wanted.count] or list(kinds)
    have = max(sum(kind.count for kind in fitting if kind.partition == name) for name in names)
    where = f"partition {', '.join(names)}"
    with_gpus = f" with {wanted} GPUs" if wanted.count else ""
    if cluster.spares and nodes <= have < nodes + cluster.spares:
        raise SchedulerError(
            f"nodes={nodes} and cluster.spares={cluster.spares}, and {where} has {have}{with_gpus}: set"
            f" cluster.spares={have - nodes}, or another partition"
        )
    if nodes > have:
        raise SchedulerError(
            f"nodes={nodes}, and {where} has {have}{with_gpus}: set nodes={have}, or another partition"
        )
    max_cpus = max(kind.cpus for kind in fitting)
    if int(filled.cpus_per_task or 1) > max_cpus:
        raise SchedulerError(
            f"cluster.cpus_per_task={filled.cpus_per_task}, and nodes of {where} have {max_cpus} CPUs"
        )
    limit = max(kind.time_limit for kind in kinds)
    if cluster.time is not None and parse_time_limit("cluster.time", cluster.time) > limit:
        raise SchedulerError(
            f"cluster.time={cluster.time} is over the limit of {where}, {format_minutes(limit)}: ask for"
            " less, since a job that comes to its limit is requeued and goes on"
        )


def format_minutes(minutes: float) -> str:
    """Write a time limit as SLURM does."""
    hours, rest = divmod(round(minutes), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{rest:02}:00" if days else f"{hours:02}:{rest:02}:00"
