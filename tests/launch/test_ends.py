"""How jobs on this machine end: exit codes, who failed first, last words, restarts, what follows a hang."""

import json
import math
import os
import signal
import socket
from pathlib import Path

import pytest

from launcher.launch.ending import NodeEnd, describe_exit, judge_end
from launcher.launch.processes import Death, RankProcess
from tests.seam import (
    QUICK_AGENT,
    Launch,
    Started,
    find_port,
    find_run,
    mount_disk,
    run_inside,
    run_to_end,
    start,
    wait_for,
    write_program,
)

HOST = socket.gethostname()
PROGRAM = """
import os, signal, sys, time
def die(number, frame):
    print("error: connection closed by peer", file=sys.stderr, flush=True)
    os._exit(7)
signal.signal(signal.SIGTERM, die)
print("rank", os.environ["RANK"], "at work", flush=True)
open(f"up-{{os.environ['RANK']}}", "w").close()
while os.environ["RANK"] != "1" or sum(name.startswith("up-") for name in os.listdir()) < 3:
    time.sleep(0.01)
{deed}
"""
DEEDS = {
    'raise ValueError("no such layer: 33")': (1, "exited with code 1", "ValueError: no such layer: 33"),
    "os.kill(0, signal.SIGKILL)": (137, "SIGKILL (signal 9), probably out of memory", "rank 1 at work"),
}


@pytest.mark.parametrize(("restarts", "deed"), [*enumerate(DEEDS)])
def test_the_first_failure_is_named(tmp_path: Path, restarts: int, deed: str) -> None:
    """It is the cause of those that follow, which are louder, and ends the job if no restarts are left."""
    status, how, last = DEEDS[deed]
    words = ("nproc_per_node=3", f"restarts={restarts}")
    job = run_to_end(tmp_path, PROGRAM.format(deed=deed), *words, code=status)
    said, outcome = job.read(), job.manifest()["outcome"]
    assert f"rank 1 on {HOST} (local rank 1) failed first: it " in said
    assert how in said and last in said
    assert "torch/distributed" not in said and "ChildFailedError" not in said
    failure = outcome["first_failure"]
    assert [failure[key] for key in ("rank", "host", "exit_code", "attempt")] == [1, HOST, status, restarts]
    assert outcome["state"] == "failed"


def test_program_that_cannot_be_executed(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with start(tmp_path, "--", "./broken") as started:
        assert started.wait() == 127
    assert f"rank 0 on {HOST} exited with code 127" in started.read()
    assert "no such program" in started.read()


def test_port_in_use(here: Path, launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = launch(f"rdzv_endpoint=localhost:{port}", "--", "true")
    result.assert_error(3, f"port {port} of this host is not free")
    assert not (here / "runs").exists()


RESTARTED = """
import os, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", count, os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
print("error file", os.environ["TORCHELASTIC_ERROR_FILE"], flush=True)
sys.exit(5 if count != "2" and os.environ["RANK"] == "1" else 0)
"""


def test_restarts_by_torchrun_have_logs_of_their_own(tmp_path: Path) -> None:
    words = ("nproc_per_node=2", "nodes=1:1", "torchrun.max_restarts=3", "torchrun.rdzv_conf.timeout=60")
    job = run_to_end(tmp_path, RESTARTED, *words)
    assert job.log(1).startswith("attempt 0 3\n")
    assert job.log(1, attempt=2).startswith("attempt 2 3\nerror file /")
    assert "rank 1 failed (code 5); the other ranks are ended" in job.read()
    assert "the ranks were started again: attempt 1" in job.read()
    assert job.manifest()["outcome"]["attempts"] == 3


NODE = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID".split()
found = [os.environ[name] for name in names]
"""
"""What a rank is told of its job; the ranks' numbers come from the nodes' rendezvous."""
MEETING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
found.append(int(total))
dist.destroy_process_group()
"""
SHOW = "print(*found, flush=True)"


@pytest.mark.slow
def test_two_nodes_started_by_hand_may_share_a_run_directory(tmp_path: Path) -> None:
    job = ("nodes=2:4", "cluster=manual", "nproc_per_node=2", f"rdzv_endpoint=localhost:{find_port()}")
    more = ("torchrun.rdzv_id=job7", "torchrun.rdzv_conf.last_call_timeout=2", "logs.console=all")
    words = (*job, *more, "new_run_dir=../shared", "--", write_program(tmp_path, NODE + MEETING + SHOW))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        start(tmp_path / "b", "node_rank=1", *words) as second,
        start(tmp_path / "a", "node_rank=0", *words) as first,
    ):
        assert (first.wait(120), second.wait(120)) == (0, 0)
    lines = (first.read("stdout") + second.read("stdout")).splitlines()
    fields = sorted(line.split("] ")[1].split() for line in lines)
    assert [f[0] for f in fields] == ["0", "1", "2", "3"]
    assert {(f[1], f[3], f[5], f[6]) for f in fields} == {("4", "2", "job7", "4")}
    shared = tmp_path / "shared"
    logs = {f"rank-{rank}.out" for rank in range(4)}
    assert {path.name for path in (shared / "logs" / "0").glob("*.out")} == logs
    for name in ("manifest.json", "manifest-1.json"):
        assert json.loads((shared / name).read_text())["outcome"]["state"] == "succeeded"


@pytest.mark.slow
def test_kubeflow_variables_start_a_node(tmp_path: Path) -> None:
    program = write_program(tmp_path, NODE + SHOW)
    pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    pet |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(find_port())}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        start(tmp_path / "a", "logs.console=all", "--", program, PET_NODE_RANK="0", **pet) as first,
        start(tmp_path / "b", "logs.console=all", "--", program, PET_NODE_RANK="1", **pet) as second,
    ):
        assert (first.wait(120), second.wait(120)) == (0, 0)
    lines = (first.read("stdout") + second.read("stdout")).splitlines()
    assert sorted(line.split("] ")[1].split()[0] for line in lines) == ["0", "1"]


@pytest.mark.slow
def test_an_agent_that_fails_without_a_rank_after_a_start_with_a_failure(tmp_path: Path) -> None:
    run_to_end(tmp_path, "raise SystemExit(5)", "new_run_dir=one", code=5)
    words = ("run_dir=one", "torchrun.rdzv_backend=nonsense")
    said = run_to_end(tmp_path, "print('never')", *words, code=3).read()
    assert "no rank failed, but the agent ended with code 1" in said and "nonsense" in said
    assert "failed first" not in said and "Traceback" not in said


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


def run_status(folder: Path) -> dict[str, object]:
    """What `launch status` says of the only run."""
    done = run_inside(["status", str(find_run(folder)), "format=json"])
    (found,) = json.loads(done.out)["runs"]
    assert isinstance(found, dict)
    return found


def test_a_rank_that_ends_with_0_while_others_go_on_is_the_first_event(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, EARLY, "nproc_per_node=3", code=1)
    told = f"rank 1 on {HOST} ended with 0 at step 40 while 2 ranks went on"
    said = job.read()
    assert f"launch: {told}\n" in said and "failed after that: it exited with code 1" in said
    assert "failed first" not in said
    assert job.manifest()["outcome"]["events"] == [told]
    assert str(run_status(tmp_path)["reason"]).startswith(f"{told}; rank ")


def test_ranks_that_end_one_after_the_other_at_the_last_step_are_no_event(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, LATE), "9") as started:
        assert started.wait() == 9
    assert "ended with 0" not in started.read()
    assert "rank 0 on" in started.read() and "failed first" in started.read()


def test_a_program_that_asks_for_another_start(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, "import sys; sys.exit(75)", "nproc_per_node=2", code=os.EX_TEMPFAIL)
    said, outcome = job.read(), job.manifest()["outcome"]
    assert f"on {HOST} ended with 75, and asks for another start\n" in said and "failed" not in said
    assert f"launch: the same command with run_dir={job.run_dir()} goes on\n" in said
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", os.EX_TEMPFAIL)


def test_a_full_disk_is_the_cause(tmp_path: Path) -> None:
    with mount_disk(tmp_path / "runs", 2):
        job = run_to_end(tmp_path, FILL, "nproc_per_node=1", code=1)
        told, said = f"the run directory's disk is full ({job.run_dir()})", job.read()
        assert f"launch: {told}\n" in said and f"rank 0 on {HOST} " in said and "exited with code 1" in said
        assert job.manifest()["outcome"]["events"] == [told]
        shown = run_status(tmp_path)
        assert shown["state"] == "failed" and str(shown["reason"]).startswith(told)


def test_a_run_directory_that_is_removed_during_the_run_is_mentioned(tmp_path: Path) -> None:
    said = run_to_end(tmp_path, REMOVE, "nproc_per_node=1").read()
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
        assert started.manifest()["outcome"]["state"] == "running"
        shown = run_status(tmp_path)
        assert shown["state"] == "lost" and "is gone, and left no word" in str(shown["reason"])
        wait_for(lambda: not started.survivors(), "the ranks' end")


# What follows a hang: a restart of the ranks, or the end of the job

STEPS = """
import os, time
import launcher

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for _ in range(5):
    time.sleep(0.05)
    launcher.step()
"""
HANGING = STEPS + "time.sleep(600 if attempt == '0' else 0)"
LEFT = STEPS + "if attempt == '0':\n    time.sleep(600) if rank == '0' else os._exit(0)"
WATCHED = ("nproc_per_node=2", "binding=none", "watch.hang_seconds=2", "watch.interval=1")


@pytest.mark.parametrize("agent", ["direct", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_restart_starts_the_ranks_anew(agent: str, tmp_path: Path) -> None:
    words = (*WATCHED, f"agent={agent}", "watch.on_hang=restart")
    job = run_to_end(tmp_path, HANGING, *words, PYTHONPATH=QUICK_AGENT)
    assert "launch: hang 1 after step 5, " in job.read()
    assert "so that all start again" in job.read()
    assert "the ranks were started again: attempt 1" in job.read()
    (hang,) = job.manifest()["hangs"]
    assert hang["action"] == "restart" and hang["step"] == 5
    assert (job.run_dir() / "hang-1/verdict.json").exists()


@pytest.mark.slow
def test_restart_when_the_others_have_left(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, LEFT, *WATCHED, "watch.on_hang=restart", PYTHONPATH=QUICK_AGENT)
    assert "the ranks were started again: attempt 1" in job.read()


@pytest.mark.slow
def test_stop_ends_the_job_with_a_code_of_its_own(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, HANGING, *WATCHED, "watch.on_hang=stop", code=124, PYTHONPATH=QUICK_AGENT)
    outcome = job.manifest()["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "hang", 124)
    assert outcome["reason"] in job.read()


JOIN = """
import os, sys

if os.environ["RANK"] == "1":
    sys.exit(0)
import torch.distributed

torch.distributed.init_process_group("gloo")
"""


def test_a_rank_that_asks_its_own_store_for_the_others_waits(tmp_path: Path) -> None:
    """It does so 100 times a second over TCP, which is no activity."""
    job = run_to_end(tmp_path, JOIN, *WATCHED, "watch.on_hang=stop", code=124)
    sentence = "has ended with exit code 0, and 1 rank waits in init_process_group"
    assert f"rank 1 on {HOST} {sentence}" in job.read()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_watcher_that_fails_is_no_harm_to_the_job(number: int, tmp_path: Path) -> None:
    program = write_program(tmp_path, "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n")
    with start(tmp_path, *WATCHED, "--", program, PYTHONPATH=QUICK_AGENT) as job:

        def find_watcher() -> list[int]:
            return [pid for pid, words in job.survivors_words().items() if "launcher.watch" in words]

        wait_for(find_watcher, "the watcher", tell=job.read)
        os.kill(find_watcher()[0], number)
        if number == signal.SIGKILL:
            wait_for(lambda: "no longer watched, and run on" in job.read(), "a warning", tell=job.read)
        (tmp_path / "go").touch()
        assert job.wait(60) == 0, job.read()
        assert "outlived" not in job.read() and job.survivors() == []


DIRECT = ("agent=direct", "start.warm=off", "nproc_per_node=2", "watch.enabled=false", "logs.console=none")
FLAKY = """
import os, sys, time
print(os.environ["MASTER_PORT"], os.environ.get("LAUNCH_WATCH"), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(300)
"""


def test_all_ranks_start_anew_after_a_failure_and_meet_elsewhere(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, FLAKY, *DIRECT, "restarts=1")
    assert "rank 1 failed (code 3); the other ranks are ended" in job.read()
    assert "the ranks were started again: attempt 1" in job.read()
    assert "starting the ranks" not in job.read(), "nor is anything else shown of them"
    ports, watched = zip(*(job.log(1, attempt=attempt).split() for attempt in (0, 1)), strict=True)
    assert len({*ports}) == 2 and {*watched} == {"None"}
    assert job.manifest()["outcome"]["attempts"] == 2


RECORDING = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("no data\\x1b[2J")

main()
"""


@pytest.mark.slow
def test_the_reason_that_record_has_left_is_told(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, RECORDING, *DIRECT, "nproc_per_node=1", code=1)
    assert "it exited with code 1: ValueError: no data\\x1b[2J" in job.read()


HELPED = """
import multiprocessing

if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        pool.map(abs, [1])
"""


def test_helpers_that_end_with_their_rank_are_no_leftovers(tmp_path: Path) -> None:
    assert "outlived" not in run_to_end(tmp_path, HELPED, *DIRECT, "nproc_per_node=1").read()


UNWILLING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
if os.environ["RANK"] == "1":
    while not os.path.exists("go"):
        time.sleep(0.02)
    sys.exit(9)
time.sleep(300)
"""


def enter_stage(job: Started, number: int) -> None:
    """Send `launch` a signal, and wait until it has told of the next stage of the end."""
    stages = job.read().count(" to the ranks")
    job.process.send_signal(number)
    wait_for(lambda: job.read().count(" to the ranks") > stages, "a stage", tell=job.read)


@pytest.mark.parametrize("restarts", [0, 5])
def test_a_signal_after_a_failure_ends_the_job_and_does_not_hide_it(tmp_path: Path, restarts: int) -> None:
    """Rank 0 keeps the end or the restart waiting, since it does not end by SIGTERM."""
    words = (f"restarts={restarts}", "torchrun.shutdown_timeout=20", "--")
    with start(tmp_path, *DIRECT, *words, write_program(tmp_path, UNWILLING)) as job:
        wait_for(lambda: job.count_said("ready") == 2, "both ranks")
        (tmp_path / "go").touch()
        wait_for(lambda: "rank 1 failed (code 9)" in job.read(), "the failure", tell=job.read)
        while "SIGKILL to the ranks" not in job.read():
            enter_stage(job, signal.SIGINT)
        assert job.wait() == 9, job.read()
        assert "rank 1 on" in job.read() and job.survivors() == []
        assert not (job.run_dir() / "logs/1").exists()


REPORT = """
Root Cause (first observed failure):
[0]:
  time      : 2031-02-03_04:05:06
  host      : h
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 103)
  error_file: <N/A>
"""
CLOSING = "W1122 api.py:1029] Sending process 101 closing signal SIGTERM"
WORDS = """
   1   1 exited with code 1
   3   3 exited with code 3
 127 127 exited with code 127 (the program was not found)
 126 126 exited with code 126 (the program cannot be executed)
  75  75 exited with code 75 (EX_TEMPFAIL: it asks for another start)
 137 137 exited with code 137 (128+9, as of a child killed by SIGKILL, probably out of memory: see `dmesg`
 139 139 exited with code 139 (128+11, as of a child killed by SIGSEGV, a crash in native code
 143 143 exited with code 143 (128+15, as of a child killed by SIGTERM, from outside)
 255 255 exited with code 255
  -9 137 was killed by SIGKILL (signal 9), probably out of memory
 -11 139 was killed by SIGSEGV (signal 11), a crash in native code
  -7 135 was killed by SIGBUS (signal 7)
  -6 134 was killed by SIGABRT (signal 6)
  -2 130 was killed by SIGINT (signal 2)
 -40 168 was killed by signal 40
 -33 161 was killed by signal 33
 161 161 exited with code 161
"""
KERNEL = "out of memory: the kernel …"


def death(rank: int, exitcode: int | None, attempt: int = 0, pid: int = 0) -> Death:
    return Death(RankProcess(rank, rank % 2, attempt, pid or 100 + rank), 0.0, exitcode)


def test_ends_in_words() -> None:
    for line in WORDS.strip("\n").splitlines():
        code, status, words = line.split(maxsplit=2)
        assert death(0, int(code)).status == int(status)
        assert describe_exit(int(code)).startswith(words)
    # What the kernel counts is no guess.
    assert describe_exit(1, KERNEL) == f"exited with code 1 ({KERNEL})"
    assert describe_exit(137, KERNEL) == f"exited with code 137 ({KERNEL})"
    assert describe_exit(-9, KERNEL) == f"was killed by SIGKILL (signal 9), {KERNEL}"


@pytest.mark.parametrize(
    ("code", "number", "hang", "status"),
    [
        (1, signal.SIGTERM, "rank 1 …", 124),
        (0, signal.SIGTERM, "rank 1 …", 124),  # watch.on_hang=stop, and ranks that end with 0 then
        (1, None, "rank 1 …", 124),  # a restart that torchrun did not make
        (0, None, "rank 1 …", 0),  # the job ended by itself before the order came
        (1, signal.SIGINT, "", 130),
    ],
)
def test_what_was_ended_for_a_hang_has_its_code(
    code: int, number: int | None, hang: str, status: int
) -> None:
    end = NodeEnd(code, (), number, 0.0 if number else math.inf, (), hang)
    assert judge_end(end).status == status


@pytest.mark.parametrize(
    ("deaths", "log", "failed"),
    [
        ([death(1, 3), death(0, -15)], "", (1, 3)),
        ([death(0, 0), death(1, 5)], "", (1, 5)),
        ([death(1, 3), death(0, 7, 1)], "", (0, 7)),
        ([death(3, None), death(2, -15)], REPORT, (3, -9)),
        ([death(2, None), death(3, None)], REPORT, (3, -9)),
        ([], REPORT, (3, -9)),
        ([], "nothing of note", None),
        ([death(0, 0)], "nothing of note", None),
        ([death(0, None)], "nothing of note", None),
        ([death(1, 3), death(0, 0, 1)], "nothing of note", None),
        # What the agent itself has ended did not fail.
        ([death(1, -15)], CLOSING, None),
        ([death(0, -15), death(1, -15)], CLOSING, (0, -15)),
        ([death(1, -9)], CLOSING, (1, -9)),
        # Nor did those whose place others have taken within an attempt.
        ([death(1, -15, 0, 101), death(0, -15), death(1, 7, 0, 201), death(0, -15, 0, 200)], "", (1, 7)),
    ],
)
def test_the_first_failure_of_the_last_start(
    deaths: list[Death], log: str, failed: tuple[int, int] | None
) -> None:
    end = judge_end(NodeEnd(1, tuple(deaths), None, math.inf, (), agent_log=tuple(log.splitlines())))
    found = end.failure
    assert (found and (found.process.rank, found.exitcode)) == failed
    assert end.status == (found.status if found else 3)


def test_the_ranks_that_ended_with_0() -> None:
    for deaths, pids in (
        ([death(0, 0, 0, 100), death(1, 1, 0, 101), death(0, 0, 1, 200)], [200]),
        ([death(0, None), death(1, 0, 0, 7)], [7]),
        ([], []),
    ):
        assert [d.process.pid for d in NodeEnd(0, tuple(deaths), None, math.inf, ()).clean] == pids
