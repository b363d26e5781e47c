"""The shim really execs; its child tells what the kernel gave it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cpulist import format_cpulist, parse_cpulist
from launcher.rank.identity import Identity
from tests.rank.start_shim import ALLOWED, COMMAND, TELL, run_shim, tell, write_plan


def test_the_program_has_what_was_planned(tmp_path: Path) -> None:
    cpu = ALLOWED[-1]
    plan = write_plan(tmp_path, str(cpu))
    words = ["a b", "c'd\"", "$(x)", "new\nline", "é", "", "--", "{num_workers}", "--n={num_workers}"]
    typed = ["${run_dir}", "a$$b", '{"a": {num_workers}}', "{run_dir}x", "a={b={num_workers}}", "{}", "="]
    asked = [
        "{run_dir}/a=b",
        "a.b={run_dir}",
        "-x={run_dir}/{run_dir}",
        "{{run_dir}}/x",
        "x={{num_workers}}",
    ]
    words = [*typed, *asked, *words]
    done = run_shim(
        "--",
        sys.executable,
        "-c",
        TELL,
        *words,
        LAUNCH_PLAN=str(plan),
        OMP_NUM_THREADS="1",
        LAUNCH_RUN_DIR="/r",
    )
    told = tell(done)
    assert told["cpus"] == [cpu]
    assert (told["policy"], told["nodes"]) == ("preferred", [0])
    filled = ["/r/a=b", "a.b=/r", "-x=/r/{run_dir}", "{run_dir}/x", "x={num_workers}"]
    assert told["argv"] == [*typed, *filled, *words[len(typed + asked) : -2], "3", "--n=3"]
    assert isinstance(told["env"], dict)
    assert told["env"]["OMP_NUM_THREADS"] == "5"
    said = f"launch-rank: rank 0, cpus {cpu}, memory preferred node 0, workers 3, threads 5\n"
    assert done.stderr == said


def test_the_process_stays_the_same(tmp_path: Path) -> None:
    environ = {**os.environ, "LAUNCH_PLAN": str(write_plan(tmp_path, str(ALLOWED[0]))), "LOCAL_RANK": "0"}
    process = subprocess.Popen([*COMMAND, "sleep", "60"], env=environ, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM


def test_broken_pipe_signal_is_as_before_python(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    done = run_shim("grep", "SigIgn", "/proc/self/status", LAUNCH_PLAN=str(plan))
    assert int(done.stdout.split()[1], 16) >> (signal.SIGPIPE - 1) & 1 == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is not a plan"),
        ("{}", "is not as expected"),
        ('{"ranks": 3}', "is not as expected"),
        ('{"ranks": [{"local_rank": 0}]}', "is not as expected"),
        ('{"ranks": []}', "none of them local rank 0"),
        (
            '{"ranks": [{"local_rank": 0, "cpus": "x-y", "memory": {}, "env": {}, "gpu": 1}]}',
            "is not as expected",
        ),
    ],
)
def test_a_bad_plan_is_a_warning_and_the_program_runs(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    done = run_shim("echo", "ran", LAUNCH_PLAN=str(path))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert run_shim("echo", "ran", LAUNCH_PLAN=str(path), LAUNCH_STRICT="1").returncode == 3


def test_cpus_that_cannot_be_had_are_a_warning(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "4000")
    done = run_shim(sys.executable, "-c", TELL, LAUNCH_PLAN=str(plan))
    assert tell(done)["cpus"] == ALLOWED
    assert "CPUs 4000 were refused" in done.stderr
    strict = run_shim(sys.executable, "-c", TELL, LAUNCH_PLAN=str(plan), LAUNCH_STRICT="1")
    assert (strict.returncode, strict.stdout) == (3, "")


def test_part_of_the_cpus_is_a_warning(tmp_path: Path) -> None:
    wanted = format_cpulist({ALLOWED[0], 4000})
    done = run_shim(sys.executable, "-c", TELL, LAUNCH_PLAN=str(write_plan(tmp_path, wanted)))
    assert tell(done)["cpus"] == [ALLOWED[0]]
    assert "CPUs 4000 of the plan are outside this job's cpuset" in done.stderr


def test_a_memory_node_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]), nodes="700")
    done = run_shim(sys.executable, "-c", TELL, LAUNCH_PLAN=str(plan))
    assert tell(done)["policy"] == "default"
    assert "memory policy preferred of node 700 was refused" in done.stderr


def test_a_program_that_is_not_there_or_cannot_run(tmp_path: Path) -> None:
    plan = str(write_plan(tmp_path, str(ALLOWED[0])))
    assert run_shim("no-such-program", LAUNCH_PLAN=plan).returncode == 127
    assert run_shim(str(tmp_path), LAUNCH_PLAN=plan).returncode == 126
    assert run_shim("--", LAUNCH_PLAN=plan).returncode == 2
    assert "LAUNCH_BINDING" in run_shim("--help").stdout


def test_logs_and_record_go_to_the_run_directory(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    done = run_shim(
        *(sys.executable, "-c", code),
        LAUNCH_PLAN=str(plan),
        LAUNCH_RECORD_DIR=str(tmp_path),
        RANK="5",
        TORCHELASTIC_RESTART_COUNT="2",
        LAUNCH_ATTEMPT="1",
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "logs" / "3" / "rank-5.out").read_text() == "out\n"
    assert (tmp_path / "logs" / "3" / "rank-5.err").read_text().endswith("\nerr\n")
    assert (tmp_path / "logs" / "3" / "rank-5.err").stat().st_mode & 0o777 == 0o600
    record = json.loads((tmp_path / "rank-5.applied.json").read_text())
    assert (record["rank"], record["local_rank"], record["attempt"]) == (5, 0, 3)
    assert parse_cpulist(record["cpus"]) == {ALLOWED[0]}
    assert record["memory"] == {"policy": "preferred", "nodes": "0"}
    assert record["problems"] == []


def test_a_run_directory_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    (tmp_path / "logs").write_text("in the way")
    done = run_shim("echo", "ran", LAUNCH_PLAN=str(plan), LAUNCH_RECORD_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "has no log files" in done.stderr


@pytest.mark.parametrize(
    ("variables", "local_rank"),
    [
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"MPI_LOCALRANKID": "1"}, 1),
        ({"PALS_LOCAL_RANKID": "1"}, 1),
    ],
    ids=str,
)
def test_the_local_rank_of_each_launcher(tmp_path: Path, variables: dict[str, str], local_rank: int) -> None:
    path = write_plan(tmp_path, str(ALLOWED[0]))
    plan = json.loads(path.read_text())
    plan["ranks"].append({**plan["ranks"][0], "local_rank": local_rank, "cpus": str(ALLOWED[-1])})
    path.write_text(json.dumps(plan))
    environ = {"PATH": os.environ["PATH"], "LAUNCH_PLAN": str(path), **variables}
    done = subprocess.run(
        [*COMMAND, "grep", "Cpus_allowed_list", "/proc/self/status"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert parse_cpulist(done.stdout.split()[1]) == {ALLOWED[-1]}


def test_under_plain_torchrun_the_node_is_planned_by_each_rank(tmp_path: Path) -> None:
    code = "import os; open(os.environ['RANK'], 'w').write(repr(sorted(os.sched_getaffinity(0))))"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("LAUNCH_", "OMP_"))}
    done = subprocess.run(
        [*command, *COMMAND, sys.executable, "-c", code],
        env=environ, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
    )  # fmt: skip
    sets = [set(json.loads((tmp_path / rank).read_text())) for rank in "01"]
    assert all(cpus <= set(ALLOWED) for cpus in sets)
    if len(ALLOWED) > 1:
        assert not sets[0] & sets[1]
    assert done.stderr.count("launch-rank: rank") == 2


SLURM_STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1"},
    **{"SLURM_LOCALID": "1", "SLURM_PROCID": "3"},
}
OPEN_MPI = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
SLURM_BATCH = {"SLURM_JOB_ID": "7", "SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, 1)),
        ({"LOCAL_RANK": "2", "RANK": "6", "LOCAL_WORLD_SIZE": "4", **SLURM_STEP}, (6, 2, 4)),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, (3, 1, 2)),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "1,2"}, (3, 1, 2)),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, (3, 1, 4)),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "nonsense"}, (3, 1, None)),
        (SLURM_BATCH, (0, 0, 1)),
        ({**SLURM_BATCH, **OPEN_MPI}, (5, 1, 8)),
        ({"LOCAL_RANK": "1", **SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, (1, 1, 4)),
        ({"LOCAL_RANK": "1", **SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "1"}, (1, 1, None)),
        ({"LOCAL_RANK": "0", **SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, (0, 0, None)),
        ({"LOCAL_RANK": "1", "RANK": "1", "LOCAL_SIZE": "2"}, (1, 1, 2)),
        ({"LOCAL_RANK": "-1"}, (0, 0, 1)),
        ({"LOCAL_RANK": "abc", **SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, (3, 1, 4)),
        ({"LOCAL_RANK": "9" * 5000}, (0, 0, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2(x999999999)"}, (1, 1, None)),
        ({**SLURM_STEP, "MPI_LOCALRANKID": "0", "PMI_RANK": "4", "MPI_LOCALNRANKS": "2"}, (4, 0, 2)),
    ],
)
def test_numbers_come_from_one_launcher(
    environ: dict[str, str], expected: tuple[int, int, int | None]
) -> None:
    found = Identity(environ)
    assert (found.rank, found.local_rank, found.local_world_size) == expected


def test_a_rank_whose_starter_has_died_before_it_could_be_tied_to_it_does_not_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "logs" / "0").mkdir(parents=True, mode=0o700)
    run = {"LAUNCH_RECORD_DIR": str(tmp_path), "LAUNCH_ATTEMPT": "0", "LAUNCH_QUIET": "1"}
    ran = tmp_path / "ran"
    orphan = run_shim("touch", str(ran), preexec=None, LAUNCH_PARENT=str(os.getppid()), **run)
    assert orphan.returncode == 128 + signal.SIGTERM
    assert not ran.exists()
    assert run_shim("touch", str(ran), preexec=None, LAUNCH_PARENT=str(os.getpid()), **run).returncode == 0
    assert ran.exists()


def test_the_line_says_what_the_variables_come_to(tmp_path: Path) -> None:
    env = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LAUNCH_GC": "synchronized,warmup=30,every=50",
        "LAUNCH_NIC": "mlx5_2",
        "LAUNCH_NUM_WORKERS": "3",
        "MKL_NUM_THREADS": "8",
        "NCCL_IB_HCA": "=mlx5_2",
        "OMP_NUM_THREADS": "8",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "MINE": "1",
    }
    plan = str(
        write_plan(tmp_path, str(ALLOWED[0]), env={**env, "LD_PRELOAD": "/no/libjemalloc.so.2:/no/mine.so"})
    )
    line = run_shim("/bin/true", LAUNCH_PLAN=plan).stderr.splitlines()[0]
    assert line.partition("node 0, ")[2] == (
        "nic mlx5_2, workers 3, threads 8, gc synchronized, allocator expandable_segments:True, "
        "malloc libjemalloc.so.2, MINE=1"
    )


def test_the_line_tells_of_what_the_user_has_set_too(tmp_path: Path) -> None:
    plan = str(write_plan(tmp_path, str(ALLOWED[0]), env={}))
    own = {"OMP_NUM_THREADS": "7", "LAUNCH_GC": "default", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    line = run_shim("/bin/true", preexec=None, LAUNCH_PLAN=plan, **own).stderr
    assert line.endswith("node 0, workers 3, threads 7, allocator max_split_size_mb:64\n")
