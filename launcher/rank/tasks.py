"""Ranks that are tasks of srun: what torchrun's agent would tell each, from SLURM's own variables."""

from launcher.rank.identity import Identity, is_number, is_srun_rank

PORT_TAKEN = 199
"""Exit code of a rank 0 that could not serve the others at MASTER_PORT: the head chooses another port."""
ROLE = "default"
"""torchrun's own, where no role is given."""


def name_task(identity: Identity, environ: dict[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a rank that srun has started; empty where SLURM does not tell them all.

    They are the agent's word (torch/distributed/elastic/agent/server/local_elastic_agent.py), so that what a
    job script has set by itself does not stay. There is no agent to serve the TCPStore: rank 0 has to.
    MASTER_ADDR and MASTER_PORT are left to whoever started the step.
    """
    ranks, nodes = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_STEP_NUM_NODES", "")
    size = identity.local_world_size
    if not is_srun_rank(environ) or not is_number(ranks) or not is_number(nodes) or not size:
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
        "ROLE_NAME": environ.get("LAUNCH_ROLE") or ROLE,
        "TORCHELASTIC_RUN_ID": environ.get("LAUNCH_RUN_ID") or environ.get("SLURM_JOB_ID", "none"),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def can_serve(identity: Identity, environ: dict[str, str]) -> bool:
    """Tell whether rank 0 may listen at the port that the head has chosen; it is not for others to serve."""
    port = environ.get("MASTER_PORT", "") if "LAUNCH_RUN_DIR" in environ else ""
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
