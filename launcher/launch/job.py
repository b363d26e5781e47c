"""A job as values: what is to run and where, its part on one node, and the agent's command there."""

import contextlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import protocol
from launcher.config.settings import SLURM_KINDS, Settings
from launcher.config.start import check_port_free
from launcher.errors import MachineError
from launcher.runs.run_directory import RunDir
from launcher.text import count_things

TYPE_CHECKING = False
if TYPE_CHECKING:
    from launcher.config.start import AgentChoice, Cluster
    from launcher.fit.training import ModelDimensions
    from launcher.plan.model import Plan

SHIM = Path(__file__).parents[1] / "rank" / "__main__.py"
"""What each rank runs just before the program."""
PET_DECIDED = ("PET_MODULE", "PET_RUN_PATH", "PET_NO_PYTHON", "PET_STANDALONE")
"""torchrun's variables for what `launch` decides itself; torchrun would take them beside our options."""
PASSED_ON = "monitor_interval master_addr master_port local_addr role event_log_handler signals_to_handle"
"""Settings of the group `torchrun` that are torchrun's own options."""
NOT_INHERITED = (*PET_DECIDED, protocol.LAUNCH_WATCH, protocol.LAUNCH_FIT)
"""Variables that a launcher around this one may have set, for its own ranks."""
HANG_RESTARTS = 3
"""Restarts with `watch.on_hang=restart`, if nobody says."""
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Makes torchrun give restarted ranks a store of their own; in the agents' shared one they find the addresses
of the ranks before them, and fail to connect (github.com/pytorch/pytorch/issues/135712; torch 2.13 still)."""

STARTING = "starting the ranks: their program and its imports take a few seconds to load"
"""Until the first line of a rank there are seconds, most of them torch's import."""
LOOPBACK = "127.0.0.1"
"""torchrun's default of --master-addr."""
DEFAULT_LOCAL = (32768, 60999)
"""The kernel's own ports for outgoing connections (ip(7), ip_local_port_range), if it cannot be read."""
LOWEST = 10240
"""Below are the services of the system, SLURM's own (6817 to 6819) among them."""
FEWEST = 1000
"""Ports of a range that is worth the name."""
TRIALS = 100


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is to run and where, checked and resolved: the same for every node, rank and attempt."""

    config: Settings
    """With the run directory resolved in it; nothing changes it."""
    config_text: str
    """`config.yaml`, secrets masked."""
    choices: Mapping[str, str]
    """Option chosen for each group of the configuration."""
    given: frozenset[str]
    """Keys that the command line sets."""
    overrides: tuple[str, ...]
    """Its settings, as they were given."""
    program: tuple[str, ...] | None
    """The program as given after `--`; None for the configured one."""
    cluster: "Cluster"
    agent: "AgentChoice"
    """What starts the ranks."""
    environ: Mapping[str, str]
    """The user's environment with `env.*` over it."""
    name: str
    """The run's name."""
    run_path: Path
    """The run directory, absolute; something that stands for it in a dry run."""
    run_key: str
    """The key that decides the path: `run_dir` (an earlier run's), `new_run_dir`, or `runs_dir`."""
    fit_model: "ModelDimensions | None" = None
    """The model whose memory is to be judged; None if there is no claim, or if it was judged."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as one node runs it."""

    config: Settings
    program: tuple[str, ...]
    """The program's argv on this node."""
    cluster: "Cluster"
    plan: "Plan"
    environ: Mapping[str, str]
    """The user's environment with `env.*` over it."""
    host: str

    @property
    def world_size(self) -> int:
        """Ranks of all nodes at most, if each node has as many as this one."""
        return len(self.plan.ranks) * self.cluster.max_nodes

    agent: "AgentChoice"
    """What starts the ranks."""


def render_agent(job: Job, rdzv_id: str) -> tuple[str, ...]:
    """Return torchrun's command line for a node of a job: its options, the shim, and the program's words.

    An option that is None is left out, so that torchrun takes it from `PET_*` or its own default; a mapping
    is `key=value,key=value`.
    """
    config, cluster, environ = job.config, job.cluster, job.environ
    own = config.torchrun
    pairs = (piece.partition("=") for piece in environ.get("PET_RDZV_CONF", "").split(",") if piece)
    conf = {**{key.strip(): value.strip() for key, _, value in pairs}, **own.rdzv_conf}
    backend = own.rdzv_backend or (None if "PET_RDZV_BACKEND" in environ else "c10d")
    c10d = (backend or environ["PET_RDZV_BACKEND"]) == "c10d"
    options = {
        "nnodes": f"{cluster.min_nodes}:{cluster.max_nodes}",
        "nproc_per_node": len(job.plan.ranks),
        "node_rank": config.node_rank,
        "rdzv_backend": backend,
        "rdzv_endpoint": cluster.endpoint,
        # Nodes that are started by hand have to agree: there, torchrun's own default or PET_RDZV_ID.
        "rdzv_id": own.rdzv_id or (rdzv_id if cluster.kind != "manual" else None),
        "rdzv_conf": {"is_host": int(cluster.is_host), **conf} if c10d else conf,
        "max_restarts": choose_restarts(config, environ),
        **{name: getattr(own, name) for name in PASSED_ON.split()},
    }
    # As with the `torchrun` script, a `json.py` in the working directory is not what the agent imports (-P).
    command = [sys.executable, "-P", "-m", "torch.distributed.run"]
    for name, value in options.items():
        if value is not None and value != {}:
            items = value.items() if isinstance(value, Mapping) else ()
            text = ",".join(f"{key}={item}" for key, item in items) if items else value
            command.append(f"--{name.replace('_', '-')}={text}")
    # Without the `--`, argparse (of Python 3.13.0 too) looks for torchrun's options among the program's
    # words, and refuses `--log=x`, which may be short for two of them. torchrun fills in `${local_rank}` by
    # string.Template, for which `$$` is `$`.
    shim = (sys.executable, "-I", "-S", str(SHIM), *(word.replace("$", "$$") for word in job.program))
    return (*command, "--no-python", "--", *shim)


def render_shim(program: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a rank's shim with a program."""
    return (sys.executable, "-I", "-S", str(SHIM), "--", *program)


def render_start(job: Job, run_id: str) -> tuple[str, ...]:
    """Return the command line that starts a node's ranks: torchrun's; that of each rank with agent=direct."""
    return render_shim(job.program) if job.agent.kind == "direct" else render_agent(job, run_id)


def may_restart(config: Settings, cluster: "Cluster", environ: Mapping[str, str]) -> bool:
    """Tell whether the ranks may be started again, after a failure or with other nodes."""
    restarts = choose_restarts(config, environ) or environ.get("PET_MAX_RESTARTS", "0")
    return str(restarts) != "0" or cluster.min_nodes < cluster.max_nodes


def choose_restarts(config: Settings, environ: Mapping[str, str]) -> int | None:
    """Return how often the ranks may be started again; None for torchrun's default, or PET_MAX_RESTARTS."""
    chosen = config.torchrun.max_restarts if config.restarts is None else config.restarts
    restarts_hangs = config.watch.enabled and config.watch.on_hang == "restart"
    if chosen is None and restarts_hangs and "PET_MAX_RESTARTS" not in environ:
        return HANG_RESTARTS
    return chosen


def build_agent_environ(
    config: Settings,
    cluster: "Cluster",
    environ: Mapping[str, str],
    run: RunDir,
    host: str,
    watch_folder: str = "",
) -> dict[str, str]:
    """Return the agent's environment: the user's, and where the shim finds the plan and the run directory.

    `watch_folder` is where ranks keep their heartbeats; empty if they are not watched.
    """
    from launcher.launch.signals import KILL_GRACE, TERM_GRACE

    # The stages of a stop are ours: the agent must not come to its SIGKILL before.
    patience = config.torchrun.shutdown_timeout + int(TERM_GRACE + 2 * KILL_GRACE)
    inherited = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
    return {
        "PYTHONUNBUFFERED": "1",
        **({FRESH_STORE: "1"} if may_restart(config, cluster, environ) else {}),
        **inherited,
        **config.env,
        **({protocol.LAUNCH_STRICT: "1"} if config.binding.strict else {}),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience),
        protocol.LAUNCH_PLAN: str(run.plan_path(host)),
        protocol.LAUNCH_RECORD_DIR: str(run.path),
        protocol.LAUNCH_RUN_DIR: str(run.path),
        protocol.LAUNCH_RUN_ID: run.id,
        protocol.LAUNCH_ATTEMPT: str(run.first_attempt),
        **({protocol.LAUNCH_WATCH: watch_folder} if watch_folder else {}),
    }


def describe_job(job: Job, run: RunDir) -> tuple[str, ...]:
    """Say what was chosen and why."""
    cluster, ranks = job.cluster, f"{count_things(len(job.plan.ranks), 'rank')} on {job.host}"
    if cluster.max_nodes > 1 and cluster.kind in SLURM_KINDS:
        ranks += f", the first of {cluster.max_nodes} nodes"
    line = f"{ranks} (cluster={cluster.kind}: {cluster.why}), run directory {run.path}"
    if cluster.max_nodes == 1:
        return (line,)
    return line, f"the ranks start when {cluster.min_nodes} nodes have met at {cluster.endpoint}"


def find_free_port() -> int:
    """Return a port that nobody serves, outside of those that the kernel gives to outgoing connections.

    Rank 0 serves it a second or more later, once it has imported torch: it is to be free then too. Raises
    OSError if there is none.
    """
    ports = list_ports(*read_client_ports())
    for port in random.SystemRandom().sample(ports, TRIALS):
        if is_port_free(port):
            return port
    raise OSError(f"no port of {ports.start} to {ports.stop - 1} is free")


def read_client_ports(root: Path = Path("/proc/sys")) -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, (root / "net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
        return low, high
    return DEFAULT_LOCAL


def list_ports(first: int, last: int) -> range:
    """Return the larger range below or above those ports; all but the system's if neither is of use."""
    ports = max(range(LOWEST, min(first, 65536)), range(max(LOWEST, last + 1), 65536), key=len)
    return ports if len(ports) >= FEWEST else range(LOWEST, 65536)


def is_port_free(port: int) -> bool:
    """Tell whether this host can listen on a port, in all of its address families."""
    with contextlib.suppress(MachineError):
        check_port_free(port)
        return True
    return False
