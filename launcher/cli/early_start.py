"""The warm process, started before the configuration is composed if the command line names a Python program.

`import torch` takes a second, and composing and planning go on meanwhile. If the ranks are to run elsewhere,
by another agent, or with other variables, the process is ended again.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.main import Call
from launcher.errors import UsageError
from launcher.protocol import LAUNCH_WATCH

if TYPE_CHECKING:
    from launcher.launch.warm.process import WarmProcess

logger = logging.getLogger(__name__)

RUN_FLAGS = ("-r", "--run")


@dataclass(slots=True)
class EarlyStart:
    """A process that may be of use to a run; it ends with the block of `start_early`."""

    argv: tuple[str, ...] = ()
    """The program that it was started for."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """What the warm process was started with."""
    warm: "WarmProcess | None" = None
    """The one that is not taken yet."""

    def take(self, argv: Sequence[str], environ: Mapping[str, str]) -> "WarmProcess | None":
        """Return the process, whose owner is now the caller, if it was started for this program and
        environment; else end it, and return None.
        """
        from launcher.launch.warm.program import ExecNeededError, check_environment

        if self.warm is not None and self.argv == tuple(argv):
            with contextlib.suppress(ExecNeededError):
                check_environment(self.environ, environ)
                warm, self.warm = self.warm, None
                return warm
        self.close()
        return None

    def close(self) -> None:
        """End the warm process, if nobody has taken it."""
        warm, self.warm = self.warm, None
        if warm is not None:
            warm.close()


@contextlib.contextmanager
def start_early(call: Call, environ: Mapping[str, str]) -> Iterator[EarlyStart]:
    """Give an early start, with a process in it if the ranks may be forked from it.

    Errors of the command line are left to those who report them.
    """
    early = EarlyStart(find_early_program(call, environ) or ())
    try:
        if early.argv:
            from launcher.launch.warm.process import WarmProcess
            from launcher.launch.warm.program import ExecNeededError

            inherited = {name: value for name, value in environ.items() if name != LAUNCH_WATCH}
            # As `launcher.launch.job.build_agent_environ` has them.
            early.environ = {"PYTHONUNBUFFERED": "1", **inherited}
            try:
                early.warm = WarmProcess.start(early.argv, early.environ)
            except ExecNeededError as error:
                logger.debug(f"no early start: {error}")
        yield early
    finally:
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
