"""Starts the session of `launch fit` once the program has imported torch."""

from __future__ import annotations

from .import_hook import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import ModuleType
    from typing import Any

UNABLE = 70
"""Exit code if fake tensors cannot be turned on (EX_SOFTWARE of sysexits.h)."""


def start_fit(environ: MutableMapping[str, str]) -> None:
    """Wait for torch. What the program starts has the variable and the hook too, so as not to train."""
    order = environ["LAUNCH_FIT"]

    def begin(_module: ModuleType) -> None:
        import json

        begin_or_end(json.loads(order))

    when_imported("torch", begin)


def begin_or_end(order: dict[str, Any]) -> None:
    """Begin the session; a torch that lacks what it needs ends the process: nothing real may be run."""
    import os
    import traceback

    try:
        from .fake_step.step_session import begin_session

        begin_session(order)
    except Exception:
        traceback.print_exc()
        os._exit(UNABLE)
