"""The matrix of hangs: real ones under `launch`, here and on the sandbox's nodes; seconds to their name.

`python -m tests.benchmarks hangs hangs=sleep,gil programs=ddp where=local jobs=2 until=named`

A hang is named by a notice or as a hang; `until=named` does not wait for the latter.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from launcher.watch.node_reports import read_evidence, read_job_state, read_reports
from launcher.watch.verdict import judge
from launcher.watch.watch_model import Verdict
from tests.benchmarks.hang_cases import CASES, CULPRIT, GROUPS, PROGRAM, RANKS, Case, Marks, mark
from tests.seam import LAUNCH, clean_environ, find_processes
from tests.slurm.cluster.conftest import Sandbox, start_sandbox

PATIENCE = 120.0
"""Seconds after which it must have been named, and beyond its time, after which it must be called a hang."""
START = 240.0
"""Seconds until the hang has to begin; starts are slow if several runs share two cores."""
GOAL = 30.0
NAMED, HUNG = re.compile(r"launch: (no step for|hang 1 )"), re.compile("launch: hang 1 ")
SETTLE = 4.0
"""Seconds after the verdict, for the rest of the output."""
LOCAL = (f"nproc_per_node={RANKS}",)
CLUSTER = (
    f"nodes={RANKS}",
    "nproc_per_node=1",
    "follow=true",
    "cluster.cpus_per_task=4",
    "cluster.mem=3500M",
    "cluster.gpus_per_node=0",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix."""

    case: Case
    program: str
    where: str
    """`local` or `cluster`."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it."""

    cell: Cell
    seconds: float | None
    """From its begin to the line on the console that names it; None if there was none."""
    verdict: Verdict | None
    marks: Marks | None
    ended: int | None
    """Exit code if the job ended before a verdict."""
    hung: float | None = None
    """Seconds to the line that calls it a hang."""
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the verdict is; where torch ends the program, whether there was none."""
        if not self.cell.case.kinds:
            return self.ended is not None and self.verdict is None
        return self.marks is not None and self.marks.are_right and self.seconds is not None


class Console:
    """The lines of a process, each with the time when it came."""

    def __init__(self, process: "subprocess.Popen[str]", copy: Path) -> None:
        self.lines: list[tuple[float, str]] = []
        self.copy = copy
        assert process.stdout is not None
        self.thread = threading.Thread(target=self.read, args=(process.stdout,), daemon=True)
        self.thread.start()

    def read(self, stream: Iterator[str]) -> None:
        """Collect lines until the stream ends."""
        with self.copy.open("w") as file:
            for line in stream:
                self.lines.append((time.time(), line))
                file.write(f"{time.time():.1f} {line}")
                file.flush()

    def find(self, pattern: re.Pattern[str]) -> float | None:
        """When a line with such a text came first."""
        return next((when for when, line in self.lines if pattern.search(line)), None)


@dataclass(frozen=True, slots=True)
class Job:
    """A started `launch`."""

    cell: Cell
    process: "subprocess.Popen[str]"
    console: Console
    stamps: Path
    folder: Path
    sandbox: Sandbox | None

    @property
    def run_path(self) -> Path | None:
        """Its run directory, once there is one."""
        return next(iter(self.folder.glob("runs/*/*")), None)

    def read_stamp(self) -> float | None:
        """When the hang began."""
        with suppress(OSError, ValueError):
            return float((self.stamps / "began").read_text())
        return None

    def read_verdict(self) -> Verdict | None:
        """The verdict in the run directory, or that on what was gathered for a notice."""
        state = read_job_state(self.run_path) if self.run_path else None
        if self.run_path is None or state is None or state.hangs:
            return state.hangs[0].verdict if state else None
        nodes = read_evidence(self.run_path, max(self.list_questions(), default=0))
        return judge(nodes, [stored.report for stored in read_reports(self.run_path)])

    def list_questions(self) -> Iterator[int]:
        """Numbers of the questions that nodes have answered."""
        for path in self.run_path.glob("watch/evidence-*.json") if self.run_path else ():
            with suppress(OSError, ValueError):
                yield int(json.loads(path.read_text())["number"])


@contextmanager
def start_job(cell: Cell, folder: Path, sandbox: Sandbox | None) -> Iterator[Job]:
    """Start a run; whatever is left at the end is killed."""
    stamps = folder / "stamps"
    stamps.mkdir(parents=True)
    mark_word = f"LAUNCH_TEST_MARK={folder}"
    environ = {**(sandbox.environ if sandbox else clean_environ()), **dict([mark_word.split("=")])}
    words = [*(CLUSTER if sandbox else LOCAL), "name=hang", "--", str(PROGRAM), f"--program={cell.program}"]
    words += [f"--hang={cell.case.name}", f"--culprit={CULPRIT}", f"--stamps={stamps}"]
    process = subprocess.Popen(
        [*LAUNCH, *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    job = Job(cell, process, Console(process, folder / "console"), stamps, folder, sandbox)
    try:
        yield job
    finally:
        kill_job(job)


def kill_job(job: Job) -> None:
    """End a run and all of its processes."""
    if job.sandbox and job.run_path:
        with suppress(OSError, KeyError, ValueError, AssertionError):
            manifest = json.loads((job.run_path / "manifest.json").read_text())
            job.sandbox.run("scancel", "--signal=KILL", "--full", str(manifest["slurm"]["job_id"]))
            job.sandbox.run("scancel", str(manifest["slurm"]["job_id"]))
    job.process.kill()
    end = time.monotonic() + 20
    while (left := find_processes(str(job.folder))) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    job.process.wait(10)


def stop_from_outside(job: Job) -> None:
    """Send SIGSTOP to the rank, or to all of its node, once it has come to the step; note the time."""
    name = job.cell.case.name
    if name not in {"sigstop", "node-stopped"}:
        return
    step = job.stamps / f"step-{CULPRIT}"
    end = time.monotonic() + START
    while not (step.exists() and int(step.read_text() or 0) >= 8) and time.monotonic() < end:
        if job.process.poll() is not None:
            return
        time.sleep(0.05)
    pid = int((job.stamps / f"pid-{CULPRIT}").read_text())
    pids = [pid]
    if name == "node-stopped":
        assert job.sandbox is not None
        listed = [line.split(maxsplit=2) for line in job.sandbox.list_processes()]
        (node,) = {words[1] for words in listed if int(words[0]) == pid}
        ours = set(find_processes(str(job.folder)))
        pids = [int(words[0]) for words in listed if words[1] == node and int(words[0]) in ours]
    for one in pids:
        os.kill(one, signal.SIGSTOP)
    (job.stamps / "began").write_text(str(time.time()))


def run_cell(cell: Cell, folder: Path, sandbox: Sandbox | None, until: str) -> Found:
    """Run one cell until it is named, or called a hang, or ends, or the end of patience."""
    shutil.rmtree(folder, ignore_errors=True)
    with start_job(cell, folder, sandbox) as job:
        stop_from_outside(job)
        named = hung = verdict = None
        end = time.time() + START
        while time.time() < end and job.process.poll() is None:
            began = job.read_stamp()
            if began is not None and named is None:
                end = began + PATIENCE
            if named is None and (named := job.console.find(NAMED)):
                time.sleep(SETTLE)
                verdict = job.read_verdict()
                end = time.time() if until == "named" else (began or named) + cell.case.seconds + PATIENCE
            if hung := job.console.find(HUNG):
                time.sleep(SETTLE)
                break
            time.sleep(0.2)
        if began is None:
            return Found(cell, None, verdict, None, job.process.poll(), note="it never began")
        if named is None or verdict is None:
            return Found(cell, None, None, None, job.process.poll(), note=tell_ending(job))
        marks = mark(cell.case, cell.program, verdict)
        return Found(cell, named - began, verdict, marks, None, hung and hung - began)


def tell_ending(job: Job) -> str:
    """The last line about an error."""
    errors = [
        line.strip() for _, line in list(job.console.lines) if "Error" in line or "launch: error" in line
    ]
    return errors[-1][:160] if errors else ""


def show_mark(mark_: bool | None) -> str:
    """A cell of the table."""
    return {True: "yes", False: "NO", None: ""}[mark_]


def show_row(found: Found) -> str:
    """A row of the table."""
    cell, marks = found.cell, found.marks
    seconds = "" if found.seconds is None else f"{found.seconds:.1f}"
    hung = "" if found.hung is None else f"{found.hung:.1f}"
    if found.verdict is None:
        sentence = f"no verdict; exit code {found.ended}; {found.note}"
    else:
        sentence = found.verdict.sentence + (f" ({found.note})" if found.note else "")
    kind = found.verdict.kind if found.verdict else "ended" if found.ended is not None else "none"
    right = [show_mark(one) for one in (marks.rank, marks.group, marks.line)] if marks else [""] * 3
    cells = [cell.case.name, cell.program, cell.where, seconds, hung, kind, *right]
    cells += ["yes" if found.is_right else "NO", sentence.replace("|", "/")]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "hang",
    "program",
    "where",
    "named, s",
    "a hang, s",
    "kind",
    "rank",
    "group",
    "line",
    "right",
    "sentence",
)


def print_totals(found: Sequence[Found]) -> None:
    """Print how many are right, and the seconds."""
    expected = [one for one in found if one.cell.case.kinds]
    times = sorted(one.seconds for one in expected if one.seconds is not None)
    print(f"\nhangs: {len(expected)}; right: {sum(one.is_right for one in expected)}")
    for name in ("rank", "group", "line", "kind"):
        counts = Counter(getattr(one.marks, name) for one in expected if one.marks)
        print(f"{name}: {counts[True]} right, {counts[False]} wrong, {counts[None]} not asked for")
    if times:
        within = sum(seconds <= GOAL for seconds in times)
        print(f"named: {times[0]:.1f} to {times[-1]:.1f} s, median {times[len(times) // 2]:.1f}; ", end="")
        print(f"within {GOAL:.0f} s: {within} of {len(expected)}")
        late = [one.hung - one.cell.case.seconds for one in expected if one.hung is not None]
        if late:
            print(f"called a hang: {len(late)}, at most {max(late):.1f} s after its time")
    others = [one for one in found if not one.cell.case.kinds]
    print(f"ended by torch itself, without a verdict: {sum(one.is_right for one in others)} of {len(others)}")


def list_cells(options: Mapping[str, str]) -> list[Cell]:
    """The cells that are selected; raises ValueError for unknown names."""
    wheres = choose(options, "where", ("local", "cluster"))
    names, programs = choose(options, "hangs", tuple(CASES)), choose(options, "programs", tuple(GROUPS))
    cells = [Cell(CASES[name], program, where) for where in wheres for program in programs for name in names]
    return [cell for cell in cells if cell.where == "cluster" or not cell.case.clusters_only]


def choose(options: Mapping[str, str], key: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that an option selects, or all."""
    chosen = tuple(options[key].split(",")) if key in options else names
    if unknown := set(chosen) - set(names):
        raise ValueError(f"{key}= is of {', '.join(names)}, not {', '.join(sorted(unknown))}")
    return chosen


def bench_hangs(folder: Path, options: Mapping[str, str]) -> None:
    """Run the matrix, `jobs` runs at a time, and print a row for each; `keep=DIR` keeps what they wrote."""
    cells, jobs = list_cells(options), int(options.get("jobs", "1"))
    folder = Path(options.get("keep", folder)).absolute()
    print(f"\n| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|", flush=True)
    found: list[Found] = []
    for where in dict.fromkeys(cell.where for cell in cells):
        with start_sandbox("--no-accounting") if where == "cluster" else nullcontext() as sandbox:
            chosen = [cell for cell in cells if cell.where == where]
            with ThreadPoolExecutor(jobs) as pool:
                until = options.get("until", "hang")
                run = partial(run_and_print, folder=folder, sandbox=sandbox, until=until)
                found += pool.map(run, chosen)
    print_totals(found)


def run_and_print(cell: Cell, folder: Path, sandbox: Sandbox | None, until: str) -> Found:
    """Run a cell and print its row."""
    path = folder / f"{cell.where}-{cell.case.name}-{cell.program}"
    try:
        found = run_cell(cell, path, sandbox, until)
    except (OSError, subprocess.SubprocessError, AssertionError, ValueError) as error:
        found = Found(cell, None, None, None, None, note=f"the harness failed: {error!r}"[:300])
    print(show_row(found), flush=True)
    (path / "found.json").write_text(json.dumps(asdict(found), default=list))
    return found


if __name__ == "__main__":
    sys.exit("python -m tests.benchmarks hangs")
