"""The configuration's schema: every key that can be set, with its type and default.

These are the dataclasses that Hydra checks overrides against. `conf/launch.yaml` builds on them.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ClusterConfig:
    """Where the job runs."""

    kind: str = "auto"
    """`auto`, `local` (this machine) or `manual` (one node of a job that is started by hand on each)."""


@dataclass
class BindingConfig:
    """How ranks are placed on cores."""

    policy: str = "exclusive"
    """`exclusive`, `numa`, `socket`, `l3` or `none`."""
    strict: bool = False
    """A placement that falls short of the policy ends the job rather than warning."""
    reserve_cores: int = 0
    """Physical cores left for the system, spread over the NUMA nodes."""
    nic: bool = False
    """Tell NCCL of each rank's nearest NIC too (`NCCL_IB_HCA`)."""


@dataclass
class DataloaderConfig:
    """How many DataLoader workers a rank gets."""

    workload: str = "text"
    num_workers: int = 2
    """Workers that each rank would like; fewer where it has too few cores."""


@dataclass
class MachineConfig:
    """Which machine is planned for."""

    root: str = "/"
    """Folder that holds the machine's `sys` and `proc`."""
    snapshot: str | None = None
    """A file that `launch topo save=FILE` or `launch plan format=json` wrote on that machine.

    It is looked for from the working directory, then in `machine/` of each configuration folder.
    """


@dataclass
class LogsConfig:
    """What of the ranks' output the console shows; the run directory has all of it."""

    console: str = "rank0"
    """`rank0`, `all` or `none`."""
    tail: int = 20
    """Lines of the first failed rank's log that the final message shows."""


@dataclass
class TorchrunConfig:
    """torchrun's own options, under its own names; null leaves an option to torchrun and its `PET_*`."""

    max_restarts: int | None = None
    monitor_interval: float | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: dict[str, Any] = field(default_factory=dict)
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    role: str | None = None
    event_log_handler: str | None = None
    signals_to_handle: str | None = None
    shutdown_timeout: int = 30
    """Seconds that ranks have to end after a signal, before the next harder one."""


@dataclass
class LaunchConfig:
    """All keys."""

    nodes: Any = 1
    """Nodes: a number, or `min:max` for an elastic job."""
    nproc_per_node: Any = "auto"
    """Ranks on each node; `auto` is the visible GPUs, else one for each NUMA node with usable CPUs."""
    name: str | None = None
    """Name of the run; by default the model's or the program's."""
    runs_dir: str = "runs"
    """Where run directories are made: RUNS_DIR/NAME/ID."""
    run_dir: str | None = None
    """This very run directory: a new one, or an earlier run's to go on with."""
    node_rank: int | None = None
    """Number of this node, for `cluster=manual`."""
    rdzv_endpoint: str | None = None
    """HOST:PORT where the nodes meet, on the node with `node_rank=0`, for `cluster=manual`."""
    devices: str = "all"
    """`all`: every rank sees the job's GPUs; `own`: each rank sees its own alone."""
    dry_run: bool = False
    """Show the plan and the command, and start nothing."""
    format: str = "table"
    """What `launch plan`, `topo` and `doctor` print: `table` or `json`."""
    explain: bool = False
    """Say in a sentence for each rank why it runs where it does."""
    save: str | None = None
    """File that `launch topo` writes a snapshot of the machine to."""
    image: str | None = None
    """File that `launch topo` draws the machine and its ranks to: `FILE.svg` or `FILE.png`."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables for the program."""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    binding: BindingConfig = field(default_factory=BindingConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    torchrun: TorchrunConfig = field(default_factory=TorchrunConfig)
