"""What the ranks of a run have recorded of themselves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.codec import load
from launcher.cpulist import format_cpulist
from launcher.files import LARGEST, read_file
from launcher.plan.model import Memory, RankPlan
from launcher.protocol import name_applied_file


@dataclass(frozen=True, slots=True)
class Applied:
    """One rank's record, `rank-N.applied.json`, as the shim wrote it."""

    rank: int
    local_rank: int
    attempt: int
    pid: int
    agent: int
    """PID of the process that started the rank, on its host."""
    host: str
    cpus: str
    memory: Memory
    problems: tuple[str, ...]
    gpu: str | None = ""
    """UUID of its GPU; None for no GPU, empty if the record does not tell."""
    num_workers: int | None = None
    """None if the record does not tell."""
    env: Mapping[str, str] | None = None
    """Variables that the shim set; None if the record does not tell."""
    time: float = 0
    """Seconds since the epoch."""
    has_terminal: bool = False
    """Its output goes to a pseudo-terminal of the launcher's rather than to its log."""


@dataclass(slots=True)
class AppliedReader:
    """Reads the records that are new or have changed since the last call."""

    run_path: Path
    own: bool = True
    """What the records say is acted upon: those of other users are left out."""
    seen: dict[Path, int] = field(default_factory=dict)

    def read_new(self) -> list[Applied]:
        """Return the new records; one that is not readable is left for the next call."""
        found = []
        try:
            paths = sorted(self.run_path.glob(name_applied_file("*")))
        except OSError:  # a network filesystem's hiccup
            return []
        for path in paths:
            try:
                stamp = path.lstat().st_mtime_ns
                if self.seen.get(path) != stamp:
                    found.append(load(Applied, read_file(path, LARGEST, own=self.own)))
                    self.seen[path] = stamp
            except (OSError, ValueError):
                continue
        return found


def compare_applied(ranks: Sequence[RankPlan], applied: Sequence[Applied]) -> list[str]:
    """Say, for each rank of this node, where what was applied is not what was planned."""
    found = {record.local_rank: record for record in applied}
    differences: list[str] = []
    for rank in ranks:
        record = found.get(rank.local_rank)
        if record is None:
            differences.append(f"local rank {rank.local_rank} left no record of its placement")
        else:
            differences += compare_rank(rank, record)
    return differences


def compare_rank(rank: RankPlan, record: Applied) -> Iterator[str]:
    """Say where one rank has something else than was planned for it."""
    cpus, name = format_cpulist(rank.cpus), f"rank {record.rank}"
    if record.cpus != cpus:
        yield f"{name} runs on CPUs {record.cpus}, planned {cpus}"
    if rank.memory.policy != "default" and record.memory != rank.memory:
        took, planned = map(describe_memory, (record.memory, rank.memory))
        yield f"{name} has memory policy {took}, planned {planned}"
    gpu = rank.gpu.uuid if rank.gpu else None
    if record.gpu not in ("", gpu):
        yield f"{name} has GPU {record.gpu or 'none'}, planned {gpu or 'none'}"
    if record.num_workers not in (None, rank.num_workers):
        yield f"{name} has {record.num_workers} DataLoader workers, planned {rank.num_workers}"
    env = dict(rank.env)
    for key in sorted({*env, *record.env}) if record.env is not None else ():
        value = (record.env or {}).get(key, "unset")
        if value != env.get(key, "unset"):
            yield f"{name} has {key} {value}, planned {env.get(key, 'unset')}"


def describe_memory(memory: Memory) -> str:
    """Return a memory policy with its nodes: `preferred 0`."""
    return f"{memory.policy} {format_cpulist(memory.nodes)}".strip()
