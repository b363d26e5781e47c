"""Ranks that srun starts by itself: torchrun's variables, the node's plan, the signals, the port."""

import json
import os
import subprocess
import sys

import pytest

from launcher.rank.identity import find_first_host
from launcher.slurm.notation import expand_hosts
from tests.rank.start_shim import COMMAND

TELL = "import json, os; print(json.dumps(dict(os.environ)))"
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "n1",
}
NAMED = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


def start(variables: dict[str, str], *program: str) -> "subprocess.CompletedProcess[str]":
    """The shim as srun starts it, without what the other tests take for granted."""
    environ = {"PATH": os.environ["PATH"], **variables}
    words = [*COMMAND, *(program or (sys.executable, "-I", "-S", "-c", TELL))]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)


def hear(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def test_a_task_without_a_rank_becomes_one() -> None:
    done = start({**TASK, "SLURM_STEP_NODELIST": "n[0-1]"})
    told = hear(done)
    assert {name: told[name] for name in (*NAMED, "MASTER_ADDR") if name in told} == {
        **NAMED,
        "MASTER_ADDR": "n0",
    }
    other = hear(start({**TASK, "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}))
    assert (other["RANK"], other["MASTER_PORT"]) == ("2", told["MASTER_PORT"])
    assert 10240 <= int(told["MASTER_PORT"]) < 32768
    step = hear(start({**TASK, "SLURM_STEP_ID": "1"}))
    assert step["MASTER_PORT"] != told["MASTER_PORT"] and "MASTER_ADDR" not in step


def test_what_a_job_script_has_set_of_the_meeting_stays() -> None:
    told = hear(start({**TASK, "MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}))
    assert (told["MASTER_ADDR"], told["MASTER_PORT"], told["RANK"]) == ("head", "29500", "3")


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "9"},
        {"LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "many"},
        {"SLURM_STEP_TASKS_PER_NODE": "?"},
    ],
)
def test_ranks_of_another_launcher_are_left_alone(variables: dict[str, str]) -> None:
    told = hear(start({**TASK, **variables}))
    names = {*NAMED, "MASTER_ADDR", "MASTER_PORT"}
    assert {name: told[name] for name in names if name in told} == {
        name: value for name, value in variables.items() if name in names
    }
    assert not set(NAMED) & set(hear(start({"SLURM_JOB_ID": "7", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"})))


def test_tasks_that_see_their_own_gpu_alone_are_told_why_they_are_no_ranks() -> None:
    first = {"SLURM_LOCALID": "0", "SLURM_PROCID": "2"}
    done = start({**TASK, **first, "CUDA_VISIBLE_DEVICES": "0"})
    assert not set(NAMED) & set(hear(done))
    assert "use srun --gpus-per-node, not --gpus-per-task" in done.stderr
    assert hear(start({**TASK, "CUDA_VISIBLE_DEVICES": "0,1"}))["RANK"] == "3"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("n[0-3]", "n0"),
        ("login,n[0-3]", "login"),
        ("rack[1-2]n[08-10,12],login", "rack1n08"),
        ("a,b", "a"),
        ("n7", "n7"),
        ("n[5,7],m1", "n5"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(text: str, first: str) -> None:
    assert find_first_host(text) == first
    assert expand_hosts(text)[:1] == ((first,) if first else ())


def test_under_an_agent_that_srun_has_started_the_agent_counts() -> None:
    agent = {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    done = start({**TASK, **agent})
    assert hear(done)["RANK"] == "2"
    assert "launch-rank: rank 2, " in done.stderr
