"""A run directory read back: each host's plan, and what its ranks have recorded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.cpulist import parse_cpulist
from launcher.files import LARGEST, read_file
from launcher.plan.model import Gpu, Memory, RankPlan, Variable
from launcher.protocol import name_applied_file, name_plan_file, parse_plan_file
from launcher.runs.applied_records import DAMAGE, Applied, parse_applied


@dataclass(frozen=True, slots=True)
class HostRecords:
    """One host of a run."""

    name: str
    planned: tuple[RankPlan, ...]
    """Empty where the run has no plan of this host."""
    records: tuple[Applied, ...]
    """The newest record of each local rank in the host's last attempt."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RunRecords:
    """A run directory, as far as it can be read."""

    path: str
    hosts: tuple[HostRecords, ...]
    state: str = ""
    """How the run went, as the manifest has it; empty where it does not tell."""
    damaged: tuple[str, ...] = ()
    """Files that cannot be read, with the reason."""


def find_last_run(runs_dir: Path) -> Path | None:
    """The run directory below RUNS_DIR/NAME whose plan was written last; None where there is none."""
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
            plans[host] = read_ranks(json.loads(read_file(file, LARGEST).decode()))
        except DAMAGE as error:
            damaged.append(describe_damage(file, error))
    for file in sorted(path.glob(name_applied_file("*"))):
        try:
            records.append(parse_applied(read_file(file, LARGEST).decode()))
        except DAMAGE as error:
            damaged.append(describe_damage(file, error))
    state, manifest = "", min(path.glob("manifest*.json"), default=path / "manifest.json")
    try:
        state = str(json.loads(read_file(manifest, LARGEST).decode())["outcome"]["state"])
    except DAMAGE as error:
        damaged.append(describe_damage(manifest, error))
    hosts = sorted({*plans, *(record.host for record in records)} - {h for h in plans if plans[h] is None})
    return RunRecords(
        str(path),
        tuple(gather(name, plans.get(name) or (), records) for name in hosts),
        state,
        tuple(damaged),
    )


def gather(name: str, planned: tuple[RankPlan, ...], records: list[Applied]) -> HostRecords:
    """One host's plan with the records of its last attempt.

    Attempts are counted on each host, anew where nodes are started by hand, and ranks may get other numbers
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
    reason = f"not as expected, {error!r}"
    if isinstance(error, FileNotFoundError):
        reason = "not there"
    elif isinstance(error, OSError | json.JSONDecodeError | UnicodeDecodeError):
        reason = getattr(error, "strerror", None) or str(error)
    return f"{path.name} cannot be read ({reason[:200]})"


def read_ranks(plan: Mapping[str, object]) -> tuple[RankPlan, ...]:
    """Read the ranks of a plan's JSON; raises KeyError, TypeError, ValueError or AttributeError."""
    entries = plan["ranks"]
    if not isinstance(entries, list) or not entries:
        raise TypeError("ranks is no list, or empty")
    return tuple(read_rank(entry) for entry in entries)


def read_rank(entry: Mapping[str, object]) -> RankPlan:
    """Read one entry of `ranks`, as far as it is compared; raises as `read_ranks`."""
    gpu, memory, env = entry["gpu"], entry["memory"], entry["env"]
    if not isinstance(memory, dict) or not isinstance(env, dict) or not isinstance(gpu, dict | None):
        raise TypeError("gpu, memory and env are objects")
    return RankPlan(
        local_rank=int(str(entry["local_rank"])),
        gpu=Gpu(int(gpu["index"]), str(gpu["uuid"]), str(gpu["pci"]), None) if gpu else None,
        cpus=parse_cpulist(str(entry["cpus"])),
        worker_cpus=parse_cpulist(str(entry["worker_cpus"])),
        memory=Memory(str(memory["policy"]), parse_cpulist(str(memory["nodes"]))),
        num_workers=int(str(entry["num_workers"])),
        omp_num_threads=int(str(entry["omp_num_threads"])),
        env=tuple((str(name), str(value)) for name, value in env.items()),
        variables=tuple(map(read_variable, take_list(entry.get("variables", [])))),
    )


def read_variable(entry: Mapping[str, object]) -> Variable:
    """Read one entry of `variables`; raises as `read_ranks`."""
    return Variable(str(entry["name"]), str(entry["value"]), str(entry["from"]), str(entry.get("why", "")))


def take_list(value: object) -> list[Mapping[str, object]]:
    """Return a list of objects; raises TypeError. Plans of earlier versions have none here."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError(f"a list of objects is {value!r}")
    return value
