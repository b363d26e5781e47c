"""The Training that a configuration asks for, and what a start makes of the estimate of its memory."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.codec import DecodeError, convert
from launcher.config.program import BUNDLED, find_unused
from launcher.config.run_path import dump_masked
from launcher.config.settings import (
    FitConfig,
    ParallelConfig,
    Settings,
    find_fault,
    list_settings,
    show_value,
)
from launcher.config.start import is_step_task, parse_nodes
from launcher.errors import MachineError, UsageError
from launcher.files import read_input
from launcher.fit.choice import (
    OPTIONS,
    FitReport,
    assess,
    choose_settings,
    describe_change,
    describe_choice,
    describe_fit,
    explain_misfit,
    find_value,
)
from launcher.fit.counts import count_model_parameters
from launcher.fit.gpus import find_gpu
from launcher.fit.training import (
    Device,
    Lora,
    ModelDimensions,
    NodeResources,
    ParallelLayout,
    Training,
    TrainingSettings,
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
LARGEST_NUMBER = 10**9
"""Of a dimension: none is near it, and products of several stay within what a float can hold."""
LARGEST_LAYERS = 10_000
"""The deepest published models have some hundred."""
NUMBER = {"whole": True, "minimum": 1, "maximum": LARGEST_NUMBER, "words": (AUTO,)}
PROGRAM_OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fit.micro_batch": ("batch_size", NUMBER),
    "fit.accumulation": ("grad_accumulation", NUMBER),
    "fit.seq_len": ("seq_len", NUMBER),
    "fit.checkpointing": ("activation_checkpointing", {"choices": (AUTO, "none", "selective", "full")}),
    "parallel.framework": ("parallel", {"choices": (AUTO, "ddp", "fsdp")}),
}
"""The bundled program's options by the keys that say the same, and what they take, as in
launcher.programs.options; `auto` is chosen."""
SPLITTING = (
    *("parallel.tp", "parallel.pp", "parallel.cp"),
    *("parallel.ep", "parallel.zero", "parallel.framework"),
)
"""Keys that leave nothing to choose of how the bundled program is parallel."""
NOT_OF_THE_TRAINING = ("check", "gpu", "gpu_memory_gib", "tokens", "step_seconds", "grid", "timeout")
"""Keys of `fit` that ask about a training and do not describe it."""
TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kM]?)(tokens)?")
"""Of `program.global_batch`."""
FEWEST_PARAMETERS = 100_000_000
"""Of a model whose preset's usual global batch counts; gpt2, the smallest with one, has 124 million."""
LARGEST_CONFIG = 1 << 20
"""Bytes of a config.json; published ones have a few KiB."""
DIMENSIONS = ("vocab_size", "layers", "hidden_size", "heads", "intermediate_size", "max_seq_len")
AT_LEAST_ONE = (*DIMENSIONS, "kv_heads", "head_width", "count", "per_token")
WORDS = {"norm": ("rmsnorm", "layernorm"), "mlp": ("swiglu", "gelu"), "position": ("rope", "learned")}
T = TypeVar("T")


def is_bundled_program(config: Settings, program: Sequence[str] | None) -> bool:
    """Tell whether the bundled program is what runs; `program` is what is given after `--`."""
    return not program and config.program.get("command") == list(BUNDLED)


def find_fit_model(
    config: Settings, program: Sequence[str] | None, given: Collection[str]
) -> ModelDimensions | None:
    """Return the model to judge; None if there is no claim.

    The bundled program's model counts. Another program's counts if the command line names it (`+model=…`,
    `model.config=FILE`), or if the configured program takes the section and that has dimensions. Raises
    UsageError for a model that makes no sense.
    """
    is_bundled = is_bundled_program(config, program)
    is_own = not program and not is_bundled  # configured, with a section of its own
    asked = not program or any(key.partition(".")[0] == "model" for key in given)
    if (config.fit.check == "off" and not is_bundled) or not asked:
        return None
    if is_own and "model" in find_unused(config, None, given):
        return None
    try:
        return read_dimensions(config.model)
    except UsageError:
        if is_own and "model.config" not in given:
            return None
        raise


def read_dimensions(section: Mapping[str, object]) -> ModelDimensions | None:
    """Return the dimensions that the section `model` gives, by itself or by the file that `config` names.

    The file is a Hugging Face config.json, relative to the working directory. A preset's other keys are the
    program's own. None without any of the dimensions. Raises UsageError for a file that cannot be read or
    lacks a field, and for dimensions that make no model.
    """
    path = section.get("config")
    if path is not None:
        from launcher.fit.hf import parse_model_config

        try:
            text = read_input(str(path), LARGEST_CONFIG).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"model.config={path} cannot be read ({getattr(error, 'strerror', '') or error}): give the"
                " path of a model's config.json from here"
            ) from None
        try:
            return _check_dimensions(parse_model_config(text, str(path)))
        except UsageError as error:
            raise UsageError(f"model.config={path}: {error}") from None
    given = {key: value for key, value in section.items() if value is not None}
    missing = [name for name in DIMENSIONS if name not in given]
    if not any(name in section for name in DIMENSIONS):
        return None
    if missing:
        raise UsageError(
            f"model has no {', '.join(missing)}: choose a preset such as model=llama7b, or set it"
        )
    heads, hidden = given["heads"], given["hidden_size"]
    width = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else 1
    derived = {"kv_heads": heads, "head_width": given.get("head_dim", width)}
    try:
        return _check_dimensions(
            convert(ModelDimensions, {**derived, **given, "name": str(given.get("name"))}, 0)
        )
    except DecodeError as error:
        raise UsageError(f"model.{error}") from None


def _check_dimensions(model: ModelDimensions) -> ModelDimensions:
    """Return dimensions that make a model; raises UsageError for others."""
    experts = model.experts
    for key, value, _ in list_settings(model, "model."):
        name = key.rpartition(".")[2]
        most = LARGEST_LAYERS if name == "layers" else LARGEST_NUMBER
        takes = {"choices": WORDS.get(name), "minimum": int(name in AT_LEAST_ONE), "maximum": most}
        if (name in WORDS or type(value) is int) and (fault := find_fault(value, takes)):
            raise UsageError(f"{key}={show_value(value)}: {fault}")
    if model.latent_attention is None and model.heads % model.kv_heads:
        raise UsageError(f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}")
    if experts and experts.per_token > experts.count:
        raise UsageError(
            f"model.experts.per_token={experts.per_token} is more than model.experts.count={experts.count}"
        )
    if experts and experts.dense_layers > model.layers:
        raise UsageError(
            f"model.experts.dense_layers={experts.dense_layers} is more than model.layers={model.layers}"
        )
    return model


def count_plan_nodes(nodes: object, environ: Mapping[str, str]) -> int:
    """Return the least number of nodes that a job would have; raises UsageError.

    Fewer nodes share less: of `min:max`, the least decides.
    """
    if nodes == AUTO and "SLURM_JOB_ID" in environ and not is_step_task(environ):
        have = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
        return int(have) if have.isdecimal() and int(have) else 1
    return parse_nodes(1 if nodes == AUTO else nodes)[0]


def make_fit_request(
    config: Settings,
    plan: Plan,
    model: ModelDimensions | None,
    nodes: int,
    environ: Mapping[str, str],
    *,
    is_bundled: bool,
) -> Training | None:
    """Return what is asked of a job of which each node has this plan; None if there is no claim.

    What the bundled program computes with is chosen on a device of unknown memory, too.
    `model` is what `find_fit_model` returns. Raises UsageError for settings that make no training.
    """
    if model is None or not plan.ranks:
        return None
    device = choose_fit_device(config, plan, takes_option=is_bundled)
    if not device.memory_mib and not is_bundled:
        return None
    machine = plan.machine
    allowed = {cpu.core for cpu in machine.cpus if cpu.id in machine.allowed_cpus}
    node = NodeResources(
        cores=len(allowed) or None,
        memory_kib=count_memory_kib(machine) or None,
        shm_kib=machine.limits.shm_kib,
        num_workers=max(rank.num_workers for rank in plan.ranks),
        worker_gib=float(config.dataloader.worker_gib),
    )
    shape, expandable = (len(plan.ranks), nodes), has_expandable_segments(config, environ)
    return make_request_on(
        config, model, device, node, shape=shape, is_bundled=is_bundled, expandable=expandable
    )


def has_expandable_segments(config: Settings, environ: Mapping[str, str]) -> bool:
    """Tell whether the allocator of the ranks uses expandable segments."""
    merged = merge_settings(read_settings(config.allocator), environ)
    return merged.get(EXPANDABLE, "").lower() == "true"


def choose_fit_device(config: Settings, plan: Plan, *, takes_option: bool = True) -> Device:
    """Return what a rank of a plan computes on, or with `program.device=cpu`; raises UsageError."""
    on_cpu = takes_option and config.program.get("device") == "cpu"
    gpus = [] if on_cpu else [rank.gpu for rank in plan.ranks if rank.gpu]
    return find_fit_device(config.fit, gpus, count_memory_kib(plan.machine) // 1024 // len(plan.ranks))


def find_fit_device(fit: FitConfig, gpus: Sequence[Gpu], cpu_mib: int) -> Device:
    """Return what a rank computes on: the GPU that `fit` names, the smallest of the node's, or CPUs.

    Memory is 0 if it is not known. `cpu_mib` is the memory of a rank without a GPU. Raises UsageError.
    """
    given = None if fit.gpu_memory_gib is None else max(1, int(fit.gpu_memory_gib * 1024))
    if fit.gpu:
        known = find_gpu(fit.gpu)
        if known is None and given is None:
            raise UsageError(
                f"fit.gpu={fit.gpu} is no GPU that is known: give a name such as H100, A100-40GB or B200, or"
                " its memory too, fit.gpu_memory_gib=N"
            )
        name, own = fit.gpu, known.memory_mib if known else 0
    elif gpus:
        sharing = Counter((gpu.index, gpu.uuid) for gpu in gpus)
        gpu = min(gpus, key=lambda one: one.memory_mib // sharing[one.index, one.uuid])
        known = find_gpu(gpu.name)
        name, own = gpu.name or "GPU", gpu.memory_mib or (known.memory_mib if known else 0)
        own = 0 if gpu.uuid.startswith("MIG-") else own  # the driver's number is the whole GPU's
        own //= sharing[gpu.index, gpu.uuid]
    else:
        return Device("GPU", given) if given else Device("CPU", cpu_mib, kind="cpu")
    return Device(name, given or own, nvlink_domain=known.nvlink_domain if known else 0)


def make_request_on(
    config: Settings,
    model: ModelDimensions,
    device: Device,
    node: NodeResources,
    *,
    shape: tuple[int, int],
    is_bundled: bool,
    expandable: bool = True,
) -> Training:
    """Return what is asked of a job of `shape` (ranks of a node, nodes) on known devices; raises UsageError.

    What is `auto` in `fit` and `parallel` is what the bundled program's option says, and what is `auto` there
    too is chosen.
    """
    on_gpu, ranks, fit = device.kind == "gpu", shape[0] * shape[1], config.fit
    given, usual = (
        {
            key: value
            for section in ("fit", "parallel")
            for key, value, each in list_settings(getattr(every, section), f"{section}.")
            if each.name not in NOT_OF_THE_TRAINING
        }
        for every in (config, Settings())
    )
    fixed = tuple(key for key, value in given.items() if value != usual[key])
    options = {key: _read_option(config.program, key) for key in PROGRAM_OPTIONS} if is_bundled else {}
    chooses = is_bundled and all(given[key] == usual[key] for key in SPLITTING)
    if not chooses:
        options.pop("parallel.framework", None)
    values = {key: options.get(key, AUTO) if value == AUTO else value for key, value in given.items()}
    free = frozenset(key for key in OPTIONS if key in options and values[key] == AUTO)

    def settle(key: str, default: T) -> T:
        found: T = default if values[key] == AUTO else values[key]
        return found

    values["fit.seq_len"] = settle("fit.seq_len", min(model.max_seq_len, MAX_DEFAULT_SEQ_LEN))
    computes_half, sequences = on_gpu, None
    if is_bundled:
        gpu, dtype = find_gpu(device.name) if on_gpu else None, config.program.get("dtype", AUTO)
        has_bf16 = on_gpu and (gpu is None or gpu.tf32 is not None)  # both came with the same generation
        computes_half = dtype == "bf16" or (dtype != "fp32" and has_bf16)
        sequences = _find_sequences(config, model, values, ranks)
        if fit.global_batch:
            values["fit.accumulation"] = fit.accumulation
    usual_zero = {"fsdp": 3, "zero": 1}.get(settle("parallel.framework", ""), 0)
    zero: Any = settle("parallel.zero", usual_zero)
    splits = prod(given[key] for key in SPLITTING[:3])
    values["parallel.zero"] = 3 if zero == "fsdp" else int(zero)
    values["parallel.dp"] = settle("parallel.dp", max(1, ranks // splits))
    layout = ParallelLayout(**{each.name: values[f"parallel.{each.name}"] for each in fields(ParallelLayout)})
    micro_batch, accumulation = solve_batch(
        settle("fit.micro_batch", None), layout.dp, settle("fit.accumulation", None), fit.global_batch
    )
    precision = settle("fit.precision", "mixed" if computes_half else "fp32")
    framework = settle("parallel.framework", "ddp" if chooses else find_framework(layout))
    # What the bundled program does not do is a question of the user's, and no ground to refuse a job.
    trains = is_bundled and model.experts is None and model.latent_attention is None and not fixed
    settled: dict[str, Any] = {
        "framework": framework,
        "precision": precision,
        "checkpointing": settle("fit.checkpointing", "none"),
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "compile": settle("fit.compile", None),
        "optimizer_fused": settle("fit.optimizer_fused", None),
        "lora": Lora(fit.lora.rank, tuple(fit.lora.targets)) if fit.lora.rank else None,
        "recompute_modules": tuple(fit.recompute_modules),
        "autocast": is_bundled and precision == "mixed" and framework == "ddp",
        "bundled": trains,
        "expandable_segments": expandable,
    }
    rest = {
        each.name: values[f"fit.{each.name}"] for each in fields(TrainingSettings) if each.name not in settled
    }
    request = Training(
        *(model, layout, TrainingSettings(**settled, **rest), device, *shape, node),
        tokens=fit.tokens,
        step_seconds=fit.step_seconds,
        is_bundled=trains,
        global_batch=fit.global_batch,
        free=free,
        sequences=sequences,
        fixed=fixed,
    )
    if not free:
        return request
    check_layout(request)
    return choose_settings(request)


def _find_sequences(
    config: Settings, model: ModelDimensions, values: Mapping[str, Any], ranks: int
) -> int | None:
    """Return the sequences of a step of the bundled program, None if nobody says; raises UsageError.

    The usual global batch of a preset is for its size: a model that has been made small has none.
    """
    asked, usual = config.program.get("global_batch"), config.model.get("global_batch")
    asked = AUTO if asked is None else asked
    if asked == AUTO and count_model_parameters(model) < FEWEST_PARAMETERS:
        usual = None
    sequences = config.fit.global_batch or _read_global_batch(
        usual if asked == AUTO else asked, values["fit.seq_len"]
    )
    micro_batch, accumulation = values["fit.micro_batch"], values["fit.accumulation"]
    if AUTO not in (micro_batch, accumulation, asked) and micro_batch * accumulation * ranks != sequences:
        raise UsageError(
            f"program.global_batch={asked} is {sequences} sequences, and program.batch_size={micro_batch}"
            f" * program.grad_accumulation={accumulation} on {ranks} ranks is"
            f" {micro_batch * accumulation * ranks}: leave one out"
        )
    return sequences


def _read_option(options: Mapping[str, object], key: str) -> Any:  # noqa: ANN401 - a number or a word
    """Return what an option of the program says for a key, or `auto`; raises UsageError for what it would
    refuse.
    """
    name, takes = PROGRAM_OPTIONS[key]
    value = options.get(name)
    if isinstance(value, bool) and name == "activation_checkpointing":
        value = "full" if value else "none"
    value = AUTO if value is None else value
    if fault := find_fault(value, takes):
        raise UsageError(f"program.{name}={show_value(value)}: {fault}")
    return value


def _read_global_batch(value: object, seq_len: int) -> int | None:
    """Return the sequences of `program.global_batch`, as 256 or 4Mtokens; raises UsageError."""
    if value in (None, AUTO):
        return None
    found = TOKENS.fullmatch(str(value))
    if found and float(found[1]) > 0:
        number = float(found[1]) * {"": 1, "k": 1 << 10, "M": 1 << 20}[found[2] or ""]
        sequences = round(number / seq_len) if found[3] else number
        if sequences == int(sequences) <= LARGEST_NUMBER:
            return max(1, int(sequences))
    raise UsageError(
        f"program.global_batch={value}: give sequences, such as 256, or tokens, such as 512ktokens or"
        " 4Mtokens (k is 1024, M 1024 * 1024)"
    )


def settle_program(config: Settings, request: Training | None) -> Settings:
    """Return a configuration with the values that were chosen for the bundled program.

    Without a request, as if the device is not known, the program's own defaults are taken.
    """
    if request is None or not request.free:
        return config
    chosen = {OPTIONS[key]: find_value(request, key) for key in OPTIONS if key in request.free}
    # Nodes with other numbers of GPUs count micro-steps for as many everywhere: the program knows all ranks.
    is_kept = "fit.accumulation" in request.free and request.sequences
    chosen["global_batch"] = request.sequences if is_kept else AUTO
    return replace(config, program={**config.program, **chosen})


# At a start: what `fit.check` makes of the estimate. A mistake in that ends no job.

KEPT = "what is auto is the program's own: 8 sequences, 1 micro-step, no checkpointing, ddp"
"""Where nothing could be chosen."""


def find_start_model(
    config: Settings, program: Sequence[str] | None, given: Collection[str]
) -> ModelDimensions | None:
    """Return the model to judge at a start; None if there is none, or if it makes no sense.

    `program` is what is given after `--`. Raises UsageError if the bundled program is to train a config.json.
    """
    is_bundled = is_bundled_program(config, program)
    if is_bundled and config.model.get("config") is not None:
        raise UsageError(
            f"model.config={config.model['config']} gives dimensions for the estimate of memory; the"
            " bundled program has its own: see `launch plan`, start a program of yours by `launch"
            " model.config=… -- train.py`, or choose a model such as model=llama7b"
        )
    try:
        return find_fit_model(config, program, given)
    except UsageError as error:
        if not is_bundled:  # the bundled program says so itself
            logger.warning(f"no estimate of memory: {error}")
        return None


def settle_planned(
    config: Settings,
    plan: Plan,
    model: ModelDimensions | None,
    nodes: int,
    environ: Mapping[str, str],
    *,
    is_bundled: bool,
    judges: bool = True,
) -> Settings:
    """Do as `settle_training` with a job whose nodes have this plan; `model` is `find_start_model`'s."""

    def make(asked: Settings) -> Training | None:
        return make_fit_request(asked, plan, model, nodes, environ, is_bundled=is_bundled)

    return settle_training(make, config, is_bundled=is_bundled, judges=judges) if model else config


def settle_training(
    make: Callable[[Settings], Training | None], config: Settings, *, is_bundled: bool, judges: bool = True
) -> Settings:
    """Return the configuration with what is chosen for the bundled program, and judge the job by `fit.check`.

    `make` gives what a configuration asks. With `judges=False` that is done elsewhere: nothing is said.
    Raises MachineError for a job that is refused, which it is not in a dry run, and UsageError for settings
    of the bundled program that make no sense.
    """
    check = config.fit.check if judges else "off"
    if check == "off" and not is_bundled:
        return config
    if is_bundled:  # it is judged as it will run, whatever `fit` and `parallel` say of a training
        fit = config.fit
        asked = FitConfig(gpu=fit.gpu, gpu_memory_gib=fit.gpu_memory_gib, tokens=fit.tokens)
        asked_config = replace(config, fit=asked, parallel=ParallelConfig())
    try:
        training = make(asked_config if is_bundled else config)
        report = assess(training) if training and judges else None
    except UsageError as error:
        if not judges:
            return config
        if is_bundled:
            raise
        logger.warning(f"no estimate of memory: {error}")
        return config
    except Exception as error:
        kept = (
            f"; {KEPT}"
            if is_bundled and AUTO in [config.program.get(name) for name, _ in PROGRAM_OPTIONS.values()]
            else ""
        )
        if judges:
            logger.warning(f"no estimate of memory ({type(error).__name__}: {error}): report it{kept}")
        return config
    if report:
        if report.request.free and (check == "off" or report.verdict != "does_not_fit"):
            logger.info(describe_choice(report.request, report.estimate.total))
        if check != "off":
            _act_on(report, config)
    return settle_program(config, training)


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


def _act_on(report: FitReport, config: Settings) -> None:
    """Refuse a job of the bundled program that cannot fit; else warn, or say in a line that it fits.

    On CPUs nothing is refused: swap may hold what memory does not.
    """
    if report.verdict == "does_not_fit":
        message, is_refusable = explain_misfit(report), report.request.device.kind == "gpu"
        if config.fit.check == "error" and report.request.is_bundled and is_refusable and not config.dry_run:
            raise MachineError(f"{message}; fit.check=warn starts it all the same")
        logger.warning(message)
    elif report.verdict == "tight":
        more = (
            f"{describe_change(report.changes[0])} is enough"
            if report.changes
            else "`launch plan` shows more"
        )
        logger.warning(f"{describe_fit(report)}; {more}")
    elif report.verdict and report.request.device.kind == "gpu" and not report.request.free:
        logger.info(describe_fit(report))
