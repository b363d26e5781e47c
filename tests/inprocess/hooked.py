"""Running programs with the hook and without it: alone, in forks of one process, and talked to."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import launcher
from launcher.watch.model import Heartbeat
from launcher.watch.ranks import read_heartbeat
from tests.seam import clean_environ

ROOT = Path(launcher.__file__).parents[1]
FOLDER = ROOT / "launcher" / "inprocess"
QUICK = "synchronized,warmup=3,every=5"
PYTHON = (sys.executable, "-W", "error")

STEPS = """
import gc, json, os, sys, weakref
from launcher import collect
seen = []
"""
"""Begin of a program without torch, which marks its steps itself."""
WITHOUT_COMPILER = """
import sys, types, torch
torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
torch._dynamo.graph_break = lambda: None
torch._dynamo.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
"""
"""Begin of a program whose optimizer imports no compiler, which takes longer than the rest of torch."""


def run_program(
    words: Sequence[str], cwd: Path, policy: str | None = QUICK, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command line as the shim would exec it; `policy` None is without the hook."""
    environ = {**clean_environ(), **variables}
    path = [str(FOLDER)] if policy is not None else []
    path += [variables["PYTHONPATH"]] if "PYTHONPATH" in variables else []
    environ.pop("PYTHONPATH", None)
    environ |= {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    environ |= {"LAUNCH_GC": policy} if policy is not None else {}
    return subprocess.run(
        [*words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False
    )


def run_code(
    code: str,
    cwd: Path,
    policy: str | None = QUICK,
    python: Sequence[str] = PYTHON,
    **variables: str,
) -> object:
    """Run a program that prints one line of JSON, and, by PYTHON, no warning; return what is in it."""
    (cwd / "program.py").write_text(code)
    done = run_program([*python, "program.py"], cwd, policy, **{"PYTHONPATH": str(ROOT), **variables})
    assert done.returncode == 0, done.stderr
    assert not done.stderr or python != PYTHON, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


DATA = Path(__file__).parents[1] / "data"
RUNNER = f"""
import json, os, sys
sys.path.insert(0, {str(FOLDER)!r})
import launch_inprocess
from launch_inprocess import import_hook
sys.path.pop(0)
BEGIN
import_hook.note_copies()
SCENARIOS = json.loads(sys.argv.pop())
for number, scenario in enumerate(SCENARIOS):
    child = os.fork()
    if not child:
        break
    os.waitpid(child, 0)
else:
    os._exit(0)
for descriptor in (1, 2):
    os.dup2(os.open(f"{{number}}.{{descriptor}}", os.O_WRONLY | os.O_CREAT), descriptor)
os.environ.update(scenario["variables"])
if scenario["hooked"]:
    launch_inprocess.start(os.environ)
exec(scenario["code"])
"""
"""Runs the scenarios of its last argument after BEGIN, an import of torch for instance."""


def run_scenarios(
    begin: str, scenarios: Sequence[Mapping[str, Any]], folder: Path, more: str = ""
) -> list[tuple[str, str]]:
    """Return what each program wrote to stdout and stderr.

    A scenario has `code`, `variables`, and perhaps `hooked`. `begin` is run once before them, `more` in each.
    """
    environ = {**clean_environ(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    cases = [
        {
            "code": more + scenario["code"],
            "hooked": scenario.get("hooked", True),
            "variables": scenario["variables"],
        }
        for scenario in scenarios
    ]
    program = RUNNER.replace("BEGIN", begin)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, json.dumps(cases)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    return [
        ((folder / f"{number}.1").read_text(), (folder / f"{number}.2").read_text())
        for number in range(len(cases))
    ]


def check_table(name: str, folder: Path, begin: str, more: str = "") -> None:
    """Run the scenarios of a file in tests/data: each prints as JSON what it says under `finds`.

    `policies` are for LAUNCH_GC. One with `same` prints the same without the hook, one with `steps` prints
    nothing, and collects at these steps by the log of its policy.
    """
    table = tomllib.loads((DATA / name).read_text())["scenario"]
    scenarios = [
        {"row": row, "code": row["code"], "hooked": hooked, "variables": {"LAUNCH_GC": policy}}
        for row in table
        for policy in row.get("policies", [QUICK])
        for hooked in ((True, False) if row.get("same") else (row.get("hooked", True),))
    ]
    outputs = run_scenarios(begin, scenarios, folder, more)
    last: object = None
    for scenario, (out, err) in zip(scenarios, outputs, strict=True):
        row, where = scenario["row"], f"{scenario['row']['name']}, {scenario['variables']}: {out}{err}"
        if "steps" in row:
            found = re.findall(r"^launch: rank 0: step (\d+): .*$", err, re.MULTILINE)
            assert ([*map(int, found)], len(found), out) == (row["steps"], err.count("\n"), ""), where
            continue
        assert out and not err, where
        before, last = last, json.loads(out.splitlines()[-1])
        assert last == row.get("finds", last), where
        if row.get("same") and not scenario["hooked"]:
            assert last == before, where


BEGIN = """
import os, signal, sys, time
import launcher

def wait(word="ready"):
    "Let the test look, and go on when it says so."
    print(word, flush=True)
    return input()
"""
"""Begin of a program that the test talks to."""


def list_heartbeats(folder: Path) -> list[Heartbeat]:
    """The heartbeats in a folder by rank."""
    found = [beat for path in folder.glob("rank-*.beat") if (beat := read_heartbeat(path))]
    return sorted(found, key=lambda beat: beat.rank)


class Program:
    """A running program, rank 0 of its job."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.path = folder / "rank-0.beat"

    def read(self) -> Heartbeat | None:
        """Return its heartbeat."""
        return read_heartbeat(self.path)

    def read_now(self) -> Heartbeat:
        """Return its heartbeat, which must be there."""
        found = self.read()
        assert found is not None
        return found

    def wait(self) -> str:
        """Wait until it waits, and return its word."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def go_on(self, word: str = "") -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[int, str, str]:
        """Return how it ended, and what more it wrote to stdout and stderr."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def make_watched_environ(folder: Path, **variables: str) -> dict[str, str]:
    """Return what the shim gives to a rank that is watched."""
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LAUNCH_WATCH": str(folder)}
    path = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
    return {**clean_environ(), **ours, **path, "OMP_NUM_THREADS": "1", **variables}


@contextmanager
def start_program(
    code: str, folder: Path, python: tuple[str, ...] = PYTHON, **variables: str
) -> Generator[Program]:
    """Start a program whose heartbeat is in `folder/beats`; it is killed if it has not ended by itself."""
    beats = folder / "beats"
    beats.mkdir(exist_ok=True, mode=0o700)
    process = subprocess.Popen(
        [*python, "-c", BEGIN + code],
        cwd=folder,
        env=make_watched_environ(beats, **variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Program(process, beats)
    finally:
        process.kill()
        process.communicate()


def is_mapped(path: str | os.PathLike[str], pid: int) -> bool:
    """Tell whether a process still has its heartbeat mapped; an exec ends that, whatever file is there."""
    try:
        inode, name = str(Path(path).stat().st_ino), Path(path).name
        with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as file:
            mapped = (line.rstrip("\n").split(None, 5)[4:] for line in file)
            return any(
                len(part) == 2 and part[0] == inode and part[1].endswith(f"/{name}") for part in mapped
            )
    except OSError:
        return False
