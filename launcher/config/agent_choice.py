"""What starts the ranks of a job: `launch` itself or torchrun."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from launcher.config.cluster import Cluster
from launcher.config.settings import SLURM_KINDS, Settings, TorchrunConfig
from launcher.errors import UsageError

SHARED = ("shutdown_timeout",)
"""Options of `torchrun` that `launch` itself has a use for."""
PET_TAKEN = (
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"),
    *("PET_MODULE", "PET_RUN_PATH", "PET_NO_PYTHON", "PET_STANDALONE"),
)
"""Variables for torchrun that `launch` reads itself, or decides; the others ask torchrun for something."""
TIMER, HEALTH = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_HEALTH_CHECK_PORT"
"""Variables for services of torchrun's agent: a watchdog of the ranks, a port that tells of its health."""


@dataclass(frozen=True, slots=True)
class AgentChoice:
    """What starts the ranks, and why."""

    kind: str
    """`direct` or `torchrun`."""
    why: str


def choose_agent(config: Settings, cluster: Cluster, environ: Mapping[str, str]) -> AgentChoice:
    """Decide what starts a job's ranks; raises UsageError if that cannot do what else is asked for."""
    if config.agent == "torchrun":
        return AgentChoice("torchrun", "agent=torchrun")
    needed = find_torchrun_need(config, cluster, environ)
    if config.agent == "direct":
        if needed:
            raise UsageError(
                f"agent=direct, but {needed} needs torchrun: leave it out, or set agent=torchrun"
            )
        return AgentChoice("direct", "agent=direct")
    if config.cluster.spares and needed:
        raise UsageError(
            f"cluster.spares={config.cluster.spares}, but {needed} needs torchrun, which does not replace a"
            " node: leave one of them out"
        )
    if config.cluster.spares:
        return AgentChoice("direct", f"cluster.spares={config.cluster.spares}")
    return AgentChoice("torchrun", needed) if needed else AgentChoice("direct", "a fixed number of nodes")


def find_torchrun_need(config: Settings, cluster: Cluster, environ: Mapping[str, str]) -> str:
    """Return the setting for which the ranks need torchrun's agent; empty if there is none."""
    if cluster.kind == "manual":
        return "cluster=manual"
    if cluster.min_nodes < cluster.max_nodes:
        return f"nodes={cluster.min_nodes}:{cluster.max_nodes}"
    if cluster.kind in SLURM_KINDS and (option := next(filter(is_channel_option, config.cluster.srun), "")):
        return f"cluster.srun.{option}"
    defaults = asdict(TorchrunConfig())
    chosen = {
        name: value
        for name, value in asdict(config.torchrun).items()
        if name not in SHARED and value != defaults[name]
    }
    if chosen:
        name = next(iter(chosen))
        return f"torchrun.{name}={chosen[name]}"
    return find_pet_variable(environ)


def is_channel_option(name: str) -> bool:
    """Tell whether an option of srun's leads the lines elsewhere by which the nodes agree on their start."""
    return name in ("input", "i", "error", "e")


def find_pet_variable(environ: Mapping[str, str]) -> str:
    """Return a variable of the environment that asks torchrun's agent for something; empty without one."""
    for name, value in environ.items():
        if value and name.startswith("PET_") and name not in PET_TAKEN:
            return f"{name}={value}"
    if environ.get(TIMER) == "1":
        return f"{TIMER}=1"
    return f"{HEALTH}={environ[HEALTH]}" if environ.get(HEALTH) else ""
