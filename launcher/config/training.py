"""The training that a configuration asks for, and what a start makes of the estimate of its memory."""

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.codec import DecodeError, convert
from launcher.config.program import find_unused, runs_bundled
from launcher.config.run_path import dump_masked
from launcher.config.settings import Settings, refuse
from launcher.config.start import is_step_task, parse_nodes
from launcher.config.words import FIELDS, read_section
from launcher.errors import MachineError, UsageError
from launcher.fields import check_values, find_fault, list_settings, show_value
from launcher.files import read_input
from launcher.fit.choice import OPTIONS, assess, choose_settings, describe_choice, describe_fit, find_value
from launcher.fit.counts import count_model_parameters
from launcher.fit.gpus import find_gpu
from launcher.fit.settings import ASKING, LARGEST_BATCH, FitConfig, ParallelConfig
from launcher.fit.training import (
    Device,
    ModelDimensions,
    NodeResources,
    Training,
    check_layout,
    find_framework,
    solve_batch,
)
from launcher.plan.model import Gpu, Plan
from launcher.plan.resources import count_memory_kib
from launcher.plan.variables import EXPANDABLE, merge_settings, read_settings

if TYPE_CHECKING:
    from launcher.launch.job import JobSpec

logger = logging.getLogger(__name__)

AUTO = "auto"
MAX_DEFAULT_SEQ_LEN = 4096
"""As in launcher.programs.options."""
PROGRAM_OPTIONS = {**OPTIONS, "fit.seq_len": "seq_len"}
"""The bundled program's options by the keys that say the same, and take the same; `auto` is chosen."""
FRAMEWORKS = ("auto", "ddp", "fsdp")
"""Those that the bundled program has."""
SPLITTING = (
    *("parallel.tp", "parallel.pp", "parallel.cp"),
    *("parallel.ep", "parallel.zero", "parallel.framework"),
)
"""Keys that leave nothing to choose of how the bundled program is parallel."""
TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kM]?)(tokens)?")
"""Of `program.global_batch`."""
FEWEST_PARAMETERS = 100_000_000
"""Of a model whose preset's usual global batch counts; gpt2, the smallest with one, has 124 million."""
LARGEST_CONFIG = 1 << 20
"""Bytes of a config.json; published ones have a few KiB."""
DIMENSIONS = ("vocab_size", "layers", "hidden_size", "heads", "intermediate_size", "max_seq_len")
T = TypeVar("T", FitConfig, ParallelConfig)


@dataclass(frozen=True)
class FitJob:
    """A job whose memory is to be judged: its configuration, and what it has of each node."""

    config: Settings
    model: ModelDimensions | None
    """None: there is no claim."""
    nodes: int
    ranks: int
    """Of each node."""
    gpus: tuple[Gpu, ...]
    """Of the ranks."""
    node: NodeResources
    expandable: bool = True
    """Whether the ranks' allocator uses expandable segments."""

    @property
    def is_bundled(self) -> bool:
        """Whether it is the bundled program; the configuration of another one has no section for that."""
        return runs_bundled(self.config)

    @classmethod
    def of_plan(
        cls,
        config: Settings,
        plan: Plan,
        model: ModelDimensions | None,
        nodes: int,
        environ: Mapping[str, str],
    ) -> "FitJob":
        """Make one of nodes that have this plan; `model` is `find_fit_model`'s."""
        machine = plan.machine
        node = NodeResources(
            cores=len({cpu.core for cpu in machine.cpus if cpu.id in machine.allowed_cpus}) or None,
            memory_kib=count_memory_kib(machine) or None,
            shm_kib=machine.limits.shm_kib,
            num_workers=max((rank.num_workers for rank in plan.ranks), default=0),
            worker_gib=float(config.dataloader.worker_gib),
        )
        merged = merge_settings(read_settings(config.allocator), environ)
        gpus = tuple(rank.gpu for rank in plan.ranks if rank.gpu)
        expandable = merged.get(EXPANDABLE, "").lower() == "true"
        return cls(config, model, nodes, len(plan.ranks), gpus, node, expandable)

    def find_device(self) -> Device:
        """Return what a rank computes on: the GPU that `fit` names, the smallest of the node's, or CPUs.

        Memory is 0 if it is not known. Raises UsageError for a GPU that is not.
        """
        fit, on_cpu = self.config.fit, self.is_bundled and self.config.program.get("device") == "cpu"
        given = None if fit.gpu_memory_gib is None else max(1, int(fit.gpu_memory_gib * 1024))
        if not fit.gpu and (on_cpu or not self.gpus):
            memory = (self.node.memory_kib or 0) // 1024 // max(1, self.ranks)
            return Device("GPU", given) if given else Device("CPU", memory, kind="cpu")
        if fit.gpu:
            name, known = fit.gpu, find_gpu(fit.gpu)
            own = known.memory_mib if known else 0
            if known is None and given is None:
                raise refuse("unknown_gpu", gpu=fit.gpu)
        else:
            sharing = Counter((gpu.index, gpu.uuid) for gpu in self.gpus)
            gpu = min(self.gpus, key=lambda one: one.memory_mib // sharing[one.index, one.uuid])
            name, known = gpu.name or "GPU", find_gpu(gpu.name)
            own = gpu.memory_mib or (known.memory_mib if known else 0)
            own = 0 if gpu.uuid.startswith("MIG-") else own  # the driver's number is the whole GPU's
            own //= sharing[gpu.index, gpu.uuid]
        return Device(name, given or own, nvlink_domain=known.nvlink_domain if known else 0)


def find_fit_model(
    config: Settings, program: Sequence[str] | None, given: Collection[str], *, starts: bool = False
) -> ModelDimensions | None:
    """Return the model to judge; None if there is no claim.

    The bundled program's model counts. Another program's counts if the command line names it (`+model=…`,
    `model.config=FILE`), or if the configured program takes the section and that has dimensions. Raises
    UsageError for a model that makes no sense, which at a start is the program's matter, and if the bundled
    program is to be started with a config.json.
    """
    is_bundled = runs_bundled(config, program)
    if starts and is_bundled and config.model.get("config") is not None:
        raise refuse("model_config", c=config)
    is_own = not program and not is_bundled  # configured, with a section of its own
    asked = not program or "model" in map(read_section, given)
    if (config.fit.check == "off" and not is_bundled) or not asked:
        return None
    if is_own and "model" in find_unused(config, None, given):
        return None
    try:
        return read_dimensions(config.model)
    except UsageError as error:
        is_known = is_own and "model.config" not in given
        if not starts and not is_known:
            raise
        if starts and not is_bundled and not is_known:  # the bundled program says so itself
            logger.warning(f"no estimate of memory: {error}")
        return None


def read_dimensions(section: Mapping[str, object]) -> ModelDimensions | None:
    """Return the dimensions that the section `model` gives, by itself or by the file that `config` names.

    The file is a Hugging Face config.json, relative to the working directory. A preset's other keys are the
    program's own. None without any of the dimensions. Raises UsageError for a file that cannot be read or
    lacks a field, and for dimensions that make no model.
    """
    path = section.get("config")
    given = {key: value for key, value in section.items() if value is not None}
    if path is None and not given.keys() & {*DIMENSIONS}:
        return None
    try:
        if path is not None:
            from launcher.fit.hf import parse_model_config

            text = read_input(str(path), LARGEST_CONFIG).decode("utf-8-sig")
            model = parse_model_config(text, str(path))
        else:
            heads, hidden = given.get("heads"), given.get("hidden_size")
            width = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else 1
            derived = {"kv_heads": heads, "head_width": given.get("head_dim", width)}
            model = convert(ModelDimensions, {**derived, **given, "name": str(given.get("name"))})
        check_values(model, "model.")
        experts = model.experts
        if model.latent_attention is None and model.heads % model.kv_heads:
            raise refuse("kv_heads", model=model)
        if experts and (experts.per_token > experts.count or experts.dense_layers > model.layers):
            raise refuse("experts", model=model, experts=experts)
        return model
    except (OSError, ValueError, UsageError) as error:
        if path is None and isinstance(error, DecodeError):
            raise UsageError(f"model.{error}: set it, or choose a preset such as model=llama7b") from None
        if path is None:
            raise
        what = str(error)
        if isinstance(error, OSError | UnicodeDecodeError):
            what = f"it cannot be read ({getattr(error, 'strerror', '') or error}): give the path of a file"
        raise UsageError(f"model.config={path}: {what}") from None


def count_plan_nodes(nodes: object, environ: Mapping[str, str]) -> int:
    """Return the least number of nodes that a job would have; raises UsageError.

    Fewer nodes share less: of `min:max`, the least decides.
    """
    if nodes == AUTO and "SLURM_JOB_ID" in environ and not is_step_task(environ):
        have = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
        return int(have) if have.isdecimal() and int(have) else 1
    return parse_nodes(nodes)[0]


def _list_values(config: Settings) -> dict[str, Any]:
    """List the values that describe a training, by their keys."""
    return {
        key: value
        for section in ("fit", "parallel")
        for key, value, each in list_settings(getattr(config, section), f"{section}.")
        if each.name not in ASKING
    }


def _fill(section: T, **values: Any) -> T:  # noqa: ANN401 - of any setting
    """Return a section in which what is `auto` has these values."""
    return replace(section, **{key: value for key, value in values.items() if getattr(section, key) == AUTO})


def make_training(job: FitJob) -> Training | None:
    """Return what a job asks, None if there is no claim; raises UsageError for settings that make none.

    What is `auto` in `fit` and `parallel` is what the bundled program's option says, and what is `auto` there
    too is chosen, on a device of unknown memory, too.
    """
    config, model, is_bundled = job.config, job.model, job.is_bundled
    if model is None or not job.ranks:
        return None
    device, ranks = job.find_device(), job.ranks * job.nodes
    if not device.memory_mib and not is_bundled:
        return None
    on_gpu, given, usual = device.kind == "gpu", _list_values(config), _list_values(Settings())
    fixed = tuple(key for key, value in given.items() if value != usual[key])
    options = {key: _read_option(config.program, key) for key in PROGRAM_OPTIONS} if is_bundled else {}
    if {*fixed} & {*SPLITTING}:
        options.pop("parallel.framework", None)  # nothing is left to choose
    free = frozenset(key for key in OPTIONS if options.get(key) == given[key] == AUTO)
    layout = _fill(config.parallel, framework=options.pop("parallel.framework", AUTO))
    settings = _fill(config.fit, **{key.removeprefix("fit."): value for key, value in options.items()})
    settings = _fill(settings, seq_len=min(model.max_seq_len, MAX_DEFAULT_SEQ_LEN))
    computes_half, sequences = on_gpu, None
    if is_bundled:
        gpu, dtype = find_gpu(device.name) if on_gpu else None, config.program.get("dtype", AUTO)
        has_bf16 = on_gpu and (gpu is None or gpu.tf32 is not None)  # both came with the same generation
        computes_half = dtype == "bf16" or (dtype != "fp32" and has_bf16)
        sequences = _find_sequences(config, model, settings, ranks)
        if settings.global_batch:
            settings = replace(settings, accumulation=config.fit.accumulation)
    zero, dp = {"fsdp": 3, "zero": 1}.get(layout.framework, 0), ranks // (layout.tp * layout.pp * layout.cp)
    layout = _fill(layout, zero=zero, dp=max(1, dp))
    layout = replace(layout, zero=3 if layout.zero == "fsdp" else int(layout.zero))
    layout = _fill(layout, framework=find_framework(layout))
    batch = _fill(settings, micro_batch=None, accumulation=None)
    solved = solve_batch(batch.micro_batch, layout.dp, batch.accumulation, settings.global_batch)
    settings = replace(settings, micro_batch=solved[0], accumulation=solved[1])
    precision = "mixed" if computes_half else "fp32"
    settings = _fill(settings, precision=precision, checkpointing="none", compile=None, optimizer_fused=None)
    # What the bundled program does not do is a question of the user's, and no ground to refuse a job.
    trains = is_bundled and model.experts is None and model.latent_attention is None and not fixed
    training = Training(
        *(model, layout, settings, device, job.ranks, job.nodes, job.node),
        is_bundled=trains,
        free=free,
        sequences=sequences,
        fixed=fixed,
        expandable_segments=job.expandable,
        may_autocast=is_bundled,
    )
    if not free:
        return training
    check_layout(training)
    return choose_settings(training)


def _find_sequences(config: Settings, model: ModelDimensions, settings: FitConfig, ranks: int) -> int | None:
    """Return the sequences of a step of the bundled program, None if nobody says; raises UsageError.

    The usual global batch of a preset is for its size: a model that has been made small has none.
    """
    asked, sequences = config.program.get("global_batch") or AUTO, settings.global_batch
    value = config.model.get("global_batch") if asked == AUTO else asked
    if asked == AUTO and count_model_parameters(model) < FEWEST_PARAMETERS:
        value = None
    if sequences is None and value not in (None, AUTO):
        found, number = TOKENS.fullmatch(str(value)), 0.0
        if found:
            number = float(found[1]) * {"": 1, "k": 1 << 10, "M": 1 << 20}[found[2]]
            number = max(1, round(number / settings.seq_len)) if found[3] and number else number
        if number != int(number) or not 1 <= number <= LARGEST_BATCH:
            raise refuse("global_batch", value=value)
        sequences = int(number)
    micro_batch, accumulation = settings.micro_batch, settings.accumulation
    if AUTO not in (micro_batch, accumulation, asked) and micro_batch * accumulation * ranks != sequences:
        found = micro_batch * accumulation * ranks
        batch = f"program.batch_size={micro_batch} * program.grad_accumulation={accumulation}"
        raise refuse("sequences", asked=asked, sequences=sequences, batch=batch, ranks=ranks, found=found)
    return sequences


def _read_option(options: Mapping[str, object], key: str) -> Any:  # noqa: ANN401 - a number or a word
    """Return what an option of the program says for a key, or `auto`; raises UsageError for what it would
    refuse.
    """
    name = PROGRAM_OPTIONS[key]
    value = AUTO if options.get(name) is None else options[name]
    if isinstance(value, bool) and name == "activation_checkpointing":
        value = "full" if value else "none"
    takes = {"choices": FRAMEWORKS} if key == "parallel.framework" else FIELDS[key].metadata
    if fault := find_fault(value, takes):
        raise UsageError(f"program.{name}={show_value(value)}: {fault}")
    return value


def settle_program(config: Settings, training: Training | None) -> Settings:
    """Return a configuration with the values that were chosen for the bundled program.

    Without a training, as if the device is not known, the program's own defaults are taken.
    """
    if training is None or not training.free:
        return config
    chosen = {OPTIONS[key]: find_value(training, key) for key in OPTIONS if key in training.free}
    # Nodes with other numbers of GPUs count micro-steps for as many everywhere: the program knows all ranks.
    is_kept = "fit.accumulation" in training.free and training.sequences
    chosen["global_batch"] = training.sequences if is_kept else AUTO
    return replace(config, program={**config.program, **chosen})


def settle_training(job: FitJob, *, judges: bool = True, chooses: bool = True) -> Settings:
    """Return the configuration with what is chosen for the bundled program, and judge the job by `fit.check`.

    With `judges=False` or `chooses=False` that is done elsewhere: nothing is said of it. A mistake in the
    estimate ends no job. Raises MachineError for a job that is refused: never in a dry run, nor on CPUs,
    where swap may hold what memory does not; and UsageError for settings of the bundled program that make no
    sense.
    """
    config, is_bundled = job.config, job.is_bundled
    check = config.fit.check if judges else "off"
    if job.model is None or (check == "off" and not is_bundled):
        return config
    if is_bundled:  # it is judged as it will run, whatever `fit` and `parallel` say of a training
        fit = FitConfig(gpu=config.fit.gpu, gpu_memory_gib=config.fit.gpu_memory_gib)
        job = replace(job, config=replace(config, fit=fit, parallel=ParallelConfig()))
    try:
        training = make_training(job)
        report = assess(training) if training and judges else None
    except Exception as error:
        what = str(error)
        if is_bundled and judges and isinstance(error, UsageError):
            raise
        if not isinstance(error, UsageError):
            what = f"{type(error).__name__}: {error}: report it; what is auto is the program's own default"
        if judges:
            logger.warning(f"no estimate of memory: {what}")
        return config
    is_told = chooses and (check == "off" or (report and report.verdict != "does_not_fit"))
    if report and report.request.free and is_told:
        logger.info(describe_choice(report.request, report.estimate.total))
    if report and report.verdict and check != "off":
        message, on_gpu = describe_fit(report), report.request.on_gpu
        is_refused = check == "error" and report.request.is_bundled and on_gpu and not config.dry_run
        if report.verdict == "does_not_fit" and is_refused:
            raise MachineError(f"{message}; fit.check=warn starts it all the same")
        if report.verdict != "fits":
            logger.warning(message)
        elif on_gpu and not report.request.free:
            logger.info(message)
    return settle_program(config, training) if chooses else config


def settle_job(spec: "JobSpec", config: Settings) -> "JobSpec":
    """Return a job with a configuration in which values of the bundled program were chosen."""
    import yaml

    tree = yaml.safe_load(spec.config_text)
    before = tree.get("program") or {}
    chosen = {key: config.program.get(key, value) for key, value in before.items() if value == AUTO}
    if all(value == AUTO for value in chosen.values()):
        return replace(spec, config=config)
    text = dump_masked({**tree, "program": {**before, **chosen}})
    return replace(spec, config=config, config_text=text)
