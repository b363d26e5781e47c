"""A run directory read back: the plan of each host, and what its ranks have recorded of themselves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.codec import DecodeError, load
from launcher.cpulist import format_cpulist
from launcher.files import LARGEST, read_file
from launcher.plan.model import Memory, RankPlan
from launcher.protocol import name_applied_file, name_plan_file, parse_plan_file


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
class EndState:
    """The part of a manifest's outcome that is shown."""

    state: str


@dataclass(frozen=True, slots=True)
class PlainManifest:
    """The part of a manifest that is shown."""

    outcome: EndState
    hosts: tuple[str, ...] = ()
    slurm: Any = None
    """Only in a SLURM job's, whose `hosts` are all nodes of its last attempt."""


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
    newest: dict[Path, float] = {}
    for plan in runs_dir.glob("*/*/plan-*.json"):
        try:
            newest[plan.parent] = max(newest.get(plan.parent, 0), plan.stat().st_mtime)
        except OSError:  # taken away meanwhile
            continue
    return max(newest, key=lambda path: (newest[path], str(path)), default=None)


def read_run(path: Path) -> RunRecords:
    """Read a run directory; files that are damaged are told in the result, and nothing raises."""
    damaged: list[str] = []
    plans: dict[str, tuple[RankPlan, ...] | None] = {}
    records: list[Applied] = []
    for file in sorted(path.glob(name_plan_file("*"))):
        host = parse_plan_file(file.name)
        plans[host] = None
        try:
            plans[host] = read_ranks(read_file(file, LARGEST))
        except (OSError, ValueError) as error:
            damaged.append(describe_damage(file, error))
    for file in sorted(path.glob(name_applied_file("*"))):
        try:
            records.append(load(Applied, read_file(file, LARGEST)))
        except (OSError, ValueError) as error:
            damaged.append(describe_damage(file, error))
    state = ""
    last_hosts: tuple[str, ...] = ()
    manifest = min(path.glob("manifest*.json"), default=path / "manifest.json")
    try:
        found = load(PlainManifest, read_file(manifest, LARGEST))
        state, last_hosts = found.outcome.state, found.hosts if found.slurm else ()
    except (OSError, ValueError) as error:
        damaged.append(describe_damage(manifest, error))
    recorded = {record.host for record in records}
    # A node that was left out, or that a spare one has replaced, has a plan, and others have its ranks.
    gone = {host for host in plans if plans[host] is None or (last_hosts and host not in last_hosts)}
    hosts = sorted(({*plans} - gone) | (recorded - {host for host in plans if plans[host] is None}))
    return RunRecords(
        str(path),
        tuple(gather(name, plans.get(name) or (), records) for name in hosts),
        state,
        tuple(damaged),
    )


def gather(name: str, planned: tuple[RankPlan, ...], records: list[Applied]) -> HostRecords:
    """One host's plan with the records of its last attempt.

    Attempts are counted on each host, anew if nodes are started by hand, and ranks may get other numbers
    without a new attempt: the newest record says which attempt is the last, and of several records of one
    local rank, the newest counts.
    """
    own = [record for record in records if record.host == name]
    own.sort(key=lambda record: (record.time, record.attempt))
    last = own[-1].attempt if own else 0
    newest = {record.local_rank: record for record in own if record.attempt == last}
    return HostRecords(name, planned, tuple(newest[rank] for rank in sorted(newest)), last)


def describe_damage(path: Path, error: Exception) -> str:
    """Say which file cannot be read, and why."""
    reason = "not there" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None)
    return f"{path.name} cannot be read ({(reason or str(error))[:200]})"


def read_ranks(data: bytes) -> tuple[RankPlan, ...]:
    """Read the ranks of a plan's JSON; raises DecodeError."""
    plan = load(PlannedRanks, data)
    if not plan.ranks:
        raise DecodeError("ranks is empty")
    return plan.ranks
