"""sbatch, called through submitit, and what to do about a job that it refused."""

import contextlib
import getpass
import io
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from submitit.core.utils import CommandFunction, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher.errors import SchedulerError
from launcher.slurm.client import run_slurm
from launcher.slurm.resources import NodeKind
from launcher.slurm.sbatch_options import Option
from launcher.slurm.slurm_environ import find_variables

LARGE = 64 << 10
"""Characters of a variable from which an error names it."""


class ScriptExecutor(SlurmExecutor):
    """submitit's executor for a script that is there already: no pickles, and nothing else in the folder."""

    def __init__(self, script: Path, environ: Mapping[str, str]) -> None:
        super().__init__(script.parent)
        self.script, self.environ = script, dict(environ)

    def _submit_command(self, command: str) -> SlurmJob[None]:
        """Submit; submitit's own would write the script anew, and leave a link to it."""
        words = self._make_submission_command(self.script)
        # submitit prints what sbatch complains of, which is to be part of one error.
        with contextlib.redirect_stderr(io.StringIO()):
            output = CommandFunction(words, verbose=False, env=self.environ)()
        return SlurmJob(self.folder, self._get_job_id_from_submission_command(output), tasks=[0])


def submit_script(script: Path, environ: Mapping[str, str]) -> str:
    """Submit a script in this environment, which the job gets too, and return the job's id.

    Raises SchedulerError with what sbatch complained of.
    """
    try:
        return ScriptExecutor(script, environ)._submit_command("").job_id
    except FailedJobError as error:
        cause = error.__cause__
        code = cause.returncode if isinstance(cause, subprocess.CalledProcessError) else "an error"
        raise SchedulerError(
            shorten_complaint(str(error)) or f"sbatch ended with {code}, and said nothing"
        ) from None
    except FailedSubmissionError as error:
        raise SchedulerError(f"sbatch: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise SchedulerError(explain_start(error, environ)) from None


def shorten_complaint(text: str) -> str:
    """Return sbatch's complaints in one line, without what each line repeats."""
    lines = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    said = [line.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("fatal: ") for line in lines]
    return f"sbatch: {'; '.join(said)}" if said else ""


def explain_start(error: OSError, environ: Mapping[str, str]) -> str:
    """Say why sbatch did not start: as a rule an environment that is larger than the kernel allows."""
    large = sorted(environ, key=lambda name: -len(environ[name]))[:3]
    names = ", ".join(
        f"{name} ({len(environ[name]) >> 10} KiB)" for name in large if len(environ[name]) >= LARGE
    )
    total = sum(len(name) + len(value) for name, value in environ.items()) >> 10
    why = f"{error.strerror}: the environment has {total} KiB{', of which ' + names if names else ''}"
    return f"sbatch cannot be started ({why}): unset what the job does not need"


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
"""Complaints of every command where slurmctld, munge or slurm.conf is not there."""


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
    given = [option for option in options if option.name in names]
    others = {*names} - {option.name for option in given}
    variables = [name for option in sorted(others) for name in find_variables(environ, option)]
    shown = ", ".join(
        [f"{option.key}: {option.render()}" for option in given]
        + [f"{name}={environ[name]}" for name in variables]
    )
    keys = [option.key for option in given] + variables or [f"--{name}" for name in names]
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
    """Return the accounts that the user may use, where accounting tells."""
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
