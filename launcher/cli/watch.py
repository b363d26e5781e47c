"""`launch watch`: a live table of what a run's ranks do, from its directory."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.choose_runs import choose_live
from launcher.cli.run_watch import RunWatch, describe_run_state
from launcher.cli.verbs import VerbCall
from launcher.config.config_file import read_config_value
from launcher.config.validation import check_minimum
from launcher.errors import UsageError
from launcher.report.byte_stream import open_stream
from launcher.runs.run_status import RunStatus
from launcher.slurm.run_states import find_run_states
from launcher.text import redirect_log
from launcher.watch.rank_details import RankDetails, read_details
from launcher.watch.run_reader import RunReader, RunSnapshot
from launcher.watch.stack_requests import write_stack_request

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.report.watch_screen import View

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the JSON form."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at a run."""


def show_watch(call: VerbCall) -> int:
    """Show what a run's ranks do, to its end; without a terminal, as it is now. Returns 0.

    Raises UsageError for a run, or a rank, that there is not.
    """
    config = call.config
    check_minimum("rank", 0 if config.rank is None else config.rank, 0)
    path = choose_live(config, call.names, "watch")
    if config.format == "json":
        print_json(path)
        return 0
    from launcher.report.console import make_console

    console = make_console(stderr=False)
    (run,) = find_run_states([path]).runs
    if not run.is_live or not open_stream("stdout").is_screen:
        print_once(console, read_view(path, run, RunReader(path).read(), config.rank), config.rank)
        return 0
    watch_live(console, path, config.rank)
    return 0


def print_json(path: Path) -> None:
    """Print how a run stands, what its nodes have reported, and what is known of the job."""
    (run,) = find_run_states([path]).runs
    snapshot = RunReader(path).read()
    found = {
        "schema": SCHEMA,
        "run": asdict(run),
        "progress": asdict(snapshot.progress) if snapshot.progress else None,
        "job": asdict(snapshot.job) if snapshot.job else None,
        "nodes": [
            {"age": round(view.age, 3), "is_silent": view.is_silent, **asdict(view.report)}
            for view in snapshot.nodes
        ],
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


def print_once(console: "Console", view: "View", rank: int | None) -> None:
    """Print the table, or a rank, and how the run stands; raises UsageError for an unknown rank."""
    from launcher.report.watch_screen import WatchScreen

    screen = WatchScreen(view, rank=rank)
    check_rank(view.snapshot, rank)
    console.print(screen.render_whole(console.width))
    if not view.run.is_live:
        sys.stdout.flush()
        logger.info(describe_run_state(view.run))


def check_rank(snapshot: RunSnapshot, rank: int | None) -> None:
    """Raise UsageError for a rank that no node has reported, if there are reports."""
    ranks = {one.rank for view in snapshot.nodes for one in view.report.ranks}
    if rank is not None and ranks and rank not in ranks:
        raise UsageError(f"rank={rank} is not known: the run's ranks are {min(ranks)} to {max(ranks)}")


def read_view(path: Path, run: RunStatus, snapshot: RunSnapshot, rank: int | None, say: str = "") -> "View":
    """Return what is known of a run, and of the rank that is open."""
    from launcher.report.watch_screen import View

    return View(run, snapshot, find_details(path, snapshot, rank), say or explain_table(path, run, snapshot))


def find_details(path: Path, snapshot: RunSnapshot, rank: int | None) -> RankDetails | None:
    """Return the details of a rank; None if there is no such rank."""
    for view in snapshot.nodes if rank is not None else ():
        for one in view.report.ranks:
            if one.rank == rank:
                return read_details(path, rank, one.local_rank, view.report.host, one.attempt)
    return None


def explain_table(path: Path, run: RunStatus, snapshot: RunSnapshot) -> str:
    """Say why there is no table; empty if there is one."""
    if run.state == "queued":
        return describe_run_state(run)
    if snapshot.nodes:
        return ""
    watched = read_config_value(path, "watch", "enabled")
    if watched is None:
        return "its ranks are not watched: an older version of launch started it; see launch logs"
    if watched is False:
        return "its ranks are not watched (watch.enabled=false): see launch logs"
    if not run.is_live:
        return "its nodes have left no reports"
    return "no node has reported yet: reports begin some seconds after the ranks' start"


def watch_live(console: "Console", path: Path, rank: int | None) -> None:
    """Show the table until the user quits or the run has ended, which is told then."""
    from launcher.report.key_input import reading_keys
    from launcher.report.live_screen import LiveScreen
    from launcher.report.watch_screen import WatchScreen

    feed = RunFeed(path, wanted=rank, takes_stack=rank is not None)
    restore_log = redirect_log(lambda record: feed.say(record.getMessage()))
    try:
        view = feed.read()
        check_rank(view.snapshot, rank)
        with reading_keys() as keys:
            feed.start(keys.wake)
            screen = LiveScreen(console, WatchScreen(view, rank=rank), feed, keys)
            screen.run()
    finally:
        restore_log()
        feed.close()
    if screen.ended_by is not None:
        keys.end_by(screen.ended_by)
    view = screen.screen.view
    if not view.run.is_live:
        print_once(console, view, None)


@dataclass(slots=True)
class RunFeed:
    """Looks at a run once a second, in a thread: a filesystem that is stuck must not stop the keys."""

    path: Path
    wanted: int | None = None
    """The rank whose details are read too."""
    asked: int = 0
    """How often the user has asked for a stack."""
    takes_stack: bool = False
    """A stack is to be asked for."""
    reader: RunReader = field(init=False)
    states: RunWatch = field(init=False)
    message: str = ""
    newest: "View | None" = None
    looking_since: float | None = None
    """Since when the look goes on that is not over, in monotonic seconds."""
    error: Exception | None = None
    """Why the thread has ended."""
    wake: Callable[[], None] = lambda: None
    hurry: threading.Event = field(default_factory=threading.Event)
    closing: bool = False

    def __post_init__(self) -> None:
        """Look at nothing yet."""
        self.reader = RunReader(self.path)
        self.states = RunWatch(self.path, self.say, "the states are those of the run directory")

    def say(self, text: str) -> None:
        """Keep what is to be said."""
        self.message = text

    def read(self) -> "View":
        """Look at the run."""
        self.request_stack()
        run = self.states.update()
        return read_view(self.path, run, self.reader.read(), self.wanted, self.message)

    def start(self, wake: Callable[[], None]) -> None:
        """Look again and again; `wake` is called when there is something new."""
        self.wake = wake
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Look, and wait: the thread's body."""
        while not self.closing:
            self.looking_since = time.monotonic()
            try:
                self.newest = self.read()
            except Exception as error:
                self.error = error
            self.looking_since = None
            self.wake()
            if self.error:
                return
            self.hurry.wait(LOOK_SECONDS)
            self.hurry.clear()

    def take(self) -> "View | None":
        """Return the newest view if it is new; raises what has ended the thread."""
        if self.error:
            raise self.error
        view, self.newest = self.newest, None
        return view

    def want(self, rank: int | None, asked: int) -> None:
        """Have the details of a rank read, at once, and its stack taken by its node."""
        if (rank, asked) != (self.wanted, self.asked):
            self.wanted, self.asked = rank, asked
            self.takes_stack = rank is not None
            self.hurry.set()

    def request_stack(self) -> None:
        """Ask the rank's node for its stack."""
        if self.wanted is None or not self.takes_stack:
            return
        self.takes_stack = False
        try:
            write_stack_request(self.path, self.wanted)
            self.message = ""
        except OSError as error:
            self.say(f"its stack cannot be asked for ({error.strerror})")

    def measure_wait(self) -> float:
        """Return the seconds for which the last look has gone on."""
        since = self.looking_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Look no more."""
        self.closing = True
        self.hurry.set()
        self.states.close()


HELP = """\
usage: launch watch [RUN] [rank=K] [KEY=VALUE ...]

Shows live what the ranks of a run do: the job's step, rate and time left, who
holds the others up, and a row for each rank, of a job of more than 32 ranks for
each node, the slowest first. It reads the run directory alone, so it works from
any machine that has it. RUN is the newest run that has not ended, or NAME/ID,
an ID, a NAME (its newest run), a run directory, or a job (12, or 12_3 of an
array). Without a terminal, the table is printed once.

Keys: arrows choose a row and the column to sort by, Enter opens a node or a
rank, whose node then takes its stack (t takes it again), Esc goes back, p
pauses, q quits, ? shows all keys and columns.

  rank=K               begin with this rank: its stack, its last lines, and its
                       placement against its plan
  format=table|json    json: print what is known now: {"schema": 1, "run": {…},
                       "progress": {…}, "job": {…}, "nodes": [{…}]}
  runs_dir=DIR         where the runs are (runs)

  launch watch
  launch watch rank=3
  launch watch train format=json
"""
