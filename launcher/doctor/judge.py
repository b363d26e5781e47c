"""All checks, in the order of the report."""

from launcher.doctor.clocks import judge_clocks
from launcher.doctor.cpus import judge_count, judge_cpuset
from launcher.doctor.environment import judge_environment
from launcher.doctor.finding import Case, Finding
from launcher.doctor.gpus import judge_devices, judge_links, judge_persistence, judge_places
from launcher.doctor.interrupts import judge_interrupts
from launcher.doctor.lastrun import judge_run
from launcher.doctor.limits import judge_files, judge_locked, judge_processes, judge_shm
from launcher.doctor.memory import judge_balancing, judge_hugepages, judge_size, judge_swap
from launcher.doctor.placement import judge_plan, judge_trial

CHECKS = (
    *(judge_plan, judge_trial, judge_cpuset, judge_count),
    *(judge_size, judge_balancing, judge_hugepages, judge_swap),
    *(judge_devices, judge_places, judge_links, judge_persistence),
    *(judge_shm, judge_files, judge_locked, judge_processes),
    *(judge_clocks, judge_interrupts, judge_environment, judge_run),
)
"""Each gives findings on one matter: at least one, or none where the machine has nothing of the kind."""
FAILING = ("error", "warning")
"""Levels that make `launch doctor` end with 1."""


def judge(case: Case) -> tuple[Finding, ...]:
    """Make every check."""
    return tuple(finding for check in CHECKS for finding in check(case))


def count_exit(findings: tuple[Finding, ...]) -> int:
    """The exit code: 1 where a finding is an error or a warning, else 0."""
    return int(any(finding.level in FAILING for finding in findings))
