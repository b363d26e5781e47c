"""Acts inside a rank's interpreter, which may be another than the launcher's, before and beside the program.

Standard library alone, for Python 3.9 and later; torch is there once the program has imported it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

STARTERS = (
    ("", "garbage_collection", "start_collector"),
    ("", "loaders", "start_loader_policies"),
    ("LAUNCH_METER", "measurements", "start_meter"),
    ("LAUNCH_WATCH", "heartbeat", "start_heartbeat"),
    ("LAUNCH_MEMORY", "measurements", "start_memory_record"),
    ("LAUNCH_FIT", "fake_step", "start_fit"),
)
"""What starts what: the variable that asks for it, if one does, the module, and its function."""


def start(environ: MutableMapping[str, str]) -> None:
    """Start what the environment of a rank asks for, before the program's first line.

    What fails leaves the rest as it is. A module that nothing asks for is not loaded.
    """
    from . import process_groups
    from .import_hook import call_safely
    from .step_counter import COUNTER

    os.register_at_fork(after_in_child=COUNTER.stop)
    for variable, name, starter in STARTERS:
        if not variable or environ.get(variable):
            module = __import__(name, globals(), fromlist=[starter], level=1)
            call_safely(getattr(module, starter), environ)
    process_groups.start_settling()
