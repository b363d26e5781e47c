"""`python -m launcher.batch RUN_DIR`: the end of the batch script, on the first node of a SLURM job."""

import sys
from pathlib import Path

from launcher.errors import LaunchError
from launcher.wording import leave


def main() -> int:
    """Run one attempt of the job and return its exit code."""
    from launcher.batch.head import run_batch

    try:
        return run_batch(Path(sys.argv[1]))
    except LaunchError as error:
        from launcher.cli import complain
        from launcher.wording import say

        (complain if error.exit_code else say)(str(error))
        return error.exit_code
    except Exception as error:
        from launcher.cli import INTERNAL, report_defect

        return report_defect(error, f"internal error, {type(error).__name__}: {error}: report it", INTERNAL)


if __name__ == "__main__":
    leave(main())
