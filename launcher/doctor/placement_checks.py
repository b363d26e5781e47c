"""The placement: the plan's warnings, whether the kernel takes it, variables against it, the last run."""

from collections.abc import Iterator

from launcher.doctor.finding import Case, Finding, report_ok, report_unchecked
from launcher.plan.rules import BINDERS, BINDS, OFF_VALUES, find_binders
from launcher.runs.applied_records import compare_rank
from launcher.runs.run_records import HostRecords, RunRecords
from launcher.text import count_things

PLACEMENT = "placement"
PERMISSION = (
    "docker: --cap-add=SYS_NICE or a seccomp profile with set_mempolicy; Kubernetes: securityContext."
    "capabilities.add: [SYS_NICE]"
)
"""Docker's default seccomp profile allows set_mempolicy with CAP_SYS_NICE alone."""
ENVIRONMENT = "environment"
SERIAL = "each kernel launch waits for the last kernel to end: made for debugging (CUDA programming guide)"
DETOUR = "NCCL's own choice of the fastest path is overruled (NCCL's environment variables: for debugging)"
DOUBTFUL = {
    **dict.fromkeys(BINDERS, ("warning", BINDS)),
    "CUDA_LAUNCH_BLOCKING": ("warning", SERIAL),
    "AMD_SERIALIZE_KERNEL": ("warning", SERIAL),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("warning", "each tensor costs a cudaMalloc, which waits for the GPU"),
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), ("note", DETOUR)),
}
"""Level and reason for each variable."""
LAST_RUN = "last run"
OTHERWISE = (
    "the rank ran elsewhere than planned: its speed and its neighbours' are not what the plan promised"
)
AGAIN = (
    "see the rank's `problems` and its log; other binding (srun --cpu-bind, mpirun --bind-to) must be none"
)


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
        yield report_ok(PLACEMENT, f"{count_things(len(case.plan.ranks), 'rank')} planned without a warning")


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
        yield report_unchecked(case, PLACEMENT, "permission to bind", trial.reason)
    elif not trial.problems:
        yield report_ok(PLACEMENT, f"CPU set and memory policy taken as planned ({trial.tried} tried)")


def is_in_effect(value: str) -> bool:
    """Tell whether a variable does something."""
    return value.strip().lower() not in OFF_VALUES


def judge_environment(case: Case) -> Iterator[Finding]:
    """The environment that ranks would inherit."""
    environ = case.environ
    if environ is None:
        yield report_unchecked(case, ENVIRONMENT, "variables", "unknown")
        return
    others = [name for name in DOUBTFUL if name not in BINDERS]
    found = [*find_binders(environ), *(name for name in others if is_in_effect(environ.get(name, "")))]
    for name in found:
        level, why = DOUBTFUL[name]
        yield Finding(level, ENVIRONMENT, f"{name}={environ[name]} is set", why, f"unset {name}")
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Finding(
            "note",
            ENVIRONMENT,
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set",
            "each collective is checked against the other ranks' before it starts",
            "unset TORCH_DISTRIBUTED_DEBUG",
        )
        return
    if not found:
        yield report_ok(ENVIRONMENT, f"none of {len(DOUBTFUL)} variables that slow jobs down is set")


def judge_last_run(case: Case) -> Iterator[Finding]:
    """Every host's records against its plan."""
    run = case.run
    if run is None:
        yield Finding("unknown", LAST_RUN, f"not compared: {case.run_reason}")
        return
    going = run.state == "running"
    found = [*find_damage(run), *(finding for host in run.hosts for finding in judge_host(host, going))]
    yield from found
    ranks = sum(len(host.records) for host in run.hosts)
    state = f", {run.state}" if run.state else ""
    if not found:
        where = f"{count_things(ranks, 'rank')} of {count_things(len(run.hosts), 'host')}"
        yield report_ok(LAST_RUN, f"{run.path}{state}: applied equals planned on {where}")
    else:
        yield Finding(
            "note", LAST_RUN, f"{run.path}{state}", "the run that was compared", "run_dir=DIR: another"
        )


def find_damage(run: RunRecords) -> Iterator[Finding]:
    """Files of the run that cannot be read."""
    for text in run.damaged:
        yield Finding(
            "warning",
            LAST_RUN,
            f"{text}: left out",
            "what it records cannot be compared",
            "check the disk's space and quota (`df -h`), and start the job again",
        )


def judge_host(host: HostRecords, going: bool) -> Iterator[Finding]:
    """One host's records of the last attempt; those of a run that is `going` on may be still to come."""
    if not host.planned:
        ranks = ", ".join(str(record.rank) for record in host.records)
        why = "there is no plan of that host to compare them with"
        yield Finding("warning", LAST_RUN, f"ranks {ranks} ran on {host.name}, which has no plan", why, AGAIN)
        return
    found = {record.local_rank: record for record in host.records}
    for rank in host.planned:
        if rank.local_rank not in found:
            yield report_missing(host, rank.local_rank, going)
            continue
        for line in compare_rank(rank, found[rank.local_rank]):
            yield Finding("error", LAST_RUN, f"{host.name}: {line}", OTHERWISE, AGAIN)
    for record in host.records:
        for problem in record.problems:
            what = f"{host.name}: rank {record.rank}: {problem}"
            yield Finding("warning", LAST_RUN, what, "the kernel did not take the plan as it was", AGAIN)
    known = {rank.local_rank for rank in host.planned}
    for record in host.records:
        if record.local_rank not in known:
            what = (
                f"{host.name}: rank {record.rank} ran as local rank {record.local_rank}, which is not planned"
            )
            yield Finding("warning", LAST_RUN, what, OTHERWISE, "start the job in a new run directory")


def report_missing(host: HostRecords, local_rank: int, going: bool) -> Finding:
    """A planned rank without a record."""
    attempt = f" in attempt {host.attempt}" if host.attempt else ""
    if going:
        what = f"{host.name}: local rank {local_rank} has no record of its placement yet{attempt}"
        return Finding("note", LAST_RUN, what, "the ranks have not started", "look again when they have")
    return Finding(
        "warning",
        LAST_RUN,
        f"{host.name}: local rank {local_rank} left no record of its placement{attempt}",
        "it may have ended before it was placed, or the file is gone",
        "see the run's logs for how it ended",
    )
