"""Ranks that srun starts by itself: torchrun's variables, the node's plan, the signals, the port."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.request import make_request
from launcher.config.schema import DataloaderConfig, LaunchConfig
from launcher.cpulist import parse_cpulist
from launcher.plan.json_form import request_to_json
from launcher.rank.srun_task import find_first_host
from launcher.runs.run_directory import RunDir, name_run_dir
from launcher.runs.run_records import read_run
from launcher.slurm.notation import expand_hosts
from tests.rank.start_shim import ALLOWED, COMMAND, run_words

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
AGENT = {**TASK, "LAUNCH_AGENT": "srun"}
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
    "TORCHELASTIC_RUN_ID": "7",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
CONFIG = LaunchConfig(
    dataloader=DataloaderConfig(num_workers=3),
    env={"A": "1", "HF_TOKEN": "hf-secret", "OMP_NUM_THREADS": "5"},
)
REQUEST = request_to_json(make_request(CONFIG, {}), "/")


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


def test_a_task_finds_what_torchrun_would_tell_it() -> None:
    told = hear(start({**AGENT, "MASTER_ADDR": "n0", "MASTER_PORT": "12345"}))
    assert {name: told.get(name) for name in NAMED} == NAMED
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("n0", "12345")


def test_what_a_job_script_has_set_for_another_step_does_not_stay() -> None:
    stale = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "9"}
    told = hear(start({**stale, **AGENT}))
    assert {name: told.get(name) for name in NAMED} == NAMED


USUAL = {name: value for name, value in NAMED.items() if not name.startswith("TORCHELASTIC_")}


def test_a_task_without_a_rank_becomes_one() -> None:
    done = start({**TASK, "SLURM_STEP_NODELIST": "n[0-1]"})
    told = hear(done)
    assert {name: told[name] for name in (*NAMED, "MASTER_ADDR") if name in told} == {
        **USUAL,
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


@pytest.mark.parametrize(
    "variables",
    [
        {"LAUNCH_AGENT": "srun"},
        {name: value for name, value in AGENT.items() if name != "SLURM_STEP_ID"},
        {**AGENT, "SLURM_STEP_NUM_TASKS": "many"},
        {**AGENT, "SLURM_STEP_TASKS_PER_NODE": "?"},
    ],
)
def test_no_task_of_srun_says_so_and_runs(variables: dict[str, str]) -> None:
    done = start(variables)
    assert not set(NAMED) & set(hear(done))
    assert done.stderr.count("LAUNCH_AGENT=srun is set, but this is no task of srun's") == 1


def test_under_an_agent_that_srun_has_started_the_agent_counts() -> None:
    agent = {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    done = start({**AGENT, **agent})
    assert hear(done)["RANK"] == "2"
    assert "launch-rank: rank 2, " in done.stderr


def start_in(run: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A rank as the head has it started."""
    told = {"LAUNCH_RECORD_DIR": str(run), "LAUNCH_ATTEMPT": "4", "LAUNCH_REQUEST": json.dumps(REQUEST)}
    told |= name_run_dir(RunDir(run))
    return start({**AGENT, **told, "LAUNCH_ROLE": "trainer", "LAUNCH_RDZV_ID": "here", **variables})


def test_a_rank_of_launch_has_its_logs_and_leaves_no_trace_of_ours(tmp_path: Path) -> None:
    done = start_in(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    told = json.loads((tmp_path / "logs/4/rank-3.out").read_text())
    assert told["LAUNCH_NUM_WORKERS"].isdecimal()
    ours = {"LAUNCH_GC", "LAUNCH_NUM_WORKERS", "LAUNCH_RANK_PLAN", "LAUNCH_RUN_DIR", "LAUNCH_RUN_ID"}
    assert {name for name in told if name.startswith("LAUNCH_")} == ours
    expected = {**NAMED, "ROLE_NAME": "trainer", "TORCHELASTIC_RUN_ID": "here"}
    assert {name: told.get(name) for name in NAMED} == expected


def test_the_first_rank_of_a_node_keeps_the_plan_that_all_have_made(tmp_path: Path) -> None:
    for local_rank in ("1", "0"):
        assert not list(tmp_path.glob("plan-*"))
        start_in(tmp_path, SLURM_LOCALID=local_rank, SLURM_PROCID=str(2 + int(local_rank)))
    assert (tmp_path / "plan-n1.json").stat().st_mode & 0o777 == 0o600
    (host,) = read_run(tmp_path).hosts
    assert (host.name, len(host.planned), len(host.records)) == ("n1", 2, 2)
    assert [one.host for one in host.records] == ["n1", "n1"]
    assert [parse_cpulist(one.cpus) for one in host.records] == [rank.cpus for rank in host.planned]
    if len(ALLOWED) > 1:
        assert not host.planned[0].cpus & host.planned[1].cpus


@pytest.mark.parametrize(
    ("changes", "variables", "name", "value"),
    [
        ({"num_workers": 0}, {}, "LAUNCH_NUM_WORKERS", "0"),
        ({}, {"LAUNCH_NUM_WORKERS": "9"}, "LAUNCH_NUM_WORKERS", "9"),
        ({}, {"OMP_NUM_THREADS": "5"}, "OMP_NUM_THREADS", "5"),
    ],
)
def test_what_was_asked_for_reaches_the_plan(
    tmp_path: Path, changes: dict[str, object], variables: dict[str, str], name: str, value: str
) -> None:
    start_in(tmp_path, LAUNCH_REQUEST=json.dumps({**REQUEST, **changes}), **variables)
    assert json.loads((tmp_path / "logs/4/rank-3.out").read_text())[name] == value


def test_a_binding_that_was_asked_for(tmp_path: Path) -> None:
    start_in(tmp_path, LAUNCH_REQUEST=json.dumps({**REQUEST, "binding": "none"}))
    applied = json.loads((tmp_path / "rank-3.applied.json").read_text())
    assert applied["memory"]["policy"] == "default"
    assert "binding none" in (tmp_path / "logs/4/rank-3.err").read_text()


def test_another_machine_is_planned_where_the_root_says_so(tmp_path: Path) -> None:
    done = start_in(tmp_path, LAUNCH_REQUEST=json.dumps({**REQUEST, "root": "/no/such"}), LAUNCH_STRICT="1")
    assert done.returncode == 3
    assert "machine.root='/no/such' is not a directory" in (tmp_path / "logs/4/rank-3.err").read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"binding": 3}', json.dumps({**REQUEST, "strict": "no"})])
def test_a_request_that_nobody_wrote_is_a_warning(tmp_path: Path, text: str) -> None:
    assert start_in(tmp_path, LAUNCH_REQUEST=text).returncode == 0
    assert "is not as `launch` writes it" in (tmp_path / "logs/4/rank-3.err").read_text()
    assert json.loads((tmp_path / "logs/4/rank-3.out").read_text())["RANK"] == "3"


def read_mask(run: Path, name: str) -> int:
    status = (run / "logs/4/rank-3.out").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(name)), 16)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG])
def test_the_checkpoint_signal_is_ignored_until_the_program_has_a_handler(
    tmp_path: Path, number: int
) -> None:
    told = {"LAUNCH_RECORD_DIR": str(tmp_path), "LAUNCH_ATTEMPT": "4", "LAUNCH_SIGNAL": str(int(number))}
    start({**AGENT, **told}, "cat", "/proc/self/status")
    ignored = read_mask(tmp_path, "SigIgn")
    named = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGPIPE, signal.SIGTERM)
    assert [one for one in named if ignored >> (one - 1) & 1] == [number]


def test_a_port_that_is_taken_ends_rank_0_before_it_begins(tmp_path: Path) -> None:
    first = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        assert start_in(tmp_path, MASTER_PORT=port, **first).returncode == 199
        assert not list(tmp_path.iterdir())
        assert start_in(tmp_path, MASTER_PORT=port).returncode == 0  # another rank
        by_hand = start({**AGENT, **first, "MASTER_PORT": port})
        assert hear(by_hand)["RANK"] == "0"  # in a user's own script, it is the program's to complain
    assert start_in(tmp_path, MASTER_PORT=port, **first).returncode == 0


def test_the_help_names_it() -> None:
    assert "LAUNCH_AGENT=srun" in run_words([*COMMAND, "--help"], {}).stdout
