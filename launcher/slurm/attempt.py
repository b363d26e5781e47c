"""A running attempt, the manifest that it begins with, and the attempts before it."""

import contextlib
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import LaunchError, SchedulerError
from launcher.protocol import name_host
from launcher.runs.manifest import (
    OF_ATTEMPT,
    OF_START,
    describe_start,
    read_manifest,
    stamp_time,
    take_dict,
    take_earlier,
    write_manifest,
)
from launcher.runs.progress import AttemptProgress, measure_attempt
from launcher.runs.run_directory import RunDir, reserve_space
from launcher.slurm.attempt_end import AttemptEnd, Decision, PastAttempt, decide_requeue
from launcher.slurm.commands import JobState, ask_last_end, ask_node_states, count_restarts, is_down, name_job
from launcher.slurm.job_request import JobRequest, hold_manifest
from launcher.slurm.node_order import NodeOrder

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
"""A manifest, or one of its earlier attempts."""
CLAIM = "ended-by-"
"""`logs/ATTEMPT/ended-by-0` links to the name of the node that ends an attempt, `-1` if that is lost too."""
ENDS = {
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "TIMEOUT": "timeout",
    "REQUEUED": "requeued",
}
"""States of an attempt in accounting that was requeued for something else than a preemption."""


@dataclass(slots=True)
class Attempt:
    """An attempt that is running."""

    request: JobRequest
    run: RunDir
    environ: Mapping[str, str]
    hosts: tuple[str, ...]
    manifest: Manifest
    requeues: bool
    """The job is ours to requeue; false if `launch` runs in somebody's allocation."""
    started: float = field(default_factory=time.time)
    spares: tuple[str, ...] = ()
    """Nodes that wait, without ranks, to replace one that is lost."""
    prepared: tuple[JobState, AttemptEnd, Decision] | None = None
    """What SLURM said, and what was found and decided, when it began to end the job during the step."""

    @property
    def job_id(self) -> str:
        """SLURM's id of the job; `12_3` for an array's member."""
        return name_job(self.environ)

    @property
    def restarts(self) -> int:
        """How often the job had been requeued when this attempt began."""
        return count_restarts(self.environ)

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on with fewer nodes."""
        return self.request.min_nodes < self.request.max_nodes

    @property
    def is_guarded(self) -> bool:
        """Whether SLURM would have the job run on without its first node, so that others watch that one."""
        return self.requeues and (self.is_elastic or self.request.config.cluster.spares > 0)

    @property
    def step_hosts(self) -> tuple[str, ...]:
        """All nodes with a task of ours: those of the ranks, and the spare ones."""
        return (*self.hosts, *self.spares)

    @property
    def earlier(self) -> tuple[Manifest, ...]:
        """The attempts before this one, each requeued into the next; a start by hand begins anew."""
        return list_requeued_attempts(self.manifest, self.job_id)

    @property
    def unrecorded(self) -> int:
        """Attempts that SLURM counts and the manifest lacks, since it could not be written."""
        slurm = [take_dict(entry, "slurm") for entry in take_earlier(self.manifest)]
        known = [int(one.get("restarts", -1)) for one in slurm if one.get("job_id") == self.job_id]
        return max(self.restarts - 1 - max(known, default=-1), 0)

    def measure_progress(self) -> AttemptProgress:
        """Return how far it has come."""
        return measure_attempt(self.run, self.request.progress_patterns)

    def write(self) -> None:
        """Write the manifest, unless another node has ended this attempt; if that fails, say so and go on."""
        if is_taken_over(self.run):
            return
        try:
            write_manifest(self.run, self.manifest)
        except OSError as error:
            logger.warning(f"the manifest could not be written ({error})")


class AttemptRefusedError(LaunchError):
    """No further attempt begins, by the policy or since the last one has finished; it has that one's code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def start_attempt(
    request: JobRequest,
    run: RunDir,
    environ: Mapping[str, str],
    order: NodeOrder,
    *,
    requeues: bool = True,
) -> Attempt:
    """Write the manifest of a new attempt, with those before it, and return it.

    A submission that never ran is no attempt, nor is what `launch` has written of this start in an allocation
    (if the job is not ours to requeue). Raises AttemptRefusedError if the job is to end at once:
    SLURM requeues a preempted job, and one that lost a node, by itself, and what `cluster.requeue` says of it
    is carried out here.
    """
    found: Manifest = read_manifest(run.path) or describe_start(run, request.command, request.choices)
    state, slurm = take_dict(found, "outcome").get("state"), take_dict(found, "slurm")
    earlier, job_id = take_earlier(found), name_job(environ)
    if requeues and state == "running" and slurm.get("job_id") == job_id:
        found["outcome"] = reconstruct_outcome(request, found, run, environ)
    if requeues and state != "submitted" and slurm:
        earlier.append({key: found[key] for key in OF_ATTEMPT if key in found})
    hosts, spares = order.hosts[: request.max_nodes], order.hosts[request.max_nodes :]
    manifest = {
        **{key: value for key, value in found.items() if key not in OF_START},
        "directory": request.directory,
        "submitted": found.get("submitted") or found.get("started"),
        "started": stamp_time(),
        "ended": None,
        "hosts": list(hosts),
        "attempt": run.first_attempt,
        "slurm": {**slurm, "job_id": job_id, "restarts": count_restarts(environ)},
        "outcome": {"state": "running"},
        "earlier": earlier,
        "node_order": {"source": order.source, "why": order.why, "hosts": list(order.hosts)},
        **({"spares": list(spares)} if spares else {}),
    }
    attempt = Attempt(request, run, environ, hosts, manifest, requeues, spares=spares)
    past = list_past_attempts(attempt.earlier) if requeues else []
    if past:
        *before, last = past
        decision = decide_requeue(last.cause, request.config.cluster.requeue, before, last.advanced)
        if not decision.requeue:  # the manifest is closed with the last attempt's end
            closed = attempt.earlier[-1]
            state = "failed" if decision.cause else "succeeded"
            closed["outcome"] |= {"state": state, "cause": decision.cause, "reason": decision.reason}
            attempt.manifest = {**manifest, **closed, "earlier": earlier[:-1]}
            attempt.write()
            number = len(past)
            text = f"attempt {number + 1} does not begin: attempt {number} ended: {decision.reason}"
            code = closed["outcome"].get("exit_code") or int(state == "failed")
            raise AttemptRefusedError(text, code)
    with hold_manifest(run.path):
        attempt.write()
    reserve_space(run)
    return attempt


def reconstruct_outcome(
    request: JobRequest, found: Manifest, run: RunDir, environ: Mapping[str, str]
) -> Manifest:
    """Return the outcome of an attempt whose batch script wrote none: it died with its node, or was killed.

    Accounting tells, if there is any. Else a node that is down tells of its loss; the rest are preemptions.
    """
    outcome, hosts = take_dict(found, "outcome"), [str(host) for host in found.get("hosts") or ()]
    lost: list[str] = []
    with contextlib.suppress(SchedulerError):
        lost = [host for host, state in ask_node_states(hosts, environ).items() if is_down(state)]
    word = ask_last_end(name_job(environ), environ)
    cause = outcome.get("cause") or ENDS.get(word) or ("preempted" if word or not lost else "node_failure")
    advance = measure_attempt(RunDir(run.path, found.get("attempt") or 0), request.progress_patterns)
    reason = f"{', '.join(lost)} was lost" if lost else "it was killed before it could say why"
    return {
        **outcome,
        **{"state": "requeued", "cause": cause, "reason": reason, "lost": lost},
        **{"step": advance.step, "checkpoint": advance.newest},
        "advanced": has_advanced(advance, list_requeued_attempts(found, name_job(environ))),
    }


def list_requeued_attempts(manifest: Manifest, job_id: str) -> tuple[Manifest, ...]:
    """Return the attempts that led to a manifest's last one by requeues of the same job, oldest first."""
    earlier: list[Manifest] = []
    for entry in reversed(take_earlier(manifest)):
        requeued = take_dict(entry, "outcome").get("state") == "requeued"
        if not requeued or take_dict(entry, "slurm").get("job_id") != job_id:
            break
        earlier.append(entry)
    return tuple(reversed(earlier))


def list_past_attempts(earlier: Sequence[Manifest]) -> list[PastAttempt]:
    """Return what the policy looks at in earlier attempts."""
    outcomes = [entry["outcome"] for entry in earlier]
    return [PastAttempt(outcome.get("cause"), outcome.get("advanced")) for outcome in outcomes]


def has_advanced(advance: AttemptProgress, earlier: Sequence[Manifest]) -> bool | None:
    """Tell whether an attempt came to a later step, or wrote a newer checkpoint, than those before it.

    None if neither a step nor a checkpoint was ever seen: then there is nothing to judge by.
    """
    steps = [step for entry in earlier if (step := entry["outcome"].get("step")) is not None]
    times = [time for entry in earlier if (time := entry["outcome"].get("checkpoint")) is not None]
    if advance.step is None and advance.newest is None and not steps and not times:
        return None
    later = advance.step is not None and advance.step > max(steps, default=-1)
    return later or (advance.newest is not None and advance.newest > max(times, default=float("-inf")))


def claim_end(run: RunDir, host: str, lost: Collection[str] = ()) -> str:
    """Take it upon a node to end an attempt; returns the node that does, empty on a full disk.

    The claim of a node among `lost` counts no more.
    """
    claims = list_claims(run)
    if not claims or claims[-1] in lost:
        with contextlib.suppress(OSError):  # a link is made whole or not at all, by one of many
            (run.path / "logs" / str(run.first_attempt) / f"{CLAIM}{len(claims)}").symlink_to(host)
    return next(reversed(list_claims(run)), "")


def list_claims(run: RunDir) -> list[str]:
    """Return the nodes that have taken it upon themselves to end an attempt; the last one counts."""
    found = (run.path / "logs" / str(run.first_attempt)).glob(f"{CLAIM}*")
    try:
        return [str(path.readlink()) for path in sorted(found)]
    except OSError:
        return []


def is_taken_over(run: RunDir) -> bool:
    """Tell whether another node has ended the attempt of this process, whose own was taken for lost."""
    return any(host != name_host(os.environ) for host in list_claims(run)[-1:])
