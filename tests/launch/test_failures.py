"""A rank that fails: the right exit code, the right rank named, its last words shown, and nothing else."""

import json
import socket
from pathlib import Path

import pytest

from tests.seam import Launch, start, wait_for, write_program

PROGRAM = """
import os, signal, sys, time
print("rank", os.environ["RANK"], "at work", flush=True)
if os.environ["RANK"] == "1":
    {deed}
time.sleep(300)
"""
LATE_AND_LOUD = """
import os, signal, sys, time
def die(number, frame):
    print("error: connection closed by peer", file=sys.stderr, flush=True)
    os._exit(7)
signal.signal(signal.SIGTERM, die)
print("ready", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    raise RuntimeError("the first failure")
while not os.path.exists("stop"):
    time.sleep(0.01)
"""
DEEDS = {
    "raise": (
        'raise ValueError("no such layer: 33")',
        1,
        "exited with code 1",
        "ValueError: no such layer: 33",
    ),
    "exit": ("sys.exit(3)", 3, "exited with code 3", "rank 1 at work"),
    "kill": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        137,
        "SIGKILL (signal 9), probably out of memory",
        "rank 1 at work",
    ),
    "abort": ("os.abort()", 134, "SIGABRT (signal 6)", "rank 1 at work"),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_first_failure_is_named(tmp_path: Path, deed: str) -> None:
    code, status, how, last = DEEDS[deed]
    program = write_program(tmp_path, PROGRAM.format(deed=code))
    with start(tmp_path, "nproc_per_node=2", "--", program) as started:
        assert started.wait() == status
        assert started.survivors() == []
        said = started.read()
        manifest = json.loads((started.run_dir() / "manifest.json").read_text())
    host = socket.gethostname()
    assert f"rank 1 on {host} (local rank 1) failed first: it " in said
    assert how in said
    assert last in said
    assert "torch/distributed" not in said
    assert "ChildFailedError" not in said
    failure = manifest["outcome"]["first_failure"]
    assert (failure["rank"], failure["host"], failure["exit_code"]) == (1, host, status)
    assert manifest["outcome"]["state"] == "failed"


def test_the_first_of_several_failures_is_the_cause(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=3", "--", write_program(tmp_path, LATE_AND_LOUD)) as started:
        assert started.wait() == 1
    assert "rank 1 on" in started.read()
    assert "RuntimeError: the first failure" in started.read()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--", "no-such-program"), "no such program: no-such-program"),
        (("--", "gone.py"), "no such program: gone.py"),
        (("--", "-m", "no_such_module"), "no module 'no_such_module'"),
        (("--", "./data.txt"), "is not executable"),
        (("--", "."), "is a folder"),
        (("--", "--lr", "3"), "is no program"),
    ],
)
def test_program_that_never_starts(here: Path, launch: Launch, words: tuple[str, ...], text: str) -> None:
    (here / "data.txt").write_text("no program")
    launch(*words).assert_error(2, text)
    assert not (here / "runs").exists()


def test_program_that_cannot_be_executed(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with start(tmp_path, "--", "./broken") as started:
        assert started.wait() == 127
    assert f"rank 0 on {socket.gethostname()} exited with code 127" in started.read()
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
    with start(tmp_path, *words, "--", write_program(tmp_path, RESTARTED)) as started:
        assert started.wait(120) == 0
        logs = started.run_dir() / "logs"
        said = started.read()
        first, last = ((logs / n / "rank-1.out").read_text() for n in "02")
        manifest = json.loads((started.run_dir() / "manifest.json").read_text())
    assert first.startswith("attempt 0 3\n")
    assert last.startswith("attempt 2 3\n")
    assert "error file /" in last
    assert "rank 1 failed (code 5); the other ranks are ended" in said
    assert "the ranks were started anew: attempt 1" in said
    assert manifest["outcome"]["attempts"] == 3


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
def test_two_nodes_started_by_hand(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program = write_program(tmp_path, NODE + MEETING + SHOW)
    words = ("nodes=2:4", "cluster=manual", "nproc_per_node=2", f"rdzv_endpoint=localhost:{port}")
    both = (
        "torchrun.rdzv_id=job7",
        "torchrun.rdzv_conf.last_call_timeout=2",
        "logs.console=all",
        "--",
        program,
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        start(tmp_path / "b", *words, "node_rank=1", *both) as second,
        start(tmp_path / "a", *words, "node_rank=0", *both) as first,
    ):
        assert (first.wait(120), second.wait(120)) == (0, 0)
    lines = (first.read("stdout") + second.read("stdout")).splitlines()
    fields = sorted(line.split("] ")[1].split() for line in lines)
    assert [f[0] for f in fields] == ["0", "1", "2", "3"]
    assert {(f[1], f[3], f[5], f[6]) for f in fields} == {("4", "2", "job7", "4")}


@pytest.mark.slow
def test_kubeflow_variables_start_a_node(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    program = write_program(tmp_path, NODE + SHOW)
    pet = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": port,
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        start(tmp_path / "a", "logs.console=all", "--", program, PET_NODE_RANK="0", **pet) as first,
        start(tmp_path / "b", "logs.console=all", "--", program, PET_NODE_RANK="1", **pet) as second,
    ):
        assert (first.wait(120), second.wait(120)) == (0, 0)
    lines = (first.read("stdout") + second.read("stdout")).splitlines()
    assert sorted(line.split("] ")[1].split()[0] for line in lines) == ["0", "1"]


def test_elastic_job_goes_on_in_the_same_run_directory(tmp_path: Path) -> None:
    program = write_program(tmp_path, "print('here', flush=True)")
    for key in ("new_run_dir", "run_dir"):
        with start(tmp_path, f"{key}=runs/mine/one", "--", program) as started:
            assert started.wait() == 0
    logs = tmp_path / "runs" / "mine" / "one" / "logs"
    assert sorted(path.name for path in logs.iterdir() if path.is_dir()) == ["0", "1"]
    manifest = json.loads((logs.parent / "manifest.json").read_text())
    assert [entry["outcome"]["state"] for entry in manifest["earlier"]] == ["succeeded"]
    wait_for(lambda: (logs / "1" / "rank-0.out").read_text() == "here\n", "the second start's log")


@pytest.mark.slow
def test_nodes_by_hand_can_share_a_run_directory(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = (
        "nodes=2",
        "cluster=manual",
        "nproc_per_node=1",
        f"rdzv_endpoint=localhost:{port}",
        "new_run_dir=shared",
    )
    program = write_program(tmp_path, NODE + SHOW)
    with (
        start(tmp_path, *words, "node_rank=0", "--", program) as first,
        start(tmp_path, *words, "node_rank=1", "--", program) as second,
    ):
        assert (first.wait(120), second.wait(120)) == (0, 0)
    shared = tmp_path / "shared"
    assert {path.name for path in (shared / "logs" / "0").glob("*.out")} == {"rank-0.out", "rank-1.out"}
    for name in ("manifest.json", "manifest-1.json"):
        assert json.loads((shared / name).read_text())["outcome"]["state"] == "succeeded"


@pytest.mark.slow
def test_an_agent_that_fails_without_a_rank_after_a_start_with_a_failure(tmp_path: Path) -> None:
    with start(tmp_path, "new_run_dir=one", "--", write_program(tmp_path, "raise SystemExit(5)")) as started:
        assert started.wait() == 5
    words = ("run_dir=one", "torchrun.rdzv_backend=nonsense", "--", write_program(tmp_path, "print('never')"))
    with start(tmp_path, *words) as started:
        assert started.wait() == 3
    said = started.read()
    assert "no rank failed, but torchrun's agent ended with code 1" in said and "nonsense" in said
    assert "failed first" not in said and "Traceback" not in said
