"""tests/gpu/prove without a GPU: what it runs, fails, leaves out, writes, and ends with."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu import main as command
from tests.gpu.environment import ROOT, list_requirements
from tests.gpu.running import Stopped
from tests.gpu.table import STEPS, Step
from tests.seam import clean_environ

PROVE = str(ROOT / "tests/gpu/prove")
CHEAP = "machine,drivers,allocator"
RECORD = """
import json, os
def record(**values):
    with open(os.environ["GPU_PROOF_RECORDS"], "a") as file:
        file.write(json.dumps(values) + "\\n")
"""
HOLDS = 'record(check="it holds", status="passed", detail="")\n'
BREAKS = 'record(check="it holds", status="failed", detail="4 | 5")\n'
ROW = 'record(table="Speeds", values={"model": "tiny", "tokens_per_s": 1234.5})\n'
LOOK = """
steps = json.load(open(os.environ["GPU_PROOF_OUTPUT"] + "/proof.json"))["steps"]
found = [step["status"] for step in steps]
record(check="the report has what was found so far", status="passed" if found[0] == "ran" else "failed",
       detail=f"{found}")
"""
LEAVE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
record(table="Left", values={"pid": child.pid})
"""


@dataclass(frozen=True, slots=True)
class Proved:
    """How a proof ended, and its two reports."""

    code: int
    said: str
    report: Mapping[str, Any]
    markdown: str

    def find(self, name: str) -> Mapping[str, Any]:
        """A step of the report."""
        (found,) = (step for step in self.report["steps"] if step["name"] == name)
        return found  # type: ignore[no-any-return]


def read(code: int, said: str, output: Path) -> Proved:
    report = json.loads((output / "proof.json").read_text())
    return Proved(code, said, report, (output / "proof.md").read_text())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Proved:
    """The real command with its cheap steps, from another directory."""
    folder = tmp_path_factory.mktemp("proof")
    python = os.path.relpath(sys.executable, folder)
    words = [sys.executable, PROVE, "--python", python, "--cpu", "--only", CHEAP, "--output", "found"]
    done = subprocess.run(
        words, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=240, check=False
    )
    return read(done.returncode, done.stdout + done.stderr, folder / "found")


def test_cheap_steps_run_and_what_needs_a_gpu_is_left_out(real: Proved) -> None:
    assert real.code == 0, real.said
    assert [step["name"] for step in real.report["steps"]] == CHEAP.split(",")
    assert [step["status"] for step in real.report["steps"]] == ["ran", "left out", "ran"], real.said
    assert real.find("drivers")["reason"] == "needs a GPU"
    assert "| drivers | left out |" in real.markdown
    assert "2 ran; left out: drivers" in real.said
    table = real.markdown[real.markdown.index("| step |") : real.markdown.index("\n\n## ")]
    assert table in real.said
    assert real.report["cpu"] is True
    assert real.report["machine"]["gpus"] == []


def test_the_steps_find_what_this_machine_is(real: Proved) -> None:
    machine, allocator = real.find("machine"), real.find("allocator")
    passed = {check["name"] for check in machine["checks"] if check["status"] == "passed"}
    assert passed == {"the snapshot's plan is the machine's", "no rank has a GPU", "doctor ends with 0 or 1"}
    assert machine["tables"]["Ranks as planned"][0]["cpus"]
    left_out = {
        check["name"]: check["detail"] for check in allocator["checks"] if check["status"] == "left out"
    }
    assert left_out == {"settings at CUDA's first use": "needs a GPU"}
    assert any(check["name"].startswith("the parser, expandable_segments:") for check in allocator["checks"])
    assert " passed, 1 left out |" in real.markdown
    assert "- left out: settings at CUDA's first use: needs a GPU" in real.markdown


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where reports go, of a proof in this interpreter's own environment: one is made by `real`."""
    monkeypatch.setattr(command, "make_environment", lambda *_: sys.executable)
    monkeypatch.setattr(
        command, "read_facts", lambda *_: {"torch": "2.11", "gpus": [], "why_none": "none is here"}
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "gpu-proof"


def prove(
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps: Sequence[Step],
    *words: str,
) -> Proved:
    monkeypatch.setattr(command, "STEPS", tuple(steps))
    code = command.main(["--cpu", *words])
    return read(code, capsys.readouterr().out, output)


def make_step(name: str, program: str, limit: float = 60) -> Step:
    return Step(name, f"what {name} does", limit, "the same", arguments=("-c", RECORD + program))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_way_to_fail_is_told_and_the_others_run_all_the_same(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        make_step("good", ROW + HOLDS),
        make_step("check", BREAKS + HOLDS),
        make_step("error", HOLDS + "raise RuntimeError('no such thing')"),
        make_step("empty", ""),
        make_step("killed", "os.kill(os.getpid(), 9)"),
        make_step("endless", HOLDS + "import time; time.sleep(600)", limit=1),
        make_step("left", HOLDS + LEAVE),
        make_step("last", LOOK),
    ]
    proved = prove(output, monkeypatch, capsys, steps)
    reasons = {step["name"]: step["reason"] for step in proved.report["steps"] if step["status"] == "failed"}
    assert proved.code == 1
    assert reasons.pop("left").startswith("1 of 2 checks: no process is left: 1: ")
    assert not is_running(proved.find("left")["tables"]["Left"][0]["pid"])
    assert reasons == {
        "check": "1 of 2 checks: it holds: 4 | 5",
        "error": "exited with 1: RuntimeError: no such thing",
        "empty": "it checked nothing",
        "killed": "died of signal 9: it printed nothing",
        "endless": "not done after 1 s: ended",
    }
    assert [proved.find(name)["status"] for name in ("good", "last")] == ["ran", "ran"], proved.find("last")
    assert "2 ran; failed: check, error, empty, killed, endless, left" in proved.said
    assert proved.find("good")["tables"] == {"Speeds": [{"model": "tiny", "tokens_per_s": 1234.5}]}
    assert "| model | tokens per s |\n|---|---|\n| tiny | 1234 |" in proved.markdown
    assert "- failed: it holds: 4 \\| 5" in proved.markdown


def test_what_the_time_does_not_suffice_for_is_left_out(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proved = prove(output, monkeypatch, capsys, [make_step("good", HOLDS)], "--minutes=0.1")
    assert proved.code == 0
    found = proved.find("good")
    assert (found["status"], found["reason"]) == ("left out", "no time is left")
    assert "0 ran; left out: good" in proved.said


def test_a_stop_keeps_what_was_found(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise Stopped(15)

    monkeypatch.setattr(command, "run_step", stop)
    proved = prove(output, monkeypatch, capsys, [make_step("good", HOLDS), make_step("next", HOLDS)])
    assert proved.code == 143
    assert [step["status"] for step in proved.report["steps"]] == ["stopped", "not begun"]
    assert proved.find("good")["reason"] == "signal 15"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--only", "nothing"], ["--only nothing", "steps are machine, drivers,"]),
        (["--wheels", "missing"], ["--wheels missing is no directory", "make gpu-wheels"]),
        (["--python", "missing"], ["missing cannot", "--python"]),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert command.main(["--cpu", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("prove: error: ")
    assert said.count("\n") == 1
    for part in parts:
        assert part in said


def test_each_step_has_its_module_and_the_list_says_what_it_does_without_a_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    modules = {path.stem for path in (ROOT / "tests/gpu/steps").glob("*.py")} - {"__init__"}
    assert {step.name for step in STEPS} == modules
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"{step.name} " in said for step in STEPS)
    assert said.count("--cpu: left out") == 1


def test_wheels_are_of_the_project_s_own_requirements() -> None:
    needs = list_requirements()
    assert any(need.startswith("hydra-core") for need in needs)
    assert any(need.startswith("pytest") for need in needs)
    assert not any(need.startswith(("torch", "numpy", "lightning")) for need in needs)
    assert os.access(PROVE, os.X_OK)
