"""What the ranks of a run have recorded of themselves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.cpulist import format_cpulist
from launcher.plan.model import RankPlan


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
    memory: Mapping[str, str]
    problems: tuple[str, ...]


@dataclass(slots=True)
class AppliedReader:
    """Reads the records that are new or have changed since the last call."""

    run_path: Path
    seen: dict[Path, int] = field(default_factory=dict)

    def read_new(self) -> list[Applied]:
        """Return the new records; one that is not readable is left for the next call."""
        found = []
        try:
            paths = sorted(self.run_path.glob("rank-*.applied.json"))
        except OSError:  # a network filesystem's hiccup
            return []
        for path in paths:
            try:
                stamp = path.stat().st_mtime_ns
                if self.seen.get(path) != stamp:
                    found.append(parse_applied(path.read_text(encoding="utf-8")))
                    self.seen[path] = stamp
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return found


def parse_applied(text: str) -> Applied:
    """Read one record; raises ValueError, KeyError or TypeError."""
    data = json.loads(text)
    memory = {name: str(data["memory"][name]) for name in ("policy", "nodes")}
    numbers = {name: int(data[name]) for name in ("rank", "local_rank", "attempt", "pid", "agent")}
    problems = tuple(map(str, data["problems"]))
    return Applied(**numbers, host=data["host"], cpus=data["cpus"], memory=memory, problems=problems)


def compare_applied(ranks: Sequence[RankPlan], applied: Sequence[Applied]) -> list[str]:
    """Say, for each rank of this node, where what was applied is not what was planned."""
    found = {record.local_rank: record for record in applied}
    differences = []
    for rank in ranks:
        record = found.get(rank.local_rank)
        if record is None:
            differences.append(f"local rank {rank.local_rank} left no record of its placement")
        elif record.cpus != format_cpulist(rank.cpus):
            differences.append(
                f"rank {record.rank} runs on CPUs {record.cpus}, planned {format_cpulist(rank.cpus)}"
            )
        elif rank.memory.policy != "default" and record.memory != describe_memory(rank):
            took, planned = (" ".join(memory.values()) for memory in (record.memory, describe_memory(rank)))
            differences.append(f"rank {record.rank} has memory policy {took.strip()}, planned {planned}")
    return differences


def describe_memory(rank: RankPlan) -> dict[str, str]:
    """Return a planned memory policy as the record has it."""
    return {"policy": rank.memory.policy, "nodes": format_cpulist(rank.memory.nodes)}
