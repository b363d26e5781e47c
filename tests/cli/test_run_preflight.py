"""A run on this machine that is checked first: its lines, its manifest, exit code 3, signals."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import doctor
from launcher.doctor.model import Facts, PathFacts
from launcher.preflight.checks import NodeAnswer, PreflightRequest
from launcher.protocol import name_host
from tests.seam import Launch

WORDS = ("nproc_per_node=1", "name=x", "preflight=light", "watch.enabled=false")


STARTED = "would start a job"
"""What the tests' guard says of a run that gets that far."""


def read_manifest(here: Path) -> dict[str, Any]:
    (path,) = (here / "runs").glob("*/*/manifest.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def answer_with(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have another program answer, in a process of its own."""
    argv = [sys.executable, "-I", "-S", "-c", script]

    monkeypatch.setattr(PreflightRequest, "command", argv)


def print_facts(*paths: PathFacts) -> str:
    facts = Facts(name_host(os.environ), 0, time.time(), cpus=1, paths=paths)
    return f"print({NodeAnswer(facts).render()!r})"


def test_a_sick_machine_is_told_and_the_run_starts(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, print_facts(PathFacts("/data", "data", "stuck", 5.0)))
    done = launch(*WORDS, "--", "true")
    assert STARTED in done.err, done.err
    assert "preflight: sick: " in done.err and "/data" in done.err and "1 sick" in done.err
    manifest = read_manifest(here)
    assert manifest["outcome"]["state"] == "running" and len(manifest["preflight"]["sick"]) == 1
    (report,) = (here / "runs").glob("*/*/preflight/0/report.json")
    assert json.loads(report.read_text())["kind"] == "light"


@pytest.mark.parametrize("on_failure", ["stop", "exclude"])
def test_a_sick_machine_ends_the_run_with_3(
    launch: Launch, here: Path, on_failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, print_facts(PathFacts("/data", "data", "stuck", 5.0)))
    done = launch(*WORDS, f"preflight.on_failure={on_failure}", "--", "true")
    assert done.code == 3 and "launch: error: preflight found this machine sick" in done.err
    assert STARTED not in done.err
    outcome = read_manifest(here)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "sick_node", 3)


@pytest.mark.usefixtures("quick_agent")
def test_checks_that_fail_by_themselves_are_a_warning(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "import sys; sys.exit('ModuleNotFoundError: no torch')")
    done = launch(*WORDS, "preflight.on_failure=stop", "--", "true")
    assert STARTED in done.err and "not checked: ModuleNotFoundError: no torch" in done.err
    assert read_manifest(here)["preflight"]["problem"] == "ModuleNotFoundError: no torch"


def test_a_signal_ends_the_checks_and_the_run(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    answer_with(monkeypatch, script)
    assert launch(*WORDS, "--", "true").code == 128 + signal.SIGTERM
    outcome = read_manifest(here)["outcome"]
    assert (outcome["state"], outcome["signal"]) == ("stopped", "SIGTERM")


@pytest.mark.usefixtures("quick_agent")
def test_checks_that_fail_after_a_stop_do_not_start_the_run(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("a mistake of the checks' own")

    monkeypatch.setattr(doctor, "run_checks", fail)
    done = launch(*WORDS, "--", "true")
    assert done.code == 128 + signal.SIGTERM and STARTED not in done.err
    assert read_manifest(here)["outcome"]["state"] == "stopped"
