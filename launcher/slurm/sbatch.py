"""sbatch, called through submitit."""

import contextlib
import io
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor, SlurmJob
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.helpers import CommandFunction

from launcher.errors import SchedulerError
from launcher.slurm.first_node import run_batch_script

LARGE_VARIABLE = 64 << 10
"""Characters of a variable from which an error names it."""


class BatchScriptExecutor(SlurmExecutor):
    """submitit's executor for SLURM, which submits a batch script that is there already.

    `submit` and the `SlurmJob` that it returns are submitit's own, so the run directory works as the job's
    folder: `submitit.SlurmJob(RUN_DIR, JOB_ID)`. Its parameters and its own way to submit do not fit:
    it pickles a function, and writes a script that starts `python -m submitit.core._submit` in a step; it
    replaces %j in the folder's name, passes this process's environment on as it is, gives all members of an
    array one folder, and requeues by its own rules. So the method that every executor implements is another
    one here: it runs sbatch for our script, in the environment that the job is to have.
    """

    def __init__(self, script: Path, environ: Mapping[str, str]) -> None:
        super().__init__(script.parent)
        self.script, self.environ = script, dict(environ)

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[DelayedSubmission]
    ) -> list[Job[Any]]:
        """Run sbatch; the script says what runs, so the functions are not pickled."""
        sbatch = CommandFunction(["sbatch", str(self.script)], verbose=False, env=self.environ)
        # submitit prints sbatch's complaints, which are to be part of one error.
        with contextlib.redirect_stderr(io.StringIO()):
            output = sbatch()
        job_id = self._get_job_id_from_submission_command(output)
        return [SlurmJob(self.folder, job_id, tasks=[0]) for _ in delayed_submissions]


def submit_script(script: Path, environ: Mapping[str, str]) -> str:
    """Submit a script in this environment, which the job gets too, and return the job's id.

    Raises SchedulerError with what sbatch complained of.
    """
    try:
        return BatchScriptExecutor(script, environ).submit(run_batch_script, script.parent).job_id
    except FailedJobError as error:
        cause = error.__cause__
        code = cause.returncode if isinstance(cause, subprocess.CalledProcessError) else "an error"
        raise SchedulerError(
            shorten_complaint(str(error)) or f"sbatch ended with {code}, and said nothing"
        ) from None
    except FailedSubmissionError as error:
        raise SchedulerError(f"sbatch: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise SchedulerError(explain_start(error, environ)) from None


def shorten_complaint(text: str) -> str:
    """Return sbatch's complaints in one line, without what each line repeats."""
    lines = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    complaints = [
        line.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("fatal: ") for line in lines
    ]
    return f"sbatch: {'; '.join(complaints)}" if complaints else ""


def explain_start(error: OSError, environ: Mapping[str, str]) -> str:
    """Say why sbatch did not start: as a rule an environment that is larger than the kernel allows."""
    large = sorted(environ, key=lambda name: -len(environ[name]))[:3]
    names = ", ".join(
        f"{name} ({len(environ[name]) >> 10} KiB)" for name in large if len(environ[name]) >= LARGE_VARIABLE
    )
    total = sum(len(name) + len(value) for name, value in environ.items()) >> 10
    why = f"{error.strerror}: the environment has {total} KiB{', of which ' + names if names else ''}"
    return f"sbatch cannot be started ({why}): unset what the job does not need"
