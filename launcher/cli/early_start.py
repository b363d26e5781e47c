"""The warm process, started before the configuration is composed if the command line names a Python program.

`import torch` takes a second, and composing and planning go on meanwhile. If the ranks are to run elsewhere,
by another agent, or with other variables, the process is ended again.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.arguments import Command
from launcher.errors import UsageError
from launcher.protocol import LAUNCH_WATCH

if TYPE_CHECKING:
    from launcher.agent.read_ahead import Reader
    from launcher.agent.warm_process import WarmProcess

logger = logging.getLogger(__name__)

RUN_FLAGS = ("-r", "--run")
DRY = "dry_run=true"


@dataclass(slots=True)
class EarlyStart:
    """A warm process that may be of use; it is ended unless somebody takes it."""

    warm: "WarmProcess | None" = None
    argv: tuple[str, ...] = ()
    """The program that it has been started for."""
    environ: Mapping[str, str] | None = None
    """What it was started with."""
    reader: "Reader | None" = None
    """What reads ahead of it."""

    def take(self, argv: Sequence[str], environ: Mapping[str, str]) -> "WarmProcess | None":
        """Return the process, whose owner is now the caller, if it was started for this program and
        environment; else end it, and return None.
        """
        from launcher.agent.python_program import ExecNeededError, check_environment

        if self.warm is not None and self.argv == tuple(argv):
            with contextlib.suppress(ExecNeededError):
                check_environment(self.environ or {}, environ)
                warm, self.warm = self.warm, None
                return warm
        self.drop_warm()
        return None

    def take_reader(self, argv: Sequence[str], mode: str) -> "Reader | None":
        """Return what reads ahead, whose owner is now the caller, if it does for this program and is to."""
        reader, self.reader = self.reader, None
        if self.argv == tuple(argv) and mode != "off":
            return reader
        end_reader(reader)
        return None

    def drop_warm(self) -> None:
        """End the warm process, if nobody has taken it."""
        warm, self.warm = self.warm, None
        if warm is not None:
            warm.close()

    def close(self) -> None:
        """End the processes that nobody has taken."""
        self.drop_warm()
        end_reader(self.reader)
        self.reader = None


def end_reader(reader: "Reader | None") -> None:
    """End what reads ahead, which ends as its stdin is closed."""
    with reader or contextlib.nullcontext():
        pass


@contextlib.contextmanager
def start_early(command: Command, environ: Mapping[str, str]) -> Iterator[EarlyStart]:
    """Give an early start, with a process in it if the ranks may be forked from one; it ends with the block.

    Errors of the command line are left to those who report them.
    """
    early = EarlyStart()
    try:
        argv = find_early_program(command, environ)
        if argv:
            early = open_early(argv, environ)
        yield early
    finally:
        early.close()


def open_early(argv: tuple[str, ...], environ: Mapping[str, str]) -> EarlyStart:
    """Start the process, and before it what brings its files from a cold disk."""
    from launcher.agent.python_program import ExecNeededError
    from launcher.agent.read_ahead import start_read_ahead
    from launcher.agent.warm_process import WarmProcess

    inherited = {name: value for name, value in environ.items() if name != LAUNCH_WATCH}
    given = {"PYTHONUNBUFFERED": "1", **inherited}  # see launcher.launch.job.build_agent_environ
    early = EarlyStart(None, argv, given, start_read_ahead("auto", argv, environ))
    try:
        early.warm = WarmProcess.start(argv, given)
    except ExecNeededError as error:
        logger.debug(f"no early start: {error}")
    return early


def find_early_program(command: Command, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the program's argv if a run of a Python program that uses torch is asked for; None if not.

    That is the one on the command line, or the bundled one if no file of the user's own and no word names
    another. Whether its ranks run here and are forked is decided later.
    """
    from launcher.agent.program_text import read_program
    from launcher.config.program import BUNDLED, resolve_program

    words = [word for word in command.words if word not in RUN_FLAGS]
    if command.verb != "run" or DRY in words:
        return None
    if any(word.startswith("-") or ("=" not in word and word[:1] != "~") for word in words):  # no settings
        return None
    if command.program is None and (Path("conf").exists() or any(w.startswith("program=") for w in words)):
        return None
    try:
        argv = resolve_program(command.program or BUNDLED, environ)
    except UsageError:
        return None
    if command.program is None:
        return argv
    text = read_program(argv, environ)
    return argv if text and text.uses_torch and not text.obstacle else None
