"""Starts what the environment of a rank asks for."""

from __future__ import annotations

import os

from .garbage_collection import start_collector
from .gloo_end import start_settling
from .import_hook import call_safely
from .step_counter import COUNTER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping


def start_recording(environ: MutableMapping[str, str]) -> None:
    """Have the rank's peak of memory written at its end if that is asked for."""
    if environ.get("LAUNCH_MEMORY"):
        from .memory_record import start_memory_record

        start_memory_record(environ)


def start_fitting(environ: MutableMapping[str, str]) -> None:
    """Run the program's first steps on fake tensors if `launch fit` asks for it."""
    if environ.get("LAUNCH_FIT"):
        from .fit_start import start_fit

        start_fit(environ)


def start(environ: MutableMapping[str, str]) -> None:
    """Start the policies before the program's first line. One that fails leaves the others."""
    os.register_at_fork(after_in_child=COUNTER.stop)
    starters = (start_collector, start_loader_policies, start_measuring, start_watching)
    for starter in (*starters, start_recording, start_fitting):
        call_safely(starter, environ)
    start_settling()


def start_loader_policies(environ: Mapping[str, str]) -> None:
    """Move DataLoader workers to their CPUs, and give loaders a number of them if that is asked for."""
    from .worker_affinity import place_workers

    place_workers(environ)
    if environ.get("LAUNCH_LOADER_DEFAULT") == "1":  # for nobody else is the module loaded
        from .dataloader_default import set_worker_default

        set_worker_default(environ)


def start_measuring(environ: Mapping[str, str]) -> None:
    """Measure the rank if `launch tune` asks for it; the module for that is loaded for nobody else."""
    if environ.get("LAUNCH_METER"):
        from .step_meter import start_meter

        start_meter(environ)


def start_watching(environ: MutableMapping[str, str]) -> None:
    """Keep a heartbeat if somebody watches the rank."""
    if environ.get("LAUNCH_WATCH"):
        from .heartbeat import start_heartbeat

        start_heartbeat(environ)
