"""Nodes that are lost, by what is heard of them, the first node's guard, and signals while a job is requeued.

SLURM's commands are made up.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.config.settings import Settings
from launcher.runs.manifest import read_own_manifest
from launcher.runs.run_directory import open_run_dir
from launcher.slurm import lost_nodes
from launcher.slurm.attempt import Attempt
from launcher.slurm.commands import exclude_nodes
from launcher.slurm.job_request import JobRequest, write_job_request
from launcher.slurm.lost_nodes import Liveness
from tests.cli.make_runs import read_manifest
from tests.seam import clean_environ, wait_for, write_script

GUARD = """
import sys
from launcher.slurm import lost_nodes
lost_nodes.SILENCE, lost_nodes.RETRY = float(sys.argv[3]), 0.5
lost_nodes.UNREACHABLE_FOR, lost_nodes.STEADY = 0.5, 2.0
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
        write_script(tmp_path / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "LAUNCH_ATTEMPT": "0"}
    return {**clean_environ(), **job, "PATH": f"{tmp_path}:/usr/bin:/bin"}


def make_attempt(environ: dict[str, str], folder: Path, *hosts: str, requeues: int = 10) -> Attempt:
    """An attempt that runs, with its job's log."""
    config = Settings()
    config.cluster.requeue.node_failure = requeues
    run = open_run_dir(folder / "run", None)
    request = JobRequest(config, {}, ("x",), ("launch", "x"), "/", 2, 3)
    write_job_request(request, run.path)
    started = {"id": run.id, "started": datetime.now(UTC).isoformat(), "hosts": list(hosts)}
    written = {**started, "outcome": {"state": "running"}, "slurm": {"job_id": "7"}}
    run.manifest_path.write_text(json.dumps(written))
    (run.path / "logs/0").mkdir(parents=True, exist_ok=True)
    (run.path / "logs/slurm-7.out").touch()
    return Attempt(request, run, environ, read_own_manifest(run.path), requeues=True)


@contextmanager
def start_guard(
    environ: dict[str, str], folder: Path, silence: float = 0.5
) -> Iterator["subprocess.Popen[bytes]"]:
    """The guard of n0 on n1, which has begun."""
    pipe = subprocess.PIPE
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(folder / "run"), "n0", str(silence)],
        cwd=folder,
        env=environ,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    stop = threading.Timer(90, guard.kill)
    stop.start()
    with guard:
        assert guard.stdout and guard.stdout.read(1) == b"."
        yield guard
    stop.cancel()


def tell(guard: "subprocess.Popen[bytes]", words: bytes) -> None:
    assert guard.stdin
    guard.stdin.write(words)
    guard.stdin.flush()


def list_claims(folder: Path) -> list[str]:
    return [str(path.readlink()) for path in sorted((folder / "run/logs/0").glob("ended-by-*"))]


@pytest.mark.parametrize(("requeues", "state"), [(10, "requeued"), (0, "failed")])
def test_a_guard_that_has_begun_ends_the_attempt_even_if_the_first_node_returns(
    environ: dict[str, str], tmp_path: Path, requeues: int, state: str
) -> None:
    """It puts the job back into the queue, or cancels it, once slurmctld answers.

    The first node, which is lost, may have begun to end the attempt.
    """
    run = make_attempt(environ, tmp_path, "n0", "n1", requeues=requeues).run
    if state == "failed":
        (run.path / "logs/0/ended-by-0").symlink_to("n0")
    with start_guard(environ, tmp_path) as guard:
        wait_for(lambda: guard.poll() is not None or (tmp_path / "tries").exists(), "a try")
        assert list_claims(tmp_path)[-1] == "n1"
        tell(guard, b"!")  # the first node has come back, and ends
        time.sleep(1.0)
        (tmp_path / "back").touch()
        _, said = guard.communicate()
    tries = (tmp_path / "tries").read_text().count("\n")
    assert (guard.returncode, tries > 1) == (0, True), said
    outcome = read_manifest(run.path)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["lost"]) == (state, "node_failure", ["n0"])
    assert (run.path / "logs/slurm-7.out").read_text().count("n1 ends the attempt in its place") == 1


def test_a_guard_is_quiet_while_it_hears_of_the_first_node(environ: dict[str, str], tmp_path: Path) -> None:
    """Even though SLURM says that it is down."""
    make_attempt(environ, tmp_path, "n0", "n1")
    with start_guard(environ, tmp_path, silence=6.0) as guard:
        for _ in range(40):
            tell(guard, b".")
            time.sleep(0.2)
        assert guard.poll() is None and list_claims(tmp_path) == []
        tell(guard, b"!")
        assert guard.wait() == 0
    assert list_claims(tmp_path) == []


def test_the_end_of_its_words_and_slurm_tell_a_guard_of_a_loss(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """What goes wrong before it ends the attempt is in the job's log, too."""
    log = make_attempt(environ, tmp_path, "n0", "n1").run.path / "logs/slurm-7.out"
    write_script(tmp_path / "squeue", f"[ -e back ] || exit 1\n{COMMANDS['squeue']}")
    with start_guard(environ, tmp_path) as guard:
        assert guard.stdin
        guard.stdin.close()
        while guard.poll() is None and "n0 is lost, but its job cannot be ended" not in log.read_text():
            time.sleep(0.05)
        assert guard.poll() is None and list_claims(tmp_path) == []
        (tmp_path / "back").touch()
        assert guard.wait() == 0
    assert list_claims(tmp_path) == ["n1"]


def test_one_look_at_a_silent_node_ends_no_attempt(environ: dict[str, str], tmp_path: Path) -> None:
    """Only if it takes no connection for a while it is lost; and so is its neighbour, whose claim is void."""
    run = make_attempt(environ, tmp_path, "n0", "n1", "n2").run
    (run.path / "logs/0/ended-by-0").symlink_to("n2")
    (tmp_path / "back").touch()
    rows = "printf 'n0|allocated%s|127.0.0.1|1|\\nn1|idle|127.0.0.1|1|\\nn2|idle*|127.0.0.1|1|\\n' \"$star\""
    (tmp_path / "looks").touch()
    star = "case $(wc -l <looks) in 2) star='*' ;; *) star= ;; esac\n[ -e gone ] && star='*'"
    write_script(tmp_path / "sinfo", f"echo >>looks\n{star}\n{rows}")
    with start_guard(environ, tmp_path) as guard:
        while guard.poll() is None and (tmp_path / "looks").read_text().count("\n") < 5:
            time.sleep(0.05)
        assert guard.poll() is None and list_claims(tmp_path) == ["n2"]
        (tmp_path / "gone").touch()
        assert guard.wait() == 0
    assert list_claims(tmp_path) == ["n2", "n1"]
    assert read_manifest(run.path)["outcome"]["lost"] == ["n0", "n2"]


@pytest.mark.parametrize(("ends", "retry"), [(1, 60.0), (5, 0.01)])
def test_guards_whose_step_ends_are_started_again_where_no_node_is_down(
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ends: int,
    retry: float,
) -> None:
    """They hear of the first node all the time, and no descriptor of theirs is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lost_nodes, "ALIVE_PERIOD", 0.05)
    monkeypatch.setattr(lost_nodes, "RETRY", retry)
    caplog.set_level("INFO")
    write_script(
        tmp_path / "srun", f'echo "$*" >>starts\n[ $(wc -l <starts) -gt {ends} ] || exit 3\nexec cat >words'
    )
    before = len([*Path("/proc/self/fd").iterdir()])
    words = tmp_path / "words"
    with lost_nodes.start_guards(make_attempt(environ, tmp_path, "n1", "n0", "n2")) as guards:
        wait_for(lambda: words.exists() and len(words.read_bytes()) > 5, "words", 30)
        assert len([*Path("/proc/self/fd").iterdir()]) == before + 2
    with guards[0]:
        starts = (tmp_path / "starts").read_text().splitlines()
    assert "--nodelist=n0,n2 " in starts[0] and "--nodelist=n2 " in starts[-1]
    assert len(starts) == ends + 1 and "the guards' step ended (srun 3)" in caplog.text


def test_a_node_is_guarded_before_its_ranks_start(environ: dict[str, str], tmp_path: Path) -> None:
    write_script(tmp_path / "srun", f"sleep 0.5; touch {tmp_path}/ready; echo .; exec cat >/dev/null")
    with lost_nodes.start_guards(make_attempt(environ, tmp_path, "n1", "n2")) as guards:
        was_ready = (tmp_path / "ready").exists()
    with guards[0]:
        assert was_ready


def test_a_node_that_this_one_alone_cannot_reach_is_not_lost(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one of which the port says nothing: SLURM writes multiples of 512 so, unless told not to."""
    monkeypatch.setattr("os.environ", environ)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        for row, is_lost in {
            **{"allocated|127.0.0.1|1": False, "allocated*|127.0.0.1|1": True},
            **{f"allocated*|127.0.0.1|{taken}": False, "allocated*|127.0.0.1|17K": False},
        }.items():
            write_script(tmp_path / "sinfo", f"case $* in *--noconvert*) echo 'n0|{row}|' ;; esac")
            assert bool(lost_nodes.find_evidence("n0", 60.0)) is is_lost, row
            assert not lost_nodes.find_evidence("n0", 10.0)


def test_a_slow_slurm_delays_signals_for_a_limited_time(tmp_path: Path) -> None:
    """Each answer comes in time, and all of them together do not."""
    sinfo = "case $* in *--nodes=*) echo n9;; *) echo n0 n1 n2 n9;; esac"
    answers = {"squeue": "echo 'n9||main'", "sinfo": sinfo, "scontrol": "true"}
    for name, text in answers.items():
        write_script(tmp_path / name, f"echo {name} >> {tmp_path}/given\nsleep 0.6\n{text}")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = exclude_nodes("7", ["n0"], 1, environ, patience=1.0)
    assert told.startswith("n0 not excluded (")
    assert "scontrol" not in (tmp_path / "given").read_text()
    assert exclude_nodes("7", ["n0"], 1, environ, patience=60) == ""
    assert (tmp_path / "given").read_text().endswith("scontrol\n")


HOSTS = ("a", "b", "c")


def play(text: str) -> tuple[Liveness, list[tuple[float, str]]]:
    """Play events `TIME WHAT [HOST]` after a first word at 0 of all that are not mute.

    Returns the losses with their times. `look` is one look of the caller's; those in between, each second,
    are filled in.
    """
    liveness, found = Liveness(HOSTS, 0.0), []
    for host in HOSTS:
        if f"mute {host}" not in text:
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
    liveness, found = play("0 mute c, 55 heard a b, 57 heard a b, 61 refused c, 62 refused c")
    assert found == [(62, "c")] and liveness.now - liveness.heard["c"] == 62.0


def test_a_failure_waits_for_a_task_that_has_not_said_a_word() -> None:
    liveness, _ = play("0 mute c, 2 heard a b, 3 failed, 4 heard a b")
    assert not liveness.has_heard_all(3.0)
    liveness.note_heard("c", 5.0)
    assert liveness.has_heard_all(3.0)


def test_who_is_to_be_tried_and_whether_all_have_been_heard_of() -> None:
    for events in ("3 heard a, 3 failed, 4 heard b, 12 look", "3 failed, 3.5 heard b, 5 look"):
        assert play(events)[0].list_suspects() == ["a", "c"]
    liveness, _ = play("2 heard a b, 9 refused c, 10 refused c")
    assert liveness.has_heard_all(1.0) and not liveness.has_heard_all(2.0)
