"""`python -m launcher.slurm RUN_DIR`: the end of the batch script, on the first node of a SLURM job.

`--standalone` reads the job from the script itself, on stdin.
"""

import logging
import os
import sys
from pathlib import Path

from launcher.errors import EXIT_DEFECT, LaunchError
from launcher.text import leave, log_defect, log_error, set_up_logging

logger = logging.getLogger("launcher.slurm")


def main() -> int:
    """Run one attempt of the job and return its exit code."""
    from launcher.slurm.first_node import run_batch_script

    set_up_logging()
    try:
        if sys.argv[1] == "--standalone":
            return run_own_script()
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


def run_own_script() -> int:
    """Run the job that the script describes, and read nothing more of it; raises LaunchError."""
    from launcher.slurm.standalone_script import run_standalone

    text = sys.stdin.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return run_standalone(text, os.environ)


if __name__ == "__main__":
    leave(main())
