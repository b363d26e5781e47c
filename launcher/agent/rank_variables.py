"""torchrun's variables for a rank: what its agent sets with a static rendezvous."""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.agent.group import GroupStart

ROLE = "default"
"""torchrun's default."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default of `--signals-to-handle`, which it leaves in its ranks' environment."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What is the same for all ranks and starts of a job."""

    run_id: str
    """`TORCHELASTIC_RUN_ID`, torchrun's --rdzv-id."""
    max_restarts: int
    environ: Mapping[str, str]
    """The agent's environment."""


def make_rank_variables(
    group: GroupStart,
    group_rank: int,
    local_rank: int,
    settings: RankSettings,
    error_file: str,
) -> dict[str, str]:
    """Return torchrun's variables for a rank of the node with number `group_rank`.

    `error_file` is where torch's `@record` writes why a program has failed. From _start_workers of
    torch/distributed/elastic/agent/server/local_elastic_agent.py, launch_agent of launcher/api.py and
    config_from_args of distributed/run.py (torch 2.13).
    """
    environ = settings.environ
    local_size = group.nodes[group_rank].local_size
    rank, world_size = str(group.count_ranks_before(group_rank) + local_rank), str(group.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "WORLD_SIZE": world_size,
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(len(group.nodes)),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": ROLE,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(group.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_RUN_ID": settings.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **({"OMP_NUM_THREADS": "1"} if local_size > 1 and "OMP_NUM_THREADS" not in environ else {}),
    }
