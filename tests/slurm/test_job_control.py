"""The requeue, by commands that a real SLURM cannot be made to act like at will."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import SchedulerError
from launcher.slurm.job_control import SHORT_TIMEOUT, exclude_nodes, requeue_job

ASKS = f"""#!{sys.executable}
import signal, sys
sys.exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else "SIGTERM would end this")
"""
AWAY = "Unable to contact slurm controller (connect failure)"
Requeue = Callable[..., list[str]]


@pytest.fixture
def requeue(tmp_path: Path) -> Requeue:
    """`requeue("says", "says later")`: what scontrol complains of, one after the other, empty for none.

    Returns the commands that were given. `restarts` is what squeue tells of the job, in which there was one
    requeue before; None where squeue fails.
    """

    def start(*complaints: str, restarts: int | None = None, patience: float = SHORT_TIMEOUT) -> list[str]:
        note = f'echo "$(basename "$0") $*" >> {tmp_path}/given'
        cases = "".join(
            f'{number}) echo "{text}" >&2; exit 1;;\n' if text else f"{number}) exit 0;;\n"
            for number, text in enumerate(complaints, 1)
        )
        count = f"$(grep -c ^scontrol {tmp_path}/given)"
        answer = "exit 1" if restarts is None else f"echo 'COMPLETING|{restarts}|N/A|N/A|1:00|None|'"
        for name, text in {"scontrol": f'case "{count}" in\n{cases}esac', "squeue": answer}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{note}\n{text}\n")
            (tmp_path / name).chmod(0o755)
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": "1"}
        requeue_job("7_3", environ, patience)
        return (tmp_path / "given").read_text().splitlines()

    return start


def test_a_requeue_outlives_sigterm_and_this_process_hears_it_again(tmp_path: Path) -> None:
    command = tmp_path / "scontrol"
    command.write_text(ASKS)
    command.chmod(0o755)
    before = signal.getsignal(signal.SIGTERM)
    requeue_job("7", {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, SHORT_TIMEOUT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_command(requeue: Requeue) -> None:
    assert requeue("") == ["scontrol requeue 7_3"]


@pytest.mark.parametrize("complaint", [AWAY, "Unexpected message received", "any other words"])
@pytest.mark.parametrize("restarts", [1, None])
def test_a_controller_that_does_not_requeue_as_yet_is_asked_again(
    requeue: Requeue, complaint: str, restarts: int | None
) -> None:
    given = requeue(complaint, complaint, "", restarts=restarts)
    assert [line for line in given if line.startswith("scontrol")] == ["scontrol requeue 7_3"] * 3


def test_a_controller_that_stays_away(requeue: Requeue) -> None:
    with pytest.raises(SchedulerError, match="Unable to contact"):
        requeue(AWAY, AWAY, AWAY, patience=0)


def test_a_job_that_is_in_the_queue_already(requeue: Requeue) -> None:
    assert requeue("Job is pending execution", restarts=1) == ["scontrol requeue 7_3"]


def test_a_requeue_that_came_in_between(requeue: Requeue) -> None:
    told, asked = requeue("Unexpected message received", restarts=2)
    assert told == "scontrol requeue 7_3" and asked.startswith("squeue ") and " --jobs=7_3 " in asked


def test_a_slow_slurm_delays_signals_for_a_limited_time(tmp_path: Path) -> None:
    """Each answer comes in time, and all of them together do not."""
    sinfo = "case $* in *--nodes=*) echo n9;; *) echo n0 n1 n2 n9;; esac"
    answers = {"squeue": "echo 'n9||main'", "sinfo": sinfo, "scontrol": "true"}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/given\nsleep 0.4\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = exclude_nodes("7", ["n0"], 1, environ, patience=1)
    assert told.startswith("n0 not excluded (")
    assert "scontrol" not in (tmp_path / "given").read_text()
    assert exclude_nodes("7", ["n0"], 1, environ, patience=60) == ""
    assert (tmp_path / "given").read_text().endswith("scontrol\n")


@pytest.mark.parametrize("restarts", [0, 1, None])
def test_a_refusal(requeue: Requeue, restarts: int | None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SchedulerError, match="scontrol: Requested operation is presently disabled"):
        requeue("Requested operation is presently disabled for job 7", restarts=restarts)
    assert signal.getsignal(signal.SIGTERM) == before
