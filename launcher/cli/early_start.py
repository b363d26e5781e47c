"""The warm process, started before the configuration is composed if the command line says enough.

`import torch` takes a second, and composing and planning go on meanwhile. Whatever the command line or the
environment leaves open is left to the start after planning.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.arguments import Command
from launcher.errors import LaunchError, UsageError
from launcher.protocol import LAUNCH_FIT, LAUNCH_METER, LAUNCH_RANK_PLAN, LAUNCH_WATCH

if TYPE_CHECKING:
    from launcher.agent.read_ahead import ReadAhead
    from launcher.agent.warm_process import WarmProcess

logger = logging.getLogger(__name__)

SILENT = frozenset(
    (
        *("name", "runs_dir", "run_dir", "new_run_dir", "nproc_per_node", "devices", "objective", "restarts"),
        *("binding", "dataloader", "gc", "logs", "progress", "watch", "notify", "parallel", "fit", "tune"),
    )
)
"""Keys and groups, by their first part, that say nothing about where ranks run, by what, and with which
variables at the interpreter's start."""
AGENT_WORD = "agent=direct"
RUN_FLAGS = ("-r", "--run")
BUNDLED_ONLY = frozenset(("model", "data"))
"""Those of them that the bundled program has its arguments from."""
DECIDING = ("SLURM_JOB", "SLURM_PROC", "PET_", "TORCHELASTIC_", LAUNCH_RANK_PLAN, LAUNCH_FIT, LAUNCH_METER)
"""Beginnings of variables with which ranks may run elsewhere, or be started by another."""


@dataclass(slots=True)
class EarlyStart:
    """A warm process that was started on suspicion; it is ended unless somebody takes it."""

    warm: "WarmProcess | None" = None
    argv: tuple[str, ...] = ()
    """The program that it has been started for."""
    environ: Mapping[str, str] | None = None
    """What it was started with."""
    reader: "ReadAhead | None" = None
    """What reads ahead of it."""

    def take(self, argv: Sequence[str], environ: Mapping[str, str]) -> "WarmProcess | None":
        """Return the process, whose owner is now the caller, if it was started for this program and
        environment; else end it, and return None.
        """
        warm, self.warm = self.warm, None
        if warm is None:
            return None
        if self.argv == tuple(argv) and is_alike(self.environ or {}, environ):
            return warm
        warm.close()
        return None

    def take_reader(self, argv: Sequence[str]) -> "ReadAhead | None":
        """Return what reads ahead, whose owner is now the caller, if it does for this program."""
        if self.argv != tuple(argv):
            return None
        reader, self.reader = self.reader, None
        return reader

    def close(self) -> None:
        """End the processes that nobody has taken."""
        warm, self.warm = self.warm, None
        if warm is not None:
            warm.close()
        if self.reader is not None:
            self.reader.close()


def is_alike(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Tell whether two environments agree in what an interpreter and its libraries read as they start."""
    from launcher.agent.python_program import ExecNeededError
    from launcher.agent.start_method import check_environment

    try:
        check_environment(dict(before), dict(after), frozenset())
    except ExecNeededError:
        return False
    return True


@contextlib.contextmanager
def start_early(command: Command, environ: Mapping[str, str]) -> Iterator[EarlyStart]:
    """Give an early start, with a process in it if the ranks will be forked from one; it ends with the block.

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
    from launcher.agent.read_ahead import start_read_ahead
    from launcher.agent.warm_process import WarmProcess, WarmRefusedError

    inherited = {name: value for name, value in environ.items() if name != LAUNCH_WATCH}
    given = {"PYTHONUNBUFFERED": "1", **inherited}  # see launcher.launch.job.build_agent_environ
    reader = start_read_ahead("auto", argv, environ)
    try:
        return EarlyStart(WarmProcess.start(argv, (), Path.cwd(), given), argv, given, reader)
    except WarmRefusedError as error:
        logger.debug(f"no early start: {error}")
    return EarlyStart(None, argv, given, reader)


def find_early_program(command: Command, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the program's argv if the ranks are certain to run here and to be forked; None if not.

    They are if no file of the user's own configures anything, the words leave that open, no allocation or
    launcher is around, and the program may use torch.
    """
    if command.verb != "run" or Path("conf").exists():
        return None
    words = [word for word in command.words if word not in (AGENT_WORD, *RUN_FLAGS)]
    keys = {word.lstrip("+").partition("=")[0].partition(".")[0] for word in words}
    if keys - SILENT - (BUNDLED_ONLY if command.program is None else frozenset()):
        return None
    if any(name.startswith(DECIDING) for name in environ):
        return None
    if AGENT_WORD not in command.words and not is_direct_by_default(environ):
        return None
    from launcher.agent.torch_use import find_import_change, uses_torch
    from launcher.config.program import BUNDLED, resolve_program

    try:
        argv = resolve_program(command.program or BUNDLED, environ)
    except UsageError:
        return None
    is_plain = uses_torch(argv, environ) and not find_import_change(argv, environ)
    return argv if command.program is None or is_plain else None


def is_direct_by_default(environ: Mapping[str, str]) -> bool:
    """Tell whether `launch` starts ranks itself, on this machine, if no setting says otherwise."""
    from launcher.config.agent_choice import choose_agent
    from launcher.config.cluster import choose_cluster
    from launcher.config.schema import LaunchConfig

    try:
        cluster = choose_cluster("auto", "auto", None, None, environ)
        return cluster.kind == "local" and choose_agent(LaunchConfig(), cluster, environ).kind == "direct"
    except LaunchError:
        return False
