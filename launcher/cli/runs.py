"""The runs that there are: which ones are meant, and `launch status`, `nodes`, `cancel` and `logs`."""

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from launcher.cli.main import Call, print_json
from launcher.config.settings import Settings, refuse
from launcher.errors import EXIT_MACHINE, MachineError, SchedulerError, UsageError
from launcher.launch.signals import KILL_GRACE, TERM_GRACE
from launcher.runs.manifest import (
    OPEN,
    Outcome,
    check_process,
    open_process,
    read_manifest,
    stamp_time,
    write_manifest,
)
from launcher.runs.rank_logs import Output, RunOutputReader
from launcher.runs.run_directory import RunDir
from launcher.runs.run_status import RunStatus, add_progress, choose_runs, list_runs, name_run, read_status
from launcher.slurm.commands import ENDED, WAITING, ask_queue, expand_hosts, fold_hosts, run_slurm
from launcher.slurm.run_states import RunWatch, describe_run_state, explain_reason, find_run_states
from launcher.text import count_things, describe_time, escape_text, name_some, print_text

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the JSON forms."""
NEWEST_RUNS = 10
"""Runs that are shown if none is named, together with those that are running or queued."""
MOST_RUNS = 1000
"""Newest runs that are looked through for those."""
MOST_MANIFESTS = 5000
"""Newest runs that are looked through for nodes."""
MOST_NODES = 100
"""Nodes that are shown if none is named."""
SILENT = 30.0
"""Seconds since the last word of the node that judges, after which there will hardly be another."""
CANCEL_SECONDS = 60.0
"""Seconds that SLURM has to end jobs: twice KillWait's default."""
POLL_SECONDS = 0.5
"""Seconds between two questions to SLURM."""
EXIT_DECLINED = 1
"""Exit code if the user answers no."""
NETWORK_SECONDS = 3.0
"""Seconds that a network filesystem has to show the last lines of a job on other machines."""
LOG_SECONDS = 0.25
"""Seconds between two looks at the logs."""
LONGEST_HOST = 80
"""Characters of a host's name."""


def choose_one(config: Settings, names: Sequence[str], verb: str, *, is_live: bool = False) -> Path:
    """Return the one run that is named, the newest if none is; raises UsageError for several.

    `is_live` prefers the newest that has not ended.
    """
    if names:
        found = choose_runs(Path(config.runs_dir), names)
        if len(found) > 1:
            raise refuse("several_runs", names=" ".join(names), count=len(found), verb=verb, first=found[0])
        return found[0]
    newest = list(islice(list_runs(Path(config.runs_dir)), MOST_RUNS if is_live else 1))
    if not newest:
        raise UsageError(f"launch {verb}: no run below runs_dir={config.runs_dir} yet")
    live = next((path for path in newest if is_live and read_status(path).is_live), None)
    what = "run that has not ended" if live else "run"
    logger.info(f"{verb} of {name_run(live or newest[0])}, the newest {what}")
    return live or newest[0]


# launch status


def show_status(call: Call) -> int:
    """Print how the named runs stand, or the newest ones; returns 0. Raises UsageError for an unknown one."""
    config = call.config
    if call.names:
        paths = choose_runs(Path(config.runs_dir), call.names)
    else:
        newest = list(islice(list_runs(Path(config.runs_dir)), MOST_RUNS))
        paths = newest[:NEWEST_RUNS] + [path for path in newest[NEWEST_RUNS:] if read_status(path).is_live]
    standing, error = find_run_states(paths)
    runs = [_add_watch(add_progress(run)) for run in standing]
    if error:
        logger.warning(f"{error}: the runs' states are as they were written down")
    if config.format == "json":
        print_json({"schema": SCHEMA, "runs": [asdict(run) for run in runs]})
        return 0
    if not runs:
        print_text(f"no run below runs_dir={config.runs_dir} yet\n")
        return 0
    from launcher.report.tables import make_console, print_details, print_runs

    console = make_console(stderr=False)
    for at, run in enumerate(runs):
        if "[" not in run.nodelist:  # the list of a job that SLURM still knows is in this form
            runs[at] = replace(run, nodelist=fold_hosts(run.nodelist.split(",")))
    print_runs(console, runs)
    if call.names and len(runs) == 1:  # of an array's members and the like, the rows are what is asked for
        (run,) = runs
        if run.slurm_state in WAITING:
            run = replace(run, reason=explain_reason(run.reason))
        print_details(console, run)
    return 0


def _add_watch(status: RunStatus) -> RunStatus:
    """Add what the node that judges has written last; a hang that goes on is the reason that is shown.

    `step_age` is what was written last: steps may have been made since, unless nothing is written any more.
    """
    from launcher.watch.model import JobState
    from launcher.watch.run_files import ReportCache

    stored = ReportCache(Path(status.path)).read(JobState)
    if stored is None:
        return status
    state = stored.value
    running = status.state == "running" and state.state != "ended"
    hang, reason, age = state.hangs[-1] if state.hangs else None, status.reason, state.step_age
    if running and hang and hang.recovered is None and not reason:
        where = f"after step {hang.step}" if hang.step else "before the first step"
        reason = f"hang {hang.number} {where}: {hang.verdict.sentence}"
    silence = time.monotonic() - stored.seen
    if age is not None and running and silence > SILENT:
        age += silence
    watch = {
        "state": state.state if running else "ended",
        "step_age": None if age is None else round(age, 3),
        "step_seconds": state.p50,
        "verdict": asdict(hang.verdict) if hang else None,
        "hang": None if hang is None else {"number": hang.number, "recovered": hang.recovered},
        "hangs": len(state.hangs),
        "stragglers": len({one.rank for one in state.stragglers}),
        "silent": list(state.silent),
        **{name: getattr(state, name) for name in ("time", "step", "restarts")},
    }
    return replace(status, reason=reason, watch=watch)


# launch nodes


def show_nodes(call: Call) -> int:
    """Print what is known of the nodes; returns 0. Raises UsageError for a name that no node has."""
    from launcher.runs.node_history import collect_history

    config = call.config
    newest = islice(list_runs(Path(config.runs_dir)), MOST_MANIFESTS)
    nodes = list(collect_history((name_run(path), read_manifest(path)) for path in newest))
    if call.names:
        chosen: set[str] = set()
        for name in call.names:
            hosts = _choose_hosts([node.host for node in nodes], name)
            if not hosts:
                known = name_some(sorted(node.host for node in nodes), 8) or "none is known"
                raise UsageError(f"no run below runs_dir={config.runs_dir} was on a node {name!r}: {known}")
            chosen |= hosts
        nodes = [node for node in nodes if node.host in chosen]
    if config.format == "json":
        listed = [{**asdict(node), "trouble": node.trouble} for node in nodes]
        print_json({"schema": SCHEMA, "nodes": listed})
        return 0
    if not nodes:
        print_text(f"no run below runs_dir={config.runs_dir} yet\n")
        return 0
    from launcher.report.tables import make_console, print_nodes

    shown = nodes if call.names else nodes[:MOST_NODES]
    print_nodes(make_console(stderr=False), shown, detailed=bool(call.names))
    if left := len(nodes) - len(shown):
        print_text(f"and {left} nodes with less trouble: name them, as in `launch nodes n1*`\n")
    return 0


def _choose_hosts(hosts: Sequence[str], name: str) -> set[str]:
    """Return the hosts that a name, a pattern (`n1*`) or a list of SLURM's (`n[08-12]`) means."""
    listed: Sequence[str] = ()
    with contextlib.suppress(ValueError):
        listed = expand_hosts(name)
    return {*listed} & {*hosts} or {host for host in hosts if fnmatchcase(host, name)}


# launch cancel


def cancel_runs(call: Call) -> int:
    """Cancel runs; return 0 if all of them have ended, 1 if the user answers no, 3 if one is still ending.

    Raises UsageError for unknown runs and if there is nobody to ask, MachineError for another host's, and
    SchedulerError if SLURM refuses.
    """
    config, names = call.config, call.names
    if not names:
        raise UsageError("cancel which run? `launch status` lists them: launch cancel NAME/ID")
    standing, error = find_run_states(choose_runs(Path(config.runs_dir), names), own=True)
    if error:
        raise error
    with contextlib.ExitStack() as opened:
        processes = {run.path: _open_launch(run, opened) for run in standing}
        for run in standing:
            if not run.is_live:
                reason = f" ({run.reason})" if run.reason else ""
                logger.info(f"{run.run} has ended already: {run.state}{reason}")
        live = [run for run in standing if run.is_live]
        if live and not config.yes and not _confirm(live):
            logger.info("nothing was cancelled")
            return EXIT_DECLINED
        jobs = [run for run in live if not run.process]
        left = _cancel_jobs(jobs) if jobs else 0
        for run in live:
            if run.process:
                left += _stop_process(run, processes[run.path], config.torchrun.shutdown_timeout)
    return EXIT_MACHINE if left else 0


def _open_launch(run: RunStatus, opened: contextlib.ExitStack) -> int | None:
    """Return a pidfd of the `launch` that a local run hangs on; None if it is gone, or SLURM has the run.

    Raises MachineError for a run that cannot be cancelled from here.
    """
    if run.state == "unknown":
        raise MachineError(f"{run.run} is left alone: {run.reason} ({run.path})")
    if not run.is_live or (run.job_id and not run.process):
        return None
    if not run.process:
        raise refuse("no_process", MachineError, run=run)
    if check_process(run.process) is None:
        raise MachineError(
            f"{run.run} is process {run.process.pid} on {run.process.host}: give this command there"
        )
    try:
        descriptor = open_process(run.process, Path(run.path))
    except ProcessLookupError:
        return None
    except PermissionError as error:
        raise MachineError(f"{run.run} is left alone: {error.strerror} ({run.path})") from None
    opened.callback(os.close, descriptor)
    return descriptor


def _confirm(runs: Sequence[RunStatus]) -> bool:
    """Ask whether to cancel runs such as `tiny/ID, job 12, running on n[0-3] for 3 h 20 min`.

    Raises UsageError if there is no terminal.
    """
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("launch cancel asks first, and there is no terminal to ask on: give yes=true")
    for run in runs:
        what = f"job {run.job_id}" if not run.process else f"process {run.process.pid}"
        where = f" on {run.nodelist}" if run.nodelist and run.state == "running" else ""
        since = f" for {describe_time(run.seconds)}" if run.seconds is not None else ""
        sys.stderr.write(escape_text(f"  {run.run}, {what}, {run.state}{where}{since}") + "\n")
    sys.stderr.write(f"cancel {count_things(len(runs), 'run')}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _cancel_jobs(runs: Sequence[RunStatus]) -> int:
    """Cancel jobs of SLURM, wait for their ends, and return how many are still ending."""
    left = [str(run.job_id) for run in runs]
    run_slurm(["scancel", *left])
    end, said = time.monotonic() + CANCEL_SECONDS, False
    while True:
        with contextlib.suppress(SchedulerError):  # all of them may live while it does not answer
            jobs = ask_queue(left)
            left = [job_id for job_id in left if job_id in jobs and jobs[job_id].state not in ENDED]
        if not left or time.monotonic() >= end:
            break
        if not said:
            said = True
            logger.info(f"cancelling {', '.join(left)}, whose ranks have SLURM's KillWait to end")
        time.sleep(POLL_SECONDS)
    for run in runs:
        if run.job_id in left:
            logger.info(f"{run.run}, job {run.job_id}, is still ending: see launch status {run.run}")
        else:
            _record_cancellation(run)
            logger.info(f"{run.run}, job {run.job_id}, is cancelled")
    return len(left)


def _record_cancellation(run: RunStatus) -> None:
    """Write that a run was cancelled, if its job has not: it never began, or was killed."""
    path = Path(run.path)
    manifest = read_manifest(path)
    if manifest.last.outcome.state not in OPEN:
        return
    manifest.last.ended = stamp_time()
    manifest.last.outcome = Outcome("stopped", "cancelled", 128 + signal.SIGTERM, reason="cancelled")
    try:
        write_manifest(RunDir(path), manifest)
    except OSError as error:
        logger.warning(f"{path}/manifest.json could not be written ({error.strerror})")


def _stop_process(run: RunStatus, descriptor: int | None, grace: float) -> int:
    """Send a local run's `launch` SIGTERM and wait for its end; returns 1 if it is still ending."""
    if descriptor is None:
        logger.info(f"{run.run} has just ended")
        return 0
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    logger.info(f"stopping {run.run}, whose ranks have {grace:.0f} s to end")
    # After the grace, launch itself goes on to SIGKILL.
    ready, _, _ = select.select([descriptor], [], [], grace + TERM_GRACE + 2 * KILL_GRACE)
    ((now,), _) = find_run_states([Path(run.path)])
    logger.info(f"{run.run} has ended: {now.state}" if ready else f"{run.run} is still ending")
    return 0 if ready else 1


# launch logs


def show_logs(call: Call) -> int:
    """Print the output of a run's last attempt, or follow it; returns 0. Raises UsageError."""
    config = call.config
    path = choose_one(config, call.names, "logs")
    writer = OutputWriter(config.rank)
    if config.follow:
        _follow_output(path, RunOutputReader(path, config.rank, config.logs.tail), writer)
        return 0
    tail = RunOutputReader(path, config.rank)
    if tail.rank is not None and not tail.find_attempts():
        logs = [log for logs in RunOutputReader(path).find_attempts().values() for log in logs]
        if known := sorted({int(log.stem.partition("-")[2]) for log in logs}):
            raise refuse("silent_rank", rank=tail.rank, first=known[0], last=known[-1])
    if not writer.write(tail.read_lines(final=True)):
        ((run,), _) = find_run_states([path])
        logger.info(f"no output: {describe_run_state(run)}")
    return 0


def _follow_output(path: Path, tail: RunOutputReader, writer: "OutputWriter") -> None:
    """Print what comes, over all attempts, until the run has ended; Ctrl-C ends it earlier."""
    from launcher.report.viewer import open_stream  # which no other verb of runs has a use for

    said, changed, lived = "", time.monotonic(), False
    watch = RunWatch([path])
    while True:
        (run,) = watch.update()
        lived = lived or run.is_live
        if writer.write(tail.read_lines()) or run.is_live:
            changed = time.monotonic()
        # Lines of a job on other machines that ended while it was followed may still come.
        elif time.monotonic() - changed >= (NETWORK_SECONDS if lived and run.job_id else 0):
            break
        text = describe_run_state(run)
        if run.state == "queued" and run.slurm_state and run.reason and text != said:
            logger.info(text)
            said = text
        time.sleep(LOG_SECONDS)
    writer.write(tail.read_lines(final=True))
    if open_stream("stdout").is_same_file(open_stream("stderr")):
        writer.end_line()
    logger.info(describe_run_state(run))


@dataclass(slots=True)
class OutputWriter:
    """Prints lines on stdout, those of several ranks with their origin, and our remarks on stderr.

    On a terminal a line is text, of a bar its last state, and of what acts on the terminal only colours are
    let through; elsewhere it is its bytes.
    """

    rank: int | None
    """The one rank that is shown; None is all of them."""
    unfinished: Output | None = None
    """What was printed last, if it does not end with a newline."""

    def write(self, lines: Iterable[Output]) -> int:
        """Print lines; returns how many."""
        count, is_terminal = 0, sys.stdout.isatty()
        for line in lines:
            if line.remark:
                self.end_line()
                logger.info(line.text)
                continue
            if not is_terminal:
                self.copy_line(line)
            elif not line.raw.endswith(b"\r"):  # that is a former state of a bar
                print_text(f"{self.format_origin(line)}{line.text}\n", colours=True)
            count += 1
        sys.stdout.flush()
        return count

    def end_line(self) -> None:
        """End an unfinished line, and have all that was printed shown."""
        if self.unfinished:
            sys.stdout.buffer.write(b"\n")
            self.unfinished = None
        sys.stdout.flush()

    def copy_line(self, line: Output) -> None:
        """Print a line as it is; a newline of ours ends an unfinished one that another source's follows."""
        before, origin = b"", os.fsencode(self.format_origin(line))
        if last := self.unfinished:
            is_same = (last.rank, last.stream, last.host) == (line.rank, line.stream, line.host)
            before, origin = (b"", b"") if is_same else (b"\n", origin)
        sys.stdout.buffer.write(before + origin + line.raw)
        self.unfinished = None if line.raw.endswith(b"\n") else line

    def format_origin(self, line: Output) -> str:
        """Return what stands before a line."""
        if self.rank is not None or line.rank is None:
            return ""
        return f"[{escape_text(line.host, LONGEST_HOST)}:{line.rank}] "
