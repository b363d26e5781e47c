"""Every key that can be set: its type, its default, and which values it takes.

These are the dataclasses that Hydra checks overrides against; `conf/launch.yaml` builds on them. The checks,
their errors and docs/configuration.md are made from them.
"""
# ruff: noqa: RUF009 - `setting` makes a field

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, get_args, get_origin

from launcher.errors import LaunchError, UsageError
from launcher.plan.model import BindingConfig, DataloaderConfig, GcConfig

SLURM_KINDS = ("slurm", "allocation")
"""Values of `cluster.kind` with which SLURM starts the nodes."""
EVENTS = ("start", "hang", "recover", "straggler", "fail", "end")
"""Of which a job can tell."""
ADAPTED = (
    *("all-linear", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "lm_head"),
)
"""Matrices that can have an adapter."""
BLOCK_PARTS = (
    *("core_attn", "attention", "layernorm", "mla_up_proj"),
    *("mlp", "moe", "moe_act", "shared_experts"),
)
"""Modules that can be computed again."""
LARGEST_COUNT = 10**6
"""GPUs in a group: ten times those of the largest machines."""
LARGEST_BATCH = 10**9
"""Sequences, and tokens of a sequence."""
LARGEST_AMOUNT = 1e20
"""Tokens in all, GiB, and seconds."""
LONGEST_SHOWN = 60
"""Characters of a refused value."""
TUNE_OPTION = r"-[A-Za-z]|--[A-Za-z][\w.-]*=?|(?:\+{1,2})?[A-Za-z_][\w./-]*=|program\.\w+"
"""An option of a program, a key of Hydra's with its `=`, or a key of the section `program`."""


def setting(default: Any, **takes: object) -> Any:  # noqa: ANN401 - stands for a field of any type
    """Return a field with what it takes; all else is refused, and a null that is not the default.

    `choices` are all the words there are. Numbers have a `minimum`, a `maximum`, are `above` one, or are
    `whole` in a field of any type; `words` may stand in their place. A text matches a `pattern`, and `give`
    says what that is. For a list, it is what may be in it.
    """
    if isinstance(default, list):
        return field(default_factory=lambda: [*default], metadata=takes)
    return field(default=default, metadata=takes)


def one_of(default: str, *others: str) -> Any:  # noqa: ANN401 - stands for a field
    """Return a field that takes one of these words, and no other."""
    return setting(default, choices=(default, *others))


def list_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, "Field[Any]"]]:  # noqa: ANN401
    """Give each setting of a section, and the sections in it with theirs: its key, value and field."""
    for each in fields(section):
        value, key = getattr(section, each.name), f"{prefix}{each.name}"
        yield key, value, each
        if is_dataclass(value):
            yield from list_settings(value, f"{key}.")


def check_values(section: Any) -> None:  # noqa: ANN401 - see above
    """Refuse the first value that its field does not take; raises UsageError with what it takes."""
    for key, value, each in list_settings(section):
        kind: Any = get_origin(each.type) or each.type
        shape = describe_shape(key, each.type)
        if shape and not isinstance(value, kind):
            raise UsageError(f"{key}={show_value(value)}: give {shape}")
        for entry in value if kind is list else [value]:
            if kind is list and not isinstance(entry, get_args(each.type)[0]):
                raise UsageError(
                    f"{key}={show_value(value)}: {show_value(entry)} cannot be in it, give {shape}"
                )
            is_null = entry is None and each.default is None
            if not is_null and (fault := find_fault(entry, each.metadata) if each.metadata else ""):
                raise UsageError(f"{key}={show_value(entry)}: {fault}")


def describe_shape(key: str, kind: Any) -> str:  # noqa: ANN401 - an annotation
    """Say how a section, a mapping or a list is given; empty for a plain value."""
    if is_dataclass(kind):
        return f"its keys, as in {key}.{fields(kind)[0].name}=…"
    return {dict: f"a mapping, as in {key}.NAME=…", list: f"a list, as in {key}=[…]"}.get(
        get_origin(kind), ""
    )


def find_fault(value: Any, takes: Mapping[str, Any]) -> str:  # noqa: ANN401 - of any type
    """Say what to give in place of a value; empty if it is one of those that a field takes."""
    if choices := takes.get("choices"):
        return "" if show_value(value) in choices else f"choose from {', '.join(choices)}"
    if pattern := takes.get("pattern"):
        return "" if re.fullmatch(pattern, str(value), re.DOTALL) else f"give {takes['give']}"
    words, above = takes.get("words", ()), takes.get("above")
    low, high = takes.get("minimum", -math.inf), takes.get("maximum", math.inf)
    if value in words:
        return ""
    is_number = isinstance(value, int if takes.get("whole") else int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and math.inf != value and (above is None or value > above):
        return ""
    least = f"of at least {low:g}" if above is None else f"above {above:g}"
    most = f" and at most {high:.15g}" if high < math.inf else ""
    return f"give {takes.get('give', 'a number')} {least}{most}{''.join(f', or {word}' for word in words)}"


def show_value(value: object) -> str:
    """Write a value as the command line has it, cut off if it is long."""
    if isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


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
class ParallelConfig:
    """How the program splits its work over the GPUs: a description, which changes nothing in it.

    `auto` is what the options of the bundled program say. For another program, dp is what is left of the
    GPUs, and zero is 0.
    """

    tp: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """GPUs that share each layer (tensor parallelism)."""
    pp: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """Pipeline stages."""
    dp: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_COUNT, words=("auto",))
    """Data-parallel replicas; `auto`: the GPUs over tp, pp and cp."""
    cp: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """GPUs that share a sequence (context parallelism)."""
    ep: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """GPUs that share the experts."""
    zero: Any = setting("auto", choices=("auto", "fsdp", "0", "1", "2", "3"))
    """What is sharded over the replicas: 0 nothing, 1 optimizer states, 2 gradients too, 3 (or `fsdp`)
    weights too."""
    framework: str = one_of("auto", "ddp", "fsdp", "zero", "megatron")
    """`zero` is DeepSpeed."""
    shard_size: int | None = setting(None, minimum=1, maximum=LARGEST_COUNT)
    """GPUs over which states are sharded; null is all replicas."""
    sequence_parallel: bool = True
    """With tp: activations between the matrices are split along the sequence."""
    virtual_stages: int = setting(1, minimum=1, maximum=LARGEST_COUNT)
    """Model chunks of each pipeline stage (interleaved schedule)."""


@dataclass
class LoraConfig:
    """Low-rank adapters that are trained in place of the model; their alpha does not change memory."""

    rank: int | None = setting(None, minimum=1, maximum=1 << 16)
    """null: the model itself is trained."""
    targets: list[str] = setting(["all-linear"], choices=ADAPTED)
    """Matrices with an adapter; `all-linear` is all of them but lm_head."""


@dataclass
class FitConfig:
    """What is assumed of the training, to say before the start whether it fits and how fast it will be.

    `auto` is what the options of the bundled program say.
    """

    check: str = one_of("error", "warn", "off")
    """What becomes of a job of the bundled program that cannot fit; others are never refused."""
    precision: str = one_of("auto", "fp32", "bf16", "mixed", "fp8")
    """`mixed` is bf16 with fp32 weights."""
    optimizer: str = one_of("adamw", "adamw8bit", "adafactor", "lion", "sgd", "muon")
    checkpointing: str = one_of("auto", "none", "selective", "full")
    """Activation checkpointing."""
    offload: str = one_of("none", "optimizer", "parameters")
    """What is in CPU memory; with `parameters`, the optimizer too."""
    micro_batch: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_BATCH, words=("auto",))
    """Sequences of a replica in a micro-step."""
    accumulation: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_BATCH, words=("auto",))
    """Micro-steps of an optimizer step; `auto`: from global_batch if that is set, else 1."""
    global_batch: int | None = setting(None, minimum=1, maximum=LARGEST_BATCH)
    """Sequences of an optimizer step: micro_batch * dp * accumulation."""
    seq_len: Any = setting("auto", whole=True, minimum=1, maximum=LARGEST_BATCH, words=("auto",))
    """Tokens of a sequence; `auto`: the program's, else the model's max_seq_len, at most 4096."""
    flash_attention: bool = True
    loss: str = one_of("auto", "plain", "compiled", "chunked", "fused")
    """`plain`: all logits at once, with fp32 copies; `compiled`: without copies; `chunked`; `fused`: Liger's
    or cut cross-entropy; `auto`: not known."""
    compile: Any = setting("auto", choices=("auto", "true", "false"))
    """torch.compile; `auto` is not known."""
    optimizer_fused: Any = setting("auto", choices=("auto", "true", "false"))
    """The optimizer's `fused=True`."""
    gradients: str = one_of("auto", "fp32", "bf16")
    """`bf16` in recipes of Megatron Bridge; `auto` is the framework's."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    quantization: str = one_of("none", "nf4", "int8")
    """Of the weights that LoRA freezes: 4 bits (QLoRA, bitsandbytes, torchao), or 8 (LLM.int8)."""
    optimizer_in_backward: bool = False
    """Each parameter is updated, and its gradient freed, as soon as it has one."""
    activation_offload: bool = False
    """Activations are in CPU memory between forward and backward."""
    recompute_modules: list[str] = setting([], choices=BLOCK_PARTS)
    """What checkpointing=selective computes again, in Megatron Core's words; []: by operator, or Megatron's
    default."""
    gpu: str | None = setting(None, pattern=r".*\S.*", give="a name such as H100, or leave it out")
    """A GPU by name (`H100`, `A100-40GB`), in place of the machine's."""
    gpu_memory_gib: float | None = setting(None, above=0, maximum=LARGEST_AMOUNT)
    """Memory of a GPU in GiB, in place of the machine's."""
    tokens: float | None = setting(None, above=0, maximum=LARGEST_AMOUNT)
    """Tokens to train on in all, for time and GPU-hours."""
    step_seconds: float | None = setting(None, above=0, maximum=LARGEST_AMOUNT)
    """Measured seconds of an optimizer step, for TFLOPS, MFU and HFU."""
    grid: bool = False
    """`launch plan` shows micro-batches by checkpointing by sharding."""
    timeout: float = 600.0
    """Seconds that `launch fit` gives a program."""


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
