"""Ranks that srun starts by itself: torchrun's variables, the port, the address; and who is none of them."""

import json
import subprocess
import sys

import pytest

from launcher.rank.identity import Identity, find_first_host, make_rank_variables
from launcher.slurm.notation import expand_hosts
from tests.rank.start_shim import COMMAND, run_words

TASK = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"},
    **{"SLURM_PROCID": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURMD_NODENAME": "n1"},
}
NAMED = {
    **{"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "GROUP_RANK": "1"},
    **{"GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default"},
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


def make(**variables: str) -> dict[str, str]:
    environ = {**TASK, **variables}
    return make_rank_variables(Identity(environ), environ)[0]


def start(**variables: str) -> "tuple[dict[str, str], subprocess.CompletedProcess[str]]":
    """What the program of a task finds."""
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    words = ["env", "-u", "LOCAL_RANK", *COMMAND, sys.executable, "-I", "-S", "-c", code]
    done = run_words(words, {**TASK, **variables})
    return json.loads(done.stdout), done


def test_a_task_without_a_rank_becomes_one() -> None:
    told, _ = start(SLURM_STEP_NODELIST="n[0-1]")
    assert {name: told.get(name) for name in NAMED} == NAMED
    assert not [name for name in told if name.startswith("TORCHELASTIC_")]
    assert told["MASTER_ADDR"] == "n0"
    assert 10240 <= int(told["MASTER_PORT"]) < 32768
    other = make(SLURM_STEP_NODELIST="n[0-1]", SLURM_PROCID="2", SLURM_LOCALID="0")
    assert (other["RANK"], other["MASTER_PORT"]) == ("2", told["MASTER_PORT"])
    step = make(SLURM_STEP_ID="1")
    assert step["MASTER_PORT"] != told["MASTER_PORT"] and "MASTER_ADDR" not in step


def test_what_a_job_script_has_set_of_the_meeting_stays() -> None:
    told, _ = start(MASTER_ADDR="head", MASTER_PORT="29500", WORLD_SIZE="9")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"], told["RANK"]) == ("head", "29500", "3")
    assert told["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "9"},
        {"LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "many"},
        {"SLURM_STEP_TASKS_PER_NODE": "?"},
        {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
    ],
)
def test_ranks_of_another_launcher_are_left_alone(variables: dict[str, str]) -> None:
    assert make(**variables) == {}
    batch = {"SLURM_JOB_ID": "7", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
    assert make_rank_variables(Identity(batch), batch) == ({}, "")


def test_tasks_that_see_their_own_gpu_alone_are_told_why_they_are_no_ranks() -> None:
    told, done = start(SLURM_LOCALID="0", SLURM_PROCID="2", CUDA_VISIBLE_DEVICES="0")
    assert not set(NAMED) & set(told)
    assert "use srun --gpus-per-node, not --gpus-per-task" in done.stderr
    assert make(CUDA_VISIBLE_DEVICES="0,1")["RANK"] == "3"


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
