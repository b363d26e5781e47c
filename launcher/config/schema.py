"""The configuration's schema: every key that can be set, with its type and default.

These are the dataclasses that Hydra checks overrides against. `conf/launch.yaml` builds on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints


@dataclass
class RequeueConfig:
    """How often a job goes back into the queue, by the reason why it ended; 0 is never."""

    preempted: int = 100
    """A job of higher priority took its nodes."""
    timeout: int = 100
    """It came to its time limit while ranks were running."""
    node_failure: int = 10
    """A node was lost; it is excluded on the next attempt."""
    stopped: int = 10
    """One node's task, or a rank, got SIGTERM from outside: neither launch nor SLURM's queue sent it."""
    requested: int = 100
    """The first rank that failed had one of `exit_codes`, and no stop had been asked for."""
    crash: int = 0
    """The program failed."""
    exit_codes: list[int] = field(default_factory=lambda: [75])
    """Exit codes by which a program asks for another start; 75 is EX_TEMPFAIL of sysexits.h."""
    no_progress: int = 3
    """Attempts in a row without a later step or a newer checkpoint, after which the job stops; 0 is never.

    Steps are what rank 0 prints, checkpoints what is below RUN_DIR/checkpoints or found by progress.paths; a
    job that never showed either is not judged. Attempts that were preempted or requeued from outside do not
    count.
    """
    limit: int = 200
    """Attempts in all, at least 1."""


@dataclass
class ContainerConfig:
    """The container that ranks run in; none where there is no image."""

    runtime: str = "pyxis"
    """`pyxis` (srun's --container-* options) or `apptainer`."""
    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    """`SRC:DST[:OPTIONS]`, beside the run directory and the working directory."""
    python: str = "python3"
    """The container's Python, which has the launcher installed."""
    args: list[str] = field(default_factory=list)
    """Further arguments of the runtime."""


@dataclass
class ClusterConfig:
    """Where the job runs. What is SLURM's has SLURM's own names; null leaves it to SLURM."""

    kind: str = "auto"
    """`auto`, `local` (this machine), `slurm` (sbatch), `allocation` (a step in the job that this is) or
    `manual` (one node of a job that is started by hand on each)."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """SLURM's notations: minutes, MM:SS, HH:MM:SS, DD-HH, DD-HH:MM, DD-HH:MM:SS."""
    gpus_per_node: Any = "auto"
    """A number, `TYPE:NUMBER`, or `auto`: one for each rank; where ranks are `auto`, all that nodes have."""
    cpus_per_task: Any = "auto"
    """CPUs of each node (there is one task on each); `auto`: the GPUs' share of the partition's nodes."""
    mem: Any = "auto"
    """Memory of each node as SLURM writes it (`200G`); `auto`: the GPUs' share of the partition's nodes."""
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    switches: str | None = None
    array_parallelism: int = 256
    """Jobs of a sweep that run at the same time."""
    dependency: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    signal: str = "USR2@120"
    """Checkpoint signal and how many seconds before the time limit the ranks get it."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the start: module loads, environment activation."""
    additional: dict[str, Any] = field(default_factory=dict)
    """Any other option of sbatch, by its name; true is an option without value."""
    srun: dict[str, Any] = field(default_factory=dict)
    """Any other option of srun, by its name."""
    machine: str | None = None
    """Shipped machine or snapshot that `dry_run=true` plans for, in place of the partition's nodes."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)


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
    """What the number is for, in the words of the plan; empty for a number that the command line sets."""
    num_workers: int = 2
    """Workers that each rank would like. A workload's number is less if cores or memory are too few; any
    other number stays as it is, with a warning."""
    worker_gib: float = 0.0
    """Memory of one worker in GiB; 0 where it is not known, and does not limit them."""
    worker_shm_mib: float = 0.0
    """What the batches of one worker take of /dev/shm, in MiB; 0 where it is not known."""
    default: bool = False
    """Let a `DataLoader(...)` without num_workers have that many."""
    measured: bool = False
    """`num_workers` has been measured, as by `launch tune dataloader`, and nothing limits it; the plan warns
    where memory and the like are short."""


@dataclass
class GcConfig:
    """Garbage collection in the ranks; steps are those of the optimizer."""

    policy: str = "synchronized"
    """`synchronized`, `disabled`, `frozen` or `default`."""
    warmup: int = 30
    """Steps after which objects are frozen (`synchronized`, `frozen`)."""
    every: int = 50
    """Steps from one full collection to the next, on all ranks at the same step (`synchronized`, `disabled`);
    0 is never."""
    log: bool = False
    """Have each rank tell of its collections on stderr."""


@dataclass
class TuneConfig:
    """How `launch tune dataloader` measures."""

    max_workers: Any = "auto"
    """Workers of each rank at most; `auto`: two for each of its cores, from 4 to 64, if memory allows."""
    steps: int = 48
    """Steps that are measured with each number of workers at most; fewer where the mean is clear."""
    seconds: float = 60.0
    """Time after which a number of workers has been measured for long enough."""
    timeout: float = 900.0
    """Seconds for a run of the program; one that takes longer is ended."""


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
class ProgressConfig:
    """What counts as progress, beside the steps that rank 0 prints and what is below RUN_DIR/checkpoints."""

    paths: list[str] = field(default_factory=list)
    """Patterns of the program's checkpoints elsewhere: `/scratch/me/ckpt/*`, `**` for folders at any depth.

    A relative one counts from the working directory. What was written since the submission counts.
    """


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

    nodes: Any = "auto"
    """Nodes: a number, `min:max` for an elastic job, or `auto`: the allocation's, else 1."""
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
    """`all`: every rank sees the job's GPUs, and rank N uses GPU N; `own`: each rank sees its own alone;
    `spread`: with fewer ranks than GPUs, all ranks see as many GPUs, spread over packages and NICs."""
    agent: str = "torchrun"
    """What starts the ranks of a node in a SLURM job: `torchrun`, or `srun` (each rank is a task)."""
    follow: bool = False
    """Stay with a submitted job: its place in the queue, its output, its exit code."""
    rank: int | None = None
    """The rank whose output `launch logs` shows; null is all of them."""
    yes: bool = False
    """Do not ask (`launch cancel`); replace a file that is not launch's own (`launch tune`)."""
    dry_run: bool = False
    """Show the plan and the command, and start nothing."""
    format: str = "table"
    """What `launch plan`, `topo`, `doctor`, `status` and `tune` print: `table` or `json`."""
    explain: bool = False
    """Say in a sentence for each rank why it runs where it does."""
    save: str | None = None
    """File that `launch topo` writes a snapshot of the machine to, and `launch tune` its choice."""
    image: str | None = None
    """File that `launch topo` draws the machine and its ranks to: `FILE.svg` or `FILE.png`."""
    objective: str = "loss"
    """What a sweeper such as Optuna optimizes: `loss`, the last that rank 0 prints, or `file`, the number in
    RUN_DIR/objective.txt, or numbers, that the program writes."""
    env: dict[str, Any] = field(default_factory=dict)
    """Variables for the program; `from_file` is none, but a dotenv file with more, or a list of such."""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    binding: BindingConfig = field(default_factory=BindingConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    allocator: dict[str, Any] = field(default_factory=dict)
    """PyTorch's allocator settings by their names in PYTORCH_CUDA_ALLOC_CONF; `host` is what serves malloc:
    `system`, `tcmalloc` or `jemalloc`."""
    gc: GcConfig = field(default_factory=GcConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    torchrun: TorchrunConfig = field(default_factory=TorchrunConfig)


def load_config(data: Mapping[str, Any]) -> LaunchConfig:
    """Make the configuration from what `dataclasses.asdict` made of one; raises KeyError or TypeError."""
    return _load(LaunchConfig, data)  # type: ignore[no-any-return]  # one function for all the classes


def _load(kind: Any, data: Any) -> Any:  # noqa: ANN401 - see load_config
    """Make one of the classes above, and those within it."""
    if not is_dataclass(kind):
        return data
    hints = get_type_hints(kind)
    return kind(**{item.name: _load(hints[item.name], data[item.name]) for item in fields(kind)})  # type: ignore[operator]
