"""Nodes that are lost, by what is heard of them, the first node's guard, and signals while a job is requeued.

SLURM's commands are made up.
"""

import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.config.settings import Settings
from launcher.runs.run_directory import open_run_dir
from launcher.slurm import lost_nodes
from launcher.slurm.commands import exclude_nodes
from launcher.slurm.job_request import JobRequest, write_job_request
from launcher.slurm.lost_nodes import Liveness
from tests.cli.make_runs import read_manifest
from tests.seam import clean_environ

GUARD = """
import sys
from launcher.slurm import lost_nodes
lost_nodes.SILENCE = lost_nodes.RETRY = 0.5
sys.exit(lost_nodes.main())
"""
COMMANDS = {
    "sinfo": "printf 'n0|down*|127.0.0.1|1|\\nn1|idle|127.0.0.1|1|\\n'",
    "squeue": "echo '7|RUNNING|main|2|n[0-1]|N/A|0|0|N/A|N/A|1:00|None|'",
    "scontrol": """case "$*" in
requeue*)
    echo >> tries
    [ -e back ] && exit
    echo 'Unable to contact slurm controller (connect failure)' >&2
    exit 1 ;;
esac""",
    "scancel": """echo >> tries
[ -e back ] && exit
echo 'Unable to contact slurm controller (connect failure)' >&2
exit 1""",
}


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "LAUNCH_ATTEMPT": "0"}
    return {**clean_environ(), **job, "PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.mark.parametrize(("requeues", "state"), [(10, "requeued"), (0, "failed")])
def test_a_guard_that_has_begun_ends_the_attempt_even_if_the_first_node_returns(
    environ: dict[str, str], tmp_path: Path, requeues: int, state: str
) -> None:
    """It puts the job back into the queue, or cancels it, once slurmctld answers.

    The first node, which is lost, may have begun to end the attempt.
    """
    config = Settings()
    config.cluster.requeue.node_failure = requeues
    run = open_run_dir(tmp_path / "run", None)
    write_job_request(JobRequest(config, {}, ("x",), ("launch", "x"), "/", 2, 3), run.path)
    started = {"started": datetime.now(UTC).isoformat(), "hosts": ["n0", "n1"], "attempt": 0, "earlier": []}
    manifest = {**started, "outcome": {"state": "running"}, "slurm": {"job_id": "7"}}
    run.manifest_path.write_text(json.dumps(manifest))
    (run.path / "logs/0").mkdir(parents=True, exist_ok=True)
    if state == "failed":
        (run.path / "logs/0/ended-by-0").symlink_to("n0")
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(run.path), "n0"],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with guard:
        assert guard.stdin
        stop = threading.Timer(90, guard.kill)
        stop.start()
        while guard.poll() is None and not (tmp_path / "tries").exists():
            time.sleep(0.05)
        assert str(max((run.path / "logs/0").glob("ended-by-*")).readlink()) == "n1"
        guard.stdin.write(b"!")  # the first node has come back, and ends
        guard.stdin.flush()
        time.sleep(1.0)
        (tmp_path / "back").touch()
        _, said = guard.communicate()
        stop.cancel()
    tries = (tmp_path / "tries").read_text().count("\n")
    assert (guard.returncode, tries > 1) == (0, True), said
    outcome = read_manifest(run.path)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["lost"]) == (state, "node_failure", ["n0"])


@pytest.mark.parametrize(("state", "is_lost"), [("allocated", False), ("allocated*", True)])
def test_a_node_that_this_one_alone_cannot_reach_is_not_lost(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, *, is_lost: bool
) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\necho 'n0|{state}|127.0.0.1|1|'\n")
    monkeypatch.setattr("os.environ", environ)
    assert bool(lost_nodes.find_evidence("n0", 60.0)) is is_lost
    assert not lost_nodes.find_evidence("n0", 10.0)


def test_a_slow_slurm_delays_signals_for_a_limited_time(tmp_path: Path) -> None:
    """Each answer comes in time, and all of them together do not."""
    sinfo = "case $* in *--nodes=*) echo n9;; *) echo n0 n1 n2 n9;; esac"
    answers = {"squeue": "echo 'n9||main'", "sinfo": sinfo, "scontrol": "true"}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/given\nsleep 0.6\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = exclude_nodes("7", ["n0"], 1, environ, patience=1.0)
    assert told.startswith("n0 not excluded (")
    assert "scontrol" not in (tmp_path / "given").read_text()
    assert exclude_nodes("7", ["n0"], 1, environ, patience=60) == ""
    assert (tmp_path / "given").read_text().endswith("scontrol\n")


HOSTS = ("a", "b", "c")


def play(text: str) -> tuple[Liveness, list[tuple[float, str]]]:
    """Play events `TIME WHAT [HOST]` after a first word of all at 0; returns the losses with their times.

    `look` is one look of the caller's; those in between, each second, are filled in.
    """
    liveness, found = Liveness(HOSTS, 0.0), []
    for host in HOSTS:
        liveness.note_heard(host, 0.0)
    before = 0.0
    for item in filter(None, text.split(", ")):
        moment, what, *hosts = item.split()
        now = float(moment)
        while what != "gap" and before + 1 < now:
            before += 1
            liveness.note_look(before)
        before = now
        match what:
            case "heard":
                for host in hosts:
                    liveness.note_heard(host, now)
            case "failed":
                liveness.doubted = now
            case "refused" | "open":
                liveness.note_look(now)
                for host in hosts:
                    liveness.note_connection(host, is_open=what == "open")
            case _:
                liveness.note_look(now)
        for host, silence in liveness.take_losses().items():
            assert silence >= 2.0
            found.append((now, host))
    return liveness, found


@pytest.mark.parametrize(
    ("events", "losses"),
    [
        ("3 refused b, 4 refused b", []),  # it speaks: its daemon alone is away
        ("7 heard a c stranger, 9 refused b, 10 refused b", [(10, "b")]),
        ("7 heard a c, 9 refused b", []),
        ("7 heard a c, 9 refused b, 10 open b, 11 refused b", []),
        ("7 heard a c, 9 refused b, 10 heard b, 11 refused b", []),
        ("7 heard a c, 9 refused b, 10 refused b, 11 refused b", [(10, "b")]),  # told once
        ("7 heard a c, 9 open b, 10 open b, 60 open b", []),  # it takes connections: no more than slow
        # After a failure two seconds without an answer are enough to look.
        ("2 failed, 2 heard a c, 3 refused b, 4 refused b", [(4, "b")]),
        ("2 failed, 2.1 heard a b c, 3 refused b, 4 refused b, 5 refused b", []),
        # The caller itself has slept, and with it perhaps all it would have heard.
        ("1 heard a b c, 30 gap, 30.5 refused b", []),
        ("1 heard a b c, 30 gap, 31 refused b, 32 refused b, 33 heard a c, 38 refused b", [(38, "b")]),
    ],
)
def test_silence_and_a_second_sign_make_a_loss(events: str, losses: list[tuple[float, str]]) -> None:
    assert play(events)[1] == losses


def test_a_task_that_has_not_said_a_word_has_more_time() -> None:
    liveness = Liveness(HOSTS, 0.0)
    for moment in range(61):
        liveness.note_look(float(moment))
        assert not liveness.list_suspects()
    liveness.note_look(61.0)
    assert liveness.list_suspects() == ["a", "b", "c"]


def test_who_is_to_be_tried() -> None:
    liveness, _ = play("3 heard a, 3 failed, 4 heard b, 12 look")
    assert liveness.list_suspects() == ["a", "c"]
    liveness, _ = play("3 failed, 3.5 heard b, 5 look")
    assert liveness.list_suspects() == ["a", "c"]


def test_all_have_been_heard_of() -> None:
    liveness, _ = play("2 heard a b, 9 refused c, 10 refused c")
    assert liveness.has_heard_all(1.0) and not liveness.has_heard_all(2.0)
