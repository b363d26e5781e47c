"""One job that is followed: what its manifest and SLURM say of it, what is new, and when it has ended."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from launcher.runs.disk_reserve import explain_silence
from launcher.runs.manifest import CLOSED, read_job, read_manifest, take_dict
from launcher.runs.run_directory import RunDir
from launcher.slurm.pending_reason import Place, describe_wait
from launcher.slurm.polling import Answer
from launcher.slurm.queue import ENDED, JobState

PATIENCE = 5.0
"""Seconds that a network filesystem has to show what was written, and SLURM to notice an end."""
SILENT = ("COMPLETING", "STAGE_OUT", "SIGNALING", "REQUEUED")
"""States that pass by themselves."""


@dataclass(slots=True)
class FollowedJob:
    """What is known of one job."""

    run_path: Path
    job_id: str
    state: JobState | None = None
    """SLURM's newest word; None before the first, and for a job that SLURM has forgotten."""
    place: Place | None = None
    forgotten: bool = False
    outcome: Mapping[str, object] = field(default_factory=dict)
    """The manifest's."""
    told: tuple[object, ...] = ()
    """What the last line was about."""
    ran: bool = False
    ending: float | None = None
    """When there was first a sign of the end, in monotonic seconds."""
    status: int | None = None
    """Its exit code, once it has ended."""

    def note_answer(self, answer: Answer) -> str:
        """Take what SLURM says, and return a line about what is new; empty where nothing is."""
        self.state = state = answer.jobs.get(self.job_id)
        self.place, self.forgotten = answer.place, state is None
        if state is None or state.state in ENDED or state.state in SILENT:
            return ""
        pending = state.state == "PENDING"
        key = (state.state, state.reason if pending else state.nodelist, state.restarts)
        if key == self.told or (pending and not state.reason):
            return ""
        self.told = key
        line = f"job {self.job_id} {self.describe_state(state)}"
        self.ran = self.ran or not pending
        return line

    def describe_state(self, state: JobState) -> str:
        """Say in which state it is, and what that means."""
        if state.state == "PENDING":
            wait = describe_wait(state, self.place, datetime.now())
            if not (self.ran or state.restarts):
                return f"waits: {wait}"
            cause = str(self.outcome.get("cause") or "") if self.outcome.get("state") == "requeued" else ""
            return f"is back in the queue{f' ({cause})' if cause else ''}: {wait}"
        where = f" on {state.nodelist}" if state.nodelist else ""
        again = (
            f", after {state.restarts} requeue{'s' if state.restarts > 1 else ''}" if state.restarts else ""
        )
        return f"is {state.state.lower()}{where}{again}"

    def read_manifest(self) -> bool:
        """Read how the run stands, and tell whether that is news."""
        before = self.outcome.get("state")
        self.outcome = read_outcome(self.run_path, self.job_id) or self.outcome
        return self.outcome.get("state") != before

    @property
    def is_final(self) -> bool:
        """Whether the manifest tells the end."""
        return self.outcome.get("state") in CLOSED

    @property
    def is_over(self) -> bool:
        """Whether SLURM says that it has ended, or knows nothing of it any more."""
        return self.forgotten or (self.state is not None and self.state.state in ENDED)

    @property
    def has_run(self) -> bool:
        """Whether its last attempt may have begun: SLURM shows no nodes of a job that ended before it ran."""
        return self.state is None or bool(self.state.nodelist)

    def judge_end(self) -> str | None:
        """Find its exit code once it has ended; returns what there is to say of that, None before the end.

        The manifest's word counts. SLURM's does where the job ended without one, or never began.
        """
        if not (self.is_final or self.is_over):
            self.ending = None
            return None
        now = time.monotonic()
        self.ending = self.ending or now
        late = now - self.ending > PATIENCE
        leaving = self.is_over or (self.state is not None and self.state.state == "COMPLETING")
        if self.is_final and (leaving or late):
            self.status = read_code(
                self.outcome.get("exit_code"), 0 if self.outcome["state"] == "succeeded" else 1
            )
            return ""
        if not self.is_over or not (late or not self.has_run):
            return None
        return self.judge_state()

    def judge_state(self) -> str:
        """Find the exit code by SLURM's word alone, and say what that is."""
        if self.state is None:
            self.status = 1
            return f"SLURM has forgotten job {self.job_id}, and {self.run_path} does not tell how it ended"
        done = self.state.state == "COMPLETED"
        self.status = self.state.exit_code or (0 if done else 1)
        reason = f" ({self.state.reason})" if self.state.reason else ""
        silence = explain_silence(RunDir(self.run_path))
        more = f"; {silence}" if silence else ""
        return f"job {self.job_id} ended{self.describe_place()}: {self.state.state}{reason}{more}"

    def describe_place(self) -> str:
        """Say where a job ended that SLURM shows no nodes of: in the queue, perhaps after some attempts."""
        if self.has_run:
            return ""
        count = (self.state.restarts if self.state else 0) or int(self.ran)
        attempts = f"{count} attempt{'' if count == 1 else 's'}"
        return f" in the queue, after {attempts}" if count else " before it ran"

    def describe_end(self) -> str:
        """Say how it ended, in a line: the last one of an array's member."""
        failure = self.outcome.get("first_failure")
        why = (
            f": rank {failure['rank']} on {failure['host']} {failure['reason']}"
            if isinstance(failure, dict)
            else ""
        )
        word = str(self.outcome.get("state")) if self.is_final else "ended"
        code = f" with exit code {self.status}" if self.status else ""
        return f"job {self.job_id} {word}{code}{why} ({self.run_path})"


def read_code(value: object, default: int) -> int:
    """Return a manifest's exit code; one that is missing or damaged is the default."""
    return value if isinstance(value, int) else default


def read_outcome(run_path: Path, job_id: str) -> Mapping[str, object]:
    """Return the outcome that a manifest tells of a job; empty where it tells none."""
    manifest = read_manifest(run_path)
    return take_dict(manifest, "outcome") if read_job(manifest) == job_id else {}
