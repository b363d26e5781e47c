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
def _read_texts() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("errors.toml").read_text(encoding="utf-8"))


def say(kind: str, rule: str, values: Mapping[str, object]) -> str:
    """Return what a rule among the `errors` or the `warnings` says of values."""
    return _Texts().vformat(_read_texts()[kind][rule], (), values)


def refuse(rule: str, kind: type[LaunchError] = UsageError, /, **values: object) -> LaunchError:
    """Return the error of a rule."""
    return kind(say("errors", rule, values))


@dataclass
class RequeueConfig:
    """How often a job goes back into the queue, for each reason why it ended; 0 means never."""

    preempted: int = setting(100, minimum=0)
    """A job of higher priority took its nodes."""
    timeout: int = setting(100, minimum=0)
    """The job reached its time limit while ranks were running."""
    node_failure: int = setting(10, minimum=0)
    """A node was lost; the next attempt excludes it."""
    sick_node: int = setting(3, minimum=0)
    """A node was sick, and `preflight.on_failure=exclude` could not do without it."""
    stopped: int = setting(10, minimum=0)
    """A SIGTERM came that neither launch nor SLURM's queue sent."""
    requested: int = setting(100, minimum=0)
    """The first rank that failed ended with one of `exit_codes`, and nobody had asked for a stop."""
    hang: int = setting(3, minimum=0)
    """`watch.on_hang=stop` ended the ranks."""
    crash: int = setting(0, minimum=0)
    """The program failed."""
    exit_codes: list[int] = setting([75], minimum=1, maximum=255)
    """Exit codes by which a program asks to be started again; 75 is EX_TEMPFAIL."""
    no_progress: int = setting(3, minimum=0)
    """Attempts in a row without a later step or a newer checkpoint, after which the job stops."""
    limit: int = setting(200, minimum=1)
    """Attempts in all."""
    allocation: bool = False
    """In an allocation, requeue the job like a submitted one: for a script that ends with `exec launch`."""


@dataclass
class ContainerConfig:
    """The container that ranks run in; without an image there is none."""

    runtime: str = one_of("pyxis", "apptainer")
    """`pyxis` (srun's --container-* options) or `apptainer`."""
    image: str | None = None
    """The image, in the runtime's notation."""
    mounts: list[str] = field(default_factory=list)
    """`SRC:DST[:OPTIONS]`, in addition to the run directory and the working directory."""
    python: str = "python3"
    """The container's Python, in which launch is installed."""
    args: list[str] = field(default_factory=list)
    """Further arguments of the runtime."""


@dataclass
class ClusterConfig:
    """Where the job runs. SLURM's options have SLURM's names; null leaves an option to SLURM."""

    kind: str = one_of("auto", "local", "slurm", "allocation", "manual")
    """`local` (this machine), `slurm` (sbatch), `allocation` (a step in the surrounding SLURM job), `manual`
    (started by hand on each node), or `auto`: `allocation` in a job, else `slurm` for several nodes, else
    `local`."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """As SLURM writes it: minutes, MM:SS, HH:MM:SS, DD-HH, DD-HH:MM, DD-HH:MM:SS."""
    gpus_per_node: Any = "auto"
    """A number, `TYPE:NUMBER`, or `auto`: one for each rank, or all if nproc_per_node is auto."""
    cpus_per_task: Any = "auto"
    """CPUs of each node; `auto`: the share that belongs to the GPUs."""
    mem: Any = "auto"
    """Memory of each node (`200G`); `auto`: the share that belongs to the GPUs."""
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    switches: str | None = None
    segment: int | None = setting(None, minimum=1)
    """Nodes in one block of the network, such as an NVLink domain (`--segment`); divides the number of nodes,
    spare ones included."""
    exclusive: Any = setting(None, choices=("true", "false", "user", "mcs", "topo"))
    """`true`: the job has its nodes whole; `user`, `mcs` or `topo` as with SLURM's `--exclusive`."""
    spares: int = setting(0, minimum=0, maximum=1000)
    """Nodes beside `nodes` that are checked, wait idle, and replace lost ones."""
    node_order: str = "auto"
    """The order of the nodes: `topology` (SLURM's switches), `slurm`, a file with one node a line, or `auto`:
    `topology` if SLURM knows of switches, else `slurm`."""
    array_parallelism: int = setting(256, minimum=1)
    """How many jobs of a sweep run at the same time."""
    dependency: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    signal: str = "USR2@120"
    """The checkpoint signal, and how many seconds before the time limit the ranks get it."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the start: module loads, environment activation."""
    additional: dict[str, Any] = field(default_factory=dict)
    """Any other option of sbatch; true means one without a value."""
    srun: dict[str, Any] = field(default_factory=dict)
    """Any other option of srun."""
    machine: str | None = None
    """A shipped machine or a snapshot; `dry_run=true` shows the plan for it."""
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
    """The folder that holds the machine's `sys` and `proc`."""
    snapshot: str | None = None
    """A file that `launch topo save=FILE` or `launch plan format=json` wrote, here or in a folder `machine/`
    of the configuration."""


@dataclass
class LogsConfig:
    """What the console shows of the ranks' output. The run directory has all of it."""

    console: str = one_of("rank0", "all", "none")
    tail: int = setting(20, minimum=1)
    """Last lines of the first failed rank's log that are shown."""


@dataclass
class ProgressConfig:
    """What counts as progress, besides the steps that rank 0 prints and files below RUN_DIR/checkpoints."""

    paths: list[str] = setting([], pattern=".+", give="paths that are not empty")
    """Patterns of checkpoints elsewhere, such as `/scratch/me/ckpt/*`, with `**` for any depth; relative
    to the working directory."""


@dataclass
class TorchrunConfig:
    """torchrun's options, under torchrun's names; null leaves an option to torchrun and its `PET_*`."""

    max_restarts: int | None = setting(None, minimum=0)
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
    shutdown_timeout: int = setting(30, minimum=0)
    """Seconds that ranks have to end after a signal, before the next signal."""


@dataclass
class WatchConfig:
    """How running ranks are watched."""

    enabled: bool = True
    """Watch the ranks. Their program is not changed, and nothing ends them but `on_hang`."""
    hang_seconds: Any = setting("auto", minimum=1, words=("auto",), give="a number of seconds")
    """Seconds without activity of a rank that others wait for; `auto`: 60, or three times the longest pause
    so far."""
    on_hang: str = one_of("report", "restart", "stop")
    """`restart` starts the ranks again, as often as `restarts` says, else 3 times; `stop` ends the job with
    exit code 124, under SLURM with the cause `hang` of cluster.requeue."""
    interval: float = setting(5.0, minimum=0.5, maximum=3600, give="a number of seconds")
    """Seconds from one report of a node to the next."""
    metrics_interval: float = setting(30.0, minimum=0, maximum=3600, give="a number of seconds")
    """Seconds from one line of `metrics-HOST.jsonl` to the next, fewer at first; 0 writes none."""
    prometheus_port: int | None = setting(
        None, minimum=0, maximum=65535, give="a port, or 0 for any free one,"
    )
    """Port on which each node serves its metrics to Prometheus."""
    prometheus_address: str = "127.0.0.1"
    """Address that it listens on."""
    textfile: str | None = setting(None, pattern=".+", give="a folder, or leave it out")
    """Folder of node_exporter's textfile collector, into which each node writes its metrics."""


@dataclass
class NotifyConfig:
    """Whom a job tells how it goes. A message that cannot be sent is a warning."""

    url: str | None = None
    """Gets a POST with JSON for each of the events."""
    format: str = one_of("auto", "json", "slack")
    """`json`, `slack`, or `auto`: Slack's form for hooks.slack.com."""
    events: list[str] = setting(list(EVENTS), choices=EVENTS)
    """Which to tell."""
    ping_url: str | None = None
    """Gets a GET every `ping_interval` seconds as long as steps are made."""
    ping_interval: float = setting(60.0, minimum=1, give="a number of seconds")


@dataclass
class PreflightConfig:
    """Checks of every node before the program starts."""

    kind: str = one_of("auto", "off", "light", "deep")
    """`off`; `light` (10 s at most); `deep` (60 s); `auto`: light for SLURM jobs with GPUs, else off."""
    on_failure: str = one_of("report", "stop", "exclude")
    """If a node is sick: `report` it and go on; `stop` (exit code 3); `exclude` it."""
    paths: list[str] = setting([], pattern=".+", give="paths that are not empty")
    """Further paths that have to answer on every node."""
    min_free_gib: float = setting(1.0, minimum=0)
    """Free space for the run directory and the temporary directory."""
    tolerance: float = setting(0.93, above=0, maximum=1)
    """Share of the devices' median below which one is slow."""


@dataclass
class StartConfig:
    """How ranks of `agent=direct` come to run."""

    warm: str = one_of("auto", "off")
    """`auto`: fork the ranks from a process that has imported torch, if the program then runs the same;
    `off`: exec each rank's interpreter."""
    preload: list[str] = field(default_factory=list)
    """Further modules for that process to import, such as `transformers`."""
    read_ahead: str = one_of("auto", "on", "off")
    """Read torch's files into the page cache first; `auto`: if they are not there."""


@dataclass
class Settings:
    """All keys."""

    nodes: Any = "auto"
    """A number, `min:max` for an elastic job, or `auto`: the allocation's, else 1."""
    nproc_per_node: Any = "auto"
    """Ranks on each node; `auto`: one for each visible GPU, else for each NUMA node."""
    name: str | None = None
    """The run's name; by default the model's or the program's."""
    runs_dir: str = "runs"
    """The folder for run directories: RUNS_DIR/NAME/ID."""
    run_dir: str | None = None
    """An earlier run's directory, to go on with it."""
    new_run_dir: str | None = None
    """A new run's directory, in place of RUNS_DIR/NAME/ID; `${run_dir}` refers to it."""
    node_rank: int | None = None
    """The number of this node, for `cluster=manual`."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the rendezvous, on the node with `node_rank=0`, for `cluster=manual`."""
    devices: str = one_of("all", "own", "spread")
    """What a rank sees: `all` of the job's GPUs, its `own` alone, or `spread`: of more GPUs than ranks, those
    that are spread over packages and NICs."""
    agent: str = one_of("auto", "direct", "torchrun")
    """What starts the ranks: `direct` (launch itself) or `torchrun`; `auto`: `torchrun` for elastic jobs,
    `cluster=manual` or its options, else `direct`."""
    restarts: int | None = setting(None, minimum=0)
    """How often all ranks are started again after one has failed; null: never, but 3 times with
    `watch.on_hang=restart`."""
    follow: bool = False
    """Stay with a submitted job: show why it waits and its output, and end with its exit code."""
    rank: int | None = setting(None, minimum=0)
    """The rank that `launch logs` or `launch watch` shows; null means all."""
    yes: bool = False
    """`launch cancel` does not ask; `launch tune` replaces a file that it did not write."""
    dry_run: bool = False
    """Show the plan and the command, and start nothing."""
    format: str = one_of("table", "json")
    """What `launch plan`, `topo`, `doctor`, `status`, `watch` and `tune` print."""
    explain: bool = False
    """Say for each rank why it runs where it does, and list its variables."""
    save: str | None = None
    """The file for a machine's snapshot (`launch topo`) or the choice (`launch tune`)."""
    image: str | None = None
    """The file for a picture of the machine (`launch topo`): `FILE.svg`, `.png` or `.pdf`."""
    objective: str = one_of("loss", "file")
    """What a sweeper optimizes: the last `loss` that rank 0 prints, or the `file` RUN_DIR/objective.txt."""
    env: dict[str, Any] = field(default_factory=dict)
    """Variables for the program; `env.from_file` names dotenv files with more."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model of the bundled program; `model.config` is a Hugging Face config.json for `launch plan`."""
    data: dict[str, Any] = field(default_factory=dict)
    """The text for the bundled program: `data.path` and `data.val_fraction`."""
    program: dict[str, Any] = field(default_factory=dict)
    """The program and its arguments."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    binding: BindingConfig = field(default_factory=BindingConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    allocator: dict[str, Any] = field(default_factory=dict)
    """PyTorch's allocator settings, by their names in PYTORCH_CUDA_ALLOC_CONF. `allocator.host` serves
    malloc: `system`, `tcmalloc` or `jemalloc`."""
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
