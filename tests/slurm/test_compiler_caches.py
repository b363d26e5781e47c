"""The compilers' caches of a SLURM job: on the node, private, shared by its ranks, and gone with the job."""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.plan.model import Request
from launcher.plan.planner import plan
from launcher.runs.node_records import read_nodes
from launcher.runs.run_records import read_run
from launcher.slurm.compiler_caches import CACHES, PREFIX, open_caches, remove_leftovers
from launcher.slurm.job_request import JobRequest, write_job_request
from tests.plan.lab_machines import convert, load
from tests.seam import clean_environ
from tests.specify import specify

SHOW = """
import os, stat, sys
folders = [os.environ[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
for folder in folders:
    os.makedirs(folder, exist_ok=True)
open(f"{folders[0]}/{os.environ['RANK']}", "w").close()
print([*folders, oct(os.stat(os.path.dirname(folders[0])).st_mode & 0o777)], flush=True)
if "wait" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pause()
"""


@pytest.mark.parametrize("names", [("SLURM_TMPDIR", "TMPDIR"), ("TMPDIR",)])
def test_a_private_folder_on_the_first_disk_that_will_do(tmp_path: Path, names: tuple[str, ...]) -> None:
    places = {name: str(tmp_path / name) for name in names}
    for place in places.values():
        Path(place).mkdir()
    with open_caches({**places, "SLURM_JOB_ID": "47"}) as folder:
        assert Path(folder).parent == tmp_path / names[0]
        assert Path(folder).name.startswith(f"{PREFIX}47-")
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        (Path(folder) / "triton").mkdir()
    assert not list(tmp_path.glob("*/*"))


def test_a_disk_that_will_not_do_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    odd = {"SLURM_TMPDIR": str(tmp_path / "none"), "TMPDIR": str(tmp_path / "file")}
    with open_caches(odd) as folder:
        assert Path(folder).parent == Path("/tmp")
    with open_caches({"SLURM_TMPDIR": "/proc", "TMPDIR": str(tmp_path)}) as folder:  # takes no folders
        assert Path(folder).parent == tmp_path


def test_a_disk_that_nothing_can_be_loaded_from_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor and Triton load what they have compiled; mounting one with noexec takes root."""
    (tmp_path / "noexec").mkdir()
    look = os.statvfs

    def see(place: str) -> os.statvfs_result:
        found = [*look(place)]
        found[8] |= os.ST_NOEXEC if "noexec" in place else 0
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", see)
    with open_caches({"SLURM_TMPDIR": str(tmp_path / "noexec"), "TMPDIR": str(tmp_path)}) as folder:
        assert Path(folder).parent == tmp_path


def test_it_goes_where_the_work_fails_and_is_not_made_where_the_user_has_caches(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_caches({"TMPDIR": str(tmp_path)}):
        raise RuntimeError
    own = dict.fromkeys(CACHES, "/mine")
    with open_caches({**own, "TMPDIR": str(tmp_path)}) as folder:
        assert folder == ""
    assert not list(tmp_path.iterdir())


def test_the_plan_says_who_set_them() -> None:
    machine = convert(load("gh200"))
    request = Request(caches="/t/x", environ=(("TRITON_CACHE_DIR", "/mine"),))
    (rank,) = plan(machine, request).ranks
    told = {each.name: (each.value, each.source) for each in rank.variables}
    assert told["TORCHINDUCTOR_CACHE_DIR"] == ("/t/x/inductor", "plan")
    assert told["TRITON_CACHE_DIR"] == ("/mine", "user")
    assert not {*CACHES} & set(dict(plan(machine, Request()).ranks[0].env))


@contextmanager
def start_task(folder: Path, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A node's task with two ranks, as srun starts it; its stdin is the channel from the first node."""
    run = folder / "run"
    (run / "logs").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "show.py").write_text(SHOW)
    program = (str(folder / "show.py"), *words)
    config = specify(["nproc_per_node=2"], program, run_dir=run).config
    write_job_request(JobRequest(config, {}, program, ("launch",), str(folder), 1, 1), run)
    told = {"SLURMD_NODENAME": "localhost", "SLURM_JOB_ID": "47", "TMPDIR": str(folder / "tmp")}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.slurm.task", str(run)],
        env={**clean_environ(), **told},
        stdin=subprocess.PIPE,
    ) as task:
        try:
            yield task
        finally:
            if task.poll() is None:
                task.kill()


def read_shown(folder: Path, rank: int) -> list[str]:
    (line,) = (folder / f"run/logs/0/rank-{rank}.out").read_text().splitlines()
    found = ast.literal_eval(line)
    assert isinstance(found, list)
    return found


def test_the_ranks_of_a_node_share_a_folder_that_is_gone_at_the_end(tmp_path: Path) -> None:
    with start_task(tmp_path) as task:
        assert task.wait(120) == 0
    triton, inductor, mode = read_shown(tmp_path, 0)
    assert read_shown(tmp_path, 1) == [triton, inductor, mode]
    assert Path(triton).is_relative_to(tmp_path / "tmp") and mode == "0o700"
    assert not list((tmp_path / "tmp").glob("*launch-*"))
    (host,) = read_run(tmp_path / "run").hosts
    assert ("TRITON_CACHE_DIR", triton, "plan") in [
        (each.name, each.value, each.source) for each in host.planned[1].variables
    ]


def test_a_job_that_is_stopped_leaves_none(tmp_path: Path) -> None:
    with start_task(tmp_path, "wait") as task:
        logs = [tmp_path / f"run/logs/0/rank-{rank}.out" for rank in range(2)]
        while not all(log.exists() and log.read_text() for log in logs):
            assert task.poll() is None
            time.sleep(0.05)
        assert list((tmp_path / "tmp").glob(f"{PREFIX}47-*/triton/*"))
        task.send_signal(signal.SIGTERM)
        assert task.wait(60) == 0, "the ranks end with 0, and that is a success"
    (record,) = read_nodes(tmp_path / "run", 0)
    assert (record.state, record.exit_code, record.signal) == ("succeeded", 0, "SIGTERM")
    assert [rank for rank, _ in sorted(record.clean)] == [0, 1]
    assert not list((tmp_path / "tmp").glob("*launch-*"))


HOLD = """
import os, sys
from launcher.slurm.compiler_caches import open_caches
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
    with hold_caches(tmp_path) as (killed, left), hold_caches(tmp_path) as (_, kept):
        assert left != kept and left.parent == kept.parent == tmp_path
        killed.kill()
        killed.wait()
        assert (left / "triton").is_dir()
        with open_caches({"TMPDIR": str(tmp_path)}) as own:
            assert {*tmp_path.iterdir()} == {kept, Path(own)}
        assert (kept / "triton").is_dir()
    assert not list(tmp_path.iterdir())


def test_they_are_removed_by_a_command_too(tmp_path: Path) -> None:
    with hold_caches(tmp_path) as (killed, left):
        killed.kill()
        killed.wait()
        environ = {**clean_environ(), "TMPDIR": str(tmp_path)}
        subprocess.run([sys.executable, "-m", "launcher.slurm.compiler_caches"], env=environ, check=True)
        assert not left.exists()


def test_what_is_not_a_jobs_own_folder_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (tmp_path / f"{PREFIX}1-linked00").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}1-file0000").touch()
    (tmp_path / "launch-1-of-another-version").mkdir()
    (tmp_path / f".{PREFIX}1-being00").mkdir()
    before = {*tmp_path.iterdir()}
    remove_leftovers(str(tmp_path))
    remove_leftovers(str(tmp_path / "none"))
    assert {*tmp_path.iterdir()} == before and (elsewhere / "precious").exists()


def test_another_users_folder_stays(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("giving a folder away needs root")
    theirs = tmp_path / f"{PREFIX}1-theirs00"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    remove_leftovers(str(tmp_path))
    assert theirs.is_dir()
