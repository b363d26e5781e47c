"""What the doctor takes and what it gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.doctor.facts import Health
from launcher.plan.model import Gpu, Machine, Plan
from launcher.runs.run_records import RunRecords

if TYPE_CHECKING:
    from launcher.doctor.node_facts import NodeFacts

LEVELS = ("error", "warning", "note", "unknown", "ok")
"""Worst first. `unknown` is a check that could not be made; errors and warnings make the exit code 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked."""

    level: str
    """One of `LEVELS`."""
    subject: str
    what: str
    """What was found, with the values."""
    why: str = ""
    """Why it matters to a job; empty if all is well."""
    fix: str = ""
    """A command or a setting."""


@dataclass(frozen=True, slots=True)
class BindingTrial:
    """What became of the plan's placements when processes tried them just now."""

    tried: int = 0
    """Ranks that tried theirs."""
    problems: tuple[str, ...] = ()
    """What the kernel refused or took otherwise, in the shim's words."""
    reason: str = ""
    """Why nothing was tried."""


@dataclass(frozen=True, slots=True)
class Case:
    """All that is judged."""

    plan: Plan
    """Where a job would run now."""
    health: Health
    trial: BindingTrial
    num_workers: int = 2
    """DataLoader workers that each rank would like."""
    environ: Mapping[str, str] | None = None
    """The environment that ranks would inherit; None for another machine's."""
    run: RunRecords | None = None
    """The last run; None if there is none."""
    run_reason: str = ""
    """Why there is no run to compare."""
    node: "NodeFacts | None" = None
    """What preflight looks at before a job; None for a snapshot."""
    min_free_kib: float = 1 << 20
    """Free space that directories which the job writes to should have."""

    @property
    def machine(self) -> Machine:
        """The machine that is planned for."""
        return self.plan.machine

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that ranks would use, each once."""
        return tuple(dict.fromkeys(rank.gpu for rank in self.plan.ranks if rank.gpu))


def report_ok(subject: str, what: str) -> Finding:
    """A check that found nothing amiss."""
    return Finding("ok", subject, what)


def report_unchecked(case: Case, subject: str, what: str, reason: str) -> Finding:
    """A check that could not be made, and why."""
    reason = reason if case.health.live else "not in these files"
    return Finding("unknown", subject, f"{what} not checked: {reason}")
