"""Settings of PyTorch's allocator from the environment, applied after torch was imported."""

import sys
from collections.abc import Mapping

from launcher.agent.python_program import ExecNeededError
from launcher.agent.start_method import ALLOCATOR


def apply_allocator_settings(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Apply a rank's settings (`after`), which the warm process (`before`) did not have.

    Raises ExecNeededError for what counts from the import on: another allocator (`backend:`), a setting that
    is taken back. A torch without GPUs reads none.
    """
    torch = sys.modules.get("torch")
    if torch is None or not (torch.version.cuda or torch.version.hip):
        return
    old, new = (tuple(environ.get(name, "") for name in ALLOCATOR) for environ in (before, after))
    if old == new:
        return
    text = next(filter(None, new), "")
    if any(old) or "backend" in text:
        raise ExecNeededError("the allocator's settings count from the import of torch on")
    names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
    functions = (getattr(vars(torch)["_C"], name, None) for name in names)
    apply = next(filter(None, functions), None)
    if apply is None:
        raise ExecNeededError("this torch has no function for the allocator's settings")
    apply(text)
