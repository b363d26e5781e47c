"""What a job, or the jobs of a sweep, ask SLURM for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.config.schema import ClusterConfig
from launcher.config.sexagesimal import check_files
from launcher.config.validation import check_choice
from launcher.errors import SchedulerError, UsageError
from launcher.launch.job import Draft, name_run, parse_nproc
from launcher.runs.secrets import MASK, mask_text
from launcher.slurm.batch_script import SCRIPT
from launcher.slurm.resources import Inventory, NodeKind, ask_sinfo, check_limits, fill_auto_resources
from launcher.slurm.sbatch import explain_refusal, is_slurm_away
from launcher.slurm.sbatch_options import (
    JobSize,
    Option,
    array_option,
    build_options,
    check_cluster,
    require_same,
)

RUNTIMES = ("pyxis", "apptainer")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of one submission, and what they were made from."""

    options: tuple[Option, ...]
    partitions: tuple[str, ...]
    """All that there are; none where sinfo failed."""
    kinds: tuple[NodeKind, ...]
    """Nodes of the chosen partition."""
    warnings: tuple[str, ...]


def choose_options(drafts: Sequence[Draft], environ: Mapping[str, str], *, dry: bool) -> JobOptions:
    """Return the options for one job, or for an array of several; raises UsageError or SchedulerError.

    With `dry`, what SLURM would not grant is a warning.
    """
    for draft in drafts:
        check_draft(draft)
    first = drafts[0].config.cluster
    inventory, warnings = ask_inventory(environ, first.additional.get("clusters"), dry=dry)
    every = []
    for draft in drafts:
        cluster = draft.config.cluster
        kinds = inventory.select(cluster.partition or environ.get("SBATCH_PARTITION"))
        filled = fill_auto_resources(cluster, read_nproc(draft.config.nproc_per_node), kinds, environ)
        try:
            check_limits(cluster, draft.cluster.min_nodes, filled, kinds)
        except SchedulerError as error:
            if not dry:
                raise
            warnings = [*warnings, str(error)]
        shape = JobSize(name_slurm_job(drafts), draft.cluster.min_nodes, draft.cluster.max_nodes)
        every.append(build_options(cluster, shape, filled))
    require_same(every)
    check_setups(drafts)
    array = [array_option(len(drafts), first.array_parallelism)] if len(drafts) > 1 else []
    kinds = inventory.select(first.partition or environ.get("SBATCH_PARTITION"))
    return JobOptions((*every[0], *array), inventory.list_partitions(), kinds, tuple(dict.fromkeys(warnings)))


def check_draft(draft: Draft) -> None:
    """Check what is asked of SLURM before SLURM is asked; raises UsageError."""
    check_files(draft)
    check_cluster(draft.config.cluster)
    check_choice("cluster.container.runtime", draft.config.cluster.container.runtime, RUNTIMES)
    read_nproc(draft.config.nproc_per_node)
    check_secrets(draft.config.cluster)
    if draft.config.machine.root != "/":
        raise UsageError(
            f"machine.root={draft.config.machine.root} is of this machine, and the job plans its own nodes:"
            " leave it out, or set cluster=local"
        )


def check_secrets(cluster: ClusterConfig) -> None:
    """Raise UsageError for a secret's value, rather than an expansion, in lines that go to a file."""
    lines = [("cluster.setup", line) for line in cluster.setup]
    lines += [
        (f"cluster.additional.{name}", f"--{name}={value}") for name, value in cluster.additional.items()
    ]
    for key, line in lines:
        masked = mask_text(line)
        hidden = line[len(masked.partition(MASK)[0]) :].lstrip("\"'")
        if masked != line and not hidden.startswith(("$", "`")):
            raise UsageError(
                f"{key} has a secret, {masked}, which would stand in {SCRIPT}: set env.NAME=VALUE,"
                " which is written nowhere"
            )


def check_setups(drafts: Sequence[Draft]) -> None:
    """Raise UsageError where the jobs of a sweep differ in what their one script does."""
    for key in ("setup", "array_parallelism"):
        for number, draft in enumerate(drafts[1:], 2):
            one, two = (getattr(each.config.cluster, key) for each in (drafts[0], draft))
            if one != two:
                raise UsageError(
                    f"cluster.{key}: job {number} of the sweep has {two} and job 1 has {one}: one job array"
                    " has one script, so run launch once for each value"
                )


def ask_inventory(environ: Mapping[str, str], clusters: object, *, dry: bool) -> tuple[Inventory, list[str]]:
    """Ask sinfo; where that fails, return an empty inventory and what to say of it.

    Raises SchedulerError where sbatch would fail too, which takes a minute each.
    """
    try:
        return ask_sinfo(environ, None if clusters is None else str(clusters)), []
    except SchedulerError as error:
        if is_slurm_away(str(error)) and not dry:
            raise explain_refusal(str(error), (), (), ()) from None
        left = "what is auto of cluster.gpus_per_node, cpus_per_task and mem is left to SLURM"
        return Inventory(()), [f"{error}; {left}"]


def read_nproc(text: object) -> int | None:
    """Return the ranks of a node where they are a number; raises UsageError."""
    return None if text in ("auto", "gpu", "cpu") else parse_nproc(text, 1)


def name_slurm_job(drafts: Sequence[Draft]) -> str:
    """Return the job's name for SLURM: the run's; of several names the first, and how many more there are."""
    names = list(dict.fromkeys(name_run(draft) for draft in drafts))
    return names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
