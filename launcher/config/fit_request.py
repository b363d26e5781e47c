"""The Training of a configuration: the model, and where it would be trained; None if there is no claim."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from launcher.config.allocator_options import read_allocator_settings
from launcher.config.fit_settings import (
    AUTO,
    Ranks,
    describe_bundled,
    describe_training_settings,
    find_free,
    list_fixed,
)
from launcher.config.model_dimensions import read_dimensions
from launcher.config.program import BUNDLED, find_unused
from launcher.config.settings import FitConfig, ParallelConfig, Settings
from launcher.config.start import is_step_task, parse_nodes
from launcher.errors import UsageError
from launcher.fit.choice import choose_settings
from launcher.fit.gpus import GpuType, find_gpu
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Device, Free, ModelDimensions, NodeResources, Training, check_layout
from launcher.plan.allocator import EXPANDABLE, merge_settings
from launcher.plan.model import Gpu, Machine, Plan
from launcher.plan.workers_and_threads import count_memory_kib


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
    if config.fit.check == "off" and not is_bundled_program(config, program):
        return None
    is_own = not program and not is_bundled_program(config, program)  # configured, with a section of its own
    asked = any(key.partition(".")[0] == "model" for key in given)
    if program and not asked:
        return None
    if is_own and "model" in find_unused(config, None, given):
        return None
    try:
        return read_dimensions(config.model)
    except UsageError:
        if is_own and "model.config" not in given:
            return None
        raise


def count_plan_nodes(nodes: object, environ: Mapping[str, str]) -> int:
    """Return the least number of nodes that a job would have; raises UsageError.

    Fewer nodes share less: of `min:max`, the least decides.
    """
    if nodes == "auto" and "SLURM_JOB_ID" in environ and not is_step_task(environ):
        have = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
        return int(have) if have.isdecimal() and int(have) else 1
    return parse_nodes(1 if nodes == "auto" else nodes)[0]


def make_fit_request(
    config: Settings,
    plan: Plan,
    model: ModelDimensions | None,
    *,
    nodes: int,
    is_bundled: bool,
    environ: Mapping[str, str],
) -> Training | None:
    """Return what is asked of a job of which each node has this plan; None if there is no claim.

    What the bundled program computes with is chosen on a device of unknown memory, too.
    `model` is what `find_fit_model` returns. Raises UsageError for settings that make no training.
    """
    if model is None or not plan.ranks:
        return None
    on_cpu = is_bundled and config.program.get("device") == "cpu"
    found = [] if on_cpu else [rank.gpu for rank in plan.ranks if rank.gpu]
    device = find_fit_device(config.fit, found, share_node_memory(plan.machine, len(plan.ranks)))
    if not device.memory_mib and not is_bundled:
        return None
    node = describe_node_resources(plan, float(config.dataloader.worker_gib))
    return make_request_on(
        config,
        model,
        device,
        node,
        shape=(len(plan.ranks), nodes),
        is_bundled=is_bundled,
        expandable=has_expandable_segments(config, environ),
    )


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

    What is `auto` of the bundled program is chosen.
    """
    gpu = find_gpu(device.name) if device.kind == "gpu" else None
    ranks = Ranks(
        count=shape[0] * shape[1],
        has_bf16=device.kind == "gpu" and supports_bf16(gpu),
        has_half=device.kind == "gpu",
        expandable_segments=expandable,
    )
    fixed = list_fixed(config.fit, config.parallel)
    trains = is_bundled and model.experts is None and model.latent_attention is None
    free = Free()
    if is_bundled:
        layout, settings = describe_bundled(config, model, ranks)
        free = find_free(config, model, settings.seq_len, ranks.count)
        usual = replace(config, fit=FitConfig(), parallel=ParallelConfig())
        # What the bundled program does not do is a question of the user's, and no ground to refuse a job.
        is_usual = (layout, settings) == describe_bundled(usual, model, ranks)
        is_usual = is_usual and free == find_free(usual, model, settings.seq_len, ranks.count)
        trains = trains and (not fixed or is_usual)
    else:
        layout, settings = describe_training_settings(config.fit, config.parallel, model, ranks)
    request = Training(
        model=model,
        layout=layout,
        settings=replace(settings, bundled=trains),
        device=device,
        gpus_per_node=shape[0],
        nodes=shape[1],
        node=node,
        tokens=config.fit.tokens,
        step_seconds=config.fit.step_seconds,
        is_bundled=trains,
        global_batch=config.fit.global_batch,
        free=free,
        fixed=fixed,
    )
    if not free.any:
        return request
    check_layout(request)
    return choose_settings(request, lambda one: estimate_memory(one).total)


def settle_program(config: Settings, request: Training | None) -> Settings:
    """Return a configuration with the values that were chosen for the bundled program.

    Without a request, as if the device is not known, the program's own defaults are taken.
    """
    if request is None or not request.free.any:
        return config
    free, settings = request.free, request.settings
    chosen = {
        "batch_size": settings.micro_batch if free.micro_batch else None,
        "grad_accumulation": settings.accumulation if free.accumulation else None,
        "activation_checkpointing": settings.checkpointing if free.checkpointing else None,
        "parallel": settings.framework if free.parallel else None,
    }
    found = {key: value for key, value in chosen.items() if value is not None}
    # Nodes with other numbers of GPUs count micro-steps for as many everywhere: the program knows all ranks.
    found["global_batch"] = free.sequences if free.accumulation and free.sequences else AUTO
    return replace(config, program={**config.program, **found})


def find_fit_device(fit: FitConfig, gpus: Sequence[Gpu], cpu_mib: int) -> Device:
    """Return what a rank computes on: the GPU that `fit` names, the smallest of the node's, or CPUs.

    Memory is 0 if it is not known. `cpu_mib` is the memory of a rank without a GPU. Raises UsageError.
    """
    given = None if fit.gpu_memory_gib is None else max(1, int(fit.gpu_memory_gib * 1024))
    if fit.gpu:
        return name_fit_device(fit.gpu, given)
    if not gpus:
        return Device("GPU", given) if given else Device("CPU", cpu_mib, kind="cpu")
    sharing = Counter((gpu.index, gpu.uuid) for gpu in gpus)
    gpu = min(gpus, key=lambda one: one.memory_mib // sharing[one.index, one.uuid])
    found = find_gpu(gpu.name)
    own = gpu.memory_mib or (found.memory_mib if found else 0)
    if gpu.uuid.startswith("MIG-"):
        own = 0  # the driver's number is the whole GPU's
    memory = given or own // sharing[gpu.index, gpu.uuid]
    return Device(gpu.name or "GPU", memory, nvlink_domain=found.nvlink_domain if found else 0)


def name_fit_device(name: str, given: int | None) -> Device:
    """Return the GPU that `fit.gpu` names, with the memory given; raises UsageError for an unknown one."""
    found = find_gpu(name)
    if found is None and given is None:
        raise UsageError(
            f"fit.gpu={name} is no GPU that is known: give a name such as H100, A100-40GB or B200, or its"
            " memory too, fit.gpu_memory_gib=N"
        )
    memory = given or (found.memory_mib if found else 0)
    return Device(name, memory, nvlink_domain=found.nvlink_domain if found else 0)


def share_node_memory(machine: Machine, ranks: int) -> int:
    """Return the MiB of the node's memory that a rank has."""
    return count_memory_kib(machine) // 1024 // ranks


def supports_bf16(gpu: GpuType | None) -> bool:
    """Tell whether a GPU computes in bf16; one that is not known does."""
    return gpu is None or gpu.tf32 is not None  # both came with the same generation


def has_expandable_segments(config: Settings, environ: Mapping[str, str]) -> bool:
    """Tell whether the allocator of the ranks uses expandable segments."""
    merged = merge_settings(read_allocator_settings(config.allocator), environ)
    return merged.get(EXPANDABLE, "").lower() == "true"


def describe_node_resources(plan: Plan, worker_gib: float) -> NodeResources:
    """Return what the job has of a planned node."""
    machine = plan.machine
    allowed = {cpu.core for cpu in machine.cpus if cpu.id in machine.allowed_cpus}
    return NodeResources(
        cores=len(allowed) or None,
        memory_kib=count_memory_kib(machine) or None,
        shm_kib=machine.limits.shm_kib,
        num_workers=max(rank.num_workers for rank in plan.ranks),
        worker_gib=worker_gib,
    )
