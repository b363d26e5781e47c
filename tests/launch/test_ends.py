"""Ends of a job on this machine that are easily told wrongly: the first event, and what it means."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.seam import LAUNCH, Started, start, wait_for, write_program

HOST = socket.gethostname()
PEERS = """
import os, select, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    with socket.create_server(("127.0.0.1", 0)) as server:
        open("hub.new", "w").write(str(server.getsockname()[1]))
        os.rename("hub.new", "hub")
        peers = [server.accept()[0] for _ in range(world - 1)]
else:
    while not os.path.exists("hub"):
        time.sleep(0.02)
    peers = [socket.create_connection(("127.0.0.1", int(open("hub").read())))]
"""
EARLY = (
    PEERS
    + """
print("step 40/100 loss 2.5", flush=True)
if rank == 1:
    os._exit(0)
select.select(peers, [], [])
time.sleep(1)
sys.exit("RuntimeError: gloo/transport Connection closed by peer")
"""
)
LATE = (
    PEERS
    + """
print("step 100/100 loss 2.5", flush=True)
if rank:
    os._exit(0)
while peers[0].recv(1):
    pass
time.sleep(0.2)
sys.exit(int(sys.argv[1]))
"""
)
FILL = """
import os, sys
if os.environ["RANK"] == "0":
    with open("runs/filler", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
"""
REMOVE = """
import glob, os, shutil
if os.environ["RANK"] == "0":
    shutil.rmtree("runs")
"""


def read_outcome(started: Started) -> dict[str, object]:
    found: dict[str, object] = json.loads((started.run_dir() / "manifest.json").read_text())["outcome"]
    return found


def run_status(folder: Path) -> dict[str, object]:
    """What `launch status` says of the only run."""
    done = subprocess.run(
        [*LAUNCH, "status", "format=json"], cwd=folder, capture_output=True, text=True, check=True
    )
    (found,) = json.loads(done.stdout)["runs"]
    assert isinstance(found, dict)
    return found


def test_a_rank_that_ends_with_0_while_others_go_on_is_the_first_event(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=3", "--", write_program(tmp_path, EARLY)) as started:
        assert started.wait() == 1
        outcome = read_outcome(started)
    told = f"rank 1 on {HOST} ended with 0 at step 40 while 2 ranks went on"
    said = started.read()
    assert f"launch: {told}\n" in said and "failed after that: it exited with code 1" in said
    assert "failed first" not in said
    assert outcome["events"] == [told]
    assert str(run_status(tmp_path)["reason"]).startswith(f"{told}; rank ")


@pytest.mark.parametrize("code", [0, 9])
def test_ranks_that_end_one_after_the_other_at_the_last_step_are_no_event(tmp_path: Path, code: int) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, LATE), str(code)) as started:
        assert started.wait() == code
    assert "ended with 0" not in started.read()
    assert ("rank 0 on" in started.read()) == ("failed first" in started.read()) == bool(code)


def test_a_program_that_asks_for_another_start(tmp_path: Path) -> None:
    program = write_program(tmp_path, "import sys; sys.exit(75)")
    with start(tmp_path, "nproc_per_node=2", "--", program) as started:
        assert started.wait() == os.EX_TEMPFAIL
        outcome, path = read_outcome(started), started.run_dir()
    said = started.read()
    assert f"on {HOST} ended with 75, and asks for another start\n" in said and "failed" not in said
    assert f"launch: the same command with run_dir={path} goes on\n" in said
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", os.EX_TEMPFAIL)


def test_a_full_disk_is_the_cause(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("mounting a small filesystem needs root")
    disk = tmp_path / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    try:
        with start(tmp_path, "nproc_per_node=1", "--", write_program(tmp_path, FILL)) as started:
            assert started.wait() == 1
            (path,) = disk.glob("*/*")
        told = f"the run directory's disk is full ({path})"
        said = started.read()
        assert f"launch: {told}\n" in said and f"rank 0 on {HOST} " in said and "exited with code 1" in said
        assert json.loads((path / "manifest.json").read_text())["outcome"]["events"] == [told]
        shown = run_status(tmp_path)
        assert shown["state"] == "failed" and str(shown["reason"]).startswith(told)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_run_directory_that_is_removed_during_the_run_is_mentioned(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=1", "--", write_program(tmp_path, REMOVE)) as started:
        assert started.wait() == 0
    said = started.read()
    assert "launch: warning: the run directory was removed during the run (" in said
    assert "launch: succeeded after" in said and "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_a_launch_that_was_killed_is_not_running(tmp_path: Path) -> None:
    """Its manifest says so for ever; the kernel knows better."""
    program = write_program(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(300)")
    with start(tmp_path, "nproc_per_node=1", "--", program) as started:
        wait_for(lambda: list(tmp_path.glob("runs/*/*/logs/0/rank-0.out")), "the rank")
        started.process.kill()
        started.wait()
        assert read_outcome(started)["state"] == "running"
        shown = run_status(tmp_path)
        assert shown["state"] == "lost" and "is gone, and left no word" in str(shown["reason"])
        wait_for(lambda: not started.survivors(), "the ranks' end")


LOCKED = """
import os, threading
if os.environ["RANK"] == "1":
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.acquire, daemon=True).start()
    print("waits", flush=True)
    lock.acquire()
"""


@pytest.mark.slow
def test_a_rank_that_stays_idle_after_its_peer_is_told_with_what_it_waits_in(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, LOCKED)) as started:
        line = (
            f"rank 1 on {HOST} has been idle for 60 s after a peer ended with 0: its main thread is in futex"
        )
        wait_for(lambda: line in started.read(), "the line", 150, started.read)
        time.sleep(12)
        assert started.read().count("has been idle") == 1
        assert "other threads: " in started.read()
        assert started.process.poll() is None
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 128 + signal.SIGTERM
