"""A process group of one process that stands for many: torch's `fake` backend, which sends nothing."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..import_hook import when_imported

if TYPE_CHECKING:
    from types import ModuleType

FAKE = "fake"


def pretend_group() -> None:
    """Have `init_process_group` and what is built on it make groups of the fake backend."""
    if not dist.is_available():
        return
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    loose: Any = c10d
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    original, make_helper = loose.init_process_group, loose._new_process_group_helper

    def init_process_group(*_: object, **named: Any) -> None:  # the user's
        original(FAKE, world_size=world, rank=rank, store=fake_pg.FakeStore())

    def make_group(*args: Any, **named: Any) -> Any:
        args = (*args[:3], FAKE, *args[4:]) if len(args) > 3 else args
        named.update({key: None for key in ("device_id", "backend_options", "pg_options") if key in named})
        return make_helper(*args, **({**named, "backend": FAKE} if "backend" in named else named))

    def rendezvous(*_: object, **__: object) -> Any:
        return iter([(make_store(), rank, world)])

    replacements = {
        "init_process_group": init_process_group,
        "_new_process_group_helper": make_group,
        "_verify_params_across_processes": lambda *_, **__: None,
        "_broadcast_coalesced": lambda *_, **__: None,
        "_store_based_barrier": lambda *_, **__: None,
        "is_nccl_available": lambda: True,
        "get_backend": lambda *_, **__: "nccl" if torch.cuda.is_available() else "gloo",
        **make_object_collectives(world),
    }
    for name, value in replacements.items():
        setattr(loose, name, value)
        if hasattr(dist, name):
            setattr(dist, name, value)
    meeting: Any = sys.modules["torch.distributed.rendezvous"]  # torch.distributed has a function of the name
    when_imported("torch.nn.parallel.distributed", answer_reducer)
    loose.rendezvous = meeting.rendezvous = rendezvous


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
    kind.register_comm_hook = kind._register_builtin_comm_hook = lambda *_, **__: None


def make_object_collectives(world: int) -> dict[str, Any]:
    """Return the collectives for Python objects: what the others would send is what this rank has."""

    def all_gather_object(found: list[Any], value: object, *_: object, **__: object) -> None:
        found[:] = [value] * len(found)

    def gather_object(value: object, found: list[Any] | None = None, *_: object, **__: object) -> None:
        if found is not None:
            found[:] = [value] * len(found)

    def scatter_object_list(found: list[Any], values: list[Any] | None, *_: object, **__: object) -> None:
        found[0] = values[0] if values else None

    return {
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "scatter_object_list": scatter_object_list,
        "broadcast_object_list": lambda *_, **__: None,
        "barrier": lambda *_, **__: None,
        "monitored_barrier": lambda *_, **__: None,
    }


def make_store() -> Any:
    """Return a store in which each key that nobody has set holds its own name, as if another rank had."""
    from torch._C._distributed_c10d import Store

    class AnsweringStore(Store):
        """Waits for nobody."""

        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:  # bytes or text
            self.values[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key: str) -> bytes:
            return self.values.get(key, key.encode())

        def add(self, key: str, amount: int) -> int:
            found = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(found).encode()
            return found

        def wait(self, *_: object) -> None:
            return None

        def check(self, _keys: list[str]) -> bool:
            return True

    return AnsweringStore()
