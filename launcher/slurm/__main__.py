"""`python -m launcher.slurm RUN_DIR`: the end of the batch script, on the first node of a SLURM job.

`--standalone` reads the job from the script itself, on stdin.
"""

import os
import sys
from pathlib import Path

from launcher.errors import LaunchError
from launcher.text import leave


def main() -> int:
    """Run one attempt of the job and return its exit code."""
    from launcher.slurm.first_node import run_batch

    try:
        if sys.argv[1] == "--standalone":
            return run_own_script()
        return run_batch(Path(sys.argv[1]))
    except LaunchError as error:
        from launcher.cli.main import complain
        from launcher.text import say

        (complain if error.exit_code else say)(str(error))
        return error.exit_code
    except Exception as error:
        from launcher.cli.main import INTERNAL, report_defect

        return report_defect(error, f"internal error, {type(error).__name__}: {error}: report it", INTERNAL)


def run_own_script() -> int:
    """Run the job that the script describes, and read nothing more of it; raises LaunchError."""
    from launcher.slurm.standalone_script import run_standalone

    text = sys.stdin.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return run_standalone(text, os.environ)


if __name__ == "__main__":
    leave(main())
