"""Where the names are to which other modules have copied a function, as `torch.save` is a copy.

If a function is replaced before torch is imported, others copy the replacement. In a rank
that was forked from a process with torch, the copies are there already. To look for them takes 30 ms, and has
32 MB of memory copied (a lookup writes the reference count of an object), so that the parent notes them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, Mapping
    from typing import Any

    Function = Callable[..., Any]

REPLACED: Mapping[str, tuple[str, ...]] = {
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
    "torch.distributed.distributed_c10d": ("init_process_group", "destroy_process_group"),
    "gc": ("collect", "get_objects", "get_referrers"),
}
"""Functions of modules that this package replaces, by module."""

COPIES: dict[int, list[tuple[dict[str, object], str]]] = {}
"""The namespaces and names that hold each of these functions, by its id; one for the interpreter."""


def note_copies() -> None:
    """Note all names of the functions that are there, in a process from which ranks are forked.

    Not those of this package, which calls the originals.
    """
    own = __name__.rpartition(".")[0]
    others = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != own]
    functions = [
        getattr(sys.modules.get(module), name, None) for module, names in REPLACED.items() for name in names
    ]
    COPIES.update({id(function): [] for function in functions if function is not None})
    for module in others:
        namespace: dict[str, object] = getattr(module, "__dict__", {})
        for name, value in list(namespace.items()):
            if id(value) in COPIES:
                COPIES[id(value)].append((namespace, name))


def replace(owner: object, name: str, function: Function, original: Function) -> None:
    """Put a function in the place of torch's, which it looks like; torch.compile leaves both alone."""
    from functools import update_wrapper

    update_wrapper(function, original)
    setattr(owner, name, function)
    replace_copies(original, function)


def replace_copies(original: Function, function: Function) -> None:
    """Put a function in the place of the original wherever that was noted and still is."""
    for namespace, name in COPIES.get(id(original), ()):
        if namespace.get(name) is original:
            namespace[name] = function
