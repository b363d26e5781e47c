"""Functions of torch that are replaced for a fake step.

They ask for a GPU before they dispatch, take another kernel on one, tell of one, make process groups, or are
work beside the step. They are replaced by name: what sees calls of functions does not see those that torch's
own functions make.
"""

from __future__ import annotations

import collections
import functools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from ..import_hook import SAVERS, when_imported
from .fake_tensors import CPU, GPU, find_kind, find_value, get_device, local, show_devices
from .kernels import replace_kernels

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .session import StepMemory, StepSession

CONSTRUCTORS = _device._device_constructors()
"""Those to which `torch.device(…)` as a context gives its device."""
LIKE = [f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
NEW = [f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")]
OF_DATA = ("tensor", "as_tensor", "asarray")
"""These look for the GPU before they dispatch."""
LEFT_OUT = {
    **SAVERS,
    "transformers.modeling_utils": "PreTrainedModel.save_pretrained",
    "transformers.trainer": "Trainer._save_checkpoint Trainer.save_model",
    "accelerate.accelerator": "Accelerator.save Accelerator.save_state Accelerator.save_model",
    "lightning.pytorch.trainer.trainer": "Trainer.save_checkpoint",
    "pytorch_lightning.trainer.trainer": "Trainer.save_checkpoint",
}
"""What saves, which is left out: modules, and functions in them or methods of a class."""
WITHOUT_RESULT = (
    "broadcast_object_list barrier monitored_barrier _store_based_barrier _verify_params_across_processes "
    "_broadcast_coalesced"
)
"""Collectives after which a rank has what it had."""
FAKE = "fake"
"""torch's backend that sends nothing."""
NO_EFFECT = (
    "_lazy_init init synchronize empty_cache ipc_collect set_stream manual_seed manual_seed_all seed "
    "seed_all set_rng_state set_rng_state_all set_sync_debug_mode set_per_process_memory_fraction set_device "
    "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached _set_stream_by_id "
    "reset_accumulated_memory_stats"
)
"""Functions of `torch.cuda`."""
ACCELERATOR_NO_EFFECT = (
    "_accelerator_setDeviceIndex _accelerator_maybeExchangeDevice _accelerator_setStream "
    "_accelerator_synchronizeDevice"
)
"""Functions of `torch._C`."""
PROPERTIES = {
    **dict.fromkeys(("is_integrated", "is_multi_gpu_board"), False),
    **{"multi_processor_count": 132, "max_threads_per_multi_processor": 2048, "warp_size": 32},
    **{"L2_cache_size": 50 << 20, "gcnArchName": "", "uuid": "00000000-0000-0000-0000-000000000000"},
}
"""Of the pretended GPU, beside its name, memory and capability: an H100's."""
loose: Any = torch
tensor_class: Any = torch.Tensor


def replace_functions() -> None:
    """Put these in the place of torch's."""
    show_devices()
    names = {function.__name__ for function in CONSTRUCTORS} & {*vars(torch)}
    for owner, known in ((torch, {*LIKE, *names}), (tensor_class, NEW)):
        for name in known:
            setattr(owner, name, name_device(getattr(owner, name)))
    tensor_class.new_tensor = make_alike
    replace_moves()
    replace_values()
    replace_kernels()


def make_alike(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **named: Any) -> Any:
    """Do what `Tensor.new_tensor` does."""
    device = self.device if device is None else device
    return torch.tensor(data, dtype=dtype or self.dtype, device=device, **named)


def name_device(function: Any) -> Any:  # torch's
    """Return a function that names the GPU with its index, and that tells the program's `meta` from C++'s."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        device = named.get("device")
        if device is None and function in CONSTRUCTORS:
            device = find_default()
        if device is None or local.in_kernel:
            return function(*args, **named)
        device = as_device(device)
        with local.doing(wants_meta=device.type == "meta"):
            if device != GPU or function.__name__ not in OF_DATA:
                return function(*args, **{**named, "device": device})
            is_leaf = named.pop("requires_grad", False)
            source = args[0] if args and isinstance(args[0], torch.Tensor) else None
            made = function(*args, **{**named, "device": CPU if source is None else source.device}).to(GPU)
            return made.requires_grad_() if is_leaf else made

    return call


def find_default() -> torch.device | None:
    """Return the device of the innermost `with torch.device(…)`, or of `set_default_device`."""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    return next((one.device for one in reversed(modes) if isinstance(one, _device.DeviceContext)), None)


def as_device(value: Any) -> torch.device:
    """Return a device; the GPU is the pretended one."""
    device = GPU if isinstance(value, int) else torch.device(value)
    return GPU if device.type == "cuda" else device


def replace_moves() -> None:
    """Replace what brings a tensor to a device."""
    move = tensor_class.to

    def to(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if local.in_kernel:
            return move(self, *args, **named)
        is_copied = named.pop("copy", False)
        first: Any
        first, *rest = args or (named.pop("device", None),)
        if isinstance(first, torch.Tensor):  # whose device C++ would ask for
            first, rest = first.device, [first.dtype, *rest]
        if rest[1:] and isinstance(rest[-2], bool):
            rest, is_copied = rest[:-1], rest[-1]
        first = GPU if type(first) is int else first
        device, dtype, _, form = torch._C._nn._parse_to(first, *rest, **named)
        device, dtype = as_device(device or self.device), dtype or self.dtype
        if device == self.device and not is_copied:
            return move(self, dtype, memory_format=form)
        with local.doing(wants_meta=device.type == "meta"):
            return move(self, device, dtype, copy=True, memory_format=form)

    tensor_class.to = to
    tensor_class.cuda = lambda self, *_, memory_format=None, **__: to(self, GPU, memory_format=memory_format)
    tensor_class.cpu = lambda self, **named: to(self, CPU, **named)
    tensor_class.pin_memory = lambda self, *_: self
    tensor_class.is_pinned, tensor_class.record_stream = give(False), return_none


def replace_values() -> None:
    """Have fake tensors give NumPy and lists what is known of them, else ones, as for a table of metrics."""

    def read(tensor: torch.Tensor) -> torch.Tensor | None:
        if get_device(tensor).type != "meta":
            return tensor
        known = find_value(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=CPU) if known is None else known

    def make_reader(original: Any) -> Any:
        return lambda tensor, *args, **named: original(read(tensor), *args, **named)

    for name in ("numpy", "tolist"):
        setattr(tensor_class, name, make_reader(getattr(tensor_class, name)))
    show = torch._tensor_str._str

    def describe(tensor: torch.Tensor, **named: Any) -> str:
        if not find_kind(tensor):
            return str(show(tensor, **named))
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    loose._tensor_str._str = describe


def give(value: Any) -> Callable[..., Any]:
    """Return a function that gives a value, whatever it is asked."""
    return lambda *_, **__: value


return_none = give(None)
"""In place of what has an effect on a GPU or on files alone."""


class Pretended:
    """In place of CUDA's streams, events and contexts: work on fake tensors is done at once."""

    device, device_index, stream_id, cuda_stream, priority = GPU, 0, 0, 0, 0
    __init__ = synchronize = wait_stream = wait_event = record = wait = __exit__ = return_none
    query, is_capturing, elapsed_time = give(True), give(False), give(1.0)

    def __enter__(self) -> Pretended:
        return self

    def record_event(self, event: Pretended | None = None) -> Pretended:
        """Return the event."""
        return event or Pretended()


def pretend_cuda(gpu: dict[str, Any], memory: StepMemory) -> None:
    """Put functions about a pretended GPU into `torch.cuda`; see `launch fit` for what `gpu` has."""
    total, (major, minor) = int(gpu["memory"]), gpu["capability"]
    known = {"name": gpu["name"], "total_memory": total, "major": major, "minor": minor}
    properties = SimpleNamespace(**known, **PROPERTIES)

    def measure_now(*_: object, **__: object) -> int:
        return memory.totals.get("cuda", 0)

    def measure_most(*_: object, **__: object) -> int:
        return memory.peaks.get("cuda", (0, 0))[0]

    def describe_memory(*_: object, **__: object) -> dict[str, int]:
        found = collections.Counter({"num_alloc_retries": 0, "num_ooms": 0})
        for kind in ("allocated", "reserved", "active"):
            found[f"{kind}_bytes.all.current"] = measure_now()
            found[f"{kind}_bytes.all.peak"] = measure_most()
        return found

    answer_by_names(
        torch.cuda,
        {
            NO_EFFECT: return_none,
            "is_available is_initialized _is_compiled can_device_access_peer": give(True),
            "is_current_stream_capturing": give(False),
            "is_bf16_supported is_tf32_supported": give(major >= 8),
            "device_count": give(int(gpu["count"])),
            "current_device _exchange_device _maybe_exchange_device utilization initial_seed": give(0),
            "get_device_name": give(gpu["name"]),
            "get_device_capability": give((major, minor)),
            "get_device_properties": give(properties),
            "get_arch_list": give([f"sm_{major}{minor}"]),
            "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
            "get_rng_state_all": lambda *_, **__: [torch.zeros(16, dtype=torch.uint8)],
            "memory_allocated memory_reserved memory_cached": measure_now,
            "max_memory_allocated max_memory_reserved max_memory_cached": measure_most,
            "mem_get_info": lambda *_, **__: (max(0, total - measure_now()), total),
            "memory_stats": describe_memory,
            "memory_summary": give(""),
            "memory_snapshot": give([]),
            "current_stream default_stream": Pretended,
        },
    )
    for name in ("Stream", "ExternalStream", "Event", "stream", "device", "device_of"):
        setattr(torch.cuda, name, Pretended)
    loose.Stream, loose.Event, loose.Generator = Pretended, Pretended, Generator
    loose.version.cuda = loose.version.cuda or "12.8"
    loose.cuda.nccl.version = give((2, 27, 5))
    answers = {  # FSDP2 and `torch.accelerator` ask there
        "_get_accelerator _accelerator_getAccelerator": give(torch.device("cuda")),
        "_accelerator_getDeviceIndex _accelerator_exchangeDevice": give(0),
        "_accelerator_deviceCount": torch.cuda.device_count,
        "_accelerator_isAllocatorInitialized": give(False),
        "_accelerator_getStream": Pretended,
        ACCELERATOR_NO_EFFECT: return_none,
    }
    answer_by_names(loose._C, answers)


def answer_by_names(module: ModuleType, answers: dict[str, Callable[..., Any]]) -> None:
    """Put functions into a module; several names have one."""
    for names, function in answers.items():
        for name in names.split():
            setattr(module, name, function)


class Generator(torch.Generator):
    """In place of `torch.Generator`: one for a GPU is one of the CPU, which nobody asks."""

    def __new__(cls, *_: object, **__: object) -> Any:  # torch's
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def pretend_group() -> None:
    """Have `init_process_group` and what is built on it make groups of the fake backend.

    There, what the others would send is what this rank has.
    """
    if not dist.is_available():
        return
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    module: Any = c10d
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    original, make_helper = module.init_process_group, module._new_process_group_helper

    def init_process_group(*_: object, **named: Any) -> None:  # the user's
        original(FAKE, world_size=world, rank=rank, store=fake_pg.FakeStore())

    def make_group(*args: Any, **named: Any) -> Any:
        args = (*args[:3], FAKE, *args[4:]) if len(args) > 3 else args
        named.update({key: None for key in ("device_id", "backend_options", "pg_options") if key in named})
        return make_helper(*args, **({**named, "backend": FAKE} if "backend" in named else named))

    replacements = {
        "init_process_group": init_process_group,
        "_new_process_group_helper": make_group,
        "is_nccl_available": give(True),
        "get_backend": lambda *_, **__: "nccl" if torch.cuda.is_available() else "gloo",
        **dict.fromkeys(WITHOUT_RESULT.split(), return_none),
    }
    for name, value in replacements.items():
        setattr(module, name, value)
        if hasattr(dist, name):
            setattr(dist, name, value)
    when_imported("torch.nn.parallel.distributed", answer_reducer)


def answer_reducer(module: ModuleType) -> None:
    """Give DDP's reducer what it sends as what has come back; the fake backend answers with nothing.

    A program's own hook would replace this one, and is left out.
    """
    kind: Any = module.DistributedDataParallel
    original, register = kind.__init__, kind.register_comm_hook

    def return_bucket(_state: object, bucket: Any) -> Any:  # torch's
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return_bucket.__annotations__ = {}  # torch compares them

    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        register(self, None, return_bucket)

    kind.__init__ = init
    kind.register_comm_hook = kind._register_builtin_comm_hook = return_none


def leave_out_work(session: StepSession) -> None:
    """Leave out what a program does beside its step: compiling, saving, loader processes.

    torch.compile returns the function as it is, and the result says so. A checkpoint of fake tensors is none.
    """

    def compile_nothing(model: Any = None, *_: object, **__: object) -> Any:  # the user's
        session.note("torch.compile was left out: the memory is that of the program without it")
        return model if model is not None else lambda function: function

    loose.compile, loose.save, loose.nn.Module.compile = compile_nothing, return_none, compile_nothing
    for name, functions in LEFT_OUT.items():
        when_imported(name, functools.partial(leave_out_saving, functions.split()))
    when_imported("torch.utils.data.dataloader", leave_out_workers)


def leave_out_saving(names: list[str], module: ModuleType) -> None:
    """Have functions of a module, or methods of a class in it, do nothing."""
    for name in names:
        kind, _, function = name.rpartition(".")
        owner = getattr(module, kind) if kind else module
        if hasattr(owner, function):
            setattr(owner, function, return_none)


def leave_out_workers(module: ModuleType) -> None:
    """Have a DataLoader read in this process: fake tensors cannot be sent."""
    make = module.DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        return make(loader)

    module.DataLoader.__iter__ = iterate
