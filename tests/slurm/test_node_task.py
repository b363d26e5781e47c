"""A node's task, as srun starts it: its record, its reports and orders, and the compilers' caches.

Reports and orders (`node_control.toml`) are as they are on the wire, over real pipes and without SLURM.
"""

import ast
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.launch.coordinator import GroupNode, GroupStart, JobEnd
from launcher.launch.signals import open_signal_channel
from launcher.slurm.job_request import JobRequest, write_job_request
from launcher.slurm.node_job import NodeControl, open_caches
from tests.cli.make_runs import read_nodes
from tests.seam import PATIENCE, clean_environ, list_modules, specify, wait_for
from tests.strangers import give_away

CONTROL: dict[str, Any] = tomllib.loads(Path(__file__).with_name("node_control.toml").read_text())
PREFIX = f"launch-caches-{os.uname().nodename}-"
SHOW = """
import os, signal, stat, sys
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
folders = [os.environ[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
for folder in folders:
    os.makedirs(folder, exist_ok=True)
open(f"{folders[0]}/{os.environ['RANK']}", "w").close()
assert not {"LAUNCH_SECRETS", "LAUNCH_RENDEZVOUS", "LAUNCH_ATTEMPT", "LAUNCH_NODE_ORDER"} & {*os.environ}
print([*folders, oct(os.stat(os.path.dirname(folders[0])).st_mode & 0o777)], flush=True)
if "wait" in sys.argv:
    signal.pause()
"""


def run_task(run_dir: Path) -> "subprocess.CompletedProcess[str]":
    order = {"LAUNCH_NODE_ORDER": "n[0,2],n1,n7"}  # a task finds its number in the order
    told = {"SLURMD_NODENAME": "n7", "SLURM_NODEID": "1", "LAUNCH_ATTEMPT": "2", **order}
    return subprocess.run(
        [sys.executable, "-P", "-m", "launcher.slurm.task", str(run_dir)],
        env={**clean_environ(), **told},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_task_that_cannot_begin_leaves_a_record_or_says_why(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    done = run_task(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    (record,) = read_nodes(tmp_path, 2)
    found = [record[key] for key in ("host", "node_rank", "state", "exit_code", "failure")]
    assert found == ["n7", 3, "failed", 3, None] and "job.json cannot be read" in record["agent_said"]
    done = run_task(tmp_path / "not here")
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("launch: error: n7: ") and "share" in done.stderr


def test_the_processes_of_a_job_load_no_large_libraries(tmp_path: Path) -> None:
    loaded = list_modules("import launcher.slurm.node_job, launcher.slurm.first_node", tmp_path)
    large = {"hydra", "omegaconf", "torch", "numpy", "rich", "submitit", "psutil"}
    assert not {name.partition(".")[0] for name in loaded} & large
    assert not {name for name in loaded if "preflight" in name}


@contextmanager
def start_task(folder: Path, *words: str, text: str = SHOW) -> Iterator["subprocess.Popen[bytes]"]:
    """A node's task with two ranks; its stdin is the channel from the first node."""
    run = folder / "run"
    (run / "logs").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "show.py").write_text(text)
    program = (str(folder / "show.py"), *words)
    config = specify(["nproc_per_node=2", f"env.TMPDIR={folder}/tmp"], program, run_dir=run).config
    request = JobRequest(config, {}, program, ("launch",), str(folder), 1, 1, agent="direct")
    write_job_request(request, run)
    told = {"SLURMD_NODENAME": "localhost", "SLURM_JOB_ID": "47"}
    told |= {"LAUNCH_SECRETS": "{}", "LAUNCH_ATTEMPT": "0", "LAUNCH_NODE_ORDER": "n[0,2]"}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.slurm.task", str(run)],
        env={**clean_environ(), **told},
        stdin=subprocess.PIPE,
    ) as task:
        try:
            with socket.create_server(("localhost", 0)) as server:
                port = server.getsockname()[1]
            order = GroupStart(0, (GroupNode("localhost", 2),), "localhost", port)
            assert task.stdin
            task.stdin.write(f"HELLO\nSTART {json.dumps(asdict(order))}\n".encode())
            task.stdin.flush()
            yield task
        finally:
            if task.poll() is None:
                task.kill()


def test_the_ranks_of_a_node_share_a_folder_that_is_gone_at_the_end(tmp_path: Path) -> None:
    with start_task(tmp_path) as task:
        assert task.wait(120) == 0
    first, second = ((tmp_path / f"run/logs/0/rank-{rank}.out").read_text() for rank in (0, 1))
    assert first == second
    triton, inductor, mode = ast.literal_eval(first)
    assert Path(triton).is_relative_to(tmp_path / "tmp") and mode == "0o700"
    assert Path(inductor).parent == Path(triton).parent
    assert not list((tmp_path / "tmp").glob("*launch-*"))
    (plan,) = (tmp_path / "run").glob("plan-*.json")
    (variable,) = (
        each
        for each in json.loads(plan.read_text())["ranks"][1]["variables"]
        if each["name"] == "TRITON_CACHE_DIR"
    )
    assert (variable["value"], variable["from"]) == (triton, "plan")


def test_a_job_that_is_stopped_leaves_none(tmp_path: Path) -> None:
    with start_task(tmp_path, "wait") as task:
        logs = [tmp_path / f"run/logs/0/rank-{rank}.out" for rank in range(2)]
        wait_for(lambda: all(log.exists() and log.read_text() for log in logs), "the ranks")
        assert list((tmp_path / "tmp").glob(f"{PREFIX}47-*/triton/*"))
        task.send_signal(signal.SIGTERM)
        assert task.wait(60) == 0, "the ranks end with 0, and that is a success"
    (record,) = read_nodes(tmp_path / "run", 0)
    assert [record[key] for key in ("state", "exit_code", "signal")] == ["succeeded", 0, "SIGTERM"]
    assert [rank for rank, _ in sorted(record["clean"])] == [0, 1]
    assert not list((tmp_path / "tmp").glob("*launch-*"))


def test_a_private_folder_on_the_first_disk_that_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is one which takes folders, and from which what has been compiled can be loaded."""
    for name in ("one", "two", "noexec"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    look = os.statvfs

    def see(place: str) -> os.statvfs_result:
        found = [*look(place)]
        found[8] |= os.ST_NOEXEC if "noexec" in place else 0
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", see)
    for scratch, temporary, chosen in (
        *(("one", "two", "one"), ("", "two", "two"), ("none", "two", "two"), ("/proc", "two", "two")),
        *(("noexec", "two", "two"), ("none", "file", "/tmp")),
    ):
        environ = {"SLURM_JOB_ID": "47", "TMPDIR": str(tmp_path / temporary)}
        with open_caches(
            {**environ, **({"SLURM_TMPDIR": str(tmp_path / scratch)} if scratch else {})}
        ) as made:
            folder = Path(made)
            assert folder.parent == tmp_path / chosen and folder.name.startswith(f"{PREFIX}47-")
            assert folder.stat().st_mode & 0o777 == 0o700
            (folder / "triton").mkdir()
        assert not folder.exists()
    with pytest.raises(RuntimeError), open_caches({"TMPDIR": str(tmp_path / "one")}):
        raise RuntimeError
    given = {"TRITON_CACHE_DIR": "/mine", "TORCHINDUCTOR_CACHE_DIR": "/mine"}
    with open_caches({**given, "TMPDIR": str(tmp_path / "one")}) as none:
        assert none == "", "the user has caches"
    assert not list(tmp_path.glob("*/*"))


HOLD = """
import os, sys
from launcher.slurm.node_job import open_caches
with open_caches({"TMPDIR": sys.argv[1], "SLURM_JOB_ID": "46"}) as folder:
    os.mkdir(folder + "/triton")
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def hold_caches(place: Path) -> Iterator["tuple[subprocess.Popen[str], Path]"]:
    """A process that has a folder open, until it is killed or its stdin ends."""
    words = [sys.executable, "-c", HOLD, str(place)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=clean_environ(), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        yield process, Path(process.stdout.readline().strip())


def test_what_a_killed_task_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with hold_caches(tmp_path) as (_, kept), hold_caches(tmp_path) as (killed, left):
        killed.kill()
        killed.wait()
        assert (left / "triton").is_dir() and left.parent == kept.parent == tmp_path
        draft = tmp_path / f".{left.name}"  # killed before it had its name
        draft.mkdir()
        os.utime(draft, (0, 0))
        with open_caches({"TMPDIR": str(tmp_path)}) as own:
            assert {*tmp_path.iterdir()} == {kept, Path(own)}
        assert [*tmp_path.iterdir()] == [kept] and (kept / "triton").is_dir()
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_jobs_own_folder_stays(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    for folder in (place, elsewhere):
        folder.mkdir()
    (elsewhere / "precious").touch()
    (place / f"{PREFIX}1-linked00").symlink_to(elsewhere)
    (place / f"{PREFIX}1-file0000").touch()
    for name in ("launch-1-of-another-version", f".{PREFIX}1-being00", f"{PREFIX}1-theirs00"):
        (place / name).mkdir()
    give_away(place / f"{PREFIX}1-theirs00")
    before = {*place.iterdir()}
    with open_caches({"TMPDIR": str(place), "SLURM_TMPDIR": str(place / "none")}) as own:
        assert Path(own).parent == place
    assert {*place.iterdir()} == before and (elsewhere / "precious").exists()


MARK = "launch-task: "
NODES = (GroupNode("n0", 2), GroupNode("n1", 2))
ORDERS: dict[str, GroupStart | JobEnd] = {
    "first": GroupStart(0, NODES, "n0", 20000),
    "second": GroupStart(1, NODES, "n0", 20001),
    "over": JobEnd(failed=False),
    "failed": JobEnd(failed=True),
}


def render_order(order: GroupStart | JobEnd) -> str:
    return f"{'END' if isinstance(order, JobEnd) else 'START'} {json.dumps(asdict(order))}\n"


@dataclass
class Ends:
    """Both ends of a task's channel and of its stderr."""

    reading: int
    writing: int
    stderr: int
    written: int

    def read_reports(self) -> list[str]:
        """Return the reports since the last call; empty lines are passed over."""
        os.set_blocking(self.stderr, False)
        try:
            lines = os.read(self.stderr, 1 << 16).decode().split("\n")
        except BlockingIOError:
            return []
        found = [json.loads(line.removeprefix(MARK)) for line in lines if line]
        assert all(line.startswith(MARK) for line in lines if line)
        return [f"{one['kind']} {one['restart']} {one['number']}" for one in found]


@pytest.fixture
def ends() -> Iterator[Ends]:
    pipes = Ends(*os.pipe(), *os.pipe())
    os.write(pipes.writing, b"HELLO\n")
    yield pipes
    for descriptor in (pipes.reading, pipes.writing, pipes.stderr, pipes.written):
        os.close(descriptor)


def make_control(ends: Ends, channel: int, case: Mapping[str, Any] | None = None) -> NodeControl:
    told = {"host": "n1", "restarts": True, "taken": 0, **(case or {})}
    return NodeControl(
        told["host"],
        open_signal_channel(channel),
        may_restart=told["restarts"],
        is_port_free=lambda port: port != told["taken"],
        descriptor=ends.written,
    )


@pytest.mark.parametrize("case", CONTROL["case"], ids=lambda case: case["about"])
def test_reports_and_orders(case: dict[str, Any], ends: Ends) -> None:
    control = make_control(ends, ends.reading, case)
    for step in case["steps"]:
        what, *words = step.split()
        if what == "report":
            control.report(words[0], *map(int, words[1:]))
        elif what == "order":
            os.write(ends.writing, render_order(ORDERS[words[0]]).encode())
        elif what == "read":
            assert [signal.Signals(number).name for number in control.channel.read_signals()] == words
        else:
            assert [*control.take_orders()] == [ORDERS[word] for word in words]
    assert ends.read_reports() == case.get("reports", [])


def test_a_task_whose_stdin_is_not_the_first_nodes(ends: Ends) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    control = make_control(ends, reading)
    control.channel.read_signals()
    assert [*control.take_orders()] == [ORDERS["failed"]]


def test_a_report_that_nobody_can_take_waits(ends: Ends) -> None:
    control = make_control(ends, ends.reading)
    os.set_blocking(ends.written, False)
    try:
        while os.write(ends.written, b"\n" * 4096):
            pass
    except BlockingIOError:
        pass
    control.report("ready", number=2)
    assert list(control.take_orders()) == []
    os.set_blocking(ends.stderr, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(ends.stderr, 1 << 16):
            pass
    assert list(control.take_orders()) == []
    assert ends.read_reports() == ["ready 0 2"]


def test_a_line_longer_than_a_pipe_stays_whole() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"HELLO\n")
    nodes = tuple(GroupNode(f"node-{number:05d}", 8) for number in range(4000))
    start = GroupStart(0, nodes, "node-00000", 20000)
    lines = f"{render_order(start)}SIGUSR2\n".encode()
    writer = threading.Thread(target=os.write, args=(writing, lines))
    writer.start()
    control = open_signal_channel(reading)
    signals: list[int] = []
    while not signals:
        signals = control.read_signals()
    assert signals == [signal.SIGUSR2] and control.take_lines() == [render_order(start).rstrip()]
    writer.join()
    os.close(writing)
    os.close(reading)
