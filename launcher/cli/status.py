"""`launch status`: a line for each run, and all there is to know of those that are named."""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from launcher.cli.choose_runs import choose_named
from launcher.cli.verbs import VerbCall
from launcher.cli.watch_summary import add_watch
from launcher.config.settings import Settings
from launcher.runs.run_lookup import list_runs
from launcher.runs.run_status import RunStatus, add_progress, read_status
from launcher.slurm.follow import explain_reason
from launcher.slurm.notation import fold_hosts
from launcher.slurm.run_states import WAITING, RunStates, find_run_states
from launcher.text import print_text

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the JSON form."""
NEWEST_RUNS = 10
"""Runs that are shown if none is named, together with those that are running or queued."""
MOST_RUNS = 1000
"""Newest runs that are looked through for those."""


def show_status(call: VerbCall) -> int:
    """Print how the named runs stand, or the newest ones; returns 0. Raises UsageError for an unknown one."""
    config, names = call.config, call.names
    paths = choose_named(config, names) if names else choose_newest(Path(config.runs_dir))
    standing = find_run_states(paths)
    runs = [add_watch(add_progress(run)) for run in standing.runs]
    warn_of_slurm(standing)
    if config.format == "json":
        sys.stdout.write(
            json.dumps({"schema": SCHEMA, "runs": [asdict(run) for run in runs]}, indent=1) + "\n"
        )
        return 0
    print_status(config, runs, detailed=bool(names))
    return 0


def print_status(config: Settings, runs: Sequence[RunStatus], *, detailed: bool) -> None:
    """Print the table, and below it a named run in detail."""
    from launcher.report.console import make_console
    from launcher.report.runs import print_details, print_runs

    console = make_console(stderr=False)
    if not runs:
        print_text(f"no run below runs_dir={config.runs_dir} yet\n")
        return
    runs = [replace(run, nodelist=shorten_nodes(run.nodelist)) for run in runs]
    print_runs(console, runs)
    # Of an array's members and the like, the rows are what is asked for.
    if detailed and len(runs) == 1:
        (run,) = runs
        waits = run.slurm_state in WAITING
        print_details(console, replace(run, reason=explain_reason(run.reason)) if waits else run)


def shorten_nodes(nodelist: str) -> str:
    """Return a list of nodes in SLURM's form, in which it is for a run whose job SLURM still knows."""
    return nodelist if "[" in nodelist else fold_hosts(nodelist.split(","))


def choose_newest(runs_dir: Path) -> list[Path]:
    """Return the newest runs, and those before them that are running or queued."""
    newest = list(islice(list_runs(runs_dir), MOST_RUNS))
    return newest[:NEWEST_RUNS] + [path for path in newest[NEWEST_RUNS:] if read_status(path).is_live]


def warn_of_slurm(standing: RunStates) -> None:
    """Say that SLURM could not be asked."""
    if standing.error:
        logger.warning(f"{standing.error}: the runs' states are as they were written down")


HELP = """\
usage: launch status [RUN ...] [KEY=VALUE ...]

Shows how runs stand, here and in SLURM's queue: the newest 10 and all that wait
or run, or those that are named. One that is named is shown in detail, with its
attempts and the first rank that failed. RUN is NAME/ID, an ID, a NAME (its
newest run), a run directory, or a job (12, or 12_3 of an array).

  format=table|json    json: {"schema": 1,
                       "runs": [{run, state, reason, step, ...}]}
  runs_dir=DIR         where the runs are (runs)

  launch status
  launch status train
  launch status format=json
"""
