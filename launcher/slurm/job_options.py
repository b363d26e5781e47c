"""What a job, or the jobs of a sweep, ask sbatch for, and what to do if it refuses."""

import contextlib
import getpass
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from launcher.config.request import parse_nproc
from launcher.config.settings import ClusterConfig, Settings
from launcher.errors import SchedulerError, UsageError
from launcher.launch.job import JobSpec
from launcher.slurm.attempt_end import LIMITED, SIGNAL_EARLY
from launcher.slurm.commands import ask_config, run_slurm
from launcher.slurm.notation import (
    check_count,
    check_dependency,
    check_size,
    check_text,
    parse_gpus,
    parse_signal,
    parse_time_limit,
)
from launcher.slurm.resources import (
    AUTO,
    NodeKind,
    Resources,
    ask_sinfo,
    check_limits,
    fill_auto_resources,
    select_kinds,
)
from launcher.slurm.slurm_environ import find_variables

NOTATIONS: Mapping[str, Callable[[str, str], object]] = {
    **dict.fromkeys(("partition", "account", "qos", "constraint", "exclude", "nodelist"), check_text),
    **dict.fromkeys(("reservation", "switches", "mail_user", "mail_type"), check_text),
    "time": parse_time_limit,
    "dependency": check_dependency,
    "gpus_per_node": parse_gpus,
    "cpus_per_task": check_count,
    "mem": check_size,
}
"""Keys of `cluster` that are options of sbatch by the same name, and what refuses a wrong notation."""
EXCLUSIVE = ("user", "mcs", "topo")
INSTEAD = {
    **{name.replace("_", "-"): f"set cluster.{name}" for name in (*NOTATIONS, "segment", "exclusive")},
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
CAUSES = (
    ("account", ("account",)),  # `Invalid account or account/partition combination`, too
    ("partition", ("partition",)),
    ("qos", ("qos",)),
    ("time limit", ("time",)),
    ("number of nodes", ("nodes", "nodelist")),
    ("reservation", ("reservation",)),
    ("feature", ("constraint",)),
    ("node name", ("nodelist", "exclude")),
    ("array", ("array",)),
    ("dependency", ("dependency",)),
    ("memory", ("mem",)),
    ("cpu count", ("cpus-per-task",)),
    ("generic resource", ("gpus-per-node",)),
    ("node count", ("nodes",)),
    ("for --cluster", ("clusters",)),
    (
        "configuration is not available",
        ("nodes", "gpus-per-node", "cpus-per-task", "mem", "constraint", "nodelist", "exclude"),
    ),
)
"""Words of sbatch's complaints (slurm_errno.c), and the options that they are about, the first that fits."""
NAMED = re.compile(r"(?:unrecognized option '|invalid )--(?P<name>[a-z-]+)")
AWAY = (
    "contact slurm controller",
    "unable to process configuration",
    "could not establish a configuration source",
    "unable to establish control",
    "unable to resolve",
    "protocol authentication",
    "did not answer",
)
"""Parts of what every command prints if slurmctld, munge or slurm.conf is not there."""


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
class JobOptions:
    """The options of one submission, and what they were made from."""

    options: tuple[Option, ...]
    partitions: tuple[str, ...]
    """All that there are; none if sinfo failed."""
    kinds: tuple[NodeKind, ...]
    """Nodes of the chosen partition."""
    warnings: tuple[str, ...]


def choose_job_options(specs: Sequence[JobSpec], environ: Mapping[str, str], *, dry_run: bool) -> JobOptions:
    """Return the options for one job, or for an array of several; raises UsageError or SchedulerError.

    With `dry_run`, what SLURM would not grant is a warning.
    """
    for spec in specs:
        check_cluster(spec.config.cluster)
    first = specs[0].config.cluster
    warnings: list[str] = []
    there: tuple[NodeKind, ...] = ()
    clusters = first.additional.get("clusters")
    try:
        there = ask_sinfo(environ, None if clusters is None else str(clusters))
    except SchedulerError as error:
        if _is_slurm_away(str(error)) and not dry_run:  # sbatch would fail too, after a minute
            raise explain_refusal(str(error), (), (), ()) from None
        left = "what is auto of cluster.gpus_per_node, cpus_per_task and mem is left to SLURM"
        warnings.append(f"{error}; {left}")
    names = list(dict.fromkeys(spec.name for spec in specs))
    name = names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
    members = []
    for spec in specs:
        cluster = spec.config.cluster
        kinds = select_kinds(there, cluster.partition or environ.get("SBATCH_PARTITION"))
        warnings += _check_signal_time(cluster)
        filled = fill_auto_resources(cluster, read_nproc(spec.config.nproc_per_node), kinds, environ)
        try:
            check_limits(cluster, spec.cluster.min_nodes, filled, kinds)
        except SchedulerError as error:
            if not dry_run:
                raise
            warnings.append(str(error))
        members.append(_build_options(spec, name, filled))
    _require_same(specs, members)
    options = members[0]
    if len(specs) > 1:
        array = f"0-{len(specs) - 1}%{first.array_parallelism}"
        options = (*options, Option("array", array, "cluster.array_parallelism"))
    kinds = select_kinds(there, first.partition or environ.get("SBATCH_PARTITION"))
    partitions = tuple(dict.fromkeys(kind.partition for kind in there))
    return JobOptions(options, partitions, kinds, tuple(dict.fromkeys(warnings)))


def check_cluster(cluster: ClusterConfig) -> None:
    """Check values that need no look at the cluster; raises UsageError."""
    for key, check in NOTATIONS.items():
        value = getattr(cluster, key)
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
    _read_additional(cluster.additional)


def read_nproc(text: object) -> int | None:
    """Return the ranks of a node if that is a number; raises UsageError."""
    return None if text in ("auto", "gpu", "cpu") else parse_nproc(text, 1)


def _build_options(spec: JobSpec, name: str, filled: Resources) -> tuple[Option, ...]:
    """Return the options of a job that is no array; raises UsageError with the key and its values."""
    cluster, spares = spec.config.cluster, spec.config.cluster.spares
    low, high = spec.cluster.min_nodes + spares, spec.cluster.max_nodes + spares
    nodes = str(low) if low == high else f"{low}-{high}"
    nodes_key = "nodes and cluster.spares" if spares else "nodes"
    found = [Option("job-name", check_text("name", name), "name"), Option("nodes", nodes, nodes_key)]
    # With --ntasks-per-node, SLURM 22.05 gives the least of a range of nodes, however many are free.
    is_elastic = low < high
    found.append(Option("no-kill", None, "nodes") if is_elastic else Option("ntasks-per-node", "1", "nodes"))
    if spares:
        found.append(Option("no-kill", None, "cluster.spares"))  # else a lost node ends the job
    gpus = None if filled.gpus_per_node == "0" else filled.gpus_per_node
    resources = {"gpus_per_node": gpus, "cpus_per_task": filled.cpus_per_task, "mem": filled.mem}
    for key in NOTATIONS:
        value = resources.get(key) if key in resources else getattr(cluster, key)
        if value is not None:
            found.append(Option(key.replace("_", "-"), value, f"cluster.{key}"))
    if cluster.segment is not None:
        for count in (low, high):
            if count % cluster.segment:
                raise UsageError(
                    f"cluster.segment={cluster.segment} does not divide {count} nodes ({nodes_key}={nodes}):"
                    " a job's segments have the same number of nodes each"
                )
        found.append(Option("segment", str(cluster.segment), "cluster.segment"))
    if cluster.exclusive not in (None, False):
        word = None if cluster.exclusive is True else str(cluster.exclusive)
        found.append(Option("exclusive", word, "cluster.exclusive"))
    number, seconds = parse_signal(cluster.signal)
    found.append(Option("signal", f"B:{number.name.removeprefix('SIG')}@{seconds}", "cluster.signal"))
    requeue = "requeue" if _may_requeue(spec.config) else "no-requeue"
    found.append(Option(requeue, None, "cluster.requeue"))
    return (*found, *_read_additional(cluster.additional))


def _may_requeue(config: Settings) -> bool:
    """Tell whether another attempt is to follow any end of one that these settings leave possible."""
    impossible = {
        "hang": config.watch.on_hang != "stop",
        "sick_node": config.preflight.on_failure != "exclude" or config.preflight.kind == "off",
    }
    policy = config.cluster.requeue
    limits = [getattr(policy, cause) for cause in LIMITED if not impossible.get(cause)]
    return policy.limit > 1 and any(limit > 0 for limit in limits)


def _read_additional(additional: dict[str, object]) -> tuple[Option, ...]:
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


def _check_signal_time(cluster: ClusterConfig) -> list[str]:
    """Return a warning if the checkpoint signal may come as soon as the job has begun."""
    number, seconds = parse_signal(cluster.signal)
    limit = 60 * parse_time_limit("cluster.time", cluster.time) if cluster.time else math.inf
    if limit - seconds >= SIGNAL_EARLY:
        return []
    return [
        f"cluster.time={cluster.time} is too short for cluster.signal={cluster.signal}: SLURM sends the"
        f" signal {seconds} s before the limit, or up to {SIGNAL_EARLY:.0f} s earlier, and so perhaps"
        f" when the job has just begun: give {number.name.removeprefix('SIG')}@SECONDS, or a longer time"
    ]


def _require_same(specs: Sequence[JobSpec], members: Sequence[tuple[Option, ...]]) -> None:
    """Raise UsageError, with the key, if the members of an array differ in what they share."""
    first = {option.name: option for option in members[0]}
    for number, (spec, options) in enumerate(zip(specs[1:], members[1:], strict=True), 2):
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
        for key in ("setup", "array_parallelism"):
            values = [getattr(each.config.cluster, key) for each in (specs[0], spec)]
            if values[0] != values[1]:
                raise UsageError(
                    f"cluster.{key}: job {number} of the sweep has {values[1]} and job 1 has {values[0]}: one"
                    " job array has one script, so run launch once for each value"
                )


def _is_slurm_away(complaint: str) -> bool:
    """Tell whether no command of SLURM's can do anything."""
    return any(words in complaint.lower() for words in AWAY)


def explain_refusal(
    complaint: str,
    options: Sequence[Option],
    partitions: Sequence[str],
    kinds: Sequence[NodeKind],
    environ: Mapping[str, str] = MappingProxyType({}),
) -> SchedulerError:
    """Return the error with the values that were refused and what there is.

    `kinds` are the partition's, `environ` is what sbatch was run with: its variables are options too.
    """
    if _is_slurm_away(complaint):
        return SchedulerError(f"{complaint}: is slurmctld up (`scontrol ping`)? Nothing was submitted")
    text = complaint.lower()
    named = NAMED.search(text)
    names = (named["name"],) if named else next((names for words, names in CAUSES if words in text), ())
    given = [option for option in options if option.name in names]
    others = sorted({*names} - {option.name for option in given})
    variables = [name for option in others for name in find_variables(environ, option)]
    shown = ", ".join(
        [f"{option.key}: {option.render()}" for option in given]
        + [f"{name}={environ[name]}" for name in variables]
    )
    keys = [option.key for option in given] + variables or [f"--{name}" for name in names]
    fix = _suggest_fix(names, keys, partitions, kinds)
    return SchedulerError(f"{complaint}{f' ({shown})' if shown else ''}: {fix}")


def _suggest_fix(
    names: Sequence[str], keys: Sequence[str], partitions: Sequence[str], kinds: Sequence[NodeKind]
) -> str:
    """Say what there is to choose from, or which of the `keys` that were given to change."""
    if "partition" in names and partitions:
        return f"choose cluster.partition from {', '.join(partitions)}"
    if "account" in names or "qos" in names:
        return _list_associations()
    if "array" in names:
        return f"make the sweep smaller: {_describe_array_limit()}"
    if kinds and tuple(names) == ("constraint",):
        if features := sorted({feature for kind in kinds for feature in kind.features}):
            return f"the partition's nodes have the features {', '.join(features)}"
        return "the partition's nodes have no features: leave cluster.constraint out"
    if kinds and {"nodes", "mem", "cpus-per-task", "gpus-per-node", "constraint"} & {*names}:
        counts: dict[str, int] = {}
        for kind in kinds:  # in whatever state they are
            counts[kind.describe()] = counts.get(kind.describe(), 0) + kind.count
        return f"the partition's nodes: {'; '.join(f'{n} with {text}' for text, n in counts.items())}"
    if names:
        what = "unset it" if all(key.startswith(("SBATCH_", "SLURM_")) for key in keys) else "leave it out"
        return f"change {' or '.join(keys)}, or {what}"
    return "change cluster.* accordingly; dry_run=true shows the script"


def _list_associations() -> str:
    """Return the accounts that the user may use, if there is accounting."""
    words = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}"]
    with contextlib.suppress(SchedulerError):
        shown = set()
        for line in run_slurm([*words, "format=account,partition,qos"]).splitlines():
            account, partition, qos = line.split("|")
            where = f" in partition {partition}" if partition else ""
            shown.add(account + where + (f" with QOS {qos}" if qos else ""))
        if shown:
            return f"yours are {'; '.join(sorted(shown))}"
    return "set cluster.account and cluster.qos to what you may use (`sacctmgr show assoc user=$USER`)"


def _describe_array_limit() -> str:
    """Say how many members an array can have."""
    with contextlib.suppress(SchedulerError):
        size = ask_config().get("MaxArraySize", "")
        if size.isdecimal():
            return f"SLURM takes {int(size) - 1} jobs in one array here (MaxArraySize={size})"
    return "SLURM's limit is MaxArraySize (`scontrol show config`)"
