"""What a job, or the jobs of a sweep, ask SLURM for, and what to do if sbatch refuses it."""

import contextlib
import getpass
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from launcher.config.request import parse_nproc
from launcher.config.settings import ClusterConfig, Settings
from launcher.errors import SchedulerError, UsageError
from launcher.launch.job import JobSpec
from launcher.slurm.client import run_slurm
from launcher.slurm.notation import parse_signal, parse_time_limit
from launcher.slurm.requeue_policy import SIGNAL_EARLY
from launcher.slurm.resources import Inventory, NodeKind, ask_sinfo, check_limits, fill_auto_resources
from launcher.slurm.sbatch_options import (
    JobSize,
    Option,
    array_option,
    build_options,
    check_cluster,
    require_same,
)
from launcher.slurm.slurm_environ import find_variables

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
    inventory, warnings = ask_inventory(environ, first.additional.get("clusters"), dry_run=dry_run)
    options_of_jobs = []
    for spec in specs:
        cluster = spec.config.cluster
        kinds = inventory.select(cluster.partition or environ.get("SBATCH_PARTITION"))
        warnings = [*warnings, *check_signal_time(cluster)]
        filled = fill_auto_resources(cluster, read_nproc(spec.config.nproc_per_node), kinds, environ)
        try:
            check_limits(cluster, spec.cluster.min_nodes, filled, kinds)
        except SchedulerError as error:
            if not dry_run:
                raise
            warnings = [*warnings, str(error)]
        nodes = spec.cluster.min_nodes, spec.cluster.max_nodes
        shape = JobSize(name_slurm_job(specs), *nodes, list_impossible_ends(spec.config), cluster.spares)
        options_of_jobs.append(build_options(cluster, shape, filled))
    require_same(options_of_jobs)
    check_setups(specs)
    array = [array_option(len(specs), first.array_parallelism)] if len(specs) > 1 else []
    kinds = inventory.select(first.partition or environ.get("SBATCH_PARTITION"))
    return JobOptions(
        (*options_of_jobs[0], *array), inventory.list_partitions(), kinds, tuple(dict.fromkeys(warnings))
    )


def check_signal_time(cluster: ClusterConfig) -> list[str]:
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


def check_setups(specs: Sequence[JobSpec]) -> None:
    """Raise UsageError if the jobs of a sweep differ in what their one script does."""
    for key in ("setup", "array_parallelism"):
        for number, spec in enumerate(specs[1:], 2):
            one, two = (getattr(each.config.cluster, key) for each in (specs[0], spec))
            if one != two:
                raise UsageError(
                    f"cluster.{key}: job {number} of the sweep has {two} and job 1 has {one}: one job array"
                    " has one script, so run launch once for each value"
                )


def ask_inventory(
    environ: Mapping[str, str], clusters: object, *, dry_run: bool
) -> tuple[Inventory, list[str]]:
    """Ask sinfo; if that fails, return an empty inventory and what to say of it.

    Raises SchedulerError if sbatch would fail too, which takes a minute each.
    """
    try:
        return ask_sinfo(environ, None if clusters is None else str(clusters)), []
    except SchedulerError as error:
        if is_slurm_away(str(error)) and not dry_run:
            raise explain_refusal(str(error), (), (), ()) from None
        left = "what is auto of cluster.gpus_per_node, cpus_per_task and mem is left to SLURM"
        return Inventory(()), [f"{error}; {left}"]


def read_nproc(text: object) -> int | None:
    """Return the ranks of a node if that is a number; raises UsageError."""
    return None if text in ("auto", "gpu", "cpu") else parse_nproc(text, 1)


def name_slurm_job(specs: Sequence[JobSpec]) -> str:
    """Return the job's name for SLURM: the run's; of several names the first, and how many more there are."""
    names = list(dict.fromkeys(spec.name for spec in specs))
    return names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"


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
    text = complaint.lower()
    if is_slurm_away(text):
        return SchedulerError(f"{complaint}: is slurmctld up (`scontrol ping`)? Nothing was submitted")
    named = NAMED.search(text)
    found = (names for words, names in CAUSES if words in text)
    names = (named["name"],) if named else next(found, ())
    given_options = [option for option in options if option.name in names]
    others = {*names} - {option.name for option in given_options}
    variables = [name for option in sorted(others) for name in find_variables(environ, option)]
    shown = ", ".join(
        [f"{option.key}: {option.render()}" for option in given_options]
        + [f"{name}={environ[name]}" for name in variables]
    )
    keys = [option.key for option in given_options] + variables or [f"--{name}" for name in names]
    fix = suggest_fix(names, keys, partitions, kinds)
    return SchedulerError(f"{complaint}{f' ({shown})' if shown else ''}: {fix}")


def is_slurm_away(complaint: str) -> bool:
    """Tell whether no command of SLURM's can do anything."""
    return any(words in complaint.lower() for words in AWAY)


def suggest_fix(
    names: Sequence[str], keys: Sequence[str], partitions: Sequence[str], kinds: Sequence[NodeKind]
) -> str:
    """Say what there is to choose from, or which of the `keys` that were given to change."""
    if "partition" in names and partitions:
        return f"choose cluster.partition from {', '.join(partitions)}"
    if "account" in names or "qos" in names:
        return list_associations()
    if "array" in names:
        return f"make the sweep smaller{ask_array_size()}"
    if kinds and {"nodes", "mem", "cpus-per-task", "gpus-per-node", "constraint"} & {*names}:
        nodes = f"the partition's nodes: {'; '.join(describe_kinds(kinds))}"
        return list_features(kinds) if tuple(names) == ("constraint",) else nodes
    if names:
        what = "unset it" if all(key.startswith(("SBATCH_", "SLURM_")) for key in keys) else "leave it out"
        return f"change {' or '.join(keys)}, or {what}"
    return "change cluster.* accordingly; dry_run=true shows the script"


def describe_kinds(kinds: Sequence[NodeKind]) -> list[str]:
    """Return each kind of node in words, with the number of them, whatever state they are in."""
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind.describe()] = counts.get(kind.describe(), 0) + kind.count
    return [f"{count} with {text}" for text, count in counts.items()]


def list_features(kinds: Sequence[NodeKind]) -> str:
    """Return the features of the nodes, in words."""
    features = sorted({feature for kind in kinds for feature in kind.features})
    if features:
        return f"the partition's nodes have the features {', '.join(features)}"
    return "the partition's nodes have no features: leave cluster.constraint out"


def list_associations() -> str:
    """Return the accounts that the user may use, if there is accounting."""
    words = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}"]
    with contextlib.suppress(SchedulerError):
        rows = [line.split("|") for line in run_slurm([*words, "format=account,partition,qos"]).splitlines()]
        shown = {
            account
            + (f" in partition {partition}" if partition else "")
            + (f" with QOS {qos}" if qos else "")
            for account, partition, qos in rows
        }
        if shown:
            return f"yours are {'; '.join(sorted(shown))}"
    return "set cluster.account and cluster.qos to what you may use (`sacctmgr show assoc user=$USER`)"


def ask_array_size() -> str:
    """Return how many members an array can have, in words."""
    with contextlib.suppress(SchedulerError):
        for line in run_slurm(["scontrol", "show", "config"]).splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "MaxArraySize" and value.strip().isdecimal():
                return f": SLURM takes {int(value) - 1} jobs in one array here (MaxArraySize={value.strip()})"
    return ": SLURM's limit is MaxArraySize (`scontrol show config`)"


def list_impossible_ends(config: Settings) -> frozenset[str]:
    """Return the classes of an attempt's end that a configuration rules out: see `JobSize.never`."""
    possible = {
        "hang": config.watch.on_hang == "stop",
        "sick_node": config.preflight.on_failure == "exclude" and config.preflight.kind != "off",
    }
    return frozenset(cause for cause, is_possible in possible.items() if not is_possible)
