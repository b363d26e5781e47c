"""`python -m launcher.slurm RUN_DIR [SIGNAL]`: the end of the batch script, on a SLURM job's first node.

SIGNAL, as `USR2`, is what the shell got before.
"""

import logging
import signal
import sys
from pathlib import Path

from launcher.errors import EXIT_DEFECT, LaunchError
from launcher.launch.signals import early_signals, note_early_signals
from launcher.text import leave, log_defect, log_error, set_up_logging

logger = logging.getLogger("launcher.slurm")


def main() -> int:
    """Run one attempt of the job and return its exit code."""
    note_early_signals()
    early_signals.extend(signal.Signals[f"SIG{name}"] for name in sys.argv[2:])
    from launcher.slurm.first_node import run_batch_script

    set_up_logging()
    try:
        return run_batch_script(Path(sys.argv[1]))
    except LaunchError as error:
        if error.exit_code:
            log_error(str(error))
        else:
            logger.info(str(error))
        return error.exit_code
    except Exception as error:
        log_defect(error, f"internal error, {type(error).__name__}: {error}: report it")
        return EXIT_DEFECT


if __name__ == "__main__":
    leave(main())
