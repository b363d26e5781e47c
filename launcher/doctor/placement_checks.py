"""The placement: what the plan warns of, and whether the kernel takes it."""

from collections.abc import Iterator

from launcher.doctor.finding import Case, Finding, pass_check, skip_check
from launcher.plan.rules import BINDERS
from launcher.text import count_things

PLACEMENT = "placement"
PERMISSION = (
    "docker: --cap-add=SYS_NICE or a seccomp profile with set_mempolicy; Kubernetes: securityContext."
    "capabilities.add: [SYS_NICE]"
)
"""Docker's default seccomp profile allows set_mempolicy with CAP_SYS_NICE alone."""


def judge_plan(case: Case) -> Iterator[Finding]:
    """The warnings of the probe and of the planner, but for those that the environment's check has."""
    probed = case.machine.warnings
    elsewhere = () if case.environ is None else tuple(f"{name}=" for name in BINDERS)
    warnings = [warning for warning in case.plan.warnings if not warning.startswith(elsewhere)]
    for warning in warnings:
        if warning in probed:
            why = "what the kernel or the driver says here is incomplete: the plan assumes the rest"
            yield Finding(
                "warning", PLACEMENT, warning, why, "compare the files named with a healthy machine's"
            )
        else:
            what, _, fix = warning.rpartition(": ")
            yield Finding("warning", PLACEMENT, what or fix, "the placement falls short there", fix)
    for oddity in case.health.oddities:
        yield Finding("note", PLACEMENT, oddity, "what it should tell is not checked", "look at the file")
    if not warnings:
        yield pass_check(PLACEMENT, f"{count_things(len(case.plan.ranks), 'rank')} planned without a warning")


def judge_binding_trial(case: Case) -> Iterator[Finding]:
    """What happened when processes tried the plan by the very shim that starts ranks."""
    trial = case.trial
    for problem in trial.problems:
        refused = "memory policy" in problem
        yield Finding(
            "warning",
            PLACEMENT,
            problem,
            "ranks would run otherwise than planned, and their memory may be remote",
            PERMISSION if refused else "start the job where the plan was made; `launch plan` shows it",
        )
    if trial.reason:
        yield skip_check(case, PLACEMENT, "permission to bind", trial.reason)
    elif not trial.problems:
        yield pass_check(PLACEMENT, f"CPU set and memory policy taken as planned ({trial.tried} tried)")
