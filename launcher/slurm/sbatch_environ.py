"""The environment that sbatch runs with, which is the job's too: nothing in it contradicts the options.

Variables win over `#SBATCH` lines (sbatch(1), input environment variables). For a job's steps see stepenv.py.
"""

from collections.abc import Collection, Mapping

from launcher.protocol import (
    LAUNCH_ATTEMPT,
    LAUNCH_PLAN,
    LAUNCH_RECORD_DIR,
    LAUNCH_RENDEZVOUS,
    LAUNCH_RUN_DIR,
    LAUNCH_RUN_ID,
    LAUNCH_SECRETS,
)

FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "SINFO_", "SQUEUE_", "PMI_", "PMIX_", "PMI2_")
"""Beginnings of what an enclosing job has left; srun's and its kin's are for other commands."""
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""Exceptions: where SLURM is, and who asks it."""
OURS = (
    LAUNCH_PLAN,
    LAUNCH_RECORD_DIR,
    LAUNCH_RUN_DIR,
    LAUNCH_RUN_ID,
    LAUNCH_ATTEMPT,
    LAUNCH_SECRETS,
    LAUNCH_RENDEZVOUS,
)
"""Of a run that this is started in."""
RANK = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
)
DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)
"""Of the enclosing job or rank, for the GPUs of its node."""
DECIDED = (
    "ARRAY_INX",
    "WAIT",
    "EXPORT",
    "EXPORT_FILE",
    "GET_USER_ENV",
    "CONTAINER",
    "CONTAINER_ID",
    "NO_KILL",
    "OPEN_MODE",
    "OUTPUT",
    "ERROR",
    "INPUT",
    "JOB_NAME",
    "SIGNAL",
    "REQUEUE",
    "NO_REQUEUE",
    "BATCH",
    "GPUS_PER_TASK",
    "GPUS_PER_SOCKET",
    "GPUS",
    "MEM_BIND",
    "MEM_BIND_LIST",
    "MEM_BIND_PREFER",
    "MEM_BIND_TYPE",
    "MEM_BIND_VERBOSE",
    "IGNORE_PBS",
    "OVERCOMMIT",
    "NTASKS_PER_NODE",
)
"""sbatch's variables, SBATCH_*, for what launch decides in any job."""
VARIABLES = {
    "time": ("TIMELIMIT",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "cpus-per-task": ("CPUS_PER_TASK", "CPUS_PER_GPU"),
    "switches": ("REQ_SWITCH", "WAIT4SWITCH"),
}
"""Options whose variables have other names, or contradict them."""


def find_variables(environ: Mapping[str, str], option: str) -> list[str]:
    """Return the variables that give sbatch an option, `time`, where the command line does not."""
    names = VARIABLES.get(option, (option.upper().replace("-", "_"),))
    found = [f"SBATCH_{name}" for name in names] + (["SLURM_CLUSTERS"] if option == "clusters" else [])
    return [name for name in found if name in environ]


def clean_for_sbatch(environ: Mapping[str, str], options: Collection[str]) -> dict[str, str]:
    """Return the environment without what contradicts the options, which are given by their names.

    SBATCH_* for options that are not given stay: they are a user's or a site's defaults. Of an enclosing
    job nothing stays.
    """
    dropped = {f"SBATCH_{name}" for name in DECIDED} | {*OURS}
    for option in options:
        names = VARIABLES.get(option, (option.upper().replace("-", "_"),))
        dropped |= {f"SBATCH_{name}" for name in names}
    if "gpus-per-node" in options and "gpu" in environ.get("SBATCH_GRES", ""):
        dropped.add("SBATCH_GRES")
    if "clusters" in options:
        dropped.add("SLURM_CLUSTERS")
    if "TORCHELASTIC_RUN_ID" in environ or "SLURM_JOB_ID" in environ:
        dropped |= {*DEVICES, *RANK} | {name for name in environ if name.startswith("TORCHELASTIC_")}
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped and (name in KEPT or not name.startswith(FOREIGN))
    }
