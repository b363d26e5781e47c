"""Ranks that are tasks of srun: the variables of torchrun's agent, from SLURM's own."""

from launcher.protocol import LAUNCH_RDZV_ID, LAUNCH_RECORD_DIR, LAUNCH_ROLE
from launcher.rank.identity import SRUN_LOCAL_RANK, Identity, is_number, read_number

PORT_TAKEN = 199
"""Exit code of a rank 0 that could not listen at MASTER_PORT: the job's first node chooses another."""
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
        "GROUP_RANK": find_group_rank(identity.rank or 0, size, environ),
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": ranks,
        "ROLE_NAME": environ.get(LAUNCH_ROLE) or ROLE,
        "TORCHELASTIC_RUN_ID": environ.get(LAUNCH_RDZV_ID) or environ.get("SLURM_JOB_ID", "none"),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def find_group_rank(rank: int, size: int, environ: dict[str, str]) -> str:
    """Return the number of a rank's node: SLURM's, or, if launch orders the nodes, that of this order."""
    if LAUNCH_RECORD_DIR in environ and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return str(rank // size)
    return environ.get("SLURM_NODEID", "0")


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


def can_listen(identity: Identity, environ: dict[str, str]) -> bool:
    """Tell whether rank 0 may listen at the port of the job's first node; true for other ranks."""
    port = environ.get("MASTER_PORT", "") if LAUNCH_RECORD_DIR in environ else ""
    if identity.rank or not is_number(port) or not 0 < int(port) < 1 << 16:
        return True
    import _socket  # `socket` costs 6 ms

    for family in (_socket.AF_INET6, _socket.AF_INET):
        try:
            probe = _socket.socket(family, _socket.SOCK_STREAM)
        except OSError:  # a kernel without IPv6
            continue
        try:
            probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))
            probe.listen(1)
        except OSError:
            return False
        finally:
            probe.close()
    return True
