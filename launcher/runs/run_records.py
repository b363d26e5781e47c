"""A run directory read back: the plan of each host, and what its ranks have recorded of themselves."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from launcher.codec import DecodeError, load
from launcher.cpulist import format_cpulist
from launcher.files import LARGEST, read_file
from launcher.plan.model import Memory, RankPlan
from launcher.protocol import name_applied_file, name_plan_file, parse_plan_file
from launcher.runs.manifest import take_dict, take_list

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """The part of a plan's JSON that is compared."""

    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True, slots=True)
class HostRecords:
    """One host of a run."""

    name: str
    planned: tuple[RankPlan, ...]
    """Empty if the run has no plan of this host."""
    records: tuple[Applied, ...]
    """The newest record of each local rank in the host's last attempt."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RunRecords:
    """A run directory, as far as it can be read."""

    path: str
    hosts: tuple[HostRecords, ...]
    state: str = ""
    """How the run went, as the manifest has it; empty if it does not tell."""
    damaged: tuple[str, ...] = ()
    """Files that cannot be read, with the reason."""


def find_last_run(runs_dir: Path) -> Path | None:
    """The run directory below RUNS_DIR/NAME whose plan was written last; None if there is none."""
    found = []
    for plan in runs_dir.glob("*/*/plan-*.json"):
        with contextlib.suppress(OSError):  # taken away meanwhile
            found.append((plan.stat().st_mtime, str(plan.parent)))
    return Path(max(found)[1]) if found else None


def read_run(path: Path) -> RunRecords:
    """Read a run directory; files that are damaged are told in the result, and nothing raises."""
    damaged: list[str] = []

    def read(decode: Callable[[bytes], T], file: Path) -> T | None:
        try:
            return decode(read_file(file, LARGEST))
        except (OSError, ValueError) as error:
            missing = "not there" if isinstance(error, FileNotFoundError) else None
            reason = missing or getattr(error, "strerror", None) or str(error)
            damaged.append(f"{file.name} cannot be read ({reason[:200]})")
            return None

    files = sorted(path.glob(name_plan_file("*")))
    plans = {parse_plan_file(file.name): read(read_ranks, file) for file in files}
    files = sorted(path.glob(name_applied_file("*")))
    records = [record for file in files if (record := read(partial(load, Applied), file))]
    file = min(path.glob("manifest*.json"), default=path / "manifest.json")
    manifest = read(read_manifest_fields, file) or {}
    # A SLURM job's node that was left out or replaced by a spare one has a plan; others have its ranks.
    last_hosts = take_list(manifest, "hosts") if manifest.get("slurm") else []
    damaged_hosts = {host for host, plan in plans.items() if plan is None}
    planned = {host for host in plans if not last_hosts or host in last_hosts}
    names = sorted((planned | {record.host for record in records}) - damaged_hosts)
    hosts = []
    for name in names:
        # Attempts are counted on each host, anew if nodes are started by hand, and ranks may get other
        # numbers without a new attempt: the newest record says which attempt is the last, and of several
        # records of one local rank, the newest counts.
        own = sorted((one for one in records if one.host == name), key=lambda one: (one.time, one.attempt))
        last = own[-1].attempt if own else 0
        newest = {record.local_rank: record for record in own if record.attempt == last}
        found = tuple(newest[rank] for rank in sorted(newest))
        hosts.append(HostRecords(name, plans.get(name) or (), found, last))
    state = take_dict(manifest, "outcome").get("state", "")
    return RunRecords(str(path), tuple(hosts), state, tuple(damaged))


def read_manifest_fields(data: bytes) -> dict[str, Any]:
    """Read a manifest; raises DecodeError for one that does not tell how the run went."""
    manifest = load(dict[str, Any], data)
    if not isinstance(take_dict(manifest, "outcome").get("state"), str):
        raise DecodeError("it has no outcome.state")
    return manifest


def read_ranks(data: bytes) -> tuple[RankPlan, ...]:
    """Read the ranks of a plan's JSON; raises DecodeError."""
    plan = load(PlannedRanks, data)
    if not plan.ranks:
        raise DecodeError("ranks is empty")
    return plan.ranks
