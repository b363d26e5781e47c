"""Names of other tools for what has a key here, each with the word to type instead.

submitit's are the parameters of its `AutoExecutor` and `SlurmExecutor` (submitit 1.5), which
hydra-submitit-launcher has as `hydra.launcher.NAME`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from launcher.config.schema import ClusterConfig

CLUSTER = frozenset(field.name for field in fields(ClusterConfig))


def write_gib(value: str) -> str:
    """Write numbers of GiB as sbatch takes them: `1.5` is `1536M`."""
    try:
        sizes = [round(float(number) * 1024) for number in value.split(",")]
    except ValueError:
        return value
    return ",".join(f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M" for mib in sizes)


def write_folder(value: str) -> str:
    """Write a folder without submitit's `%j`, the job's number."""
    return value.replace("/%j", "").replace("%j", "runs")


def write_size(value: str) -> str:
    """Write a size of memory without the `B` that submitit has in `32GB`."""
    return re.sub(r"(?<=[KMGT])B\b", "", value)


def write_gpus(value: str) -> str:
    """Write GPUs without the `gpu:` of `--gres`."""
    return value.replace("gpu:", "")


@dataclass(frozen=True, slots=True)
class ForeignName:
    """What another tool's name is here."""

    key: str
    """Our key; empty where there is none."""
    write: Callable[[str], str] = str
    """Makes our value of the tool's."""
    note: str = ""
    """What differs; what there is instead of a key."""
    tool: str = "submitit's"

    def explain(self, word: str) -> str:
        """Say what to write instead of a word, `timeout_min=60`."""
        value = word.partition("=")[2]
        note = f" ({self.note})" if self.key and self.note else ""
        fix = f"write {self.key}={self.write(value)}{note}" if self.key else self.note
        return f"{word} is {self.tool}: {fix}"

    def explain_key(self, key: str) -> str:
        """Say what to write instead of a key in a file."""
        return f"{key} is {self.tool}: {f'the key here is {self.key}' if self.key else self.note}"


WHOLE_NODE = "of a node, for all its ranks together"
SUBMITIT = {
    "timeout_min": ForeignName("cluster.time"),
    "mem_gb": ForeignName("cluster.mem", write_gib),
    "mem": ForeignName("cluster.mem", write_size),
    "mem_per_cpu": ForeignName("cluster.additional.mem_per_cpu", write_size),
    "mem_per_gpu": ForeignName("cluster.additional.mem_per_gpu", write_size),
    "tasks_per_node": ForeignName("nproc_per_node"),
    "ntasks_per_node": ForeignName("nproc_per_node"),
    "cpus_per_task": ForeignName("cluster.cpus_per_task", note=f"the CPUs {WHOLE_NODE}"),
    "gpus_per_node": ForeignName("cluster.gpus_per_node"),
    "num_gpus": ForeignName("cluster.gpus_per_node"),
    "gpus_per_task": ForeignName("cluster.gpus_per_node", note=f"the GPUs {WHOLE_NODE}"),
    "gres": ForeignName("cluster.gpus_per_node", write_gpus, "what is no GPU: cluster.additional.gres"),
    "array_parallelism": ForeignName("cluster.array_parallelism"),
    "folder": ForeignName("runs_dir", write_folder),
    "submitit_folder": ForeignName("runs_dir", write_folder),
    "job_name": ForeignName("name"),
    "signal_delay_s": ForeignName("cluster.signal", "USR2@{}".format),
    "max_num_timeout": ForeignName("cluster.requeue.timeout"),
    "additional_parameters": ForeignName("cluster.additional"),
    "srun_args": ForeignName("cluster.srun", note="a mapping, as in cluster.srun.mpi=pmix"),
    "stderr_to_stdout": ForeignName("", note="leave it out, logs.console=all shows both of every rank"),
    "teardown": ForeignName("", note="leave it out, what is to come last belongs into the program"),
    "use_srun": ForeignName("", note="leave it out, agent=srun makes each rank a task of srun's"),
    "max_pickle_size_gb": ForeignName("", note="leave it out, nothing is pickled"),
}
"""submitit's names of what has another name here, or is written in another way."""
PLAIN = ("comment", "cpus_per_gpu", "exclusive", "wckey")
"""Its names of what is one of sbatch's other options here."""
SLURMS = ("mem", "gres", "mem_per_cpu", "mem_per_gpu", "job_name")
"""Those of them that are SLURM's too, and submitit's with `slurm_` alone."""
TOP = ("nodes", "name")
"""Keys of ours that `slurm_` may stand before."""


def find_foreign(key: str) -> ForeignName | None:
    """Return what a key of the command line, or of a file, is of another tool's; None for any other."""
    launcher = key.startswith("hydra.launcher.")
    cluster = key.startswith("cluster.")
    name = key.removeprefix("hydra.launcher.").removeprefix("cluster.")
    slurm = name.startswith("slurm_")
    name = name.removeprefix("slurm_")
    if "." in name or (cluster and not slurm and name in CLUSTER):
        return None
    if name in SUBMITIT and (slurm or launcher or name not in SLURMS):
        return SUBMITIT[name]
    if not slurm and not launcher:
        return None
    if name in TOP or name in CLUSTER:
        return ForeignName(name if name in TOP else f"cluster.{name}")
    return ForeignName(f"cluster.additional.{name}") if slurm or name in PLAIN else None


def explain_foreign(words: Iterable[tuple[str, str]]) -> str | None:
    """Say what to write instead of words that are other tools'; None where none is.

    `words` are pairs of a key and of the whole word, `("timeout_min", "timeout_min=60")`.
    """
    found = [name.explain(word) for key, word in words if (name := find_foreign(key))]
    return "; ".join(found) or None
