"""What a job, or the jobs of a sweep, ask sbatch for, and what to do if it refuses."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from launcher.config.request import parse_nproc
from launcher.config.settings import ClusterConfig
from launcher.errors import SchedulerError, UsageError
from launcher.launch.job import JobSpec
from launcher.slurm.attempt_end import LIMITED
from launcher.slurm.notation import check_count, check_text, parse_gpus, parse_signal
from launcher.slurm.resources import AUTO, NodeKind, ask_sinfo, fill_auto_resources, select_kinds
from launcher.slurm.slurm_environ import find_variables

NOTATIONS: Mapping[str, Callable[[str, str], object]] = {
    **dict.fromkeys(("partition", "account", "qos", "constraint", "exclude", "nodelist"), check_text),
    **dict.fromkeys(("reservation", "switches", "mail_user", "mail_type", "time", "dependency"), check_text),
    "gpus_per_node": parse_gpus,
    "cpus_per_task": check_count,
    "mem": check_text,
}
"""Keys of `cluster` that are options of sbatch by the same name, and what refuses a wrong value."""
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
RESOURCES = ("nodes", "gpus-per-node", "cpus-per-task", "mem", "constraint", "nodelist", "exclude")
CAUSES = {
    "account": ("account",),  # `Invalid account or account/partition combination`, too
    "partition": ("partition",),
    "qos": ("qos",),
    "time limit": ("time",),
    "reservation": ("reservation",),
    "feature": ("constraint",),
    "node name": ("nodelist", "exclude"),
    "array": ("array",),
    "dependency": ("dependency",),
    "memory": ("mem",),
    "cpu count": ("cpus-per-task",),
    "generic resource": ("gpus-per-node",),
    "node count": ("nodes",),
    "number of nodes": ("nodes", "nodelist"),
    "for --cluster": ("clusters",),
    "configuration is not available": RESOURCES,
}
"""Words of sbatch's complaints (slurm_errno.c), and the options that they are about, the first that fits."""
NAMED = re.compile(r"(?:unrecognized option '|invalid )--(?P<name>[a-z-]+)")
AWAY = re.compile(
    "contact slurm controller|unable to process configuration|could not establish a configuration source"
    "|unable to establish control|unable to resolve|protocol authentication|did not answer",
    re.IGNORECASE,
)
"""What every command prints if slurmctld, munge or slurm.conf is not there."""


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
    """Return the options for one job, or for an array of several; raises UsageError or SchedulerError."""
    first = specs[0].config.cluster
    there: tuple[NodeKind, ...] = ()
    kinds, warnings, members = there, [], []
    for spec in specs:
        check_cluster(spec.config.cluster)
    clusters = first.additional.get("clusters")
    try:
        there = ask_sinfo(environ, None if clusters is None else str(clusters))
    except SchedulerError as error:
        if AWAY.search(str(error)) and not dry_run:  # sbatch would fail too, after a minute
            raise explain_refusal(str(error), (), (), ()) from None
        left = "what is auto of cluster.gpus_per_node, cpus_per_task and mem is left to SLURM"
        warnings.append(f"{error}; {left}")
    names = list(dict.fromkeys(spec.name for spec in specs))
    name = names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
    for spec in specs:
        kinds = select_kinds(there, spec.config.cluster.partition or environ.get("SBATCH_PARTITION"))
        nproc = read_nproc(spec.config.nproc_per_node)
        filled = fill_auto_resources(spec.config.cluster, nproc, kinds, environ)
        members.append(_build_options(spec, name, filled))
        if kinds and not dry_run:
            check_partition(spec, kinds, filled["gpus_per_node"])
    for number, (spec, options) in enumerate(zip(specs, members, strict=True), 1):
        odd = [option.key for option in {*options} ^ {*members[0]}]
        odd += ["cluster.setup"] if spec.config.cluster.setup != first.setup else []
        if odd:
            raise UsageError(
                f"{min(odd)}: job {number} of the sweep has another value than job 1: one job array has the"
                " same options for all of its jobs, so run launch once for each value"
            )
    options = members[0]
    if len(specs) > 1:
        array = f"0-{len(specs) - 1}%{first.array_parallelism}"
        options = (*options, Option("array", array, "cluster.array_parallelism"))
    partitions = tuple(dict.fromkeys(kind.partition for kind in there))
    return JobOptions(options, partitions, kinds, tuple(warnings))


def check_cluster(cluster: ClusterConfig) -> None:
    """Check values that need no look at the cluster; raises UsageError."""
    for key, check in NOTATIONS.items():
        value = getattr(cluster, key)
        if value is not None and value != AUTO:
            check(f"cluster.{key}", value)
    parse_signal(cluster.signal)
    _read_additional(cluster.additional)


def check_partition(spec: JobSpec, kinds: Sequence[NodeKind], gpus: str | None) -> None:
    """Raise SchedulerError if no partition has the nodes: SLURM would have the job wait for ever."""
    nodes, spares = spec.cluster.min_nodes, spec.config.cluster.spares
    wanted, counts = parse_gpus("cluster.gpus_per_node", gpus or 0), Counter[str]()
    for kind in kinds:
        counts[kind.partition] += kind.count if kind.count_gpus(wanted.kind) >= wanted.count else 0
    have = max(counts.values())
    if 0 < have < nodes + spares:  # without any, sbatch refuses the GPUs
        raise SchedulerError(
            f"nodes={nodes}{f' and cluster.spares={spares}' if spares else ''}, and partition"
            f" {', '.join(sorted(counts))} has {have}{f' with {gpus} GPUs' if wanted.count else ''}:"
            " ask for fewer, or set another cluster.partition"
        )


def read_nproc(text: object) -> int | None:
    """Return the ranks of a node if that is a number; raises UsageError."""
    return None if text in ("auto", "gpu", "cpu") else parse_nproc(text, 1)


def _build_options(spec: JobSpec, name: str, filled: Mapping[str, str | None]) -> tuple[Option, ...]:
    """Return the options of a job that is no array; raises UsageError with the key and its values."""
    cluster, spares = spec.config.cluster, spec.config.cluster.spares
    low, high = spec.cluster.min_nodes + spares, spec.cluster.max_nodes + spares
    nodes = str(low) if low == high else f"{low}-{high}"
    nodes_key = "nodes and cluster.spares" if spares else "nodes"
    found = [Option("job-name", check_text("name", name), "name"), Option("nodes", nodes, nodes_key)]
    # With --ntasks-per-node, SLURM 22.05 gives the least of a range of nodes, however many are free.
    found += [Option("ntasks-per-node", "1", "nodes")] if low == high else []
    if low < high or spares:  # else a lost node ends the job
        found.append(Option("no-kill", None, nodes_key))
    for key in NOTATIONS:
        value = filled.get(key) if key in filled else getattr(cluster, key)
        if value is not None and (key, value) != ("gpus_per_node", "0"):
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
    impossible = {
        "hang": spec.config.watch.on_hang != "stop",
        "sick_node": spec.config.preflight.on_failure != "exclude" or spec.config.preflight.kind == "off",
    }
    policy, causes = cluster.requeue, [cause for cause in LIMITED if not impossible.get(cause)]
    may_requeue = policy.limit > 1 and any(getattr(policy, cause) > 0 for cause in causes)
    found.append(Option("requeue" if may_requeue else "no-requeue", None, "cluster.requeue"))
    return (*found, *_read_additional(cluster.additional))


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
    if AWAY.search(complaint):
        return SchedulerError(f"{complaint}: is slurmctld up (`scontrol ping`)? Nothing was submitted")
    text = complaint.lower()
    named = NAMED.search(text)
    names = (named["name"],) if named else next((CAUSES[words] for words in CAUSES if words in text), ())
    given = {option.key: option.render() for option in options if option.name in names}
    shown, keys = ", ".join(f"{key}: {value}" for key, value in given.items()), [*given]
    if not given:
        variables = [name for option in names for name in find_variables(environ, option)]
        keys = variables or [f"--{name}" for name in names]
        shown = ", ".join(f"{name}={environ[name]}" for name in variables)
    if "partition" in names and partitions:
        fix = f"choose cluster.partition from {', '.join(partitions)}"
    elif "account" in names or "qos" in names:
        fix = "set cluster.account and cluster.qos to what you may use (`sacctmgr show assoc user=$USER`)"
    elif "array" in names:
        fix = "make the sweep smaller: SLURM's limit is MaxArraySize (`scontrol show config`)"
    elif kinds and tuple(names) == ("constraint",):
        features = sorted({feature for kind in kinds for feature in kind.features})
        fix = f"the partition's nodes have the features {', '.join(features)}"
    elif kinds and {*RESOURCES[:5]} & {*names}:
        counts: dict[str, int] = {}
        for kind in kinds:  # in whatever state they are
            counts[kind.describe()] = counts.get(kind.describe(), 0) + kind.count
        fix = f"the partition's nodes: {'; '.join(f'{n} with {text}' for text, n in counts.items())}"
    elif names:
        fix = f"change {' or '.join(keys)}, or leave it out"
    else:
        fix = "change cluster.* accordingly; dry_run=true shows the script"
    return SchedulerError(f"{complaint}{f' ({shown})' if shown else ''}: {fix}")
