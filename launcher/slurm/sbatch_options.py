"""sbatch's options as a value, from the configuration's `cluster`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.slurm.notation import (
    check_count,
    check_dependency,
    check_size,
    check_text,
    parse_gpus,
    parse_signal,
    parse_time_limit,
)
from launcher.slurm.requeue_policy import LIMITED

if TYPE_CHECKING:
    from launcher.config.settings import ClusterConfig

AUTO = "auto"
PLAIN = (
    "partition",
    "account",
    "qos",
    "constraint",
    "exclude",
    "nodelist",
    "reservation",
    "switches",
    "mail_user",
    "mail_type",
)
"""Keys whose values SLURM alone can judge."""
OWN_KEYS = (
    *PLAIN,
    "time",
    "gpus_per_node",
    "cpus_per_task",
    "mem",
    "dependency",
    "segment",
    "exclusive",
)
EXCLUSIVE = ("user", "mcs", "topo")
INSTEAD = {
    **{name.replace("_", "-"): f"set cluster.{name}" for name in OWN_KEYS},
    **dict.fromkeys(("gpus", "gpus-per-task", "gpus-per-socket"), "set cluster.gpus_per_node"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-gpu"), "set nproc_per_node"),
    **dict.fromkeys(("output", "error", "open-mode", "input"), "logs go to the run directory: set run_dir"),
    **dict.fromkeys(("requeue", "no-requeue"), "set cluster.requeue.*"),
    **dict.fromkeys(("export", "export-file", "get-user-env"), "the environment goes along: set env.NAME"),
    "nodes": "set nodes",
    "no-kill": "set nodes=MIN:MAX, or cluster.spares",
    "job-name": "set name",
    "array": "use -m with values separated by commas",
    "signal": "set cluster.signal",
    "chdir": "start launch from that folder",
    "wait": "set follow=true",
    "test-only": "set dry_run=true",
    "container": "set cluster.container.image",
    **dict.fromkeys(("wrap", "parsable", "help", "usage", "version", "ignore-pbs"), "leave it out"),
}
"""Options that launch decides, and how to have them otherwise."""
NAME = re.compile(r"[a-z][a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of sbatch."""

    name: str
    """As sbatch has it: `gpus-per-node`."""
    value: str | None
    """None for an option without value."""
    key: str
    """The configuration's key for it."""

    def render(self) -> str:
        """Return `--name=value`."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


@dataclass(frozen=True, slots=True)
class JobSize:
    """What the options say of a job beside `cluster`."""

    name: str
    min_nodes: int
    max_nodes: int
    never: frozenset[str] = frozenset()
    """Classes of an attempt's end that its settings rule out: `hang` unless `watch.on_hang=stop`, `sick_node`
    unless `preflight.on_failure=exclude`."""
    spares: int = 0
    """Nodes beyond `max_nodes`, which replace lost ones."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Of each node; None leaves it to SLURM."""

    gpus_per_node: str | None
    cpus_per_task: str | None
    mem: str | None


def build_options(cluster: "ClusterConfig", shape: JobSize, filled: Resources) -> tuple[Option, ...]:
    """Return the options of a job that is no array; raises UsageError with the key and its values."""
    plain = {name: getattr(cluster, name) for name in (*PLAIN, "time", "dependency")}
    nodes = render_nodes(shape.min_nodes + shape.spares, shape.max_nodes + shape.spares)
    nodes_key = "nodes and cluster.spares" if shape.spares else "nodes"
    found = [
        Option("job-name", check_text("name", shape.name), "name"),
        Option("nodes", check_text("nodes", nodes), nodes_key),
    ]
    # With --ntasks-per-node, SLURM 22.05 gives the least of a range of nodes, however many are free.
    elastic = shape.min_nodes < shape.max_nodes
    found.append(Option("no-kill", None, "nodes") if elastic else Option("ntasks-per-node", "1", "nodes"))
    if shape.spares:
        found.append(Option("no-kill", None, "cluster.spares"))  # else a lost node ends the job
    for name, value in {**plain, **name_resources(filled)}.items():
        if value is not None:
            found.append(
                Option(name.replace("_", "-"), check_text(f"cluster.{name}", value), f"cluster.{name}")
            )
    if cluster.segment is not None:
        for count in {shape.min_nodes + shape.spares, shape.max_nodes + shape.spares}:
            if count % cluster.segment:
                raise UsageError(
                    f"cluster.segment={cluster.segment} does not divide {count} nodes ({nodes_key}={nodes}):"
                    " a job's segments have the same number of nodes each"
                )
        found.append(Option("segment", str(cluster.segment), "cluster.segment"))
    if cluster.exclusive not in (None, False):
        value = None if cluster.exclusive is True else str(cluster.exclusive)
        found.append(Option("exclusive", value, "cluster.exclusive"))
    number, seconds = parse_signal(cluster.signal)
    found.append(Option("signal", f"B:{number.name.removeprefix('SIG')}@{seconds}", "cluster.signal"))
    requeue = "requeue" if may_requeue(cluster, shape.never) else "no-requeue"
    found.append(Option(requeue, None, "cluster.requeue"))
    return (*found, *read_additional(cluster.additional))


def check_cluster(cluster: "ClusterConfig") -> None:
    """Check values that need no look at the cluster; raises UsageError."""
    if cluster.time is not None:
        parse_time_limit("cluster.time", cluster.time)
    if cluster.dependency is not None:
        check_dependency("cluster.dependency", cluster.dependency)
    for key, value, check in (
        ("gpus_per_node", cluster.gpus_per_node, parse_gpus),
        ("cpus_per_task", cluster.cpus_per_task, check_count),
        ("mem", cluster.mem, check_size),
    ):
        if value is not None and value != AUTO:
            check(f"cluster.{key}", value)
    if cluster.array_parallelism < 1:
        raise UsageError(
            f"cluster.array_parallelism={cluster.array_parallelism}: give a number of at least 1"
        )
    if cluster.segment is not None and cluster.segment < 1:
        raise UsageError(f"cluster.segment={cluster.segment}: give a number of nodes, at least 1")
    if cluster.exclusive not in (None, True, False, *EXCLUSIVE):
        raise UsageError(
            f"cluster.exclusive={cluster.exclusive}: give true, false, {', '.join(EXCLUSIVE)} or null"
        )
    parse_signal(cluster.signal)
    read_additional(cluster.additional)


def name_resources(filled: Resources) -> dict[str, str | None]:
    """Return the resources by their keys; no GPUs are no option."""
    gpus = None if filled.gpus_per_node == "0" else filled.gpus_per_node
    return {"gpus_per_node": gpus, "cpus_per_task": filled.cpus_per_task, "mem": filled.mem}


def render_nodes(low: int, high: int) -> str:
    """Write a number of nodes as sbatch does: `4`, `2-4`."""
    return str(low) if low == high else f"{low}-{high}"


def may_requeue(cluster: "ClusterConfig", never: frozenset[str]) -> bool:
    """Tell whether any end of an attempt, but for those in `never`, is to be followed by another."""
    policy = cluster.requeue
    return policy.limit > 1 and any(getattr(policy, reason) > 0 for reason in {*LIMITED} - never)


def read_additional(additional: dict[str, object]) -> tuple[Option, ...]:
    """Return the options of `cluster.additional`; raises UsageError for those that launch decides."""
    found = []
    for name_given, value in additional.items():
        key, name = f"cluster.additional.{name_given}", str(name_given).replace("_", "-")
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{key}: give the long name of an option of sbatch, without the dashes before it"
            )
        if name in INSTEAD:
            raise UsageError(f"{key}={value}: launch decides --{name} itself: {INSTEAD[name]}")
        if isinstance(value, dict):
            raise UsageError(
                f"{key}={value}: give a text, a number, true for an option without value, or null"
            )
        if isinstance(value, list):
            value = ",".join(map(str, value))  # noqa: PLW2901 - as sbatch has lists
        if value is not None and value is not False:
            found.append(Option(name, None if value is True else check_text(key, value), key))
    return tuple(found)


def array_option(members: int, parallelism: int) -> Option:
    """Return the option that makes a job an array."""
    return Option("array", f"0-{members - 1}%{parallelism}", "cluster.array_parallelism")


def require_same(members: Sequence[tuple[Option, ...]]) -> None:
    """Raise UsageError, with the key, if the members of an array have different options."""
    first = {option.name: option for option in members[0]}
    for number, options in enumerate(members[1:], 2):
        other = {option.name: option for option in options}
        for name in {**first, **other}:
            one, two = first.get(name), other.get(name)
            if one != two and name != "job-name":
                key = next(option.key for option in (one, two) if option)
                shown = " and job 1 has ".join(
                    option.render() if option else f"no --{name}" for option in (two, one)
                )
                raise UsageError(
                    f"{key}: job {number} of the sweep has {shown}: one job array has the same options for"
                    " all of its jobs, so run launch once for each value"
                )
