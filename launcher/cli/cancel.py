"""`launch cancel`: ends runs, in SLURM's queue and on this machine, after asking."""

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.runs import choose_named
from launcher.cli.verbs import Call
from launcher.errors import EXIT_MACHINE, MachineError, SchedulerError, UsageError
from launcher.launch.signals import KILL_GRACE, TERM_GRACE
from launcher.runs.manifest import OPEN, read_manifest, stamp_time, take_dict, write_manifest
from launcher.runs.run_directory import RunDir
from launcher.runs.run_process import check_process, open_process
from launcher.runs.run_status import RunStatus
from launcher.slurm.commands import ENDED, ask_queue, run_slurm
from launcher.slurm.run_states import find_run_states
from launcher.text import describe_time, escape_text

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 60.0
"""Seconds that SLURM has to end jobs: twice KillWait's default."""
POLL_SECONDS = 0.5
"""Seconds between two questions to SLURM."""
EXIT_DECLINED = 1
"""Exit code if the user answers no."""


def cancel_runs(call: Call) -> int:
    """Cancel runs; return 0 if all of them have ended, 1 if the user answers no, 3 if one is still ending.

    Raises UsageError for unknown runs and if there is nobody to ask, MachineError for another host's, and
    SchedulerError if SLURM refuses.
    """
    config, names = call.config, call.names
    if not names:
        raise UsageError("cancel which run? `launch status` lists them: launch cancel NAME/ID")
    standing = find_run_states(choose_named(config, names), own=True)
    if standing.error:
        raise standing.error
    for run in standing.runs:
        _check_cancellable(run)
        if not run.is_live:
            logger.info(f"{run.run} has ended already: {run.state}{f' ({run.reason})' if run.reason else ''}")
    live = [run for run in standing.runs if run.is_live]
    if live and not config.yes and not _confirm(live):
        logger.info("nothing was cancelled")
        return EXIT_DECLINED
    jobs = [run for run in live if not run.process]
    left = _cancel_jobs(jobs) if jobs else 0
    for run in live:
        left += _stop_process(run, config.torchrun.shutdown_timeout) if run.process else 0
    return EXIT_MACHINE if left else 0


def _check_cancellable(run: RunStatus) -> None:
    """Raise MachineError for a run that cannot be cancelled from here."""
    if run.state == "unknown":
        raise MachineError(f"{run.run} is left alone: {run.reason} ({run.path})")
    if not run.is_live:
        return
    if run.process:
        if check_process(run.process) is None:
            host, pid = run.process.get("host"), run.process.get("pid")
            raise MachineError(f"{run.run} is process {pid} on {host}: give this command there")
        with contextlib.suppress(ProcessLookupError):
            os.close(_open_launch(run))
    elif not run.job_id:
        raise MachineError(
            f"{run.run} has no job, and its manifest names no process: end its `launch` where it was started"
        )


def _open_launch(run: RunStatus) -> int:
    """Return a pidfd of the `launch` that a local run hangs on.

    Raises ProcessLookupError if it is gone, and MachineError if the process is no launch of this run.
    """
    try:
        return open_process(run.process, Path(run.path))
    except PermissionError as error:
        raise MachineError(f"{run.run} is left alone: {error.strerror} ({run.path})") from None


def _confirm(runs: Sequence[RunStatus]) -> bool:
    """Ask whether to cancel `tiny/ID, job 12, running on n[0-3] for 3 h 20 min`.

    Raises UsageError if there is no terminal.
    """
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("launch cancel asks first, and there is no terminal to ask on: give yes=true")
    described = []
    for run in runs:
        what = f"job {run.job_id}" if not run.process else f"process {run.process.get('pid')}"
        where = f" on {run.nodelist}" if run.nodelist and run.state == "running" else ""
        since = f" for {describe_time(run.seconds)}" if run.seconds is not None else ""
        described.append(escape_text(f"{run.run}, {what}, {run.state}{where}{since}"))
    question = f"cancel {described[0]}?"
    if len(runs) > 1:
        sys.stderr.writelines(f"  {one}\n" for one in described)
        question = f"cancel these {len(runs)} runs?"
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _cancel_jobs(runs: Sequence[RunStatus]) -> int:
    """Cancel jobs of SLURM, wait for their ends, and return how many are still ending."""
    left = [str(run.job_id) for run in runs]
    run_slurm(["scancel", *left])
    end, said = time.monotonic() + CANCEL_SECONDS, False
    while True:
        with contextlib.suppress(SchedulerError):  # all of them may live while it does not answer
            jobs = ask_queue(left)
            left = [job_id for job_id in left if job_id in jobs and jobs[job_id].state not in ENDED]
        if not left or time.monotonic() >= end:
            break
        if not said:
            said = True
            logger.info(f"cancelling {', '.join(left)}, whose ranks have SLURM's KillWait to end")
        time.sleep(POLL_SECONDS)
    for run in runs:
        if run.job_id in left:
            logger.info(f"{run.run}, job {run.job_id}, is still ending: see launch status {run.run}")
        else:
            _record_cancellation(run)
            logger.info(f"{run.run}, job {run.job_id}, is cancelled")
    return len(left)


def _record_cancellation(run: RunStatus) -> None:
    """Write that a run was cancelled, if its job has not: it never began, or was killed."""
    path = Path(run.path)
    manifest = read_manifest(path)
    if take_dict(manifest, "outcome").get("state") not in OPEN:
        return
    manifest["ended"] = stamp_time()
    words = {"cause": "cancelled", "reason": "cancelled", "exit_code": 128 + signal.SIGTERM}
    manifest["outcome"] = {"state": "stopped", **words}
    try:
        write_manifest(RunDir(path), manifest)
    except OSError as error:
        logger.warning(f"{path}/manifest.json could not be written ({error.strerror})")


def _stop_process(run: RunStatus, grace: float) -> int:
    """Send a local run's `launch` SIGTERM and wait for its end; returns 1 if it is still ending."""
    try:
        descriptor = _open_launch(run)
    except ProcessLookupError:
        logger.info(f"{run.run} has just ended")
        return 0
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        logger.info(f"stopping {run.run}, whose ranks have {grace:.0f} s to end")
        # After the grace, launch itself goes on to SIGKILL.
        ready, _, _ = select.select([descriptor], [], [], grace + TERM_GRACE + 2 * KILL_GRACE)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    (now,) = find_run_states([Path(run.path)]).runs
    logger.info(f"{run.run} has ended: {now.state}" if ready else f"{run.run} is still ending")
    return 0 if ready else 1
