"""What every search of `launch tune` has in common: its run directory, its trials, and its end."""

import contextlib
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.cli.config_programs import name_files, report_config_programs
from launcher.cli.tune_trial import FailedTrialError, InterruptedTrialError, describe_program
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.launch.job import Job, JobSpec
from launcher.launch.local_run import prepare_run
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.run_directory import RunDir, write_json
from launcher.text import count_things
from launcher.tune.trial_records import MeasureError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.config.compose import Composed


@dataclass(slots=True)
class TuneSession:
    """A search under way."""

    composed: "Composed"
    spec: JobSpec
    job: Job
    argv: Sequence[str]
    """The whole command line."""
    run: RunDir
    manifest: dict[str, object]
    interrupted: int | None = field(default=None)
    """Signal that has ended the search early."""

    @property
    def program(self) -> str:
        """The program for people, secrets masked."""
        return describe_program(self.spec)

    @property
    def place(self) -> str:
        """Where it is measured."""
        return f"{count_things(len(self.job.plan.ranks), 'rank')} of {self.job.host}"

    def try_each(self, choose: Callable[[], int | None], attempt: Callable[[int], None]) -> None:
        """Try what is chosen next until nothing is; a signal ends it. Raises what `attempt` raises."""
        try:
            while (value := choose()) is not None:
                attempt(value)
        except InterruptedTrialError as error:
            self.interrupted = error.args[0]
        except KeyboardInterrupt:  # between two runs
            self.interrupted = signal.SIGINT

    def give_up(self, error: MeasureError | LaunchError) -> int:
        """Say why nothing could be measured; returns the program's exit code, or raises UsageError."""
        status = error.status if isinstance(error, FailedTrialError) else getattr(error, "exit_code", 2)
        self.end("failed", status)
        if isinstance(error, LaunchError):
            raise error
        if not isinstance(error, FailedTrialError):
            raise UsageError(f"{error} (run directory {self.run.path})")
        for line in str(error).splitlines():
            logger.info(line)
        logger.info(f"run directory {self.run.path}")
        return error.status

    def finish(self, result: Mapping[str, object]) -> int:
        """Keep the result in the run directory, and return the exit code; raises MachineError."""
        with contextlib.suppress(OSError):
            write_json(self.run.path / "tuning.json", result)
        status = 128 + self.interrupted if self.interrupted else 0
        self.end("stopped" if self.interrupted else "succeeded", status)
        return status

    def end(self, state: str, status: int) -> None:
        """Complete the manifest; raises MachineError."""
        self.manifest["ended"] = stamp_time()
        self.manifest["outcome"] = {"state": state, "exit_code": status}
        try:
            write_manifest(self.run, self.manifest)
        except OSError as error:
            raise MachineError(f"{self.run.manifest_path} cannot be written ({error}): make room") from None


def open_session(
    composed: "Composed", spec: JobSpec, job: Job, argv: Sequence[str], bounds: str
) -> TuneSession:
    """Make the run directory of a search, and say what is searched within which bounds."""
    run, manifest = prepare_run(spec, argv, [job.host])
    name_files(composed.own_files)
    report_config_programs([spec], composed.own_files)
    session = TuneSession(composed, spec, job, argv, run, manifest)
    logger.info(f"{session.program} on {session.place}, {bounds}")
    logger.info(f"run directory {run.path}")
    return session
