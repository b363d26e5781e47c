"""An hour of healthy programs that are slow now and then: a hang is a false alarm, and so is a second notice.

`python -m tests.benchmarks false-alarms minutes=60 jobs=3 cases=save,compile`
"""

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest

from launcher.watch.node_reports import count_hangs, read_job_state
from tests.benchmarks.healthy_program import FIRST, LAST, LATER
from tests.launch.terminals import Terminal, open_terminal
from tests.seam import LAUNCH, clean_environ

PROGRAM = Path(__file__).with_name("healthy_program.py")
CASES = (*FIRST, *LATER, *LAST)
RANKS = 2
COFFEE = 90.0
"""Seconds at the debugger's prompt."""
LIMIT = 900.0
"""Seconds for one run, on a machine that several share."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One healthy run."""

    case: str
    seconds: float
    code: int
    alarms: tuple[str, ...]
    """The sentences of hangs that were told of."""
    notices: tuple[str, ...]
    stragglers: tuple[str, ...]
    reports: int
    """Of its watcher; 0 if it was not watched."""


def run_case(case: str, folder: Path, scale: float) -> Outcome:
    """Run a case once."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "files").mkdir(parents=True)
    words = [str(PROGRAM), f"--case={case}", f"--folder={folder / 'files'}", f"--scale={scale}"]
    began = time.monotonic()
    if case in {"breakpoint", "pdb"}:
        code = run_debugged(case, words, folder, COFFEE * scale)
    else:
        code = run_plainly(words, folder)
    seconds = time.monotonic() - began
    shutil.rmtree(folder / "files")
    return read_outcome(case, seconds, code, folder)


def run_plainly(words: list[str], folder: Path) -> int:
    """Run without a terminal; return the exit code."""
    command = [*LAUNCH, f"nproc_per_node={RANKS}", "name=healthy", "--", *words]
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(
            command, cwd=folder, env=clean_environ(), stdin=subprocess.DEVNULL, stdout=console, stderr=console
        )
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            return process.wait(60)


def run_debugged(case: str, words: list[str], folder: Path, seconds: float) -> int:
    """Run on a terminal, with nobody at it for a while; return the exit code."""
    program = [sys.executable, "-m", "pdb", *words] if case == "pdb" else words
    command = (*LAUNCH, "nproc_per_node=1", "name=healthy", "--", *program)
    with open_terminal(folder, *command) as terminal:
        terminal.expect("(Pdb)", timeout=120)
        read_for(terminal, seconds)
        terminal.type("c\n")
        if case == "pdb":
            terminal.expect("The program finished", timeout=LIMIT)
            read_for(terminal, seconds / 3)
            terminal.type("q\n")
        code = terminal.finish(LIMIT)
        (folder / "console").write_text(terminal.text())
    return code


def read_for(terminal: Terminal, seconds: float) -> None:
    """Look at the terminal, and type nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        terminal.take_some(time.monotonic() + 0.5)


def read_outcome(case: str, seconds: float, code: int, folder: Path) -> Outcome:
    """What the run's directory says."""
    (path,) = folder.glob("runs/*/*")
    state = read_job_state(path)
    alarms = [hang.verdict.sentence for hang in state.hangs] if state else []
    alarms += ["a folder of a hang that the job's state does not have"] * (count_hangs(path) - len(alarms))
    stragglers = [f"rank {one.rank}: {one.cause}: {one.detail}" for one in state.stragglers] if state else []
    reports = len([*path.glob("watch/node-*.json")])
    console = (folder / "console").read_text(errors="replace").splitlines()
    notices = tuple(line for line in console if "launch: no step for " in line)
    return Outcome(case, seconds, code, tuple(alarms), notices, tuple(stragglers), reports)


class Hour:
    """Cases in turn until the time is over, and what came of them."""

    def __init__(self, cases: Iterator[str], minutes: float, folder: Path, scale: float) -> None:
        self.cases, self.folder, self.scale = cases, folder, scale
        self.end = time.monotonic() + 60 * minutes
        self.lock = threading.Lock()
        self.outcomes: list[Outcome] = []
        self.failures: list[str] = []

    def work(self, lane: int) -> None:
        """Run one case after the other."""
        while time.monotonic() < self.end:
            with self.lock:
                case = next(self.cases)
                number = len(self.outcomes)
            path = self.folder / f"{case}-{lane}-{number}"
            try:
                outcome = run_case(case, path, self.scale)
            except (Exception, SystemExit, pytest.fail.Exception) as error:
                self.failures.append(f"{case}: {error!r}"[:300])
                print(f"| {case} | the harness failed: {error!r} |"[:300], flush=True)
                continue
            with self.lock:
                self.outcomes.append(outcome)
            print_outcome(outcome)
            if not outcome.alarms and not outcome.code:
                shutil.rmtree(path, ignore_errors=True)


def print_outcome(outcome: Outcome) -> None:
    """Print a row."""
    said = "; ".join(
        (*outcome.alarms, *outcome.notices, *(f"straggler: {one}" for one in outcome.stragglers))
    ).replace("|", "/")
    cells = [outcome.case, f"{outcome.seconds:.0f}", str(outcome.code), str(len(outcome.alarms))]
    cells.append(str(len(outcome.notices)))
    print(f"| {' | '.join((*cells, str(outcome.reports), said))} |", flush=True)


def bench_false_alarms(folder: Path, options: Mapping[str, str]) -> None:
    """Run for `minutes`, `jobs` at a time; `keep=DIR` keeps the folders of runs with alarms."""
    chosen = tuple(options["cases"].split(",")) if "cases" in options else CASES
    if unknown := set(chosen) - set(CASES):
        sys.exit(f"cases are {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    jobs, minutes = int(options.get("jobs", "3")), float(options.get("minutes", "60"))
    folder = Path(options.get("keep", folder)).absolute()
    print(
        "\n| case | s | exit code | hangs | notices | reports | said |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    hour = Hour(cycle(chosen), minutes, folder, float(options.get("scale", "1")))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(hour.work, range(jobs)))
    watched = sum(one.seconds for one in hour.outcomes if one.reports) / 60
    print(f"\nhealthy runs: {len(hour.outcomes)}, watched for {watched:.0f} minutes in all")
    print(f"called a hang: {sum(len(one.alarms) for one in hour.outcomes)}")
    counts = Counter(len(one.notices) for one in hour.outcomes)
    print("runs by notices: " + ", ".join(f"{runs} with {count}" for count, runs in sorted(counts.items())))
    print(f"stragglers told of: {sum(len(one.stragglers) for one in hour.outcomes)}")
    print(f"failed: {sum(bool(one.code) for one in hour.outcomes)}; harness: {len(hour.failures)}")
