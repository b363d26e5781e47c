"""What sbatch gets for a job: options with the GPUs' share of the nodes, environment and script.

The tables of its options, variables and complaints are in `sbatch.toml`.
"""

import math
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.config.start import parse_nproc
from launcher.config.words import read_key
from launcher.errors import SchedulerError, UsageError
from launcher.launch.job import JobSpec
from launcher.protocol import LAUNCH_PLAN, LAUNCH_RECORD_DIR, LAUNCH_RUN_DIR, LAUNCH_RUN_ID
from launcher.runs.secrets import MASK, mask_words
from launcher.slurm.attempt import LIMITED
from launcher.slurm.commands import TASK_VARIABLES, WHERE_SLURM_IS, parse_signal, run_slurm

TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("sbatch.toml").read_text(encoding="utf-8"))
AUTO = "auto"
NAME = re.compile(r"[a-z][a-z0-9]+(?:-[a-z0-9]+)*")
GPUS = re.compile(r"(?:(?P<type>[A-Za-z][\w.+-]*):)?(?P<count>[0-9]+)")
OF_NODES = {"nodes", "gpus-per-node", "cpus-per-task", "mem", "constraint"}
"""Options that are refused for what the partition's nodes have."""
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
class NodeKind:
    """Nodes of one partition that are alike."""

    partition: str
    is_default: bool
    count: int
    cpus: int
    """Hardware threads that a job may have of a node."""
    cores: int
    memory_mib: int
    gpus: tuple[tuple[str | None, int], ...]
    """Type and number."""
    features: tuple[str, ...] = ()

    def count_gpus(self, kind: str | None = None) -> int:
        """GPUs of a node, of one type if one is named."""
        return sum(n for name, n in self.gpus if kind is None or (name or "").lower() == kind.lower())

    def describe(self) -> str:
        """In words, for errors."""
        gpus = ", ".join(f"gpu:{name}:{n}" if name else f"gpu:{n}" for name, n in self.gpus) or "no GPUs"
        return f"{self.cpus} CPUs, {self.memory_mib} MiB, {gpus}"


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of one submission, and what they were made from."""

    options: tuple[Option, ...] = ()
    partitions: tuple[str, ...] = ()
    """All that there are; none if sinfo failed."""
    kinds: tuple[NodeKind, ...] = ()
    """Nodes of the chosen partition."""
    warnings: tuple[str, ...] = ()

    def get(self, name: str) -> str | None:
        """Return the value of an option; None if it is not given."""
        return next((option.value for option in self.options if option.name == name), None)


def choose_job_options(specs: Sequence[JobSpec], environ: Mapping[str, str], *, dry_run: bool) -> JobOptions:
    """Return the options for one job, or for an array of several; raises UsageError or SchedulerError."""
    first, names = specs[0].config.cluster, list(dict.fromkeys(spec.name for spec in specs))
    name = names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
    there, kinds, warnings = tuple[NodeKind, ...](), tuple[NodeKind, ...](), tuple[str, ...]()
    members = [_list_options(spec, name) for spec in specs]
    try:
        there = _ask_sinfo(environ, first.additional.get("clusters"))
    except SchedulerError as error:
        if AWAY.search(str(error)) and not dry_run:  # sbatch would fail too, after a minute
            raise explain_refusal(str(error), JobOptions()) from None
        left = "what is auto of cluster.gpus_per_node, cpus_per_task and mem is left to SLURM"
        warnings = (f"{error}; {left}",)
    for number, (spec, options) in enumerate(zip(specs, members, strict=True), 1):
        partition = spec.config.cluster.partition or environ.get("SBATCH_PARTITION")
        chosen = partition.split(",") if partition is not None else ()
        kinds = tuple(
            kind for kind in there if kind.partition in chosen or (partition is None and kind.is_default)
        )
        _fill_auto(options, spec, kinds, environ)
        if not dry_run:
            _check_partition(spec.cluster.min_nodes + spec.config.cluster.spares, kinds, options)
        odd = [option.key for option in {*options.values()} ^ {*members[0].values()}]
        odd += ["cluster.setup"] if spec.config.cluster.setup != first.setup else []
        if odd:
            raise UsageError(
                f"{min(odd)}: job {number} of the sweep has another value than job 1: one job array has the"
                " same options for all of its jobs, so run launch once for each value"
            )
    if len(specs) > 1:
        array = f"0-{len(specs) - 1}%{first.array_parallelism}"
        members[0]["array"] = Option("array", array, "cluster.array_parallelism")
    partitions = tuple(dict.fromkeys(kind.partition for kind in there))
    return JobOptions(tuple(members[0].values()), partitions, kinds, warnings)


def _list_options(spec: JobSpec, name: str) -> dict[str, Option]:
    """Return the options of a job that is no array, by name; raises UsageError with the key and its value.

    What is `auto` is still to be filled in.
    """
    cluster, spares, found = spec.config.cluster, spec.config.cluster.spares, dict[str, Option]()

    def add(name: str, value: object, key: str) -> None:
        if value is not None and value is not False:
            found[name] = Option(name, None if value is True else _check_text(key, value), key)

    low, high = spec.cluster.min_nodes + spares, spec.cluster.max_nodes + spares
    nodes_key = "nodes and cluster.spares" if spares else "nodes"
    add("job-name", name, "name")
    add("nodes", low if low == high else f"{low}-{high}", nodes_key)
    # With it, SLURM 22.05 gives the least of a range of nodes, however many are free.
    add("ntasks-per-node", 1 if low == high else None, "nodes")
    add("no-kill", low < high or spares > 0, nodes_key)  # else a lost node ends the job
    if cluster.gpus_per_node not in (None, AUTO):
        parse_gpus(cluster.gpus_per_node)
    for setting in TABLE["settings"]:
        add(setting.replace("_", "-"), getattr(cluster, setting), f"cluster.{setting}")
    number, seconds = parse_signal(cluster.signal)
    add("signal", f"B:{number.name.removeprefix('SIG')}@{seconds}", "cluster.signal")
    policy = cluster.requeue
    may_requeue = policy.limit > 1 and any(getattr(policy, cause) > 0 for cause in LIMITED)
    add("requeue" if may_requeue else "no-requeue", True, "cluster.requeue")
    instead = TABLE["instead"] | {one.replace("_", "-"): f"set cluster.{one}" for one in TABLE["settings"]}
    for given, value in cluster.additional.items():
        key, name = f"cluster.additional.{given}", str(given).replace("_", "-")
        if not NAME.fullmatch(name) or isinstance(value, dict):
            raise UsageError(
                f"{key}={value}: give the long name of an option of sbatch, without the dashes before it, and"
                " a text, a number, true for an option without value, or null"
            )
        if name in instead:
            raise UsageError(f"{key}={value}: launch decides --{name} itself: {instead[name]}")
        add(name, ",".join(map(str, value)) if isinstance(value, list) else value, key)
    return found


def _check_text(key: str, value: object) -> str:
    """Return a value that fits into a line of a script; raises UsageError."""
    text = str(value)
    if not text.strip() or not text.isprintable():
        raise UsageError(f"{key}={text!r}: give a text of one line, or null to leave it to SLURM")
    return text


def parse_gpus(value: object) -> tuple[str | None, int]:
    """Read `cluster.gpus_per_node`, a number or `TYPE:NUMBER`: SLURM's type, if any, and the number.

    Raises UsageError.
    """
    match = None if isinstance(value, bool) else GPUS.fullmatch(str(value))
    if not match or match["type"] == "gpu":
        key = "cluster.gpus_per_node"
        raise UsageError(f"{key}={value}: give a number, TYPE:NUMBER as in {key}=a100:4, or auto")
    return match["type"], int(match["count"])


# What the nodes have

SINFO_FIELDS = ("%P", "%D", "%c", "%z", "%m", "%G", "%f", "%B")
"""Partition, nodes, CPUs, S:C:T, memory, gres, features, MaxCPUsPerNode."""
GRES = re.compile(r"(?:gres/)?gpu(?::(?P<type>[^:,()]+))??(?::(?P<count>\d+))?(?:\([^()]*\))?")
"""`gpu:a100:8(S:0-1)`, `gpu:8`."""


def _ask_sinfo(environ: Mapping[str, str], clusters: object) -> tuple[NodeKind, ...]:
    """Ask for the nodes of all partitions; raises SchedulerError.

    Lines of another shape (`CLUSTER: name`) and partitions without nodes are passed over.
    """
    argv = ["sinfo", "--all", "--exact", "--noheader", f"--format={'|'.join(SINFO_FIELDS)}"]
    found = []
    for line in run_slurm([*argv, f"--clusters={clusters}"] if clusters else argv, environ).splitlines():
        try:
            partition, *cells, gres, features, max_cpus = (cell.strip() for cell in line.split("|"))
            count, cpus, sockets, cores, threads, memory = (
                int(number.rstrip("+")) for cell in cells for number in cell.split(":")
            )
        except ValueError:
            continue
        allowed = min(cpus, int(max_cpus)) if max_cpus.isdecimal() else cpus
        cores = min(sockets * cores, math.ceil(allowed / threads)) if count else 0
        gpus = filter(None, (GRES.fullmatch(piece) for piece in re.split(r",(?![^()]*\))", gres)))
        if count:
            found.append(
                NodeKind(
                    *(partition.rstrip("*"), partition.endswith("*"), count, allowed, cores, memory),
                    tuple((match["type"], int(match["count"] or 1)) for match in gpus),
                    tuple(features.split(",")),
                )
            )
    return tuple(found)


def _fill_auto(
    options: dict[str, Option], spec: JobSpec, kinds: Sequence[NodeKind], environ: Mapping[str, str]
) -> None:
    """Fill in the GPUs, CPUs and memory to ask for on each node, so that it fits on every node with the GPUs.

    A share is of whole cores, since SLURM gives no less. What is not known, or asked for in another way, is
    left to SLURM.
    """
    cluster, nproc = spec.config.cluster, spec.config.nproc_per_node
    ranks = None if nproc in ("auto", "gpu", "cpu") else parse_nproc(nproc, 1)
    named = {str(name).replace("_", "-") for name, value in cluster.additional.items() if value is not None}
    suited = [kind for kind in kinds if cluster.constraint in kind.features] or kinds
    gpus, cpus, mem = cluster.gpus_per_node, cluster.cpus_per_task, cluster.mem
    if gpus == AUTO:
        gpus = environ.get("SBATCH_GPUS_PER_NODE")
        counts = [count for kind in suited if (count := kind.count_gpus())]
        if gpus is None and counts and "gres" not in named:
            gpus = min(counts) if ranks is None else min(ranks, max(counts))
    kind_wanted, wanted = parse_gpus(gpus or 0)
    shares = []  # CPUs and memory of the GPUs, and whether these are all of the node's
    for kind in suited:
        if kind.count_gpus(kind_wanted) >= wanted:
            part, whole = (wanted, kind.count_gpus()) if wanted else (1, 1)
            threads, cores = max(1, kind.cpus // kind.cores), max(1, kind.cores * part // whole)
            all_cpus = kind.cpus if part == whole else cores * threads
            shares.append((all_cpus, kind.memory_mib * part // whole, part == whole))
    if cpus == AUTO:
        is_given = cluster.exclusive or named & {"cpus-per-gpu", "mincpus"}
        cpus = None if is_given else min((share[0] for share in shares), default=None)
    if mem == AUTO:
        is_given = (
            named & {"mem-per-cpu", "mem-per-gpu"} or name_variables("mem") & environ.keys() or not shares
        )
        is_whole = all(share[2] for share in shares)
        mem = None if is_given else "0" if is_whole else f"{min(share[1] for share in shares)}M"
    for name, value in (("gpus-per-node", gpus), ("cpus-per-task", cpus), ("mem", mem)):
        if value is None or (name == "gpus-per-node" and str(value) == "0"):
            options.pop(name, None)
        else:
            options[name] = replace(options[name], value=str(value))


def _check_partition(nodes: int, kinds: Sequence[NodeKind], options: Mapping[str, Option]) -> None:
    """Raise SchedulerError if no partition has the nodes: SLURM would have the job wait for ever."""
    asked, have = options.get("gpus-per-node"), Counter[str]()
    wanted, count = parse_gpus(asked.value if asked else 0)
    for kind in kinds:
        have[kind.partition] += kind.count if kind.count_gpus(wanted) >= count else 0
    most = max(have.values(), default=0)
    if 0 < most < nodes:  # without any, sbatch refuses the GPUs
        raise SchedulerError(
            f"{nodes} nodes are wanted, and partition {', '.join(sorted(have))} has {most} with those GPUs:"
            " ask for fewer, or set another cluster.partition"
        )


def explain_refusal(
    complaint: str, chosen: JobOptions, environ: Mapping[str, str] = MappingProxyType({})
) -> SchedulerError:
    """Return the error with the values that were refused and what there is.

    `environ` is what sbatch was run with: its variables are options too.
    """
    if AWAY.search(complaint):
        return SchedulerError(f"{complaint}: is slurmctld up (`scontrol ping`)? Nothing was submitted")
    text, table = complaint.lower(), TABLE["complaints"]
    named = NAMED.search(text)
    names = [named["name"]] if named else next((table[words] for words in table if words in text), [])
    given = {option.key: option.render() for option in chosen.options if option.name in names}
    shown = [f"{key}: {value}" for key, value in given.items()]
    if not given:
        found = [name for option in names for name in sorted(name_variables(option) & environ.keys())]
        given, shown = dict.fromkeys(found, ""), [f"{name}={environ[name]}" for name in found]
    fix = "change cluster.* accordingly; dry_run=true shows the script"
    if names:
        keys = [*given] or [f"--{name}" for name in names]
        fix = f"change {' or '.join(keys)}, or leave it out"
    if "partition" in names and chosen.partitions:
        fix = f"choose cluster.partition from {', '.join(chosen.partitions)}"
    elif fixes := [TABLE["fixes"][name] for name in names if name in TABLE["fixes"]]:
        fix = fixes[0]
    elif chosen.kinds and names == ["constraint"]:
        features = sorted({feature for kind in chosen.kinds for feature in kind.features})
        fix = f"the partition's nodes have the features {', '.join(features)}"
    elif chosen.kinds and OF_NODES & {*names}:
        counts = Counter[str]()
        for kind in chosen.kinds:  # in whatever state they are
            counts[kind.describe()] += kind.count
        fix = f"the partition's nodes: {'; '.join(f'{n} with {text}' for text, n in counts.items())}"
    values = f" ({', '.join(shown)})" if shown else ""
    return SchedulerError(f"{complaint}{values}: {fix}")


# The environment

ENCLOSING = re.compile("(SLURMD?|SRUN|SALLOC|SINFO|SQUEUE|PMI[X2]?)_")
"""Beginnings of what an enclosing job has left; srun's and its kin's are for other commands."""
RUN_VARIABLES = (LAUNCH_PLAN, LAUNCH_RECORD_DIR, LAUNCH_RUN_DIR, LAUNCH_RUN_ID)
"""Of a run that this is started in, beside TASK_VARIABLES."""
OF_ENCLOSING_RANK = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    "|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
"""Of the enclosing job or rank, for the GPUs of its node too."""


def name_variables(option: str) -> set[str]:
    """Return the variables that give sbatch an option, `time`, if the command line does not."""
    return {*TABLE["variables"].get(option, (f"SBATCH_{option.upper().replace('-', '_')}",))}


def clean_for_sbatch(environ: Mapping[str, str], options: Collection[str]) -> dict[str, str]:
    """Return the environment without what contradicts the options, which are given by their names.

    SBATCH_* for options that are not given stay: they are a user's or a site's defaults. Of an enclosing
    job nothing stays.
    """
    dropped = {*RUN_VARIABLES, *TASK_VARIABLES, *(f"SBATCH_{name}" for name in TABLE["decided_variables"])}
    dropped.update(*map(name_variables, options))
    if "gpus-per-node" in options and "gpu" in environ.get("SBATCH_GRES", ""):
        dropped.add("SBATCH_GRES")
    is_inside = "TORCHELASTIC_RUN_ID" in environ or "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped
        and not (is_inside and OF_ENCLOSING_RANK.fullmatch(name))
        and (name in WHERE_SLURM_IS or not ENCLOSING.match(name))
    }


# The script

EXPORT = ': "${{{}:?the script leaves it out: export it before sbatch}}"'
DECIDED = ("dry_run", "follow", "run_dir", "new_run_dir", "cluster.kind", "cluster.requeue.allocation")
"""Settings that the command line in the script of a dry run does not take over."""
CONFIG_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")


@dataclass(frozen=True, slots=True)
class Script:
    """What the script of a job, or of a job array, is made of, whoever submits it."""

    options: tuple[Option, ...]
    remark: str
    """Where it is from, for people who read the script."""
    setup: tuple[str, ...]
    """The user's own lines of bash."""
    python: tuple[str, ...]
    """The interpreter of the submission, with its options."""

    @property
    def signal(self) -> str:
        """The checkpoint signal's name, as bash has it: of the option `B:USR2@120`."""
        value = next(option.value for option in self.options if option.name == "signal")
        return str(value).removeprefix("B:").partition("@")[0]

    def render(self, output: str, begin: str, end: str) -> str:
        """Return the script: options, `begin`, the user's lines, a look at the interpreter, and `end`.

        `output` is SLURM's pattern for the log.
        """
        log = (Option("open-mode", "append", "run_dir"), Option("output", output, "run_dir"))
        lines = [f"launch_line={shlex.quote(line)}\n{line}\nlaunch_check $?" for line in self.setup]
        python = self.python[0]
        missing = f"launch: error: no {python} on this node: is it on a filesystem that all nodes share?"
        return _fill(
            "script",
            # A comment of one line holds nothing that could end it.
            remark="".join(char if char.isprintable() else repr(char)[1:-1] for char in self.remark),
            options="\n".join(map(_render_option, (*self.options, *log))),
            begin=begin,
            setup=_fill("setup", lines="\n".join(lines)) if lines else "",
            python=shlex.quote(python),
            missing=shlex.quote(missing),
            end=end,
        )


def _fill(name: str, **values: str) -> str:
    """Return a piece of a script from the table, with values in place of @NAME@."""
    return re.sub("@([a-z]+)@", lambda found: values[found[1]], TABLE["bash"][name])


def _render_option(option: Option) -> str:
    """Write an option as sbatch reads it: in double quotes if it has any but plain characters.

    sbatch splits at white space, takes `#` for a comment and the word hetjob for a separator, and knows
    backslashes before quotes and backslashes.
    """
    text = option.render()
    name, equals, value = text.partition("=")
    if all(char.isalnum() or char in "-_.,:/@%+=[]()*&|~^" for char in value) and "job" not in value:
        return f"#SBATCH {text}"
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH {name}{equals}"{quoted}"'


def render_script(script: Script, runs: Sequence[str]) -> str:
    """Return the script of a job whose run directory is there, or of an array with one for each member.

    Raises UsageError for a path that SLURM cannot take: a backslash in `--output` means that `%j` is no
    pattern.
    """
    for run in runs:
        if "\\" in run or not run.isprintable():
            raise UsageError(
                f"the run directory {run!r} has a character that SLURM's --output cannot have: set"
                " runs_dir=DIR and name=NAME without backslashes, line breaks and the like"
            )
    quoted, command = [*map(shlex.quote, runs)], shlex.join(script.python)
    output, run = f"{runs[0].replace('%', '%%')}/logs/slurm-%j.out", f"launch_run={quoted[0]}"
    if len(runs) > 1:  # a member picks its own, and its log: SLURM has one path for all
        output, run = "/dev/null", _fill("member", runs="\n    ".join(quoted))
    begin = _fill("begin", signal=script.signal, run=run)
    return script.render(output, begin, _fill("end", signal=script.signal, python=command))


def render_dry_run(script: Script, spec: JobSpec, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script of a dry run: options, and the command line that runs the job in its allocation.

    The job's number names the run directory. SLURM's output file is where the command was given. The second
    value names the variables that have to be exported in place of secrets.
    """
    secrets, words = list[str](), list[str]()
    for before, word in zip(["", *argv], argv, strict=False):  # where the configuration is
        if before in CONFIG_FLAGS:
            words.append(f"{before} {shlex.quote(word)}")
        elif "=" in word and word.partition("=")[0] in CONFIG_FLAGS:
            words.append(shlex.quote(word))

    def quote(word: str, shown: str, name: str = "") -> str:
        """Return a word as bash reads it, with a variable in place of a secret at its end."""
        if word == shown:
            return shlex.quote(word)
        secrets.append(name or f"SECRET_{len(secrets) + 1}")
        begin = shown.removesuffix(MASK)
        return (shlex.quote(begin) if begin else "") + f'"${secrets[-1]}"'

    for word in spec.overrides:
        if (key := read_key(word)) not in DECIDED:
            name = re.sub(r"\W", "_", key.removeprefix("env.")).upper()
            words.append(quote(word, mask_words([word])[0], name))
    words_of_program = zip(spec.program or (), mask_words(spec.program or ()), strict=True)
    program = [quote(word, shown) for word, shown in words_of_program]
    run = shlex.quote(str(spec.run_path))
    if spec.run_key == "runs_dir":  # else the user has chosen it
        run = f"{shlex.quote(str(spec.run_path.parent))}/job-$SLURM_JOB_ID"
    end = _fill(
        "dry",
        exports="".join(f"{EXPORT.format(name)}\n" for name in secrets),
        run=run,
        python=shlex.join(script.python),
        words=" ".join(words),
        program=f" \\\n    -- {' '.join(program)}" if program else "",
    )
    script = replace(script, options=(*script.options, Option("chdir", str(Path.cwd()), "directory")))
    return script.render("%x-%j.out", f"trap : {script.signal}", end), sorted({*secrets})
