"""Names of other tools for what has a key here, each with the word to type instead.

submitit's are the parameters of its `AutoExecutor` and `SlurmExecutor` (submitit 1.5), which
hydra-submitit-launcher has as `hydra.launcher.NAME`. The others' are the options of torchrun (torch 2.13),
accelerate, deepspeed, sbatch and srun that people type, with `_` for `-`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

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
    """Our key; empty if there is none."""
    write: Callable[[str], str] = str
    """Makes our value of the tool's."""
    note: str = ""
    """What differs; what there is instead of a key."""
    tool: str = "submitit's"
    is_flag: bool = False
    """It is an option without a value."""

    def translate(self, value: str) -> list[str]:
        """Return the words to write instead, none if there is no key; `…` stands for a missing value."""
        if not self.key:
            return []
        return [f"{self.key}={self.write(value) if value or self.is_flag else '…'}"]

    def explain(self, word: str, value: str) -> str:
        """Say what to write instead of a word, `timeout_min=60` or `--nnodes 2`, and its value."""
        note = f" ({self.note})" if self.key and self.note else ""
        fix = f"write {' '.join(self.translate(value))}{note}" if self.key else self.note
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
    "use_srun": ForeignName(
        "", note="leave it out, `srun launch-rank PROGRAM` makes each rank a task of srun's"
    ),
    "max_pickle_size_gb": ForeignName("", note="leave it out, nothing is pickled"),
}
"""submitit's names of what has another name here, or is written in another way."""
PLAIN = ("comment", "cpus_per_gpu", "wckey")
"""Its names of what is one of sbatch's other options here."""
SLURMS = ("mem", "gres", "mem_per_cpu", "mem_per_gpu", "job_name")
"""Those of them that are SLURM's too, and submitit's with `slurm_` alone."""
TOP = ("nodes", "name")
"""Keys of ours that `slurm_` may stand before."""


def write_count(value: str) -> str:
    """Write ranks for each node: torchrun's `gpu`, `cpu` and the like are `auto`."""
    return value if value.isdecimal() or not value else "auto"


def write_mapping(value: str) -> str:
    """Write torchrun's `a=1,b=2` as a mapping."""
    return f"{{{value.replace('=', ':')}}}"


def write_true(_value: str) -> str:
    """Write an option without a value."""
    return "true"


def write_binding(value: str) -> str:
    """Write torchrun's --numa-binding as an option of the group `binding`."""
    return {"node": "numa", "core-complex": "l3"}.get(value, value)


def leave_out(note: str, *, is_flag: bool = True) -> ForeignName:
    """Return what there is no key for."""
    return ForeignName("", note=f"leave it out, {note}", is_flag=is_flag)


EACH_NODE = "ranks on each node"
VISIBLE = "env.CUDA_VISIBLE_DEVICES"
SAME_NAME = (
    *("max_restarts", "monitor_interval", "rdzv_backend", "rdzv_id", "master_addr", "master_port"),
    *("local_addr", "role", "event_log_handler", "signals_to_handle", "shutdown_timeout"),
)
"""torchrun's options that are keys of the group `torchrun`."""
TORCHRUN = {
    "nproc_per_node": ForeignName("nproc_per_node", write_count),
    "nproc": ForeignName("nproc_per_node", write_count),
    "nnodes": ForeignName("nodes"),
    "node_rank": ForeignName("node_rank", note="with cluster=manual"),
    "rdzv_endpoint": ForeignName("rdzv_endpoint", note="with cluster=manual"),
    "rdzv_conf": ForeignName("torchrun.rdzv_conf", write_mapping),
    "numa_binding": ForeignName("binding", write_binding),
    "log_dir": ForeignName("runs_dir"),
    "tee": leave_out(
        "the run directory has every rank's output, and logs.console=all shows it", is_flag=False
    ),
    "redirects": leave_out("the run directory has every rank's output", is_flag=False),
    "local_ranks_filter": leave_out("logs.console=rank0, all or none chooses", is_flag=False),
    "start_method": leave_out("ranks are always processes of their own", is_flag=False),
    "standalone": leave_out("a job on one node needs no rendezvous"),
    "no_python": leave_out("a program that is no .py file runs by itself"),
    "use_env": leave_out("LOCAL_RANK is always a variable"),
    **{name: ForeignName(f"torchrun.{name}") for name in SAME_NAME},
}
ACCELERATE = {
    "num_processes": ForeignName("nproc_per_node", note=EACH_NODE),
    "num_machines": ForeignName("nodes"),
    "machine_rank": ForeignName("node_rank", note="with cluster=manual"),
    "main_process_ip": ForeignName("torchrun.master_addr"),
    "main_process_port": ForeignName("torchrun.master_port"),
    "num_cpu_threads_per_process": ForeignName("env.OMP_NUM_THREADS"),
    "mixed_precision": ForeignName("env.ACCELERATE_MIXED_PRECISION"),
    "gpu_ids": ForeignName(VISIBLE),
    "config_file": leave_out("settings are KEY=VALUE here, and files in conf/", is_flag=False),
    "multi_gpu": leave_out("there is a rank for each visible GPU"),
}
DEEPSPEED = {
    "num_nodes": ForeignName("nodes"),
    "num_gpus": ForeignName("nproc_per_node", note=EACH_NODE),
    "hostfile": leave_out("cluster.nodelist names nodes of SLURM's", is_flag=False),
}
ADDITIONAL = (
    *(
        "licenses",
        "begin",
        "deadline",
        "nice",
        "hint",
        "mem_per_cpu",
        "mem_per_gpu",
        "cpus_per_gpu",
        "comment",
    ),
    *("cores_per_socket", "sockets_per_node", "threads_per_core", "tmp", "wckey", "prefer", "gpu_freq"),
)
"""sbatch's options that are `cluster.additional.NAME` here."""
SBATCH = {
    **{name: ForeignName(f"cluster.additional.{name}") for name in ADDITIONAL},
    **{
        name: ForeignName(f"cluster.{name}")
        for name in sorted(
            CLUSTER - {"kind", "additional", "srun", "machine", "container", "requeue", "setup"}
        )
    },
    "gres": ForeignName("cluster.gpus_per_node", write_gpus, "what is no GPU: cluster.additional.gres"),
    "gpus_per_task": ForeignName("cluster.gpus_per_node", note="of a node, for all its ranks together"),
    "cpus_per_task": ForeignName("cluster.cpus_per_task", note="of a node, for all its ranks together"),
    "nodes": ForeignName("nodes"),
    "ntasks": ForeignName("nproc_per_node", note=EACH_NODE),
    "ntasks_per_node": ForeignName("nproc_per_node"),
    "job_name": ForeignName("name"),
    "array": leave_out("-m KEY=1,2 makes an array of jobs", is_flag=False),
    "output": leave_out("the run directory has the output", is_flag=False),
    "error": leave_out("the run directory has the output", is_flag=False),
    "export": leave_out("env.NAME=VALUE sets a variable", is_flag=False),
    "wrap": leave_out("the program stands after the settings", is_flag=False),
    "chdir": leave_out("a job starts in the working directory", is_flag=False),
    "exclusive": ForeignName("cluster.exclusive", write_true, is_flag=True),
    "wait": ForeignName("follow", write_true, is_flag=True),
    "requeue": leave_out("cluster.requeue.KEY=N says after what a job is requeued"),
    "mpi": ForeignName("cluster.srun.mpi"),
    "cpu_bind": leave_out("binding=… places the ranks", is_flag=False),
    "gpu_bind": leave_out("devices=own shows each rank its own GPU", is_flag=False),
    "container_image": ForeignName("cluster.container.image"),
    "container_mounts": ForeignName("cluster.container.mounts", "[{}]".format),
}
SHORT = {
    **{"-N": "nodes", "-n": "ntasks", "-G": "gpus", "-A": "account", "-q": "qos", "-J": "job_name"},
    **{"-t": "time", "-w": "nodelist", "-C": "constraint", "-d": "dependency", "-o": "output", "-e": "error"},
}
"""Short options of sbatch; its -c, -i, -p and -r are Hydra's here."""
GUESSES = {
    **dict.fromkeys(("gpus", "ngpus", "n_gpus", "num_procs"), ForeignName("nproc_per_node", note=EACH_NODE)),
    **dict.fromkeys(("gpu", "gpu_id", "device", "cuda_visible_devices"), ForeignName(VISIBLE)),
    **dict.fromkeys(("num_workers", "workers", "dataloader_num_workers"), ForeignName("dataloader")),
    **dict.fromkeys(("nproc", "n_proc", "processes"), ForeignName("nproc_per_node", write_count)),
}
"""Names that people try, which are no one tool's."""
TOOLS = {
    "no key of launch's": GUESSES,
    "deepspeed's": DEEPSPEED,
    "accelerate's": ACCELERATE,
    "torchrun's": TORCHRUN,
    "SLURM's": SBATCH,
}
OTHERS = {
    name: replace(foreign, tool=tool)
    for tool, names in reversed(TOOLS.items())
    for name, foreign in names.items()
}
"""All names of these tools; of one that two have, the first in `TOOLS`."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
GPU_NAMES = re.compile(r"[\d,]+|(?:GPU|MIG)-.*")
"""GPUs as `CUDA_VISIBLE_DEVICES` names them."""


def find_foreign(key: str, value: str = "") -> ForeignName | None:
    """Return what a key of the command line, or of a file, is of another tool's; None for any other."""
    launcher = key.startswith("hydra.launcher.")
    cluster = key.startswith("cluster.")
    name = key.removeprefix("hydra.launcher.").removeprefix("cluster.")
    slurm = name.startswith("slurm_")
    name = name.removeprefix("slurm_")
    if "." in name or (cluster and not slurm and name in CLUSTER):
        return None
    if name in SUBMITIT and (slurm or launcher or name not in (*SLURMS, *DEEPSPEED)):
        return SUBMITIT[name]
    if not slurm and not launcher:
        return find_other(key, value)
    if name in TOP or name in CLUSTER:
        return ForeignName(name if name in TOP else f"cluster.{name}")
    return ForeignName(f"cluster.additional.{name}") if slurm or name in PLAIN else None


def find_other(name: str, value: str = "") -> ForeignName | None:
    """Return what a name without a dot is of torchrun's, accelerate's, SLURM's, or the environment's."""
    if VARIABLE.fullmatch(name):
        return ForeignName(f"env.{name}", tool="a variable of the environment")
    found = OTHERS.get(name)
    if found and found.key == "nproc_per_node" and "," in value:
        return replace(found, key=VISIBLE, note="")
    return found


def find_option(option: str, value: str = "") -> ForeignName | None:
    """Return what an option is of another tool's, `--nproc-per-node` or `-N`; None for any other."""
    name = option[2:].replace("-", "_") if option.startswith("--") else SHORT.get(option, "")
    return find_other(name, value) or SUBMITIT.get(name)
