"""Ranks forked from a warm process, and by exec if that cannot be."""

import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.group import RankStart
from launcher.agent.rank_starter import ExecStarter, RankStarter
from launcher.agent.torch_use import find_import_change, uses_torch
from launcher.agent.warm_process import WarmProcess, WarmRefusedError
from launcher.config.settings import StartConfig

logger = logging.getLogger(__name__)
NOT_FORKED = "the ranks are not forked from a process with torch: {}"


@dataclass(slots=True)
class WarmStarter:
    """Has the warm process fork each rank; the first reason against that is told, and ranks are executed."""

    by_exec: ExecStarter
    warm: WarmProcess
    ranks_left: int = -1
    """Ranks after which the process is ended, so that it takes no memory; -1 if they may start anew."""
    is_told: bool = False

    @property
    def pids(self) -> Collection[int]:
        """The warm process, as long as it lives."""
        return (self.warm.pid,) if self.warm.is_alive else ()

    @property
    def is_ready(self) -> bool:
        """Whether a rank starts at once: the warm process has imported its modules, or it never will."""
        return self.warm.is_ready

    @property
    def descriptors(self) -> Collection[int]:
        """The warm process's channel as long as the imports go on."""
        return () if self.is_ready else (self.warm.descriptor,)

    def start_rank(self, start: RankStart) -> int:
        """Start a rank and return its PID; raises OSError."""
        try:
            pid = self.fork_rank(start)
        except WarmRefusedError as error:
            if not self.is_told:
                logger.info(NOT_FORKED.format(error))
            self.is_told = True
            pid = self.by_exec.start_rank(start)
        self.ranks_left -= self.ranks_left > 0
        if not self.ranks_left:
            self.close()
        return pid

    def expect_ranks(self, count: int) -> None:
        """End the process after so many more ranks."""
        self.ranks_left = count

    def fork_rank(self, start: RankStart) -> int:
        """Have a rank forked with the shim's streams; raises WarmRefusedError and OSError."""
        with contextlib.ExitStack() as stack:
            log = self.by_exec.open_log()
            stack.callback(os.close, log)
            stdin = 0
            if not self.by_exec.reads_stdin:
                stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, stdin)
            return self.warm.fork_rank(start, (stdin, log, log))

    def close(self) -> None:
        """End the warm process."""
        self.warm.close()


def choose_starter(
    by_exec: ExecStarter, argv: Sequence[str], config: StartConfig, environ: Mapping[str, str]
) -> RankStarter:
    """Return what starts a program's ranks: forks of a process with torch unless `start.warm` forbids it.

    Ranks of a program that does not use torch are executed, unless it has modules to preload.
    """
    if config.warm == "off" or not (config.preload or uses_torch(argv, environ)):
        return by_exec
    if reason := find_import_change(argv, environ, to_the_end=bool(config.preload)):
        logger.info(NOT_FORKED.format(reason))
        return by_exec
    return warm_up(by_exec, argv, config.preload, environ)


def warm_up(
    by_exec: ExecStarter, argv: Sequence[str], preload: Sequence[str], environ: Mapping[str, str]
) -> ExecStarter | WarmStarter:
    """Start a warm process for a program in the working directory; if that cannot be, exec its ranks."""
    try:
        return WarmStarter(by_exec, WarmProcess.start(argv, preload, Path.cwd(), environ))
    except WarmRefusedError as error:
        logger.info(NOT_FORKED.format(error))
        return by_exec
