"""Starts what the environment of a rank asks for."""

from __future__ import annotations

import os

from .garbage_collection import start_collector
from .step_counter import COUNTER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Starter = Callable[[Mapping[str, str]], None]


def start(environ: Mapping[str, str]) -> None:
    """Start the policies; called once, before the program's first line. One that fails leaves the others."""
    os.register_at_fork(after_in_child=COUNTER.stop)
    for starter in (start_collector, set_loaders, measure):
        attempt(starter, environ)


def set_loaders(environ: Mapping[str, str]) -> None:
    """Put DataLoader workers on their CPUs, and give loaders that many where that is wanted."""
    from .worker_affinity import place_workers

    place_workers(environ)
    if environ.get("LAUNCH_LOADER_DEFAULT") == "1":  # for nobody else is the module loaded
        from .dataloader_default import give_workers

        give_workers(environ)


def measure(environ: Mapping[str, str]) -> None:
    """Measure the rank where `launch tune` asks for it; the module for that is loaded for nobody else."""
    if environ.get("LAUNCH_METER"):
        from .step_meter import start_meter

        start_meter(environ)


def attempt(starter: Starter, environ: Mapping[str, str]) -> None:
    """Start one; nothing of ours ends the program."""
    try:
        starter(environ)
    except Exception:
        return
