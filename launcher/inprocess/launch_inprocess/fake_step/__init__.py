"""A program's optimizer steps on fake tensors, for `launch fit`: no GPU, and the memory that they would take.

The modules of this package import torch. They are loaded once the program has imported it, and in
`launch fit` alone.
"""

from __future__ import annotations

from ..import_hook import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import ModuleType

UNABLE = 70
"""Exit code if fake tensors cannot be turned on (EX_SOFTWARE of sysexits.h)."""


def start_fit(environ: MutableMapping[str, str]) -> None:
    """Wait for torch. What the program starts has the variable and the hook too, so as not to train.

    A torch that lacks what is needed here ends the process: nothing real may be run.
    """
    text = environ["LAUNCH_FIT"]

    def begin(_module: ModuleType) -> None:
        import json
        import os
        import traceback

        try:
            from .session import StepSession

            StepSession(json.loads(text)).begin()
        except Exception:
            traceback.print_exc()
            os._exit(UNABLE)

    when_imported("torch", begin)
