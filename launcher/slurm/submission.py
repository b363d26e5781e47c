"""Submits a script by sbatch, through submitit."""

import contextlib
import io
import subprocess
from collections.abc import Mapping
from pathlib import Path

from submitit.core.utils import CommandFunction, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher.errors import SchedulerError

LARGE = 64 << 10
"""Characters of a variable from which an error names it."""


class ScriptExecutor(SlurmExecutor):
    """submitit's executor for a script that is there already: no pickles, and nothing else in the folder."""

    def __init__(self, script: Path, environ: Mapping[str, str]) -> None:
        super().__init__(script.parent)
        self.script, self.environ = script, dict(environ)

    def _submit_command(self, command: str) -> SlurmJob[None]:
        """Submit; submitit's own would write the script anew, and leave a link to it."""
        words = self._make_submission_command(self.script)
        # submitit prints what sbatch complains of, which is to be part of one error.
        with contextlib.redirect_stderr(io.StringIO()):
            output = CommandFunction(words, verbose=False, env=self.environ)()
        return SlurmJob(self.folder, self._get_job_id_from_submission_command(output), tasks=[0])


def submit_script(script: Path, environ: Mapping[str, str]) -> str:
    """Submit a script in this environment, which the job gets too, and return the job's id.

    Raises SchedulerError with what sbatch complained of.
    """
    try:
        return ScriptExecutor(script, environ)._submit_command("").job_id
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
    said = [line.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("fatal: ") for line in lines]
    return f"sbatch: {'; '.join(said)}" if said else ""


def explain_start(error: OSError, environ: Mapping[str, str]) -> str:
    """Say why sbatch did not start: as a rule an environment that is larger than the kernel allows."""
    large = sorted(environ, key=lambda name: -len(environ[name]))[:3]
    names = ", ".join(
        f"{name} ({len(environ[name]) >> 10} KiB)" for name in large if len(environ[name]) >= LARGE
    )
    total = sum(len(name) + len(value) for name, value in environ.items()) >> 10
    why = f"{error.strerror}: the environment has {total} KiB{', of which ' + names if names else ''}"
    return f"sbatch cannot be started ({why}): unset what the job does not need"
