"""Keeps two runs from writing into one run directory at the same time."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import SchedulerError, UsageError
from launcher.runs.manifest import OPEN, read_job, read_own_manifest, take_dict
from launcher.runs.run_process import check_process
from launcher.slurm.own_job import name_job
from launcher.slurm.queue import ENDED, ask_queue
from launcher.text import quote_word

logger = logging.getLogger(__name__)


def refuse_busy(path: Path, *, submits: bool) -> None:
    """Raise UsageError for a run directory whose run has not ended: two would write the same checkpoints.

    Where SLURM cannot be asked, that is SchedulerError for a job to be submitted, and else a warning.
    """
    try:
        found = read_own_manifest(path)
    except PermissionError:  # what opens the directory refuses it, and says why
        return
    if take_dict(found, "outcome").get("state") not in OPEN:
        return
    process = take_dict(found, "process")
    if process and check_process(process):
        refuse_two(path, f"process {process.get('pid')}", "running", quote_word(str(path.absolute())))
    try:
        state, job_id = ask_holder(found), str(read_job(found))
    except SchedulerError as error:
        if submits:
            raise
        logger.warning(f"whether run_dir={path} is still in use is not known: {error}")
        return
    if state:
        refuse_two(path, f"job {job_id}", state, job_id)


def refuse_two(path: Path, holder: str, state: str, target: str) -> None:
    """Raise UsageError for a run directory that another run is at."""
    raise UsageError(
        f"run_dir={path} belongs to {holder}, which is {state}: wait for its end, or `launch cancel {target}`"
    )


def ask_holder(manifest: Mapping[str, object]) -> str | None:
    """Return SLURM's state of a run's job where it has not ended; raises SchedulerError.

    The job that this process is in is no answer: of starts in an allocation, their processes tell.
    """
    job_id = read_job(manifest)
    if job_id is None or job_id == name_job(os.environ):
        return None
    state = ask_queue([job_id]).get(job_id)
    return state.state if state and state.state not in ENDED else None
