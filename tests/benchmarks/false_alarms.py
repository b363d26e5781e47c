"""Healthy programs that are slow now and then: a hang is a false alarm, and so is a second notice.

`make bench ARGS="false-alarms minutes=60 jobs=3 cases=save,compile"`; `scale=0.1` makes what is slow shorter,
and `keep=DIR` keeps the runs with alarms.
"""

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest

from tests.benchmarks.healthy_program import CASES
from tests.benchmarks.jobs import HERE, make_command, print_head, print_row, read_state, start_job
from tests.launch.terminals import open_terminal

COFFEE = 90.0
"""Seconds at the debugger's prompt."""
LIMIT = 900.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One healthy run."""

    case: str
    seconds: float
    code: int
    alarms: tuple[str, ...]
    notices: tuple[str, ...]
    stragglers: tuple[str, ...]
    is_watched: bool


def run_case(case: str, folder: Path, scale: float) -> Outcome:
    """Run a case once; the debuggers on a terminal, with nobody at it for a while."""
    (folder / "files").mkdir(parents=True)
    options = (f"--case={case}", f"--folder={folder / 'files'}", f"--scale={scale}")
    words = [str(HERE / "healthy_program.py"), *options]
    began = time.monotonic()
    if case in ("breakpoint", "pdb"):
        program = [sys.executable, "-m", "pdb", *words] if case == "pdb" else words
        with open_terminal(folder, *make_command(["launch", "name=healthy"], program)) as terminal:
            terminal.expect("(Pdb)", timeout=120)
            pause = time.monotonic() + COFFEE * scale
            while time.monotonic() < pause:
                terminal.take_some(time.monotonic() + 0.5)
            terminal.type("c\n")
            if case == "pdb":
                terminal.expect("The program finished", timeout=LIMIT)
                terminal.type("q\n")
            code, said = terminal.finish(LIMIT), terminal.text()
        state = read_state(folder)
    else:
        with start_job(folder, make_command(["launch", "name=healthy"], words, ranks=2)) as job:
            job.await_true(lambda: job.process.poll() is not None, LIMIT)
            code, state = job.process.returncode, read_state(folder)
        said = "".join(line for _, line in job.lines)
    alarms = [hang["verdict"]["sentence"] for hang in state.get("hangs", ())]
    alarms += ["a folder of a hang that the job's state does not have"] * (
        len([*folder.glob("runs/*/*/hang-*")]) - len(alarms)
    )
    told = [f"rank {one['rank']}: {one['cause']}: {one['detail']}" for one in state.get("stragglers", ())]
    notices = [line for line in said.splitlines() if "launch: no step for " in line]
    seconds = time.monotonic() - began
    return Outcome(case, seconds, code, tuple(alarms), tuple(notices), tuple(told), bool(state))


def bench_false_alarms(folder: Path, options: Mapping[str, str]) -> None:
    """Run cases in turn until the time is over, and print a row for each run."""
    folder = Path(options.get("keep", folder)).absolute()
    names = options["cases"].split(",") if "cases" in options else [*CASES]
    if unknown := set(names) - set(CASES):
        sys.exit(f"cases are {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    cases, lock = cycle(names), threading.Lock()
    end = time.monotonic() + 60 * float(options.get("minutes", "60"))
    outcomes: list[Outcome] = []
    failures: list[str] = []
    print_head("Healthy programs", "case", "s", "exit code", "hangs", "notices", "said")

    def work(lane: int) -> None:
        while time.monotonic() < end:
            with lock:
                case, number = next(cases), len(outcomes) + len(failures)
            path = folder / f"{case}-{lane}-{number}"
            try:
                outcome = run_case(case, path, float(options.get("scale", "1")))
            except (Exception, pytest.fail.Exception) as error:  # the others are worth their time
                failures.append(case)
                print_row(case, f"the benchmark failed: {error!r}"[:300])
                continue
            outcomes.append(outcome)
            counts = f"{outcome.seconds:.0f}", outcome.code, len(outcome.alarms), len(outcome.notices)
            print_row(case, *counts, "; ".join((*outcome.alarms, *outcome.notices, *outcome.stragglers)))
            if not outcome.alarms and not outcome.code:
                shutil.rmtree(path, ignore_errors=True)

    jobs = int(options.get("jobs", "3"))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))
    watched = sum(one.seconds for one in outcomes if one.is_watched) / 60
    print(f"\nhealthy runs: {len(outcomes)}, watched for {watched:.0f} minutes in all")
    print(f"called a hang: {sum(len(one.alarms) for one in outcomes)}")
    counted = sorted(Counter(len(one.notices) for one in outcomes).items())
    print("runs by notices: " + ", ".join(f"{runs} with {count}" for count, runs in counted))
    print(f"stragglers told of: {sum(len(one.stragglers) for one in outcomes)}")
    print(f"failed: {sum(bool(one.code) for one in outcomes)}; the benchmark: {len(failures)}")
