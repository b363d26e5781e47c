"""`python -m launcher.slurm.task RUN_DIR`: a node's part of a SLURM job, the task that srun starts there."""

import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

logger = logging.getLogger("launcher.slurm.task")

STOPPED = 128 + signal.SIGTERM


class StoppedError(Exception):
    """SIGTERM came before there was anything to stop."""


def main() -> int:
    """Run this node's part, and leave a record of how it ended, whatever happens; returns the exit code."""
    signal.signal(signal.SIGTERM, stop_early)
    started = time.time()
    try:
        # Only now: a signal during the imports is to leave a record too.
        from launcher.launch.signals import note_early_signals

        note_early_signals()
        from launcher.slurm.node_job import run_node

        return run_node(Path(sys.argv[1]), os.environ, started)
    except StoppedError:
        return record_early_end("it was stopped before its ranks had started", STOPPED, started)
    except Exception as error:
        from launcher.errors import EXIT_MACHINE, LaunchError

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, LaunchError):
            return record_early_end(str(error), error.exit_code, started)
        return record_early_end(f"{type(error).__name__}: {error}", EXIT_MACHINE, started)


def stop_early(_number: int, _frame: FrameType | None) -> NoReturn:
    """Signal handler, until the supervisor has its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StoppedError


def record_early_end(reason: str, status: int, started: float) -> int:
    """Record why there are no ranks on this node, for the first node to log. If that fails, log it here."""
    from dataclasses import replace

    from launcher.runs.node_records import refuse_node, write_node
    from launcher.slurm.slurm_environ import read_task_identity

    task = read_task_identity(os.environ)
    record = refuse_node(task.host, task.node_rank, status, reason, started)
    if status == STOPPED:
        record = replace(record, state="stopped")
    try:
        write_node(Path(sys.argv[1]), task.attempt, record)
    except OSError as error:
        logger.error(f"{task.host}: {' '.join(reason.split())} ({error})")
    return status


if __name__ == "__main__":
    from launcher.text import leave, set_up_logging

    set_up_logging()
    leave(main())
