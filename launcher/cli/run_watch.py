"""How a run stands while it is looked at again and again: by its manifest, and by SLURM."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launcher.runs.run_status import RunStatus, read_status
from launcher.slurm.commands import JobState
from launcher.slurm.follow import Poller
from launcher.slurm.run_states import update_run

logger = logging.getLogger(__name__)

STATE_SECONDS = 1.0
"""Seconds between two looks at the manifest."""
NETWORK_SECONDS = 3.0
"""Seconds that a network filesystem has to show the last lines of a job on other machines."""


def describe_run_state(run: RunStatus) -> str:
    """Say how a run stands: `tiny/20260801-120000 is queued, job 12: Resources`."""
    job = f", job {run.job_id}" if run.job_id else ""
    verb = "is" if run.is_live or run.state in ("lost", "unknown") else "has"
    return f"{run.run} {verb} {run.state}{job}" + (f": {run.reason}" if run.reason else "")


@dataclass(slots=True)
class RunWatch:
    """The state of a run that is followed, from its manifest and from SLURM, which a thread asks."""

    path: Path
    say: Callable[[str], None] = logger.info
    """Says what is new of a run that waits, and that SLURM does not answer."""
    error_note: str = "the logs are followed on"
    """What goes on if SLURM does not answer."""
    run: RunStatus | None = None
    job: JobState | None = None
    answered: bool = False
    """SLURM has said something."""
    poller: Poller | None = None
    updated: float = 0.0
    """When the manifest was read, in monotonic seconds."""
    changed: float = field(default_factory=time.monotonic)
    """When something was last printed or happened."""
    lived: bool = False
    """The run had not ended at the first update."""
    reported: tuple[str, ...] = ()

    def update(self) -> RunStatus:
        """Return the run's state, and report if it waits."""
        now = time.monotonic()
        if self.run is None or now - self.updated > STATE_SECONDS:
            self.updated = now
            run = read_status(self.path)
            run = self.ask_slurm(run) if run.job_id and run.is_live else run
            if self.run is None or run.is_live != self.run.is_live:
                self.changed = now
            self.run, self.lived = run, self.lived or run.is_live
            self.report_waiting(run)
        return self.run

    def ask_slurm(self, run: RunStatus) -> RunStatus:
        """Return how the run stands by SLURM's newest answer, if there is one."""
        if self.poller is None:
            self.poller = Poller((str(run.job_id),))
        for answer in self.poller.take_answers():
            if answer.error:
                self.report_once(f"{answer.error}; {self.error_note}")
            else:
                self.job, self.answered = answer.jobs.get(str(run.job_id)), True
        return update_run(run, self.job) if self.answered else run

    def report_waiting(self, run: RunStatus) -> None:
        """Report that a run waits, and why, if that is new."""
        if run.state == "queued" and self.answered and run.reason:
            self.report_once(describe_run_state(run))

    def report_once(self, text: str) -> None:
        """Say something, but once."""
        if (text,) != self.reported:
            self.reported = (text,)
            self.say(text)

    def may_still_print(self) -> bool:
        """Tell whether lines of a job that ended while it was followed may still come."""
        is_job = self.run is not None and self.run.job_id is not None
        return self.lived and is_job and time.monotonic() - self.changed < NETWORK_SECONDS

    def close(self) -> None:
        """Ask no more."""
        if self.poller:
            self.poller.close()
