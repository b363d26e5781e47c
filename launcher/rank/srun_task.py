"""Ranks that are tasks of srun: the variables of torchrun's agent, from SLURM's own."""

from launcher.rank.identity import SRUN_LOCAL_RANK, Identity, is_number, read_number

ROLE = "default"
"""torchrun's default."""
MIN_PORT, MAX_PORT = 10240, 32767
"""Ports above those of system services, and below those that the kernel gives to clients (ip(7))."""


def make_torchrun_variables(identity: Identity, environ: dict[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a rank that srun has started; empty if SLURM does not tell them all.

    The agent sets them (torch/distributed/elastic/agent/server/local_elastic_agent.py), so they replace what
    a job script has set. There is no agent to serve the TCPStore: rank 0 has to.
    MASTER_ADDR and MASTER_PORT are left to whoever started the step.
    """
    ranks, nodes = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_STEP_NUM_NODES", "")
    size = identity.local_world_size
    if identity.family != SRUN_LOCAL_RANK or not is_number(ranks) or not is_number(nodes) or not size:
        return {}
    rank = str(identity.rank)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(identity.local_rank),
        "LOCAL_WORLD_SIZE": str(size),
        "WORLD_SIZE": ranks,
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": ranks,
        "ROLE_NAME": ROLE,
        "TORCHELASTIC_RUN_ID": environ.get("SLURM_JOB_ID", "none"),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def choose_master(environ: dict[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, the same for all tasks of a step, if nobody has set them.

    The address is the step's first node, which has rank 0. The port differs between jobs and steps that may
    share a node, as long as there are ports.
    """
    host = find_first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    salt = read_number(environ, "SLURM_JOB_ID") * 7919 + read_number(environ, "SLURM_STEP_ID") * 101
    found = {"MASTER_ADDR": host, "MASTER_PORT": str(MIN_PORT + salt % (MAX_PORT - MIN_PORT + 1))}
    return {name: value for name, value in found.items() if value and not environ.get(name)}


def find_first_host(text: str) -> str:
    """Return the first node of SLURM's list of them: `rack1n08` of `rack[1-2]n[08-10],login`."""
    host, rest = "", text
    while rest:
        before, bracket, rest = rest.partition("[")
        if not bracket or "," in before:
            return host + before.partition(",")[0]
        numbers, _, rest = rest.partition("]")
        host += before + numbers.partition(",")[0].partition("-")[0]
        if rest.startswith(","):
            break
    return host


def hides_gpus(identity: Identity, environ: dict[str, str]) -> bool:
    """Tell whether this task sees fewer GPUs than its node has tasks, as with `--gpus-per-task`.

    The device `cuda:LOCAL_RANK` would not be there then.
    """
    visible = [entry for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    return 0 < len(visible) < (identity.local_world_size or 0)
