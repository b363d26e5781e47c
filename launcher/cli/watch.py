"""`launch watch`, a live table of what a run's ranks do, and `launch report`, all that is known as a page."""

import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.main import Call, print_json
from launcher.cli.plan import check_target, explain, write_file
from launcher.cli.runs import choose_one
from launcher.codec import load
from launcher.config.run_path import read_config_value
from launcher.errors import UsageError
from launcher.files import LARGEST, open_own, read_file, write_whole
from launcher.plan.model import Plan, RankPlan, parse_machine, warn
from launcher.protocol import name_plan_file, parse_plan_file
from launcher.report.viewer import open_stream
from launcher.runs.run_status import RunStatus
from launcher.slurm.run_states import RunWatch, describe_run_state, find_run_states
from launcher.text import print_text, redirect_log
from launcher.watch.run_files import StackRequest, write_value
from launcher.watch.run_reader import RunReader, RunSnapshot, read_details

if TYPE_CHECKING:
    from launcher.report.watch import View

logger = logging.getLogger(__name__)

NAME = "report.html"
SCHEMA = 1
"""Version of the JSON form."""


def show_watch(call: Call) -> int:
    """Show what a run's ranks do, to its end; without a terminal, as it is now. Returns 0.

    Raises UsageError for a run, or a rank, that there is not.
    """
    config = call.config
    path, rank = choose_one(config, call.names, "watch", is_live=True), config.rank
    ((run,), _) = find_run_states([path])
    if config.format == "json":
        snapshot = RunReader(path).read()
        nodes = [
            {"age": round(view.age, 3), "is_silent": view.is_silent, **asdict(view.report)}
            for view in snapshot.nodes
        ]
        known = {"progress": snapshot.progress, "job": snapshot.job}
        facts = {name: asdict(value) if value else None for name, value in known.items()}
        print_json({"schema": SCHEMA, "run": asdict(run), **facts, "nodes": nodes})
        return 0
    from launcher.report.tables import make_console
    from launcher.report.watch import print_once

    # The screen is drawn on stderr, and its keys are read from stdin.
    has_keys = sys.stdin is not None and sys.stdin.isatty()
    if run.is_live and has_keys and all(open_stream(name).is_screen for name in ("stdout", "stderr")):
        view, rank = watch_live(path, rank), None
        if view.run.is_live:
            return 0
    else:
        view = read_view(path, run, RunReader(path).read(), rank)
        check_rank(view.snapshot, rank)
    print_once(make_console(stderr=False), view, rank)
    if not view.run.is_live:
        sys.stdout.flush()
        logger.info(describe_run_state(view.run))
    return 0


def check_rank(snapshot: RunSnapshot, rank: int | None) -> None:
    """Raise UsageError for a rank that no node has reported, if there are reports."""
    ranks = {one.rank for view in snapshot.nodes for one in view.report.ranks}
    if rank is not None and ranks and rank not in ranks:
        raise UsageError(f"rank={rank} is not known: the run's ranks are {min(ranks)} to {max(ranks)}")


def read_view(path: Path, run: RunStatus, snapshot: RunSnapshot, rank: int | None, say: str = "") -> "View":
    """Return what is known of a run, and of the rank that is open."""
    from launcher.report.watch import View

    details = None
    for view in snapshot.nodes if rank is not None else ():
        for one in view.report.ranks:
            if one.rank == rank:
                details = read_details(path, rank, one.local_rank, view.report.host, one.attempt)
    return View(run, snapshot, details, say or explain_table(path, run, snapshot))


def explain_table(path: Path, run: RunStatus, snapshot: RunSnapshot) -> str:
    """Say why there is no table; empty if there is one."""
    if run.state == "queued":
        return describe_run_state(run)
    if snapshot.nodes:
        return ""
    if not read_config_value(path, "watch", "enabled"):
        return "its ranks are not watched (watch.enabled=false): see launch logs"
    if not run.is_live:
        return "its nodes have left no reports"
    return "no node has reported yet: reports begin some seconds after the ranks' start"


def watch_live(path: Path, rank: int | None) -> "View":
    """Show the table until the user quits or the run has ended; return what is known then.

    A signal ends this process as it would have ended without the table.
    """
    from launcher.report.live import WatchApp

    reader, messages = RunReader(path), [""]

    def say(text: str) -> None:
        messages[0] = text

    def look(rank: int | None, asks_stack: bool) -> "View":
        if rank is not None and asks_stack:
            try:
                write_value(path, StackRequest(rank, time.time_ns()))
                say("")
            except OSError as error:
                say(f"its stack cannot be asked for ({error.strerror})")
        return read_view(path, states.update()[0], reader.read(), rank, messages[0])

    states = RunWatch([path], say)
    restore_log = redirect_log(lambda record: say(record.getMessage()))
    try:
        view = look(rank, False)
        check_rank(view.snapshot, rank)
        app = WatchApp(view, rank, look)
        ended_by = app.run(mouse=False)
    finally:
        restore_log()
    if app.error:
        raise app.error
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    if ended_by:
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    return app.view


# launch report


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A plan's JSON, less its machine."""

    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()


def write_run_report(call: Call) -> int:
    """Write the page of the named run, or of the newest, and print its path; return 0.

    Raises UsageError.
    """
    config = call.config
    path = choose_one(config, call.names, "report")
    if config.save is not None:
        check_target("save", config.save)
    from launcher.report.charts import DRAWS
    from launcher.report.page import read_account, render_report

    if not DRAWS:
        logger.warning("without matplotlib the page has no charts: pip install 'launch-ranks[report]'")
    account = read_account(path)
    page, target = render_report(account, _read_plans(path)), path / NAME
    if config.save is not None:
        write_file("save", config.save, page)
    else:  # into the run directory, for its owner alone
        try:
            with open_own(path) as at:
                write_whole(at, NAME, page)
        except PermissionError as error:
            reason = error.strerror or error
            raise UsageError(f"{target} cannot be written ({reason}): name another file, save=FILE") from None
        except OSError as error:
            raise explain("save", str(target), error) from None
    if account.status.is_live:
        logger.info(f"{account.status.run} is {account.status.state}: the report tells of it so far")
    print_text(f"{config.save or target}\n")
    return 0


def _read_plans(path: Path) -> dict[str, Plan]:
    """Return the plans of a run by host; the report tells of those that cannot be read as damaged."""
    plans = {}
    for file in sorted(path.glob(name_plan_file("*"))):
        with contextlib.suppress(OSError, ValueError, UsageError):
            text = read_file(file, LARGEST).decode()
            machine, found = parse_machine(text), load(WrittenPlan, text)
            warnings = []
            for line in found.warnings:
                what, _, fix = line.rpartition(": ")
                is_probed = line in machine.warnings
                warnings.append(
                    warn("machine", text=line) if is_probed else warn("written", text=what or fix, fix=fix)
                )
            plans[parse_plan_file(file.name)] = Plan(machine, found.ranks, tuple(warnings))
    return plans
