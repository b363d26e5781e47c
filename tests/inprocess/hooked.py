"""Running programs with the hook and without it: alone, and in forks of one process."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
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
DATA = Path(__file__).parents[1] / "data"

WITHOUT_COMPILER = """
import sys, types, torch
torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
torch._dynamo.graph_break = lambda: None
torch._dynamo.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
"""
"""Begin of a program whose optimizer imports no compiler, which takes longer than the rest of torch."""


def read_table(name: str) -> dict[str, Any]:
    """Read a file in tests/data: the scenarios, and what is run once before them."""
    return tomllib.loads((DATA / name).read_text().replace("WITHOUT_COMPILER", WITHOUT_COMPILER))


PROGRAMS = read_table("programs.toml")
"""`steps` begins a program without torch, which marks its steps itself; `runner` runs the scenarios of its
last argument after BEGIN."""


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


def run_scenarios(begin: str, scenarios: Sequence[Mapping[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """Return what each program wrote to stdout and stderr.

    A scenario has `code`, `variables`, and perhaps `hooked`. `begin` is run once before them.
    """
    environ = {**clean_environ(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    cases = [
        {
            "code": scenario["code"],
            "hooked": scenario.get("hooked", True),
            "variables": scenario["variables"],
        }
        for scenario in scenarios
    ]
    program = PROGRAMS["runner"].replace("FOLDER", repr(str(FOLDER))).replace("BEGIN", begin)
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


def check_table(name: str, folder: Path) -> None:
    """Run the scenarios of a file in tests/data: each prints as JSON what it says under `finds`.

    `policies` are for LAUNCH_GC. One with `same` prints the same without the hook, one with `steps` prints
    nothing, and collects at these steps by the log of its policy.
    """
    table = read_table(name)
    scenarios = [
        {"row": row, "code": row["code"], "hooked": hooked, "variables": {"LAUNCH_GC": policy}}
        for row in table["scenario"]
        for policy in row.get("policies", [QUICK])
        for hooked in ((True, False) if row.get("same") else (row.get("hooked", True),))
    ]
    outputs = run_scenarios(table["begin"], scenarios, folder)
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


def list_heartbeats(folder: Path) -> list[Heartbeat]:
    """The heartbeats in a folder by rank."""
    found = [beat for path in folder.glob("rank-*.beat") if (beat := read_heartbeat(path))]
    return sorted(found, key=lambda beat: beat.rank)


def make_watched_environ(folder: Path, **variables: str) -> dict[str, str]:
    """Return what the shim gives to a rank that is watched."""
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LAUNCH_WATCH": str(folder)}
    path = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
    return {**clean_environ(), **ours, **path, "OMP_NUM_THREADS": "1", **variables}
