"""A run directory read back: each host's plan, and what its ranks have recorded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.codec import DecodeError, load
from launcher.files import LARGEST, read_file
from launcher.plan.model import RankPlan
from launcher.protocol import name_applied_file, name_plan_file, parse_plan_file
from launcher.runs.applied_records import Applied


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
