"""How runs stand: what their directories tell, against what SLURM says of their jobs."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from launcher.errors import SchedulerError, UsageError
from launcher.runs.manifest import CLOSED, OPEN, check_process, read_job, read_own_manifest, take_dict
from launcher.runs.rank_logs import find_logs
from launcher.runs.run_directory import FULL, RunDir, is_full
from launcher.runs.run_status import RunStatus, mark_lost, read_status
from launcher.slurm.commands import ENDED, STATES, WAITING, JobState, ask_queue, name_job
from launcher.text import quote_word

logger = logging.getLogger(__name__)

STATE_SECONDS = 0.5
"""Seconds between two looks at the manifests of runs that are followed."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 20.0
"""Seconds between two questions to SLURM after a change, and when nothing has changed for long."""


def find_run_states(
    paths: Sequence[Path], *, own: bool = False
) -> tuple[list[RunStatus], SchedulerError | None]:
    """Find out how some runs stand; SLURM is asked about those that have not ended by their manifests.

    If SLURM cannot be asked, the runs are as their manifests have them, and the error says why.
    With `own`, what another user may have written is not heard: see `read_status`.
    """
    runs = [read_status(path, own=own) for path in paths]
    job_ids = [run.job_id for run in runs if run.job_id and (run.is_live or run.state == "unknown")]
    try:
        jobs = ask_queue(job_ids) if job_ids else {}
    except SchedulerError as error:
        return runs, error
    return [update_run(run, jobs.get(run.job_id or "")) for run in runs], None


def update_run(run: RunStatus, job: JobState | None) -> RunStatus:
    """Return how a run stands; a manifest that was completed meanwhile is read again."""
    judged = resolve_run(run, job)
    if run.is_live and not judged.is_live:
        return resolve_run(read_status(Path(run.path)), job)
    return judged


def resolve_run(run: RunStatus, job: JobState | None) -> RunStatus:
    """Return how a run stands: SLURM's answer counts if the manifest has no outcome."""
    if run.job_id is None:
        return mark_lost(run, "it was never submitted") if run.state == "queued" else run
    if not run.is_live and run.state != "unknown":
        return run
    if job is None:
        return mark_lost(run, explain_forgotten(run)) if run.is_live else run
    run = replace(
        run,
        slurm_state=job.state,
        partition=job.partition,
        nodes=job.nodes or run.nodes,
        nodelist=job.nodelist,
        restarts=max(run.restarts, job.restarts),
    )
    if job.state in WAITING:
        return replace(run, state="queued", reason=job.reason, expected_start=job.start)
    if job.state not in ENDED:
        # While its nodes are cleared, the manifest tells whether it is to begin again.
        state = run.state if job.state == "COMPLETING" else "running"
        return replace(run, state=state, reason="" if job.state == "RUNNING" else job.state.lower())
    state, text = STATES["endings"].get(job.state, ("failed", job.state))
    parts = [text, "" if job.reason == "NonZeroExitCode" else job.reason]
    if job.state not in STATES["endings"] and job.exit_code:
        parts.append(f"exit code {job.exit_code}")
    parts.append(FULL if is_full(RunDir(Path(run.path))) else "")
    reason = "; ".join(filter(None, parts))
    return replace(run, state=state, reason=reason, exit_code=job.exit_code, seconds=None)


def explain_forgotten(run: RunStatus) -> str:
    """Say what it means that SLURM no longer knows a job whose end nobody has written down."""
    if run.state != "queued" or run.attempts:
        return f"SLURM no longer knows job {run.job_id}, and how it ended was not written down"
    if find_logs(Path(run.path), "slurm-"):
        return f"job {run.job_id} ended before it came to the program (cluster.setup?): see launch logs"
    return f"SLURM no longer knows job {run.job_id}, which never began: it was cancelled in the queue"


def describe_run_state(run: RunStatus) -> str:
    """Say how a run stands: `tiny/20260801-120000 is queued, job 12: Resources`."""
    job = f", job {run.job_id}" if run.job_id else ""
    verb = "is" if run.is_live or run.state in ("lost", "unknown") else "has"
    return f"{run.run} {verb} {run.state}{job}" + (f": {run.reason}" if run.reason else "")


def explain_reason(reason: str) -> str:
    """Return SLURM's reason, with an explanation if there is one: `Priority (jobs of … go first)`."""
    word, known = reason.partition(",")[0].strip(), STATES["reasons"]
    text = known.get(word) or next((known[name] for name in known if word.startswith(name)), "")
    return f"{reason} ({text})" if text else reason


@dataclass(slots=True)
class RunWatch:
    """How runs that are followed stand, by their manifests and by SLURM, which is asked in threads."""

    paths: Sequence[Path]
    say: Callable[[str], None] = logger.info
    """Says that SLURM does not answer."""
    error_note: str = "the logs are followed on"
    """What goes on meanwhile."""
    runs: list[RunStatus] = field(default_factory=list)
    updated: float = 0.0
    """When the manifests were read, in monotonic seconds."""
    answer: Mapping[str, JobState | None] = field(default_factory=dict)
    """What SLURM has said of each job that it was asked about."""
    replies: SimpleQueue[dict[str, JobState | None] | SchedulerError] = field(default_factory=SimpleQueue)
    """What threads have brought."""
    due: float = 0.0
    """When SLURM is to be asked next, in monotonic seconds; infinite while it is asked."""
    pause: float = 0.0
    """Seconds between two questions."""
    errors: int = 0
    """Since its last answer; the second one is told."""

    def update(self) -> list[RunStatus]:
        """Return how the runs stand."""
        now = time.monotonic()
        if self.runs and now - self.updated < STATE_SECONDS:
            return self.runs
        ended = {run.path: run for run in self.runs if run.state in CLOSED and not run.slurm_state}
        found = [ended.get(str(path.absolute())) or read_status(path) for path in self.paths]
        if not self.replies.empty():
            reply = self.replies.get()
            if isinstance(reply, SchedulerError):
                self.errors += 1
                if self.errors == 2:
                    self.say(f"{reply}; {self.error_note}, and SLURM asked again")
            else:
                self.pause = FIRST_PAUSE if reply != self.answer else min(1.5 * self.pause, LONGEST_PAUSE)
                self.answer, self.errors = reply, 0
            self.due = now + (self.pause or FIRST_PAUSE)
        job_ids = tuple(run.job_id for run in found if run.job_id and run.is_live)
        if job_ids and now >= self.due:
            self.due = math.inf
            threading.Thread(target=self._ask, args=(job_ids,), daemon=True).start()
        self.updated, answer = now, self.answer
        self.runs = [
            update_run(run, answer[job_id]) if (job_id := run.job_id or "") in answer else run
            for run in found
        ]
        return self.runs

    def _ask(self, job_ids: Sequence[str]) -> None:
        """Ask once: a thread's body."""
        try:
            jobs = ask_queue(job_ids)
            self.replies.put({job_id: jobs.get(job_id) for job_id in job_ids})
        except SchedulerError as error:
            self.replies.put(error)


def refuse_run_in_use(path: Path, *, submits: bool) -> None:
    """Raise UsageError for a run directory whose run has not ended: two would write the same checkpoints.

    If SLURM cannot be asked, that is SchedulerError for a job to be submitted, and else a warning.
    """
    try:
        found = read_own_manifest(path)
    except PermissionError:  # what opens the directory refuses it, and says why
        return
    if take_dict(found, "outcome").get("state") not in OPEN:
        return
    process, job_id, holder = take_dict(found, "process"), read_job(found), ""
    if process and check_process(process):
        holder = f"process {process.get('pid')}, which is running"
    elif job_id and job_id != name_job(os.environ):  # runs in an allocation are judged by their processes
        try:
            job = ask_queue([job_id]).get(job_id)
        except SchedulerError as error:
            if submits:
                raise
            logger.warning(f"whether run_dir={path} is still in use is not known: {error}")
            return
        holder = f"job {job_id}, which is {job.state}" if job and job.state not in ENDED else ""
    if holder:
        target = job_id if holder.startswith("job") else quote_word(str(path.absolute()))
        raise UsageError(f"run_dir={path} belongs to {holder}: wait for its end, or `launch cancel {target}`")
