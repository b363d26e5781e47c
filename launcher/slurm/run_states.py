"""How runs stand: what their directories tell, against what SLURM says of their jobs."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import SchedulerError, UsageError
from launcher.runs.manifest import OPEN, read_job, read_own_manifest, read_time, take_dict
from launcher.runs.rank_logs import find_job_logs
from launcher.runs.run_directory import FULL, RunDir, is_full
from launcher.runs.run_process import check_process
from launcher.runs.run_status import RunStatus, mark_lost, read_status
from launcher.slurm.commands import ENDED, JobState, ask_queue, name_job
from launcher.text import quote_word

logger = logging.getLogger(__name__)

WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
"""SLURM's states of a job that is to start, or to start again."""
TOLERANCE = 600.0
"""Seconds by which the clocks of a login node and of slurmctld may differ."""
ENDINGS = {
    "COMPLETED": ("succeeded", ""),
    "CANCELLED": ("stopped", "cancelled"),
    "TIMEOUT": ("failed", "time limit"),
    "PREEMPTED": ("failed", "preempted"),
    "NODE_FAIL": ("failed", "a node was lost"),
    "OUT_OF_MEMORY": ("failed", "out of memory: ask for more with cluster.mem"),
}
"""What SLURM's final states say of a run that did not come to write how it ended; the others: failed."""


@dataclass(frozen=True, slots=True)
class RunStates:
    """Runs, and what SLURM did not say of them."""

    runs: tuple[RunStatus, ...]
    error: SchedulerError | None = None
    """Why SLURM could not be asked: then the runs are as their manifests have them."""


def find_run_states(paths: Sequence[Path], *, own: bool = False) -> RunStates:
    """Find out how some runs stand; SLURM is asked about those that have not ended by their manifests.

    With `own`, what another user may have written is not heard: see `read_status`.
    """
    runs = [read_status(path, own=own) for path in paths]
    job_ids = [run.job_id for run in runs if run.job_id and (run.is_live or run.state == "unknown")]
    try:
        jobs = ask_queue(job_ids) if job_ids else {}
    except SchedulerError as error:
        return RunStates(tuple(runs), error)
    return RunStates(tuple(update_run(run, jobs.get(run.job_id or "")) for run in runs))


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
    if job is None or is_other_job(run, job):
        return mark_lost(run, explain_forgotten(run)) if run.is_live else run
    run = replace(
        run,
        slurm_state=job.state,
        partition=job.partition,
        nodes=job.nodes or run.nodes,
        nodelist=job.nodelist,
        restarts=max(run.restarts, job.restarts or 0),
    )
    if job.state in ENDED:
        return apply_end(run, job)
    if job.state in WAITING:
        return replace(run, state="queued", reason=job.reason, expected_start=job.start)
    # While its nodes are cleared, the manifest tells whether it is to begin again.
    clearing = job.state == "COMPLETING"
    state = run.state if clearing else "running"
    return replace(run, state=state, reason="" if job.state == "RUNNING" else job.state.lower())


def apply_end(run: RunStatus, job: JobState) -> RunStatus:
    """Return a run with the end that SLURM tells of."""
    state, text = ENDINGS.get(job.state, ("failed", job.state))
    parts = [text, "" if job.reason == "NonZeroExitCode" else job.reason]
    if job.state not in ENDINGS and job.exit_code:
        parts.append(f"exit code {job.exit_code}")
    parts.append(FULL if is_full(RunDir(Path(run.path))) else "")
    reason = "; ".join(filter(None, parts))
    return replace(run, state=state, reason=reason, exit_code=job.exit_code, seconds=None)


def is_other_job(run: RunStatus, job: JobState) -> bool:
    """Tell whether a number was given again, to a job that was submitted after this run had begun.

    A controller that has lost its state counts from the start. What has been requeued has a new time.
    """
    submitted = read_time(job.submitted)
    if submitted is None or run.known_since is None or job.restarts != 0:
        return False
    return submitted > run.known_since + TOLERANCE


def explain_forgotten(run: RunStatus) -> str:
    """Say what it means that SLURM no longer knows a job whose end nobody has written down."""
    if run.state == "queued" and not run.attempts:
        if find_job_logs(Path(run.path)):
            return f"job {run.job_id} ended before it came to the program (cluster.setup?): see launch logs"
        return f"SLURM no longer knows job {run.job_id}, which never began: it was cancelled in the queue"
    return f"SLURM no longer knows job {run.job_id}, and how it ended was not written down"


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
    process, job_id = take_dict(found, "process"), read_job(found)
    if process and check_process(process):
        refuse_two_runs(path, f"process {process.get('pid')}", "running", quote_word(str(path.absolute())))
    if job_id is None or job_id == name_job(os.environ):
        return  # runs in an allocation are judged by their processes
    try:
        job = ask_queue([job_id]).get(job_id)
    except SchedulerError as error:
        if submits:
            raise
        logger.warning(f"whether run_dir={path} is still in use is not known: {error}")
        return
    if job and job.state not in ENDED:
        refuse_two_runs(path, f"job {job_id}", job.state, job_id)


def refuse_two_runs(path: Path, holder: str, state: str, target: str) -> None:
    """Raise UsageError for a run directory that another run is at."""
    raise UsageError(
        f"run_dir={path} belongs to {holder}, which is {state}: wait for its end, or `launch cancel {target}`"
    )
