"""Many small programs in one process: each in a fork of it, in which the hook starts as in a warm rank."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.inprocess.hooked import FOLDER, QUICK, ROOT
from tests.seam import clean_environ

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
        timeout=240,
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
