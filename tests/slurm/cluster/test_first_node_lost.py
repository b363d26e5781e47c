"""Jobs that SLURM keeps running without their first node, which has the batch script, on a real SLURM."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.seam import find_processes
from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import Run
from tests.slurm.cluster.test_spares import await_line, start

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

SPARE = ("nodes=2", "cluster.spares=1")


@contextmanager
def killed(sandbox: Sandbox, *hosts: str) -> Iterator[None]:
    """Have nodes dead for a while; SLURM 22.05 counts the GPUs of two as used until it is restarted."""
    for host in hosts:
        sandbox.break_it("kill", host)
    try:
        yield
    finally:
        for host in hosts:
            sandbox.break_it("start", host)
        if len(hosts) > 1:
            sandbox.break_it("restart-controller")


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def list_commands(run: Run, word: str) -> dict[int, str]:
    """The run's processes whose command line has a word."""
    return {pid: command for pid, command in find_processes(str(run.path)).items() if word in command}


def assert_requeued(run: Run, tmp_path: Path, first: str, lost: set[str]) -> None:
    """The first attempt was ended by another node, and the next one has ended the job."""
    assert run.await_end() == "succeeded", run.describe()
    console = run.read_console()
    # SLURM 22.05 may give the attempt after the loss of two nodes no GPUs, and gives them to the next.
    assert run.causes in (["node_failure", None], ["node_failure", "node_failure", None]), console
    outcome = run.manifest["earlier"][0]["outcome"]
    assert (outcome["state"], outcome["exit_code"], {*outcome["lost"]}) == ("requeued", 3, lost)
    assert console.count(f"node {first}, which ran the batch script, is lost: ") == 1
    assert console.count("ends the attempt in its place") == 1
    status = run.sandbox.launch("status", run.path.name, cwd=tmp_path)
    assert "succeeded" in status.out, status


@pytest.mark.parametrize("words", [SPARE, ("nodes=2:3",)], ids=["spare", "elastic"])
def test_the_first_node_dies(sandbox: Sandbox, tmp_path: Path, words: tuple[str, ...]) -> None:
    run = start(sandbox, tmp_path, *words, steps=100)
    await_line(run, "step 15/")
    first = run.manifest["hosts"][0]
    with killed(sandbox, first):
        run.wait_for(lambda: run.outcome["state"] == "requeued", "the requeue", 90)
    assert_requeued(run, tmp_path, first, {first})
    assert re.search(r"begins after step [1-9]\d*0 ", run.read_rank(0))


def test_the_first_node_and_another_one_die(sandbox: Sandbox, tmp_path: Path) -> None:
    run = start(sandbox, tmp_path, *SPARE, steps=100)
    await_line(run, "step 15/")
    first, second = run.manifest["hosts"]
    with killed(sandbox, first, second):
        run.wait_for(lambda: run.outcome["state"] == "requeued", "the requeue", 90)
    assert_requeued(run, tmp_path, first, {first, second})


def test_the_first_node_dies_during_preflight(sandbox: Sandbox, tmp_path: Path) -> None:
    run = start(sandbox, tmp_path, *SPARE, "preflight.kind=deep", steps=20)
    run.wait_for(lambda: list_commands(run, "launcher.preflight {"), "preflight", 90)
    first = run.manifest["hosts"][0]
    assert "preflight" not in run.manifest
    with killed(sandbox, first):
        run.wait_for(lambda: run.outcome["state"] == "requeued", "the requeue", 90)
    assert_requeued(run, tmp_path, first, {first})


def test_a_first_node_freezes_and_comes_back(sandbox: Sandbox, tmp_path: Path) -> None:
    """What is left of it does nothing to the job that goes on without it."""
    run = start(sandbox, tmp_path, *SPARE, steps=200)
    await_line(run, "step 15/")
    first = run.manifest["hosts"][0]
    words = [line.split() for line in sandbox.list_processes()]
    pids = [int(pid) for pid, host, _ in words if host == first]
    pids.append(int((sandbox.folder / f"slurmd-{first}.pid").read_text()))
    send(pids, signal.SIGSTOP)
    try:
        run.wait_for(lambda: len(run.manifest["earlier"]) == 1, "the next attempt", 150)
    finally:
        send(pids, signal.SIGCONT)
    assert_requeued(run, tmp_path, first, {first})
    assert run.manifest["slurm"]["restarts"] == 1


def test_one_sign_alone_is_no_loss(sandbox: Sandbox, tmp_path: Path) -> None:
    """The other nodes hear nothing of the first one, whose srun for that stands still; slurmctld restarts."""
    run = start(sandbox, tmp_path, *SPARE, steps=2000)
    await_line(run, "step 15/")
    found = [
        pid for pid, words in list_commands(run, "first_node_guard").items() if words.startswith("srun ")
    ]
    assert found
    send(found, signal.SIGSTOP)
    try:
        time.sleep(30)
        sandbox.break_it("restart-controller")
        time.sleep(45)
    finally:
        send(found, signal.SIGCONT)
    assert run.await_end() == "succeeded"
    assert run.causes == [None] and run.manifest["slurm"]["restarts"] == 0
    assert "ran the batch script, is lost" not in run.read_console()
