"""Every key that can be set: its type, its default, and which values it takes.

These are the dataclasses that Hydra checks overrides against; `conf/launch.yaml` builds on them. The checks,
their errors and docs/configuration.md are made from them.
"""
# ruff: noqa: RUF009 - `setting` makes a field

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from launcher.errors import LaunchError, UsageError
from launcher.fields import one_of, setting, show_value
from launcher.fit.settings import FitConfig, ParallelConfig
from launcher.plan.model import BindingConfig, DataloaderConfig, GcConfig

SLURM_KINDS = ("slurm", "allocation")
"""Values of `cluster.kind` with which SLURM starts the nodes."""
EVENTS = ("start", "hang", "recover", "straggler", "fail", "end")
"""Of which a job can tell."""
TUNE_OPTION = r"-[A-Za-z]|--[A-Za-z][\w.-]*=?|(?:\+{1,2})?[A-Za-z_][\w./-]*=|program\.\w+"
"""An option of a program, a key of Hydra's with its `=`, or a key of the section `program`."""


class _Texts(Formatter):
    def format_field(self, value: object, spec: str) -> str:
        return format(show_value(value) if isinstance(value, list) else value, spec)


@cache
def read_texts() -> dict[str, dict[str, str]]:
    """Return the texts of errors.toml, by kind and rule."""
    return tomllib.loads(Path(__file__).with_name("errors.toml").read_text(encoding="utf-8"))


def say(kind: str, rule: str, values: Mapping[str, object]) -> str:
    """Return what a rule among the `errors` or the `warnings` says of values."""
    return _Texts().vformat(read_texts()[kind][rule], (), values)


def refuse(rule: str, kind: type[LaunchError] = UsageError, /, **values: object) -> LaunchError:
    """Return the error of a rule."""
    return kind(say("errors", rule, values))


@dataclass
class RequeueConfig:
    """How often a job is requeued, for each reason why it ended; 0: never."""

    preempted: int = setting(100, minimum=0)
    """A job of higher priority took its nodes."""
    timeout: int = setting(100, minimum=0)
    """The job reached its time limit."""
    node_failure: int = setting(10, minimum=0)
    """A node was lost; the next attempt excludes it."""
    sick_node: int = setting(3, minimum=0)
    """A node was sick, and `preflight.on_failure=exclude` could not do without it."""
    stopped: int = setting(10, minimum=0)
    """A SIGTERM from neither launch nor SLURM's queue."""
    requested: int = setting(100, minimum=0)
    """The first rank that failed ended with one of `exit_codes`, and nobody had asked for a stop."""
    hang: int = setting(3, minimum=0)
    """`watch.on_hang=stop` ended the ranks."""
    crash: int = setting(0, minimum=0)
    """The program failed."""
    exit_codes: list[int] = setting([75], minimum=1, maximum=255)
    """Exit codes that ask for another start; 75 is EX_TEMPFAIL."""
    no_progress: int = setting(3, minimum=0)
    """Attempts in a row without a later step or newer checkpoint before the job stops."""
    limit: int = setting(200, minimum=1)
    """Attempts in all."""
    allocation: bool = False
    """Also in an allocation: for a script that ends with `exec launch`."""


@dataclass
class ContainerConfig:
    """The container of the ranks, if `image` is set."""

    runtime: str = one_of("pyxis", "apptainer")
    """`pyxis` (srun's --container-*) or `apptainer`."""
    image: str | None = None
    """The image, as the runtime writes it."""
    mounts: list[str] = field(default_factory=list)
    """`SRC:DST[:OPTIONS]`, besides run and working directory."""
    python: str = "python3"
    """The container's Python, with launch installed."""
    args: list[str] = field(default_factory=list)
    """More arguments of the runtime."""


@dataclass
class ClusterConfig:
    """Where the job runs. SLURM's options have SLURM's names; null leaves an option to SLURM."""

    kind: str = one_of("auto", "local", "slurm", "allocation", "manual")
    """`local` (this machine), `slurm` (sbatch), `allocation` (a step in this SLURM job), `manual` (by hand on
    each node), or `auto`: `allocation` in a job, else `slurm` for several nodes, else `local`."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Minutes, MM:SS, HH:MM:SS, DD-HH, DD-HH:MM or DD-HH:MM:SS."""
    gpus_per_node: Any = "auto"
    """A number, `TYPE:NUMBER`, or `auto`: one a rank, or all if nproc_per_node is auto."""
    cpus_per_task: Any = "auto"
    """CPUs of each node; `auto`: the GPUs' share."""
    mem: Any = "auto"
    """Memory of each node (`200G`); `auto`: the GPUs' share."""
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    switches: str | None = None
    segment: int | None = setting(None, minimum=1)
    """Nodes in one block of the network (`--segment`), such as an NVLink domain; divides all nodes, spares
    included."""
    exclusive: Any = setting(None, choices=("true", "false", "user", "mcs", "topo"))
    """`true`: whole nodes; others as for SLURM's `--exclusive`."""
    spares: int = setting(0, minimum=0, maximum=1000)
    """Nodes beside `nodes` that wait idle to replace lost ones."""
    node_order: str = "auto"
    """`topology` (SLURM's switches), `slurm`, a file with a node a line, or `auto`: `topology` if SLURM knows
    switches, else `slurm`."""
    array_parallelism: int = setting(256, minimum=1)
    """Jobs of a sweep that run at once."""
    dependency: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    signal: str = "USR2@120"
    """The ranks' checkpoint signal, and its seconds before the time limit."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the start, such as module loads."""
    additional: dict[str, Any] = field(default_factory=dict)
    """Any other option of sbatch; true means one without a value."""
    srun: dict[str, Any] = field(default_factory=dict)
    """Any other option of srun."""
    machine: str | None = None
    """Shipped machine or snapshot, for the plan of `dry_run=true`."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)


@dataclass
class TuneConfig:
    """How `launch tune dataloader` and `launch tune batch` measure."""

    option: str | None = setting(
        None,
        pattern=TUNE_OPTION,
        give="the program's option for its micro-batch, as --batch-size, -b, train.batch_size= or"
        " program.batch_size",
    )
    """The program's own option for its micro-batch (`--batch-size`, `train.batch_size=`), for `launch tune
    batch`."""
    max_batch: int = setting(4096, minimum=1, maximum=1 << 24)
    """Largest micro-batch to try."""
    max_workers: Any = setting("auto", whole=True, minimum=1, words=("auto",))
    """Largest number of workers to try; `auto`: two for each core of a rank, 4 to 64, if memory allows."""
    steps: int = setting(48, minimum=8)
    """Largest number of steps to measure for each value; fewer if the mean is clear."""
    seconds: float = setting(60.0, above=0)
    """Seconds to measure each value at most."""
    timeout: float = setting(900.0, above=0)
    """Seconds that a run of the program may take; a longer one is ended."""


@dataclass
class MachineConfig:
    """The machine that `launch plan` and `launch topo` read."""

    root: str = "/"
    """Folder with the machine's `sys` and `proc`."""
    snapshot: str | None = None
    """A file from `launch topo save=FILE` or `launch plan format=json`, here or in the configuration's
    `machine/`."""


@dataclass
class LogsConfig:
    """What the console shows of the ranks' output; the run directory has all."""

    console: str = one_of("rank0", "all", "none")
    tail: int = setting(20, minimum=1)
    """Last lines shown of the first failed rank's log."""


@dataclass
class ProgressConfig:
    """What counts as progress, besides steps that rank 0 prints and RUN_DIR/checkpoints."""

    paths: list[str] = setting([], pattern=".+", give="paths that are not empty")
    """Patterns of checkpoints elsewhere, such as `/scratch/me/ckpt/*`; `**` is any depth; relative to the
    working directory."""


@dataclass
class TorchrunConfig:
    """torchrun's options, under torchrun's names; null leaves an option to torchrun and its `PET_*`."""

    max_restarts: int | None = setting(None, minimum=0)
    monitor_interval: float | None = setting(None, minimum=0)
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: dict[str, Any] = field(default_factory=dict)
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    role: str | None = None
    event_log_handler: str | None = None
    signals_to_handle: str | None = None
    shutdown_timeout: int = setting(30, minimum=0)
    """Seconds that ranks have to end after a signal, before the next signal."""


@dataclass
class WatchConfig:
    """How running ranks are watched."""

    enabled: bool = True
    """Watch the ranks; nothing ends them but `on_hang`."""
    hang_seconds: Any = setting("auto", minimum=1, words=("auto",), give="a number of seconds")
    """Seconds without activity of a rank that others wait for; `auto`: 60, or three times the longest
    pause."""
    on_hang: str = one_of("report", "restart", "stop")
    """`restart` starts all ranks again, `restarts` times, else 3; `stop` ends the job with exit code 124,
    under SLURM with the cause `hang`."""
    interval: float = setting(5.0, minimum=0.5, maximum=3600, give="a number of seconds")
    """Seconds between a node's reports."""
    metrics_interval: float = setting(30.0, minimum=0, maximum=3600, give="a number of seconds")
    """Seconds between lines of `metrics-HOST.jsonl`, fewer at first; 0: none."""
    prometheus_port: int | None = setting(
        None, minimum=0, maximum=65535, give="a port, or 0 for any free one,"
    )
    """Port of each node's metrics for Prometheus."""
    prometheus_address: str = "127.0.0.1"
    """Address of that port."""
    textfile: str | None = setting(None, pattern=".+", give="a folder, or leave it out")
    """Folder of node_exporter's textfile collector, for each node's metrics."""


@dataclass
class NotifyConfig:
    """Whom a job tells how it goes. A message that cannot be sent is a warning."""

    url: str | None = None
    """Gets a POST with JSON for each event."""
    format: str = one_of("auto", "json", "slack")
    """`json`, `slack`, or `auto`: Slack's form for hooks.slack.com."""
    events: list[str] = setting(list(EVENTS), choices=EVENTS)
    """Which to tell."""
    ping_url: str | None = None
    """Gets a GET every `ping_interval` seconds while steps are made."""
    ping_interval: float = setting(60.0, minimum=1, give="a number of seconds")


@dataclass
class PreflightConfig:
    """Checks of every node before the program starts."""

    kind: str = one_of("auto", "off", "light", "deep")
    """`off`, `light` (10 s), `deep` (60 s), or `auto`: light for SLURM jobs with GPUs, else off."""
    on_failure: str = one_of("report", "stop", "exclude")
    """For a sick node: `report` it, `stop` (exit code 3) or `exclude` it."""
    paths: list[str] = setting([], pattern=".+", give="paths that are not empty")
    """More paths that must answer."""
    min_free_gib: float = setting(1.0, minimum=0)
    """Free space for run and temporary directory."""
    tolerance: float = setting(0.93, above=0, maximum=1)
    """Share of the median below which a device is slow."""


@dataclass
class StartConfig:
    """How `agent=direct` starts ranks."""

    warm: str = one_of("auto", "off")
    """`auto`: fork the ranks from a process with torch, if the program then runs the same; `off`: exec each
    rank's interpreter."""
    preload: list[str] = field(default_factory=list)
    """More modules for that process, such as `transformers`."""
    read_ahead: str = one_of("auto", "on", "off")
    """Read torch's files into the page cache first; `auto`: if they are not there."""


@dataclass
class Settings:
    """All keys."""

    nodes: Any = "auto"
    """A number, `min:max` for an elastic job, or `auto`: the allocation's, else 1."""
    nproc_per_node: Any = "auto"
    """Ranks of a node; `auto`: one for each visible GPU, else each NUMA node."""
    name: str | None = None
    """The run's name; by default the model's or program's."""
    runs_dir: str = "runs"
    """Where runs are: RUNS_DIR/NAME/ID."""
    run_dir: str | None = None
    """An earlier run's directory, to go on with it."""
    new_run_dir: str | None = None
    """A new run's, in place of RUNS_DIR/NAME/ID; `${run_dir}` is either."""
    node_rank: int | None = None
    """This node's number, for `cluster=manual`."""
    rdzv_endpoint: str | None = None
    """HOST:PORT on the node with `node_rank=0`, for `cluster=manual`."""
    devices: str = one_of("all", "own", "spread")
    """A rank sees `all` GPUs of the job, its `own`, or `spread`: of more GPUs than ranks, as many, over all
    packages and NICs."""
    agent: str = one_of("auto", "direct", "torchrun")
    """What starts ranks: `direct` (launch itself), `torchrun`, or `auto`: `torchrun` for elastic jobs,
    `cluster=manual` or its options, else `direct`."""
    restarts: int | None = setting(None, minimum=0)
    """How often all ranks start again after one has failed; null: never, or 3 times with
    `watch.on_hang=restart`."""
    follow: bool = False
    """Stay with a submitted job: show why it waits, its output, and end with its exit code."""
    rank: int | None = setting(None, minimum=0)
    """The rank that `launch logs` or `watch` shows; null: all."""
    yes: bool = False
    """`launch cancel` does not ask; `launch tune` replaces a file that it did not write."""
    dry_run: bool = False
    """Show plan and command, start nothing."""
    format: str = one_of("table", "json")
    """What `launch plan`, `topo`, `doctor`, `status`, `watch` and `tune` print."""
    explain: bool = False
    """Say why each rank runs where it does, and list its variables."""
    save: str | None = None
    """File for a snapshot (`launch topo`), the choice (`tune`), or the page (`report`)."""
    image: str | None = None
    """File for a picture of the machine (`launch topo`): .svg, .png or .pdf."""
    objective: str = one_of("loss", "file")
    """A sweeper optimizes the last `loss` that rank 0 prints, or the `file` RUN_DIR/objective.txt."""
    env: dict[str, Any] = field(default_factory=dict)
    """Variables for the program; `env.from_file`: those of dotenv files."""
    model: dict[str, Any] = field(default_factory=dict)
    """The bundled program's model; `model.config`: a Hugging Face config.json for `launch plan`."""
    data: dict[str, Any] = field(default_factory=dict)
    """The bundled program's text: `data.path`, `data.val_fraction`."""
    program: dict[str, Any] = field(default_factory=dict)
    """The program and its arguments."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    binding: BindingConfig = field(default_factory=BindingConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    allocator: dict[str, Any] = field(default_factory=dict)
    """PyTorch's, by their names in PYTORCH_CUDA_ALLOC_CONF; `allocator.host` serves malloc: `system`,
    `tcmalloc` or `jemalloc`."""
    gc: GcConfig = field(default_factory=GcConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    torchrun: TorchrunConfig = field(default_factory=TorchrunConfig)
    start: StartConfig = field(default_factory=StartConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
