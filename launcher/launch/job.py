"""A job: from a configuration to what is to be run, and on a node to what is to be started there."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.allocator_check import settle_allocator, unset_settings
from launcher.cli.output_files import refuse_files
from launcher.cli.unused_settings import (
    refuse_keys,
    warn_elsewhere,
    warn_overruled,
    warn_unused,
    warn_visible,
)
from launcher.config.cluster import Cluster, check_command, choose_cluster
from launcher.config.program import SHIM, describe_interpreter, find_program
from launcher.config.request import check_wishes, describe_wishes
from launcher.config.schema import LaunchConfig
from launcher.config.validation import (
    FORMATS,
    check_agent,
    check_choice,
    check_config,
    check_container,
    check_workers,
)
from launcher.errors import UsageError
from launcher.launch.signals import KILL_GRACE, TERM_GRACE
from launcher.launch.torchrun import parse_pairs, render_torchrun
from launcher.probe.node import (
    DEVICE_NAMES,
    MOST_RANKS,
    honoured_environ,
    locate_malloc,
    read_machine,
    telling_environ,
)
from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_PLAN, LAUNCH_RECORD_DIR, LAUNCH_STRICT, name_host
from launcher.runs.run_directory import RunDir, create_run_dir, name_run_dir, open_run_dir
from launcher.runs.secrets import mask_variables

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.config.composition import Composed
    from launcher.plan.model import Plan

PET_DECIDED = ("PET_MODULE", "PET_RUN_PATH", "PET_NO_PYTHON", "PET_STANDALONE")
"""torchrun's variables for what `launch` decides itself; torchrun would take them beside our options."""
BUNDLED = "train"
"""Option of the group `program` whose runs are named after their model."""
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Makes torchrun give restarted ranks a store of their own; in the agents' shared one they find the addresses
of the ranks before them, and fail to connect (github.com/pytorch/pytorch/issues/135712; torch 2.13 still)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What the command line and the configuration say, before a run directory is made or a machine read."""

    composed: "Composed"
    config: LaunchConfig
    words: tuple[str, ...] | None
    """The program as given after `--`; None for the configured one."""
    cluster: Cluster
    environ: Mapping[str, str]
    """The user's environment with `env.*` over it."""
    loaded: Mapping[str, str]
    """Variables of `env.from_file`."""
    unset: tuple[str, ...]
    """Settings of the allocator's that do not go with the program."""

    def settle(self, run_dir: Path) -> LaunchConfig:
        """Return the configuration with `${run_dir}` in it resolved; raises UsageError."""
        from launcher.config.composition import (
            resolve,  # Hydra, which the nodes of a SLURM job have no use for
        )
        from launcher.config.environment_files import cover_env

        config = resolve(self.composed, run_dir)
        cover_env(config, self.loaded)
        unset_settings(config, self.unset)
        return config


@dataclass(frozen=True, slots=True)
class Job:
    """A job as one node runs it."""

    config: LaunchConfig
    choices: Mapping[str, str]
    """Option chosen for each group of the configuration."""
    words: tuple[str, ...] | None
    """The program as given after `--`; None for the configured one."""
    cluster: Cluster
    plan: "Plan"
    environ: Mapping[str, str]
    """The user's environment with `env.*` over it."""
    host: str

    def settle(self, config: LaunchConfig) -> "Job":
        """Return the same job with the configuration that knows its run directory."""
        return replace(self, config=config)


def draft_job(
    composed: "Composed", words: tuple[str, ...] | None, environ: Mapping[str, str], verb: str = "launch"
) -> Draft:
    """Check a job and decide where it runs; raises UsageError or MachineError, and writes nothing.

    `verb` is the command that was given, which may write files of its own.
    """
    from launcher.config.composition import resolve
    from launcher.config.environment_files import fill_env

    config = resolve(composed)
    loaded = fill_env(config)
    check_config(config)
    check_wishes(config)
    refuse_files(verb, config)
    if verb == "launch":
        refuse_keys(config, composed.given)
        warn_overruled({**environ, **config.env}, composed.given)
    merged = {**environ, **config.env}
    cluster = choose_cluster(
        config.cluster.kind, config.nodes, config.node_rank, config.rdzv_endpoint, merged
    )
    if cluster.kind == "slurm" and not config.dry_run:
        check_command("sbatch", cluster.why, merged)
    check_agent(config, cluster)
    check_container(config, cluster)
    program = find_program(words, config, merged)
    if words and (remark := describe_interpreter(words)):
        logger.info(remark)
    warn_unused(config, cluster, composed.given)
    warn_visible(config, cluster, composed.given)
    if cluster.kind != "slurm":
        warn_elsewhere(config, environ)
    unset = settle_allocator(config, program, merged, composed.given)
    return Draft(composed, config, words, cluster, merged, loaded, unset)


def plan_job(draft: Draft) -> Job:
    """Plan this node for a job; raises UsageError or MachineError."""
    placed = plan_configured(draft.config, draft.environ)
    choices, host = draft.composed.choices, name_host(draft.environ)
    return Job(draft.config, choices, draft.words, draft.cluster, placed, draft.environ, host)


def plan_configured(config: LaunchConfig, environ: Mapping[str, str], caches: str = "") -> "Plan":
    """Plan the machine that the configuration names; raises UsageError or MachineError.

    `caches` is a folder for the compilers' caches, where they are not to have their own.
    """
    from launcher.plan.model import Request
    from launcher.plan.planner import plan

    check_choice("format", config.format, FORMATS)
    check_workers(config.dataloader.num_workers)
    machine = read_machine(config.machine.root, config.machine.snapshot)
    if config.machine.snapshot:
        environ = {k: v for k, v in environ.items() if k not in DEVICE_NAMES or k in config.env}
    wishes = describe_wishes(config)
    root = config.machine.root if config.machine.snapshot is None else ""
    request = Request(
        nproc_per_node=parse_nproc(config.nproc_per_node, len(machine.allowed_cpus)),
        environ=(*honoured_environ(dict(environ)), *telling_environ(environ)),
        configured=tuple(mask_variables(config.env).items()),
        caches=caches,
        host_library=locate_malloc(str(wishes["host_allocator"]), environ, root),
        **wishes,  # type: ignore[arg-type]  # values by their names
    )
    return plan(machine, request)


def parse_nproc(text: object, cpus: int) -> int | None:
    """Read `nproc_per_node`, also torchrun's words for it; None is `auto`. Raises UsageError."""
    if text in ("auto", "gpu"):
        return None
    if text == "cpu":
        return cpus
    try:
        number = int(str(text))
    except ValueError:
        number = 0
    if not 1 <= number <= MOST_RANKS:
        shown = "null" if text is None else text
        raise UsageError(
            f"nproc_per_node={shown}: give a number of at least 1 and at most {MOST_RANKS}, or auto"
        )
    return number


def name_run(draft: Draft) -> str:
    """Return the run's name: as given, else the program's, else the model's."""
    if draft.config.name:
        return draft.config.name
    if draft.words is None:
        program = draft.composed.choices.get("program", "run")
        return draft.composed.choices.get("model", "run") if program == BUNDLED else program
    named = draft.words[1].rpartition(".")[2] if draft.words[0] == "-m" else Path(draft.words[0]).stem
    return named or "run"


def open_target(draft: Draft) -> RunDir:
    """Make or open the run directory; raises OSError."""
    config = draft.config
    if config.run_dir:
        return open_run_dir(Path(config.run_dir), config.node_rank)
    return create_run_dir(Path(config.runs_dir), name_run(draft), datetime.now().astimezone())


def render_agent(job: Job, rdzv_id: str) -> tuple[str, ...]:
    """Return torchrun's command line; the job's configuration has the run directory resolved in it."""
    config, cluster, environ = job.config, job.cluster, job.environ
    own = config.torchrun
    conf = {**parse_pairs(environ.get("PET_RDZV_CONF", "")), **own.rdzv_conf}
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
        "max_restarts": own.max_restarts,
        "monitor_interval": own.monitor_interval,
        "master_addr": own.master_addr,
        "master_port": own.master_port,
        "local_addr": own.local_addr,
        "role": own.role,
        "event_log_handler": own.event_log_handler,
        "signals_to_handle": own.signals_to_handle,
    }
    shim = (sys.executable, "-I", "-S", str(SHIM))
    return render_torchrun(sys.executable, options, shim, find_program(job.words, config, environ))


def may_restart(config: LaunchConfig, cluster: Cluster, environ: Mapping[str, str]) -> bool:
    """Tell whether torchrun may start the ranks anew, after a failure or with other nodes."""
    restarts = config.torchrun.max_restarts or environ.get("PET_MAX_RESTARTS", "0")
    return str(restarts) != "0" or cluster.min_nodes < cluster.max_nodes


def build_environ(
    config: LaunchConfig, cluster: Cluster, environ: Mapping[str, str], run: RunDir, host: str
) -> dict[str, str]:
    """Return the agent's environment: the user's, and where the shim finds the plan and the run directory."""
    # The stages of a stop are ours: the agent must not come to its SIGKILL before.
    patience = config.torchrun.shutdown_timeout + int(TERM_GRACE + 2 * KILL_GRACE)
    inherited = {name: value for name, value in environ.items() if name not in PET_DECIDED}
    return {
        "PYTHONUNBUFFERED": "1",
        **({FRESH_STORE: "1"} if may_restart(config, cluster, environ) else {}),
        **inherited,
        **config.env,
        **({LAUNCH_STRICT: "1"} if config.binding.strict else {}),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience),
        LAUNCH_PLAN: str(run.plan_path(host)),
        LAUNCH_RECORD_DIR: str(run.path),
        **name_run_dir(run),
        LAUNCH_ATTEMPT: str(run.first_attempt),
    }
