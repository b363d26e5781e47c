"""Ranks that srun, mpirun or torchrun starts: their numbers, variables, and CPUs by masks of their own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.rank.entry import Identity
from launcher.slurm.commands import expand_hosts
from tests.data_files import read_cases
from tests.rank.start_shim import (
    ALLOWED,
    COMMAND,
    PROGRAM,
    by_agent,
    by_hand,
    by_hydra,
    by_open_mpi,
    by_srun,
    run_words,
    start_bound,
)
from tests.seam import PATIENCE

FIRST, LAST = ALLOWED[0], ALLOWED[-1]
needs_two = pytest.mark.skipif(len(ALLOWED) < 2, reason="two ranks cannot be bound apart on one CPU")


def assert_split(ranks: list[tuple[set[int], str]], before: list[set[int]]) -> None:
    """Every rank has come to one plan of both ranks' CPUs together."""
    assert not ranks[0][0] & ranks[1][0]
    assert ranks[0][0] | ranks[1][0] <= before[0] | before[1]
    assert min(len(cpus) for cpus, _ in ranks) >= len(before[0] | before[1]) // 2
    for rank, (_, said) in enumerate(ranks):
        assert said.startswith(f"launch-rank: rank {rank}, cpus "), said
        assert said.count("\n") == 1


def assert_kept(ranks: list[tuple[set[int], str]], before: list[set[int]], fix: str) -> None:
    """Every rank has the CPUs that it was started with, and says so."""
    for (cpus, said), had in zip(ranks, before, strict=True):
        assert cpus == had
        assert f"to have the whole node planned, {fix}\n" in said
        assert "memory preferred node 0" in said


APART = [{FIRST}, {LAST}]
SWAPPED = [{LAST}, {FIRST}]
ODD = [{FIRST}, set(ALLOWED)]


def mask(cpus: set[int]) -> str:
    return f"{sum(1 << cpu for cpu in cpus):x}"


@needs_two
@pytest.mark.parametrize(
    ("before", "kind", "entries"),
    [
        (APART, "mask_cpu:", f"0x{mask({FIRST})},0x{mask({LAST})}"),
        (SWAPPED, "mask_cpu:", f"0x{mask({LAST})},0x{mask({FIRST})},0xf000000"),
        (APART, "mask_cpu:", f"{mask({FIRST})},{mask({LAST})}"),
        (APART, "cores,mask_cpu:", f"0x{mask({FIRST})},0x{mask({LAST})}"),
        (SWAPPED, "map_cpu:", f"{LAST},{FIRST}"),
        (ODD, "mask_cpu:", f"0x{mask({FIRST})},0x{mask(set(ALLOWED))}"),
        ([set(ALLOWED)] * 2, "mask_cpu:", f"0x{mask(set(ALLOWED))}"),
        ([set(ALLOWED)] * 2, "none", ""),
    ],
    ids=str,
)
def test_ranks_that_srun_has_bound_plan_on_all_their_cpus(
    before: list[set[int]], kind: str, entries: str
) -> None:
    ranks = start_bound(before, by_srun(kind, entries))
    assert_split(ranks, before)
    for (_, said), had in zip(ranks, before, strict=True):
        assert ("before" in said) == (had != set(ALLOWED))


@needs_two
def test_the_program_may_count_ranks_by_other_names() -> None:
    """Job scripts hand on `LOCAL_RANK=$SLURM_LOCALID`, often without the size."""
    srun = by_srun("mask_cpu:", f"0x{mask({FIRST})},0x{mask({LAST})}")
    assert_split(start_bound(APART, lambda rank: {**srun(rank), "LOCAL_RANK": str(rank)}), APART)


@needs_two
@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("rank", ""),
        ("mask_ldom:", "1"),
        ("mask_cpu:", f"0x{mask({LAST})},0x{mask({FIRST})}"),  # not what the ranks have
        ("map_cpu:", f"{FIRST},4000"),  # more than the kernel lets the rank have
        ("mask_cpu:", "nonsense"),
        ("mask_cpu:", ""),
    ],
)
def test_ranks_whose_peers_are_not_known_keep_their_cpus(kind: str, entries: str) -> None:
    ranks = start_bound(APART, by_srun(kind, entries))
    assert_kept(ranks, APART, "use srun --cpu-bind=none")


@needs_two
def test_a_binding_that_leaves_all_of_the_cpuset_is_none() -> None:
    """As `rank_ldom` is on a node of one NUMA node; all ranks then share what the kernel lets them have."""
    os.sched_setaffinity(0, range(8192))
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALLOWED)
    assert_split(start_bound([every] * 2, by_srun("rank_ldom", "")), [every] * 2)


@needs_two
def test_strict_refuses_cpus_that_were_kept() -> None:
    command = ("sh", "-c", '"$@" >/dev/null; echo "[$?]"', "sh", *COMMAND, *PROGRAM)
    srun = by_srun("rank", "")
    assert [codes for codes, _ in start_bound(APART, srun, command)] == [{0}, {0}]
    strict = start_bound(APART, lambda rank: {**srun(rank), "LAUNCH_STRICT": "1"}, command)
    assert [codes for codes, _ in strict] == [{3}, {3}]


@needs_two
@pytest.mark.parametrize(
    ("variables", "daemon", "before"),
    [
        (by_open_mpi, "orted", APART),
        (by_open_mpi, "prterun", ODD),
        (by_hydra, "hydra_pmi_proxy", SWAPPED),
        (by_agent, "", [{FIRST}, {FIRST}]),
        (by_agent, "", [set(ALLOWED)] * 2),
    ],
)
def test_ranks_plan_on_what_their_daemon_may_use(
    before: list[set[int]], variables: Callable[[int], dict[str, str]], daemon: str
) -> None:
    assert_split(start_bound(before, variables, name=daemon), [set(ALLOWED)] * 2)


@needs_two
def test_a_script_between_daemon_and_rank() -> None:
    command = ("sh", "-c", 'sh -c \'"$@"; true\' sh "$@"; true', "sh", *COMMAND, *PROGRAM)
    assert_split(start_bound(APART, by_open_mpi, command, "orted"), [set(ALLOWED)] * 2)


@needs_two
@pytest.mark.parametrize(
    ("variables", "fix"),
    [
        (by_open_mpi, "use mpirun --bind-to none"),
        (by_hydra, "use mpiexec -bind-to none"),
        (by_hand, "start it without taskset or numactl"),
        (lambda rank: {"PALS_LOCAL_RANKID": str(rank)}, "use mpiexec --cpu-bind none"),
    ],
    ids=("openmpi", "hydra", "hand", "pals"),
)
def test_ranks_of_an_unknown_parent_keep_their_cpus(
    variables: Callable[[int], dict[str, str]], fix: str
) -> None:
    assert_kept(start_bound(APART, variables), APART, fix)


@needs_two
def test_a_job_that_was_narrowed_as_a_whole_is_split_within() -> None:
    words = ["taskset", "-c", str(LAST), sys.executable, "-c"]
    code = f"import subprocess, sys; sys.exit(subprocess.run({[*COMMAND, *PROGRAM]!r}).returncode)"
    for variables in (by_hand, by_agent, by_srun("none", "")):
        environ = {"PATH": os.environ["PATH"], **variables(0)}
        done = subprocess.run([*words, code], env=environ, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [LAST]
        assert "before" not in done.stderr
        assert "keeps" not in done.stderr


@needs_two
def test_a_process_that_is_no_rank_stays_where_it_was_put() -> None:
    ((cpus, said),) = start_bound([{LAST}], lambda rank: {})
    assert (cpus, said.count("\n")) == ({LAST}, 1)


@needs_two
@pytest.mark.parametrize("variables", [by_hand, by_agent])
def test_no_binding_leaves_a_bound_rank_its_cpus(variables: Callable[[int], dict[str, str]]) -> None:
    for cpus, said in start_bound(APART, lambda rank: {**variables(rank), "LAUNCH_BINDING": "none"}):
        assert cpus in APART
        assert said.count("\n") == 1
        assert "memory default, binding none, " in said


mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")


@mpirun
@needs_two
@pytest.mark.parametrize("options", [(), ("--bind-to", "core"), ("--bind-to", "none")], ids=str)
def test_under_the_real_mpirun(tmp_path: Path, options: tuple[str, ...]) -> None:
    words = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *options)
    code = "import os; rank = os.environ['OMPI_COMM_WORLD_RANK']; "
    code += "open(rank, 'w').write(repr(sorted(os.sched_getaffinity(0))))"
    program = (*COMMAND, sys.executable, "-I", "-S", "-c", code)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [*words, *program],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    sets = [set(json.loads((tmp_path / rank).read_text())) for rank in "01"]
    assert not sets[0] & sets[1]
    assert ("bound to" in done.stderr) == (options != ("--bind-to", "none"))


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
    return Identity(environ).list_variables(environ)[0]


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
    assert Identity(batch).list_variables(batch) == ({}, "")


def test_tasks_that_see_their_own_gpu_alone_are_told_why_they_are_no_ranks() -> None:
    told, done = start(SLURM_LOCALID="0", SLURM_PROCID="2", CUDA_VISIBLE_DEVICES="0")
    assert not set(NAMED) & set(told)
    assert "use srun --gpus-per-node, not --gpus-per-task" in done.stderr
    assert make(CUDA_VISIBLE_DEVICES="0,1")["RANK"] == "3"


@pytest.mark.parametrize("case", read_cases("rank_numbers", "case"), ids=lambda case: str([*case["environ"]]))
def test_numbers_come_from_one_launcher(case: dict[str, Any]) -> None:
    found = Identity(case["environ"])
    size = -1 if found.local_world_size is None else found.local_world_size
    assert [found.rank, found.local_rank, size] == case["numbers"]


def test_the_first_node_of_a_list() -> None:
    lists = {"n[0-3]": "n0", "login,n[0-3]": "login", "rack[1-2]n[08-10,12],login": "rack1n08"}
    for text, first in {**lists, "a,b": "a", "n7": "n7", "n[5,7],m1": "n5", "": ""}.items():
        assert make(SLURM_STEP_NODELIST=text).get("MASTER_ADDR", "") == first
        assert expand_hosts(text)[:1] == ((first,) if first else ())
