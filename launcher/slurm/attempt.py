"""A running attempt, and the attempts before it in the manifest."""

import contextlib
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import SchedulerError
from launcher.files import open_below
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
from launcher.runs.progress import AttemptProgress, measure_attempt
from launcher.runs.run_directory import RunDir, closing_descriptor
from launcher.slurm.attempt_end import AttemptEnd, Decision
from launcher.slurm.commands import (
    ask_last_end,
    ask_node_fields,
    ask_node_states,
    count_restarts,
    is_down,
    name_job,
    parse_slurm_time,
)
from launcher.slurm.job_request import JobRequest

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
"""A manifest, or one of its earlier attempts."""
CLAIM = "end-"
"""`logs/ATTEMPT/end-0` is a link to the name of the node that ends an attempt."""
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
    prepared: tuple[AttemptEnd, Decision] | None = None
    """What was found and decided when SLURM began to end the job, while the step still ran."""

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
        earlier = [take_dict(entry, "slurm") for entry in take_earlier(self.manifest)]
        known = [slurm.get("restarts") for slurm in earlier if slurm.get("job_id") == self.job_id]
        newest = max((number for number in known if isinstance(number, int)), default=-1)
        return max(self.restarts - 1 - newest, 0)

    def measure_progress(self) -> AttemptProgress:
        """Return how far it has come."""
        return measure_attempt(self.run, self.request.progress_patterns)


def make_attempt_manifest(
    request: JobRequest, run: RunDir, environ: Mapping[str, str], hosts: Sequence[str], *, owned: bool
) -> Manifest:
    """Return the manifest of an attempt that begins, with those before it; nothing is written.

    A submission that never ran is no attempt, nor is what `launch` has written of this very start in an
    allocation (if the job is not `owned`).
    """
    found: Manifest = read_manifest(run.path) or describe_start(run, request.command, request.choices)
    state, slurm = take_dict(found, "outcome").get("state"), take_dict(found, "slurm")
    earlier = take_earlier(found)
    job_id = name_job(environ)
    if owned and state == "running" and slurm.get("job_id") == job_id:
        found["outcome"] = reconstruct_outcome(request, found, run, environ)
    if owned and state != "submitted" and slurm:
        earlier.append({key: found[key] for key in OF_ATTEMPT if key in found})
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    for key in OF_START:
        found.pop(key, None)
    return {
        **found,
        "directory": request.directory,
        "submitted": found.get("submitted") or found.get("started"),
        "started": stamp_time(),
        "ended": None,
        "hosts": list(hosts),
        "attempt": run.first_attempt,
        "slurm": {**slurm, "job_id": job_id, "restarts": int(restarts) if restarts.isdecimal() else 0},
        "outcome": {"state": "running"},
        "earlier": earlier,
    }


def reconstruct_outcome(
    request: JobRequest, found: Manifest, run: RunDir, environ: Mapping[str, str]
) -> Manifest:
    """Return the outcome of an attempt whose batch script wrote none: it died with its node, or was killed.

    Accounting tells, if there is any. Else a node that is down, or was booted since, tells of its loss;
    and what is left is a preemption.
    """
    outcome, hosts = take_dict(found, "outcome"), [str(host) for host in found.get("hosts") or ()]
    since = read_time(found.get("started"))
    lost: list[str] = []
    with contextlib.suppress(SchedulerError):
        states, nodes = ask_node_states(hosts, environ), ask_node_fields(hosts, environ)
        boots = {host: parse_slurm_time(fields.get("BootTime", "")) for host, fields in nodes.items()}
        booted = {host for host, boot in boots.items() if since and boot and boot > since}
        lost = [host for host in hosts if host in booted or is_down(states.get(host, ""))]
    word = ask_last_end(name_job(environ), environ)
    cause = outcome.get("cause") or ENDS.get(word) or ("preempted" if word or not lost else "node_failure")
    advance = measure_attempt(RunDir(run.path, found.get("attempt") or 0), request.progress_patterns)
    earlier = list_requeued_attempts(found, name_job(environ))
    reason = f"{', '.join(lost)} was lost" if lost else "it was killed before it could say why"
    return {
        **outcome,
        "state": "requeued",
        "cause": cause,
        "reason": reason,
        "lost": lost,
        **describe_advance(advance),
        "advanced": has_advanced(advance, earlier),
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


def describe_advance(advance: AttemptProgress) -> Manifest:
    """Return an attempt's progress for the manifest."""
    return {"step": advance.step, "checkpoint": advance.newest}


def claim_end(run: RunDir, host: str, lost: Collection[str] = ()) -> bool:
    """Take it upon a node to end an attempt; False if another one has done so, and is not lost."""
    try:
        with closing_descriptor(open_below(run.path, "logs", str(run.first_attempt))) as at:
            claims = list_claims(run)
            if claims and claims[-1] not in (host, *lost):
                return False
            if host not in claims[-1:]:
                os.symlink(host, f"{CLAIM}{len(claims)}", dir_fd=at)  # whole or not at all, for one of many
    except FileExistsError:
        return False
    except OSError:
        return not lost  # the disk is full: nobody can, and the first node goes first
    return True


def list_claims(run: RunDir) -> list[str]:
    """Return the nodes that have taken it upon themselves to end an attempt, the last one last."""
    return [str(path.readlink()) for path in sorted(run.path.glob(f"logs/{run.first_attempt}/{CLAIM}*"))]


def is_taken_over(run: RunDir) -> bool:
    """Tell whether another node has ended the attempt of this process, whose own was taken for lost."""
    try:
        return any(host != name_host(os.environ) for host in list_claims(run)[-1:])
    except OSError:
        return False


def try_write_manifest(run: RunDir, manifest: Manifest) -> None:
    """Write the manifest, unless another node has taken the attempt over; if that fails, say so and go on."""
    if is_taken_over(run):
        return
    try:
        write_manifest(run, manifest)
    except OSError as error:
        logger.warning(f"the manifest could not be written ({error})")
