"""What the cluster's nodes have, by one call of sinfo."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import UsageError
from launcher.slurm.commands import run_slurm
from launcher.slurm.notation import read_time

FIELDS = ("%P", "%D", "%c", "%z", "%m", "%G", "%t", "%l", "%f", "%B")
"""Partition, nodes, CPUs, S:C:T, memory, gres, state, time limit, features, MaxCPUsPerNode."""
GRES = re.compile(r"(?:gres/)?gpu(?::(?P<type>[^:,()]+))??(?::(?P<count>\d+))?(?:\([^()]*\))?")
"""`gpu:a100:8(S:0-1)`, `gpu:8`."""


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
        """GPUs of a node, of one type where one is named."""
        return sum(n for name, n in self.gpus if kind is None or (name or "").lower() == kind.lower())

    def describe(self) -> str:
        """In words, for errors."""
        gpus = ", ".join(f"gpu:{name}:{n}" if name else f"gpu:{n}" for name, n in self.gpus) or "no GPUs"
        return f"{self.cpus} CPUs, {self.memory_mib} MiB, {gpus}"


@dataclass(frozen=True, slots=True)
class Inventory:
    """All partitions."""

    kinds: tuple[NodeKind, ...]

    def list_partitions(self) -> tuple[str, ...]:
        """Return the partitions' names as SLURM orders them."""
        return tuple(dict.fromkeys(kind.partition for kind in self.kinds))

    def select(self, partition: str | None) -> tuple[NodeKind, ...]:
        """Return the nodes of a partition, of several joined by commas, or of the default one."""
        if partition is None:
            return tuple(kind for kind in self.kinds if kind.is_default)
        names = partition.split(",")
        return tuple(kind for kind in self.kinds if kind.partition in names)


def ask_sinfo(environ: Mapping[str, str], clusters: str | None) -> Inventory:
    """Ask for all partitions; raises SchedulerError."""
    words = ["sinfo", "--all", "--exact", "--noheader", f"--format={'|'.join(FIELDS)}"]
    return parse_sinfo(run_slurm([*words, f"--clusters={clusters}"] if clusters else words, environ))


def parse_sinfo(text: str) -> Inventory:
    """Read what sinfo prints; lines of another shape, such as `CLUSTER: name`, are passed over."""
    kinds = (parse_line(line.split("|")) for line in text.splitlines() if line.count("|") == len(FIELDS) - 1)
    return Inventory(tuple(kind for kind in kinds if kind))


def parse_line(cells: list[str]) -> NodeKind | None:
    """Read one line; None for a partition without nodes, or where a number is none."""
    partition, count, cpus, shape, memory, gres, state, limit, features, most = (
        cell.strip() for cell in cells
    )
    try:
        numbers = [int(text.rstrip("+")) for text in (count, cpus, memory)]
        sockets, cores, threads = (int(text.rstrip("+")) for text in shape.split(":"))
        minutes = read_time("sinfo", limit)
    except (ValueError, UsageError):
        return None
    if not numbers[0]:
        return None
    allowed = min(numbers[1], int(most)) if most.isdecimal() else numbers[1]
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
