"""Tells notify.url how a job or an attempt of it has ended."""

import logging
from collections.abc import Mapping

from launcher.config.settings import NotifyConfig
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that a job's end may be late because of a message."""


def post_end(
    config: NotifyConfig, run: RunDir, host: str, outcome: Mapping[str, object], *, job_id: str | None = None
) -> None:
    """Post the manifest's outcome, from one node of the job; a failure is a warning.

    `fail` is for a job that failed, and for an attempt that failed and is requeued; the rest is `end`.
    """
    if config.url is None or run.node_rank > 0:
        return
    try:
        post_outcome(config, run, host, outcome, job_id)
    except Exception as error:  # the program's exit code counts, whatever becomes of the message
        logger.warning(f"notify.url was not told of the end ({type(error).__name__})")


def post_outcome(
    config: NotifyConfig, run: RunDir, host: str, outcome: Mapping[str, object], job_id: str | None
) -> None:
    """Post the manifest's outcome, and wait for it for as long as PATIENCE."""
    from launcher.watch.model import NotifySettings
    from launcher.watch.notify import Notifier

    code = outcome.get("exit_code")
    settings = NotifySettings(url=config.url, format=config.format, events=tuple(config.events))
    name = f"{run.path.parent.name}/{run.path.name}"
    notifier = Notifier(settings, logger.warning, run=name, run_dir=str(run.path), host=host, job_id=job_id)
    notifier.tell(
        choose_event(outcome),
        describe_end(outcome),
        state=str(outcome.get("state")),
        exit_code=code if isinstance(code, int) else None,
    )
    notifier.close(PATIENCE)


def choose_event(outcome: Mapping[str, object]) -> str:
    """Return `fail`, or `end`; jobs that were preempted or that ran into their time limit did not fail."""
    state, cause = outcome.get("state"), outcome.get("cause")
    goes_on = state == "requeued" and cause in ("preempted", "timeout", "requeued")
    return "fail" if state in ("failed", "requeued") and not goes_on else "end"


def describe_end(outcome: Mapping[str, object]) -> str:
    """Return in one sentence why it ended so: who failed first, and the reason that the manifest has."""
    first, reason = outcome.get("first_failure"), outcome.get("reason")
    parts = [str(outcome.get("state"))]
    if isinstance(first, Mapping):
        parts.append(f"rank {first['rank']} on {first['host']} {first['reason']}")
    if reason:
        parts.append(str(reason))
    return "; ".join(parts)
