"""All checks, in the order of the report."""

from launcher.doctor.cpu_checks import judge_clocks, judge_count, judge_cpuset
from launcher.doctor.device_checks import (
    judge_devices,
    judge_interrupts,
    judge_links,
    judge_persistence,
    judge_places,
)
from launcher.doctor.finding import Case, Finding
from launcher.doctor.limit_checks import judge_files, judge_locked, judge_processes, judge_shm
from launcher.doctor.memory_checks import judge_balancing, judge_hugepages, judge_size, judge_swap
from launcher.doctor.node_judgement import judge_node_facts
from launcher.doctor.placement_checks import (
    judge_binding_trial,
    judge_environment,
    judge_last_run,
    judge_plan,
)

CHECKS = (
    *(judge_plan, judge_binding_trial, judge_cpuset, judge_count),
    *(judge_size, judge_balancing, judge_hugepages, judge_swap),
    *(judge_devices, judge_places, judge_links, judge_persistence),
    *(judge_shm, judge_files, judge_locked, judge_processes),
    judge_node_facts,
    *(judge_clocks, judge_interrupts, judge_environment, judge_last_run),
)
"""Each gives findings on one matter: at least one, or none if the machine has nothing of the kind."""
FAILING = ("error", "warning")
"""Levels that make `launch doctor` end with 1."""


def run_checks(case: Case) -> tuple[Finding, ...]:
    """Make every check."""
    return tuple(finding for check in CHECKS for finding in check(case))


def choose_exit_code(findings: tuple[Finding, ...]) -> int:
    """The exit code: 1 if a finding is an error or a warning, else 0."""
    return int(any(finding.level in FAILING for finding in findings))
