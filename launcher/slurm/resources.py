"""What the cluster's nodes have, by one call of sinfo, and the GPUs' share of CPUs and memory to ask for."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.slurm.commands import run_slurm
from launcher.slurm.notation import parse_gpus
from launcher.slurm.slurm_environ import find_variables

if TYPE_CHECKING:
    from launcher.config.settings import ClusterConfig

AUTO = "auto"
SINFO_FIELDS = ("%P", "%D", "%c", "%z", "%m", "%G", "%f", "%B")
"""Partition, nodes, CPUs, S:C:T, memory, gres, features, MaxCPUsPerNode."""
GRES = re.compile(r"(?:gres/)?gpu(?::(?P<type>[^:,()]+))??(?::(?P<count>\d+))?(?:\([^()]*\))?")
"""`gpu:a100:8(S:0-1)`, `gpu:8`."""
OTHER_WAYS = {
    "gpus_per_node": {"gres"},
    "cpus_per_task": {"cpus-per-gpu", "mincpus"},
    "mem": {"mem-per-cpu", "mem-per-gpu"},
}
"""Options of `cluster.additional` that take the place of what would be filled in."""


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
    features: tuple[str, ...] = ()

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
    """Ask for the nodes of all partitions; raises SchedulerError."""
    argv = ["sinfo", "--all", "--exact", "--noheader", f"--format={'|'.join(SINFO_FIELDS)}"]
    text = run_slurm([*argv, f"--clusters={clusters}"] if clusters else argv, environ)
    return tuple(kind for line in text.splitlines() if (kind := parse_line(line)))


def parse_line(line: str) -> NodeKind | None:
    """Read one line; None for one of another shape (`CLUSTER: name`) and for a partition without nodes."""
    try:
        partition, *cells, gres, features, max_cpus = (cell.strip() for cell in line.split("|"))
        count, cpus, sockets, cores, threads, memory = (
            int(number.rstrip("+")) for cell in cells for number in cell.split(":")
        )
    except ValueError:
        return None
    if not count:
        return None
    allowed = min(cpus, int(max_cpus)) if max_cpus.isdecimal() else cpus
    found = (GRES.fullmatch(piece) for piece in re.split(r",(?![^()]*\))", gres))
    return NodeKind(
        partition.rstrip("*"),
        partition.endswith("*"),
        count,
        allowed,
        min(sockets * cores, math.ceil(allowed / threads)),
        memory,
        tuple((match["type"], int(match["count"] or 1)) for match in found if match),
        tuple(features.split(",")),
    )


def fill_auto_resources(
    cluster: "ClusterConfig", nproc: int | None, kinds: Sequence[NodeKind], environ: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the GPUs, CPUs and memory to ask for on each node, so that it fits on every node with the GPUs.

    `nproc` is the number of ranks, None if that is the GPUs'. None leaves a value to SLURM, as what is `auto`
    if nothing is known of the nodes. A share is of whole cores, since SLURM gives no less.
    """
    named = {str(name).replace("_", "-") for name, value in cluster.additional.items() if value is not None}
    suited = [kind for kind in kinds if cluster.constraint in kind.features] or kinds
    gpus, cpus, mem = cluster.gpus_per_node, cluster.cpus_per_task, cluster.mem
    if gpus == AUTO:
        gpus = environ.get("SBATCH_GPUS_PER_NODE")
        counts = [count for kind in suited if (count := kind.count_gpus())]
        if gpus is None and counts and not named & OTHER_WAYS["gpus_per_node"]:
            gpus = min(counts) if nproc is None else min(nproc, max(counts))
    wanted = parse_gpus("cluster.gpus_per_node", gpus or 0)
    shares = []  # CPUs and memory of the GPUs, and whether these are all of the node's
    for kind in suited:
        have = kind.count_gpus()
        if kind.count_gpus(wanted.kind) >= wanted.count:
            part, whole = (wanted.count, have) if wanted.count else (1, 1)
            threads, cores = max(1, kind.cpus // kind.cores), max(1, kind.cores * part // whole)
            all_cpus = kind.cpus if part == whole else cores * threads
            shares.append((all_cpus, kind.memory_mib * part // whole, part == whole))
    if cpus == AUTO:
        is_given = cluster.exclusive or named & OTHER_WAYS["cpus_per_task"]
        cpus = None if is_given else min((share[0] for share in shares), default=None)
    if mem == AUTO:
        is_given = named & OTHER_WAYS["mem"] or find_variables(environ, "mem") or not shares
        is_whole = all(share[2] for share in shares)
        mem = None if is_given else "0" if is_whole else f"{min(share[1] for share in shares)}M"
    found = {"gpus_per_node": gpus, "cpus_per_task": cpus, "mem": mem}
    return {key: None if value is None else str(value) for key, value in found.items()}
