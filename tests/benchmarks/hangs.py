"""Real hangs under `launch`, here and on the sandbox's nodes: are rank, group and line right, and how soon?

`make bench ARGS="hangs hangs=sleep,gil programs=ddp where=local jobs=2 until=hang"`; by default a run ends
once its hang is named by a notice or as a hang, with `until=hang` once it is called a hang. `keep=DIR` keeps
the runs.
"""

import json
import os
import re
import signal
import statistics
import sys
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.benchmarks.jobs import HERE, Job, make_command, print_head, print_row, read_state, start_job
from tests.seam import find_processes
from tests.slurm.cluster.conftest import Sandbox, start_sandbox

PROGRAM = HERE / "hang_program.py"
RANKS, CULPRIT = 4, 2
GROUPS = {
    "ddp": ("the default group",),
    "fsdp2": ("the default group",),
    "groups": ("pair-1", "the default group"),
}
"""In which groups others wait for the culprit, by program."""
START, PATIENCE = 240.0, 120.0
"""Seconds until it has to begin; until it has to be named, or beyond its time called a hang."""
NAMED, HUNG = "launch: (n0: )?(no step for|hang 1 )", "launch: (n0: )?hang 1 "
"""As this machine says it, or a job's first node."""
SETTINGS = ["follow=true", "cluster.cpus_per_task=4", "cluster.mem=3500M"]


@dataclass(frozen=True, slots=True)
class Case:
    """A hang, and what is right to say of it: see hangs.toml."""

    name: str
    what: str
    kind: str = "absent"
    ranks: str = str(CULPRIT)
    group: bool = True
    line: bool = True
    seconds: float = 60.0
    where: str = ""


CASES = {name: Case(name, **row) for name, row in tomllib.loads((HERE / "hangs.toml").read_text()).items()}


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a run."""

    case: Case
    sentence: str = ""
    named: float | None = None
    """Seconds from the begin of the hang to the line that names it."""
    hung: float | None = None
    kind: str = ""
    code: int | None = None
    """Exit code, if the job has ended by itself."""

    def judge(self, program: str) -> dict[str, bool]:
        """Say what of the sentence is right."""
        if not self.case.kind:
            return {"ended by torch": self.code is not None and not self.sentence}
        # `rank 2 on n2`; of a node, `nothing is heard of node n2 (rank 2 on n2)`.
        ranks = re.search(r"ranks? ([\d,-]+(?: on \S+, \d+)*)", self.sentence)
        marks = {"rank": ranks is not None and expand(ranks[1]) == expand(self.case.ranks)}
        if self.case.group:
            marks["group"] = any(group in self.sentence for group in GROUPS[program])
        if self.case.line:
            stands = re.search(rf"{PROGRAM.name}:(\d+)", self.sentence)
            text = PROGRAM.read_text().splitlines()[int(stands[1]) - 1] if stands else ""
            marks["line"] = bool(re.search(rf"# HANG HERE.* {self.case.name}\b", text))
        if self.kind:
            marks["kind"] = self.kind == self.case.kind
        return marks


def expand(text: str) -> set[int]:
    """Return the numbers of `0-3` or `1 on n1, 2`."""
    found: set[int] = set()
    for first, last in re.findall(r"(?<![\w-])(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def run_case(case: Case, program: str, folder: Path, sandbox: Sandbox | None, until: str) -> Found:
    """Run until the hang is named, or called a hang, or the job ends."""
    stamps = folder / "stamps"
    stamps.mkdir(parents=True)
    options = (f"--program={program}", f"--hang={case.name}", f"--culprit={CULPRIT}", f"--stamps={stamps}")
    words = [str(PROGRAM), *options]
    way = ["launch", "name=hang", *(SETTINGS if sandbox else [])]
    command = make_command(way, words, ranks=RANKS, nodes=RANKS if sandbox else 0)
    with start_job(folder, command, sandbox=sandbox) as job:
        if case.name in ("sigstop", "node-stopped"):
            stop_from_outside(job, stamps, whole_node=case.name == "node-stopped")
        try:
            job.await_true((stamps / "began").exists, START)
        except TimeoutError as error:
            return Found(case, f"it never began: {error}", code=job.process.poll())
        began = float((stamps / "began").read_text())
        limit = began + case.seconds * (until == "hang") + PATIENCE
        pattern = HUNG if until == "hang" else NAMED
        while job.find_line(pattern) is None and time.time() < limit and job.process.poll() is None:
            time.sleep(0.2)
        named, hung = job.find_line(NAMED), job.find_line(HUNG)
        if named is None:
            return Found(case, code=job.process.poll())
        if hung:
            time.sleep(4)  # the state is written after the line
        kind = next((hang["verdict"]["kind"] for hang in read_state(folder).get("hangs", ())), "")
        (folder / "console").write_text("".join(line for _, line in job.lines))
        return Found(case, named[1].strip(), named[0] - began, hung[0] - began if hung else None, kind)


def stop_from_outside(job: Job, stamps: Path, *, whole_node: bool) -> None:
    """Send SIGSTOP to the culprit, or to all of its node, in its eighth step; note the time."""
    step = stamps / f"step-{CULPRIT}"
    job.await_true(lambda: step.exists() and int(step.read_text() or 0) >= 8, START)
    pid = int((stamps / f"pid-{CULPRIT}").read_text())
    pids = [pid]
    if whole_node:
        assert job.sandbox is not None
        listed = [line.split(maxsplit=2) for line in job.sandbox.list_processes()]
        (node,) = {words[1] for words in listed if int(words[0]) == pid}
        ours = find_processes(str(job.folder))
        pids = [int(words[0]) for words in listed if words[1] == node and int(words[0]) in ours]
    for one in pids:
        os.kill(one, signal.SIGSTOP)
    (stamps / "began").write_text(str(time.time()))


def bench_hangs(folder: Path, options: Mapping[str, str]) -> None:
    """Run the matrix, `jobs` runs at a time, and print a row for each."""
    folder = Path(options.get("keep", folder)).absolute()
    wheres, names, programs = (
        options[key].split(",") if key in options else list(known)
        for key, known in (("where", ("local", "cluster")), ("hangs", CASES), ("programs", GROUPS))
    )
    if unknown := {*names, *programs} - {*CASES, *GROUPS}:
        sys.exit(f"hangs are {', '.join(CASES)}, programs {', '.join(GROUPS)}, not {', '.join(unknown)}")
    print_head("Hangs", "hang", "program", "where", "named, s", "a hang, s", "right", "sentence")
    results: list[tuple[Found, dict[str, bool]]] = []
    for where in wheres:
        cells = [(CASES[n], p) for p, n in product(programs, names) if CASES[n].where in ("", where)]
        with start_sandbox("--no-accounting") if where == "cluster" else nullcontext() as sandbox:

            def run(cell: tuple[Case, str], where: str = where, sandbox: Sandbox | None = sandbox) -> None:
                case, program = cell
                place = folder / f"{where}-{case.name}-{program}"
                found = run_case(case, program, place, sandbox, options.get("until", "named"))
                marks = found.judge(program)
                results.append((found, marks))
                times = ["" if one is None else f"{one:.1f}" for one in (found.named, found.hung)]
                wrong = "yes" if all(marks.values()) else f"NO: {[name for name in marks if not marks[name]]}"
                said = found.sentence or f"exit code {found.code}"
                print_row(case.what, program, where, *times, wrong, said)
                (place / "found.json").write_text(json.dumps({"said": said, "marks": marks}))

            with ThreadPoolExecutor(int(options.get("jobs", "1"))) as pool:
                list(pool.map(run, cells))
    print_totals(results)


def print_totals(results: list[tuple[Found, dict[str, bool]]]) -> None:
    """Print how many are right, and the seconds."""
    print(f"\nruns: {len(results)}; right: {sum(all(marks.values()) for _, marks in results)}")
    for name in ("rank", "group", "line", "kind", "ended by torch"):
        asked = [marks[name] for _, marks in results if name in marks]
        print(f"{name}: {sum(asked)} of {len(asked)}")
    times = sorted(one.named for one, _ in results if one.named is not None)
    if times:
        print(f"named: {times[0]:.1f} to {times[-1]:.1f} s, median {statistics.median(times):.1f}")
    late = [one.hung - one.case.seconds for one, _ in results if one.hung is not None]
    if late:
        print(f"called a hang: {len(late)}, at most {max(late):.1f} s after its time")
