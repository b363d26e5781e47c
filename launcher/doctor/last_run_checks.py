"""The last run: what its ranks had against what was planned."""

from collections.abc import Iterator

from launcher.doctor.finding import Case, Finding, pass_check
from launcher.runs.applied_records import compare_rank
from launcher.runs.run_records import HostRecords, RunRecords
from launcher.text import count_things

LAST_RUN = "last run"
OTHERWISE = (
    "the rank ran elsewhere than planned: its speed and its neighbours' are not what the plan promised"
)
AGAIN = (
    "see the rank's `problems` and its log; other binding (srun --cpu-bind, mpirun --bind-to) must be none"
)


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
        yield pass_check(LAST_RUN, f"{run.path}{state}: applied equals planned on {where}")
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
