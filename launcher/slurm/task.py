"""`python -m launcher.slurm.task RUN_DIR`: a node's part of a SLURM job, the task that srun starts there."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

logger = logging.getLogger("launcher.slurm.task")


def main() -> int:
    """Run this node's part, and leave a record of how it ended, whatever happens; returns the exit code.

    If there are no ranks, the record says why, for the first node to log; if it cannot be written, this does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the supervisor has its own
    run_path, started, state = Path(sys.argv[1]), time.time(), "failed"
    try:
        # Only now: a signal during the imports is to leave a record too.
        from launcher.launch.signals import note_early_signals

        note_early_signals()
        from launcher.slurm.node_job import run_node

        return run_node(run_path, os.environ, started)
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        state, status = "stopped", 128 + signal.SIGTERM
        reason = "it was stopped before its ranks had started"
    except Exception as error:
        from launcher.errors import EXIT_MACHINE, LaunchError

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status, reason = EXIT_MACHINE, f"{type(error).__name__}: {error}"
        if isinstance(error, LaunchError):
            status, reason = error.exit_code, str(error)
    from launcher.runs.records import refuse_node, write_node
    from launcher.slurm.commands import read_task_identity

    task = read_task_identity(os.environ)
    try:
        record = refuse_node(task.host, task.node_rank, status, reason, started, state)
        write_node(run_path, task.attempt, record)
    except OSError as error:
        logger.error(f"{task.host}: {' '.join(reason.split())} ({error})")
    return status


if __name__ == "__main__":
    from launcher.text import leave, set_up_logging

    set_up_logging()
    leave(main())
