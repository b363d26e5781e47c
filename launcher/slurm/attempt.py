"""An attempt of a job, from the manifest that it begins with to its end.

The end: what happened is found out, a requeue is decided and carried out, and people are told.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.errors import EXIT_MACHINE, LaunchError, SchedulerError
from launcher.launch.ending import post_end
from launcher.protocol import name_host
from launcher.runs.manifest import (
    OF_ATTEMPT,
    OF_START,
    describe_start,
    read_manifest,
    read_time,
    stamp_time,
    take_dict,
    take_earlier,
    write_manifest,
)
from launcher.runs.progress import AttemptProgress, describe_progress, measure_attempt
from launcher.runs.run_directory import RunDir, release_space, reserve_space
from launcher.slurm import commands
from launcher.slurm.attempt_end import (
    CAUSES,
    AttemptEnd,
    Decision,
    PastAttempt,
    StepReport,
    classify_kill,
    decide_requeue,
    diagnose,
)
from launcher.slurm.job_request import JobRequest, hold_manifest
from launcher.slurm.node_order import NodeOrder
from launcher.text import break_line, describe_time

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
"""A manifest, or one of its earlier attempts."""
CLAIM = "ended-by-"
"""`logs/ATTEMPT/ended-by-0` links to the name of the node that ends an attempt, `-1` if that is lost too."""


@dataclass(slots=True)
class Attempt:
    """An attempt that is running."""

    request: JobRequest
    run: RunDir
    environ: Mapping[str, str]
    manifest: Manifest
    requeues: bool
    """The job is ours to requeue; false if `launch` runs in somebody's allocation."""
    prepared: AttemptEnd | None = None
    """What was found and decided when SLURM began to end the job during the step."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes of the ranks, in their order."""
        return tuple(self.manifest["hosts"])

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that wait, without ranks, to replace one that is lost."""
        return tuple(self.manifest.get("spares", ()))

    @property
    def job_id(self) -> str:
        """SLURM's id of the job; `12_3` for an array's member."""
        return commands.name_job(self.environ)

    @property
    def restarts(self) -> int:
        """How often the job had been requeued when this attempt began."""
        return commands.count_restarts(self.environ)

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
        """The attempts that led to this one by requeues of the same job, oldest first."""
        earlier: list[Manifest] = []
        for entry in reversed(take_earlier(self.manifest)):
            requeued = take_dict(entry, "outcome").get("state") == "requeued"
            if not requeued or take_dict(entry, "slurm").get("job_id") != self.job_id:
                break
            earlier.append(entry)
        return tuple(reversed(earlier))

    @property
    def past(self) -> list[PastAttempt]:
        """What the policy looks at in earlier attempts."""
        outcomes = [entry["outcome"] for entry in self.earlier]
        return [PastAttempt(outcome.get("cause"), outcome.get("advanced")) for outcome in outcomes]

    @property
    def number(self) -> int:
        """Its own among the job's attempts, from 1 on; an earlier one may have written no manifest."""
        return max(len(self.earlier), self.restarts) + 1

    def has_advanced(self, advance: AttemptProgress) -> bool | None:
        """Tell whether this attempt came to a later step, or wrote a newer checkpoint, than those before it.

        None if neither a step nor a checkpoint was ever seen: then there is nothing to judge by.
        """
        outcomes = [entry["outcome"] for entry in self.earlier]
        steps = [step for outcome in outcomes if (step := outcome.get("step")) is not None]
        times = [when for outcome in outcomes if (when := outcome.get("checkpoint")) is not None]
        if advance.step is None and advance.newest is None and not steps and not times:
            return None
        later = advance.step is not None and advance.step > max(steps, default=-1)
        return later or (advance.newest is not None and advance.newest > max(times, default=float("-inf")))

    def decide(self, cause: str | None, step: StepReport | None, advance: AttemptProgress) -> Decision:
        """Decide what follows; a job in somebody's allocation never goes back into the queue."""
        stays = cause == "sick_node" and not (step and step.sick)
        if cause and (stays or not self.requeues):
            return Decision(False, cause, CAUSES[cause].text)
        policy, advanced = self.request.config.cluster.requeue, self.has_advanced(advance)
        return decide_requeue(cause, policy, self.past, advanced, self.number)

    def ask_status(self, timeout: float) -> commands.JobState | None:
        """Ask SLURM how the job stands; None if it does not answer."""
        try:
            return commands.ask_job(self.job_id, self.environ, timeout)
        except SchedulerError:
            return None

    def reconstruct_outcome(self) -> None:
        """Write the outcome of an attempt whose batch script wrote none: it died, or was killed.

        A node that is down tells of its loss; the rest are taken for preemptions.
        """
        outcome = take_dict(self.manifest, "outcome")
        lost = [*commands.ask_down_nodes(self.manifest.get("hosts") or (), self.environ)]
        advance = measure_attempt(self.run, self.request.progress_patterns)
        self.manifest["outcome"] = {
            **outcome,
            "state": "requeued",
            "cause": outcome.get("cause") or ("node_failure" if lost else "preempted"),
            "reason": f"{', '.join(lost)} was lost" if lost else "it was killed before it could say why",
            "lost": lost,
            "step": advance.step,
            "checkpoint": advance.newest,
            "advanced": self.has_advanced(advance),
        }

    def write(self) -> None:
        """Write the manifest, unless another node has ended this attempt; if that fails, say so and go on."""
        if is_taken_over(self.run):
            return
        try:
            write_manifest(self.run, self.manifest)
        except OSError as error:
            logger.warning(f"the manifest could not be written ({error})")


def start_attempt(
    request: JobRequest, run: RunDir, environ: Mapping[str, str], order: NodeOrder, *, requeues: bool
) -> Attempt:
    """Write the manifest of a new attempt, with those before it, and return it.

    A submission that never ran is no attempt, nor is what `launch` has written of this start in an allocation
    (if the job is not ours to requeue). Raises LaunchError if the job is to end at once, by the policy or
    since the last attempt has finished, with that one's code: SLURM requeues a preempted job, and one that
    lost a node, by itself, and what `cluster.requeue` says of it is carried out here.
    """
    found: Manifest = read_manifest(run.path) or describe_start(run, request.command, request.choices)
    state, slurm = take_dict(found, "outcome").get("state"), take_dict(found, "slurm")
    earlier, job_id = take_earlier(found), commands.name_job(environ)
    if requeues and state == "running" and slurm.get("job_id") == job_id:
        last_run = RunDir(run.path, found.get("attempt") or 0)
        Attempt(request, last_run, environ, found, requeues).reconstruct_outcome()
    if requeues and state != "submitted" and slurm:
        earlier.append({key: found[key] for key in OF_ATTEMPT if key in found})
    spares = order.hosts[request.max_nodes :]
    manifest = {
        **{key: value for key, value in found.items() if key not in OF_START},
        "directory": request.directory,
        "submitted": found.get("submitted") or found.get("started"),
        "started": stamp_time(),
        "ended": None,
        "hosts": list(order.hosts[: request.max_nodes]),
        "attempt": run.first_attempt,
        "slurm": {**slurm, "job_id": job_id, "restarts": commands.count_restarts(environ)},
        "outcome": {"state": "running"},
        "earlier": earlier,
        "node_order": {"source": order.source, "why": order.why, "hosts": list(order.hosts)},
        **({"spares": list(spares)} if spares else {}),
    }
    attempt = Attempt(request, run, environ, manifest, requeues)
    if requeues and attempt.past:
        *before, last = attempt.past
        decision = decide_requeue(last.cause, request.config.cluster.requeue, before, last.advanced)
        if not decision.requeue:  # the manifest is closed with the last attempt's end
            number, closed = len(before) + 1, attempt.earlier[-1]
            state = "failed" if decision.cause else "succeeded"
            closed["outcome"] |= {"state": state, "cause": decision.cause, "reason": decision.reason}
            attempt.manifest = {**manifest, **closed, "earlier": earlier[:-1]}
            attempt.write()
            refusal = LaunchError(
                f"attempt {number + 1} does not begin: attempt {number} ended: {decision.reason}"
            )
            refusal.exit_code = closed["outcome"].get("exit_code") or int(state == "failed")
            raise refusal
    with hold_manifest(run.path):
        attempt.write()
    reserve_space(run)
    return attempt


def list_claims(run: RunDir) -> list[str]:
    """Return the nodes that have taken it upon themselves to end an attempt; the last one counts."""
    found = (run.path / "logs" / str(run.first_attempt)).glob(f"{CLAIM}*")
    try:
        return [str(path.readlink()) for path in sorted(found)]
    except OSError:
        return []


def claim_end(run: RunDir, host: str, lost: Collection[str] = ()) -> str:
    """Take it upon a node to end an attempt; returns the node that does, empty on a full disk.

    The claim of a node among `lost` counts no more.
    """
    claims = list_claims(run)
    if not claims or claims[-1] in lost:
        with contextlib.suppress(OSError):  # a link is made whole or not at all, by one of many
            (run.path / "logs" / str(run.first_attempt) / f"{CLAIM}{len(claims)}").symlink_to(host)
    return next(reversed(list_claims(run)), "")


def is_taken_over(run: RunDir) -> bool:
    """Tell whether another node has ended the attempt of this process, whose own was taken for lost."""
    return any(host != name_host(os.environ) for host in list_claims(run)[-1:])


def prepare_for_kill(attempt: Attempt) -> None:
    """Decide and requeue at once if SLURM has begun to end the job: called on SIGTERM, while the step runs.

    SLURM kills everything KillWait later, and the ranks may need all of that time. The manifest tells why,
    and the job is in the queue again, before that. Does nothing if a user sent the signal.
    """
    if attempt.prepared or not attempt.requeues:
        return
    status = attempt.ask_status(commands.SHORT_TIMEOUT)
    is_running = status is None or status.state in commands.RUNNING
    if not is_running and classify_kill(status, attempt.restarts) and may_end(attempt):
        attempt.prepared = carry_out(attempt, diagnose(attempt, None, status))


def may_end(attempt: Attempt) -> bool:
    """Tell whether it is still this node that ends the attempt: another one may have taken it for lost."""
    own = name_host(attempt.environ)
    if not attempt.is_guarded or claim_end(attempt.run, own) in ("", own):
        return True
    logger.info("another node has ended this attempt, to which this one was lost")
    return False


def end_attempt(attempt: Attempt, step: StepReport) -> int:
    """Diagnose an attempt's end, requeue the job or not, log it, and return the batch script's exit code."""
    if not may_end(attempt):
        return EXIT_MACHINE
    troubles = [release_space(attempt.run), *(record.trouble for record in step.records)]
    trouble = next(filter(None, troubles), "")
    if trouble:
        break_line()
    before = attempt.prepared
    if before is None:
        end = carry_out(attempt, diagnose(attempt, step, trouble=trouble))
    else:
        end = diagnose(attempt, step, before.status, before.lost, trouble)
        cause = before.decision.cause if end.cause else None
        end = replace(end, decision=replace(before.decision, cause=cause))
        write_outcome(attempt, end)
    report_end(attempt, end)
    return end.exit_code


def report_end(attempt: Attempt, end: AttemptEnd) -> None:
    """Say how an attempt went and where everything is, here and to `notify.url`."""
    if end.trouble and end.cause is None:
        logger.info(f"warning: {end.trouble}")
    now, result = time.time(), describe_progress(end.advance.steps)
    seconds = now - (read_time(attempt.manifest["started"]) or now)
    logger.info(f"{end.state} after {describe_time(seconds)}" + (f": {result}" if result else ""))
    logger.info(f"run directory {attempt.run.path}")
    notify, outcome = attempt.request.config.notify, attempt.manifest["outcome"]
    post_end(notify, attempt.run, attempt.hosts[0], outcome, job_id=attempt.job_id)


def carry_out(attempt: Attempt, end: AttemptEnd) -> AttemptEnd:
    """Log an end, write the manifest, and requeue: the manifest first, since a requeue ends this process too.

    Returns the end with another decision if SLURM refuses the requeue.
    """
    for line in end.list_failure_lines():
        logger.info(line)
    write_outcome(attempt, end)
    decision = end.decision
    if end.cause:
        reason = decision.reason
        if end.kill == "requeued" and not decision.requeue:  # SLURM's own requeue is not undone here
            reason = f"{reason}; SLURM requeues it, and the next attempt ends at once"
        logger.info(f"attempt {attempt.number} ended: {reason}")
    if not decision.requeue:
        return end
    try:
        if end.kill != "requeued":
            patience = commands.SHORT_TIMEOUT if end.kill else math.inf
            commands.requeue_job(attempt.job_id, attempt.environ, patience)
    except SchedulerError as error:
        reason = f"{decision.reason}, but SLURM refuses ({error})"
        end = replace(end, decision=replace(decision, requeue=False, reason=reason))
        logger.warning(f"the job could not be requeued ({error})")
        write_outcome(attempt, end)
        return end
    # The next attempt is kept off the nodes that this one and those before it have lost, also those that a
    # spare one has replaced, or found sick.
    bad = [*end.lost, *(end.step.sick if end.step else ())]
    for entry in (attempt.manifest, *reversed(attempt.earlier)):
        outcome, replaced = entry["outcome"], entry.get("replacements") or ()
        bad += [host for key in ("lost", "sick") for host in outcome.get(key) or ()]
        bad += [one["lost"] for one in replaced]
    if bad:
        min_nodes = attempt.request.min_nodes + attempt.request.config.cluster.spares
        warning = commands.exclude_nodes(attempt.job_id, list(dict.fromkeys(bad)), min_nodes, attempt.environ)
        if warning:
            logger.warning(warning)
    return end


def write_outcome(attempt: Attempt, end: AttemptEnd) -> None:
    """Complete the manifest, with the hangs and stragglers that the node has written that judged them."""
    from launcher.watch.run_files import read_job_state  # not at the start of the job

    manifest, state = attempt.manifest, read_job_state(attempt.run.path, own=True)
    if state and state.attempt == attempt.run.first_attempt:
        account = {"hangs": [*map(asdict, state.hangs)], "stragglers": [*map(asdict, state.stragglers)]}
        manifest |= {key: found for key, found in account.items() if found}
    advanced = attempt.has_advanced(end.advance)
    manifest["ended"] = stamp_time()
    manifest["outcome"] = {**end.describe(attempt.run.first_attempt), "advanced": advanced}
    attempt.write()
