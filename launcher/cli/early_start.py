"""The warm process, started before the configuration is composed if the command line names a Python program.

`import torch` takes a second, and composing and planning go on meanwhile. If the ranks are to run elsewhere,
by another agent, or with other variables, the process is ended again.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.main import Call
from launcher.errors import UsageError
from launcher.protocol import LAUNCH_WATCH

if TYPE_CHECKING:
    from launcher.launch.warm.process import WarmProcess

logger = logging.getLogger(__name__)

RUN_FLAGS = ("-r", "--run")


@contextlib.contextmanager
def start_early(call: Call, environ: Mapping[str, str]) -> "Iterator[WarmProcess | None]":
    """Give a warm process if the ranks may be forked from it; it has ended at the end of the block.

    Errors of the command line are left to those who report them.
    """
    early = None
    if argv := find_early_program(call, environ):
        from launcher.launch.warm.process import WarmProcess
        from launcher.launch.warm.program import ExecNeededError

        inherited = {name: value for name, value in environ.items() if name != LAUNCH_WATCH}
        try:  # as `launcher.launch.job.build_agent_environ` has them
            early = WarmProcess.start(argv, {"PYTHONUNBUFFERED": "1", **inherited})
        except ExecNeededError as error:
            logger.debug(f"no early start: {error}")
    try:
        yield early
    finally:
        if early:
            early.close()


def find_early_program(call: Call, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the program's argv if a run of a Python program that uses torch is asked for; None if not.

    That is the one on the command line, or the bundled one if no file of the user's own and no word names
    another. Whether its ranks run here and are forked is decided later.
    """
    from launcher.config.program import BUNDLED, resolve_program
    from launcher.launch.warm.program import read_program

    words = [word for word in call.words if word not in RUN_FLAGS]
    if any(word.startswith("-") or ("=" not in word and word[:1] != "~") for word in words):  # no settings
        return None
    if call.program is None and (Path("conf").exists() or any(w.startswith("program=") for w in words)):
        return None
    try:
        argv = resolve_program(call.program or BUNDLED, environ)
    except UsageError:
        return None
    if call.program is None:
        return argv
    text = read_program(argv, environ)
    return argv if text and text.uses_torch and not text.obstacle else None
