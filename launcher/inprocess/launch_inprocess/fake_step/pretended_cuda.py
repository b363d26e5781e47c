"""A GPU where there is none: what `torch.cuda` and `torch.accelerator` say of it.

Nothing is computed on it; tensors on it are fake.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .step_memory import StepMemory


class PretendedStream:
    """In place of `torch.cuda.Stream`: work on fake tensors is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)
        self.device_index, self.stream_id, self.cuda_stream, self.priority = 0, 0, 0, 0

    def __enter__(self) -> PretendedStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_stream(self, _stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, _event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        """Return the event."""
        return event or PretendedEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is being captured."""
        return False


class PretendedEvent:
    """In place of `torch.cuda.Event`."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def record(self, _stream: object = None) -> None:
        """Nothing to record."""

    def wait(self, _stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def elapsed_time(self, _other: object) -> float:
        """Return a millisecond."""
        return 1.0


@contextlib.contextmanager
def use_nothing(*_: object, **__: object) -> Iterator[None]:
    """Stand for `torch.cuda.device` and `torch.cuda.stream`."""
    yield


def return_none(*_: object, **__: object) -> None:
    """Stand for what has an effect on a GPU alone."""


NO_EFFECT = (
    *("_lazy_init", "init", "synchronize", "empty_cache", "ipc_collect", "set_stream", "manual_seed"),
    *("manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "set_sync_debug_mode"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"),
    *("reset_max_memory_cached", "set_per_process_memory_fraction", "_set_stream_by_id"),
)


def pretend_cuda(gpu: dict[str, Any], memory: StepMemory) -> None:
    """Put functions about a pretended GPU into `torch.cuda`; see `launch fit` for what `gpu` has."""
    cuda: Any = torch.cuda
    for name in NO_EFFECT:
        setattr(cuda, name, return_none)
    total = int(gpu["memory"])
    answers: dict[str, Any] = {
        **describe_devices(gpu, total),
        **describe_usage(memory, total),
        "current_stream": PretendedStream,
        "default_stream": PretendedStream,
        "stream": use_nothing,
        "device": use_nothing,
        "device_of": use_nothing,
        "Stream": PretendedStream,
        "ExternalStream": PretendedStream,
        "Event": PretendedEvent,
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "initial_seed": lambda: 0,
    }
    for name, value in answers.items():
        setattr(cuda, name, value)
    loose: Any = torch
    loose.Stream, loose.Event, loose.Generator = PretendedStream, PretendedEvent, make_generator_class()
    loose.version.cuda = loose.version.cuda or "12.8"
    cuda.nccl.version = lambda: (2, 27, 5)
    pretend_accelerator()


def describe_devices(gpu: dict[str, Any], total: int) -> dict[str, Any]:
    """Return the functions about which devices there are."""
    major, minor = gpu["capability"]
    properties = SimpleNamespace(
        name=gpu["name"],
        total_memory=total,
        major=major,
        minor=minor,
        multi_processor_count=132,
        is_integrated=False,
        is_multi_gpu_board=False,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        warp_size=32,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "device_count": lambda: int(gpu["count"]),
        "current_device": lambda: int(gpu.get("local_rank", 0)),
        "set_device": return_none,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "get_device_name": lambda *_: gpu["name"],
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": lambda *_, **__: major >= 8,
        "is_tf32_supported": lambda: major >= 8,
        "can_device_access_peer": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        "utilization": lambda *_: 0,
    }


def describe_usage(memory: StepMemory, total: int) -> dict[str, Any]:
    """Return the functions about memory: what the fake tensors would take."""

    def measure_now(*_: object) -> int:
        return memory.totals.get("cuda", 0)

    def measure_most(*_: object) -> int:
        return memory.peaks.get("cuda", (0, 0))[0]

    now = ("memory_allocated", "memory_reserved", "memory_cached")
    most = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
    return {
        **dict.fromkeys(now, measure_now),
        **dict.fromkeys(most, measure_most),
        "mem_get_info": lambda *_: (max(0, total - measure_now()), total),
        "memory_summary": lambda *_, **__: "",
        "memory_stats": lambda *_: {
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "allocated_bytes.all.current": measure_now(),
            "allocated_bytes.all.peak": measure_most(),
            "reserved_bytes.all.current": measure_now(),
            "reserved_bytes.all.peak": measure_most(),
            "active_bytes.all.current": measure_now(),
            "active_bytes.all.peak": measure_most(),
        },
        "memory_snapshot": lambda *_: [],
    }


def pretend_accelerator() -> None:
    """Have `torch.accelerator` name the same GPU."""
    loose: Any = torch
    if hasattr(torch._C, "_get_accelerator"):  # FSDP2 asks there
        loose._C._get_accelerator = lambda *_: torch.device("cuda")
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.is_available = lambda: True
    accelerator.device_count = torch.cuda.device_count
    accelerator.current_device_index = accelerator.current_device_idx = torch.cuda.current_device
    accelerator.current_stream = PretendedStream
    for name in ("set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache"):
        setattr(accelerator, name, return_none)


def make_generator_class() -> type:
    """Return a class in place of `torch.Generator`: one for a GPU is one of the CPU, which nobody asks."""
    original: Any = torch.Generator

    class Kind(type):
        """Makes the original, and takes its objects for its own."""

        def __call__(cls, device: object = "cpu", *_: object) -> Any:  # torch's
            return original()

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

    class Generator(metaclass=Kind):
        """In place of `torch.Generator`."""

    return Generator
