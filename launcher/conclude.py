"""The end of a job: exit code, manifest, and the last words to the user."""

from launcher.errors import EXIT_MACHINE
from launcher.execute import Attendant
from launcher.launch.failure import Failure, find_failure
from launcher.launch.supervise import Outcome, name_signal
from launcher.report.summary import describe_progress, describe_time
from launcher.runs.applied import compare_applied
from launcher.runs.logs import read_tail
from launcher.runs.manifest import stamp_time, write_manifest


def conclude_job(attendant: Attendant, outcome: Outcome, manifest: dict[str, object], seconds: float) -> int:
    """Write how the job ended, say it, and return the exit code."""
    run, job = attendant.run, attendant.job
    agent_log = read_tail(run.agent_log(job.host), 2000)
    failure = find_failure(outcome.deaths, "\n".join(agent_log)) if outcome.agent_exitcode else None
    status = choose_status(outcome, failure)
    console = attendant.get_console()
    console.close()
    state = "succeeded" if status == 0 else "stopped" if outcome.signal else "failed"
    manifest["ended"] = stamp_time()
    manifest["outcome"] = {
        "state": state,
        "exit_code": status,
        "signal": name_signal(outcome.signal) if outcome.signal else None,
        "first_failure": describe_failure(attendant, failure) if failure and not outcome.signal else None,
        "attempts": 1 + max((death.process.attempt for death in outcome.deaths), default=run.first_attempt),
    }
    for line in compare_applied(job.plan.ranks, list(attendant.applied.values())) if status == 0 else []:
        console.say(f"warning: {line}")
    for name in outcome.leftovers if status == 0 else ():
        console.say(f"warning: {name} was still running after the program's end, and was ended")
    for line in explain_end(attendant, outcome, failure, agent_log):
        console.say(line)
    summary = describe_progress(console.steps)
    console.say(f"{state} after {describe_time(seconds)}" + (f": {summary}" if summary else ""))
    console.say(f"run directory {run.path}")
    try:
        write_manifest(run, manifest)
    except OSError as error:
        console.say(f"warning: the manifest could not be written ({error})")
    return status


def choose_status(outcome: Outcome, failure: Failure | None) -> int:
    """Return the exit code: the program's own, 128+n for a signal, 3 where the agent itself failed."""
    if outcome.agent_exitcode == 0:
        return 0
    if outcome.signal:
        return 128 + outcome.signal
    if failure:
        return failure.status
    return 128 - outcome.agent_exitcode if outcome.agent_exitcode < 0 else EXIT_MACHINE


def describe_failure(attendant: Attendant, failure: Failure) -> dict[str, object]:
    """Return the first failure for the manifest."""
    return {
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "host": attendant.job.host,
        "attempt": failure.attempt,
        "exit_code": failure.status,
        "reason": failure.describe(),
        "last_lines": tail_rank(attendant, failure)[1],
    }


def explain_end(
    attendant: Attendant, outcome: Outcome, failure: Failure | None, agent_log: list[str]
) -> list[str]:
    """Say who failed first and show its last lines; nothing after a success or a stop that was asked for."""
    if outcome.agent_exitcode == 0 or outcome.signal:
        return []
    if failure is None:
        last = next((line.strip() for line in reversed(agent_log) if line.strip()), "it printed nothing")
        how = (
            f"code {outcome.agent_exitcode}"
            if outcome.agent_exitcode > 0
            else name_signal(-outcome.agent_exitcode)
        )
        path = attendant.run.agent_log(attendant.job.host)
        return [f"torchrun's agent ended with {how}, no rank having failed: {last}", f"its log is {path}"]
    source, lines = tail_rank(attendant, failure)
    where = f"rank {failure.rank} on {attendant.job.host} (local rank {failure.local_rank})"
    return [
        f"{where} failed first: it {failure.describe()}",
        f"the end of {source}:",
        *(f"  | {x}" for x in lines),
    ]


def tail_rank(attendant: Attendant, failure: Failure) -> tuple[str, list[str]]:
    """Return the log with the first failed rank's last words, and these; stdout where stderr is silent."""
    count = attendant.job.config.logs.tail
    for ending in ("err", "out"):
        path = attendant.run.rank_log(failure.rank, failure.attempt, ending)
        lines = [line for line in read_tail(path, count + 5) if not line.startswith("launch-rank: rank ")]
        if any(line.strip() for line in lines):
            return str(path), lines[-count:]
    return str(attendant.run.rank_log(failure.rank, failure.attempt, "err")), []
