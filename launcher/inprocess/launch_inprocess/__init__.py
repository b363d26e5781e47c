"""Acts inside a rank's interpreter, which may be another than the launcher's, before and beside the program.

Standard library alone, for Python 3.9 and later; torch is there once the program has imported it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    Starter = Callable[[MutableMapping[str, str]], None]


def start(environ: MutableMapping[str, str]) -> None:
    """Start what the environment of a rank asks for, before the program's first line.

    What fails leaves the rest as it is. A module that nothing asks for is not loaded.
    """
    from . import garbage_collection, loaders, process_groups
    from .import_hook import call_safely
    from .step_counter import COUNTER

    os.register_at_fork(after_in_child=COUNTER.stop)
    starters: list[Starter] = [garbage_collection.start_collector, loaders.start_loader_policies]
    if environ.get("LAUNCH_METER"):
        from .measurements import start_meter

        starters.append(start_meter)
    if environ.get("LAUNCH_WATCH"):
        from .heartbeat import start_heartbeat

        starters.append(start_heartbeat)
    if environ.get("LAUNCH_MEMORY"):
        from .measurements import start_memory_record

        starters.append(start_memory_record)
    if environ.get("LAUNCH_FIT"):
        from .fake_step import start_fit

        starters.append(start_fit)
    for starter in starters:
        call_safely(starter, environ)
    process_groups.start_settling()
