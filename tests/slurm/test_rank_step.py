"""agent=srun, without SLURM: the step's words, its environment, and what srun's lines say."""

import json
import signal
import sys
from collections.abc import Callable

import pytest

from launcher.errors import UsageError
from launcher.slurm.srun_command import (
    Container,
    Step,
    build_srun_environ,
    count_ranks,
    render_ranks,
)
from launcher.slurm.srun_messages import (
    TaskEnd,
    is_cpu_bind_complaint,
    is_in_node_records,
    parse_node_failure,
    parse_task_end,
)
from tests.seam import Result

PROGRAM = ("python", "-I", "-S", "shim", "train.py", "a b", "$(x)", "")


def make_step(**options: object) -> Step:
    return Step(3, (), elastic=False, directory="/here", command=PROGRAM, options=options)


def test_the_words_of_a_step() -> None:
    words = render_ranks(make_step(), 8)
    assert words[0] == "srun"
    assert words[-len(PROGRAM) :] == PROGRAM
    options = words[1 : -len(PROGRAM)]
    expected = {"--nodes=3", "--ntasks=24", "--ntasks-per-node=8", "--distribution=block", "--input=none"}
    assert expected <= set(options)
    assert {"--whole", "--overlap", "--mem=0", "--mpi=none", "--cpu-bind=none", "--export=ALL"} <= set(
        options
    )
    assert "--kill-on-bad-exit=1" in options
    assert not [word for word in options if word.startswith(("--gpus", "--gres", "--cpus-per-task"))]
    names = [word.partition("=")[0] for word in options]
    assert len(names) == len(set(names))


def test_the_users_options_win_but_for_the_count_of_ranks() -> None:
    options = render_ranks(make_step(distribution="arbitrary", network="x", ntasks=5), 2)
    assert "--distribution=arbitrary" in options
    assert "--network=x" in options
    assert [word for word in options if word.startswith("--ntasks=")] == ["--ntasks=6"]


def test_ranks_are_put_into_the_container() -> None:
    box = Container("apptainer", "train.sif", ("/runs:/runs",), ())
    step = Step(1, (), elastic=False, directory="/here", command=PROGRAM, options={}, container=box)
    words = render_ranks(step, 2)
    at = words.index("apptainer")
    assert words[at : at + 2] == ("apptainer", "exec")
    assert words[-len(PROGRAM) :] == PROGRAM


@pytest.mark.parametrize(
    ("nproc", "environ", "expected"),
    [
        (4, {}, 4),
        ("4", {"SLURM_GPUS_ON_NODE": "8"}, 4),
        ("auto", {"SLURM_GPUS_ON_NODE": "8"}, 8),
        ("gpu", {"SLURM_GPUS_ON_NODE": "8"}, 8),
        ("auto", {"SLURM_GPUS_PER_NODE": "2"}, 2),
        ("auto", {"SLURM_GPUS_PER_NODE": "a100:2"}, 2),
        ("cpu", {"SLURM_CPUS_ON_NODE": "16"}, 16),
    ],
)
def test_the_ranks_of_a_node(nproc: object, environ: dict[str, str], expected: int) -> None:
    assert count_ranks(nproc, environ) == expected


@pytest.mark.parametrize(
    ("nproc", "environ"),
    [("auto", {}), ("auto", {"SLURM_GPUS_ON_NODE": "0"}), ("many", {}), (0, {}), ("9" * 9, {}), (None, {})],
)
def test_ranks_that_nobody_has_counted(nproc: object, environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=rf"nproc_per_node={nproc} .*set\n? *nproc_per_node=N"):
        count_ranks(nproc, environ)


def test_the_environment_is_the_users_without_what_contradicts() -> None:
    users = {
        "HOME": "/h",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "1",
        "SBATCH_X": "1",
        "LOCAL_SIZE": "1",
    }
    stale = {"TORCHELASTIC_RUN_ID": "x", "LAUNCH_SECRETS": "s", "LAUNCH_BINDING": "numa", "LAUNCH_NIC": "m"}
    made = build_srun_environ({**users, **stale}, {"MASTER_PORT": "1"}, {"binding": "none"})
    assert json.loads(made.pop("LAUNCH_REQUEST")) == {"binding": "none"}
    assert made == {
        "HOME": "/h",
        "SLURM_JOB_ID": "7",
        "LAUNCH_NIC": "m",
        "LAUNCH_AGENT": "srun",
        "MASTER_PORT": "1",
        "PYTHONUNBUFFERED": "1",
    }
    assert build_srun_environ({"PYTHONUNBUFFERED": ""}, {}, {})["PYTHONUNBUFFERED"] == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun: error: n1: task 2: Exited with exit code 7", TaskEnd((2,), 7)),
        ("srun: error: n1: tasks 2-3: Exited with exit code 5", TaskEnd((2, 3), 5)),
        ("srun: error: n[0-1]: tasks 0-1,3: Exited with exit code 1", TaskEnd((0, 1, 3), 1)),
        ("srun: error: n1: task 2: Killed", TaskEnd((2,), -9)),
        ("srun: error: n0: task 1: Segmentation fault (core dumped)", TaskEnd((1,), -11)),
        ("srun: error: n0: task 1: Real-time signal 6", TaskEnd((1,), -(signal.SIGRTMIN + 6))),
        ("srun: error: n0: tasks 0-1: Terminated", TaskEnd((0, 1), -15)),
        ("srun: error: n0: task 1: Out Of Memory", TaskEnd((1,), -9, memory=True)),
        ("srun: error: n0: task 1: Aborted (core dumped)", TaskEnd((1,), -6)),
        ("srun: error: n0: task x: Killed", None),
        ("srun: error: n0: task 1: Tired", None),
        ("srun: error: n0: task 1-: Killed", TaskEnd((1,), -9)),
        ("srun: error: Node failure on n1", None),
        ("error: n1: task 2: Killed", None),
        ("", None),
    ],
)
def test_how_tasks_ended(line: str, expected: TaskEnd | None) -> None:
    assert parse_task_end(line) == expected


def test_nodes_that_were_lost_and_lines_that_say_nothing() -> None:
    assert parse_node_failure("srun: error: Node failure on n[1-2]") == "n[1-2]"
    assert parse_node_failure("srun: error: n1: task 2: Killed") == ""
    assert is_cpu_bind_complaint("srun: cluster configuration lacks support for cpu binding")
    assert not is_cpu_bind_complaint("srun: error: Node failure on n1")


def test_lines_that_the_nodes_records_make_needless() -> None:
    exited = "srun: error: n[0-1]: tasks 0-1: Exited with exit code 1"
    cancelled = "slurmstepd-n0: error: *** STEP 2.0 ON n0 CANCELLED AT 2026-01-01T00:00:00 ***"
    assert is_in_node_records(exited, ()) and is_in_node_records("srun: error: n1: task 1: Terminated", ())
    assert is_in_node_records(cancelled, (exited,)) and not is_in_node_records(cancelled, ())
    for news in ("n1: task 1: Killed", "n1: task 1: Out Of Memory", "Node failure on n1"):
        assert not is_in_node_records(f"srun: error: {news}", (exited,))


def test_an_agent_that_there_is_not(launch: Callable[..., Result]) -> None:
    program = ("--", sys.executable, "-c", "")
    launch("agent=srun", "cluster=local", *program).assert_error(2, "the ranks run here", "cluster=slurm")
    launch("agent=mpirun", *program).assert_error(2, "agent=mpirun: choose from auto, direct, torchrun, srun")
