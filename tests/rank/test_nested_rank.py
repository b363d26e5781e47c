"""A rank inside a rank: what the outer plan has set is nobody's choice, what the user has set is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.rank.hook import FOLDER, leave_outer_rank
from tests.rank.start_shim import ALLOWED, COMMAND, TELL, run_shim, tell, write_plan
from tests.seam import LAUNCH, clean_environ

INNER = [*COMMAND, sys.executable, "-c", TELL]
OUTER = {
    "LAUNCH_GC": "frozen,warmup=3",
    "LAUNCH_NUM_WORKERS": "17",
    "OMP_NUM_THREADS": "19",
    "CUDA_VISIBLE_DEVICES": "GPU-7",
}


def start_nested(folder: Path, *inner: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A shim in the program of a shim, whose plan sets what no plan made here would."""
    outer = write_plan(folder, str(ALLOWED[0]), env=OUTER)
    script = 'unset LAUNCH_PLAN; exec "$@"'
    return run_shim(
        "sh", "-c", script, "sh", *(inner or INNER), preexec=None, LAUNCH_PLAN=str(outer), **variables
    )


def environ_of(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    env = tell(done)["env"]
    assert isinstance(env, dict)
    return env


def test_the_outer_plans_values_are_made_anew(tmp_path: Path) -> None:
    found = environ_of(start_nested(tmp_path))
    alone = environ_of(
        run_shim(sys.executable, "-c", TELL, preexec=lambda: os.sched_setaffinity(0, {ALLOWED[0]}))
    )
    for name in ("LAUNCH_GC", "LAUNCH_NUM_WORKERS", "OMP_NUM_THREADS"):
        assert found[name] == alone[name] != OUTER[name], name
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-7"  # it is in the outer rank, as its CPUs are
    assert found.get("PYTHONPATH", "").count(FOLDER) <= 1


def test_what_the_user_has_set_before_the_outer_rank_comes_back(tmp_path: Path) -> None:
    found = environ_of(start_nested(tmp_path, OMP_NUM_THREADS="4", LAUNCH_GC="default"))
    assert (found["OMP_NUM_THREADS"], found["LAUNCH_GC"]) == ("4", "default")


def test_what_the_program_sets_inside_the_rank_is_its_choice(tmp_path: Path) -> None:
    changes = 'export OMP_NUM_THREADS=6 LAUNCH_NUM_WORKERS=0; exec "$@"'
    found = environ_of(start_nested(tmp_path, "sh", "-c", changes, "sh", *INNER))
    assert (found["OMP_NUM_THREADS"], found["LAUNCH_NUM_WORKERS"]) == ("6", "0")
    assert found["LAUNCH_GC"] != OUTER["LAUNCH_GC"]


def test_a_torchrun_in_a_rank_leaves_its_word_to_nobody(tmp_path: Path) -> None:
    """Its agent sets OMP_NUM_THREADS=1 in the outer ranks; that is no user's value to come back to."""
    found = environ_of(start_nested(tmp_path, TORCHELASTIC_RUN_ID="x", OMP_NUM_THREADS="1"))
    told = json.loads(found["LAUNCH_RANK_PLAN"])
    assert "OMP_NUM_THREADS" in told["env"]
    assert "OMP_NUM_THREADS" not in told["env_before"]


def test_launch_in_a_rank_plans_as_if_it_were_not_in_one(tmp_path: Path) -> None:
    outer = write_plan(tmp_path, str(ALLOWED[0]), env=OUTER)
    words = [
        "sh",
        "-c",
        'unset LAUNCH_PLAN; exec "$@"',
        "sh",
        *LAUNCH,
        "plan",
        "format=json",
        "env.LAUNCH_NIC=x",
    ]
    environ = {**clean_environ(), "LOCAL_RANK": "0", "LAUNCH_PLAN": str(outer), "NCCL_DEBUG": "WARN"}
    done = subprocess.run(
        [*COMMAND, *words], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    (rank,) = json.loads(done.stdout)["ranks"]
    sources = {each["name"]: each["from"] for each in rank["variables"]}
    assert sources["LAUNCH_GC"] == sources["OMP_NUM_THREADS"] == sources["LAUNCH_NUM_WORKERS"] == "plan"
    assert (sources["NCCL_DEBUG"], sources["LAUNCH_NIC"]) == ("user", "configuration")
    assert not set(rank["env"].items()) & set(OUTER.items())


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"env": 3}', '{"env": {"A": "1"}}', "[" * 100_000])
def test_a_word_that_no_shim_has_left(text: str) -> None:
    environ = {"LAUNCH_RANK_PLAN": text, "A": "1", "PYTHONPATH": "/x"}
    leave_outer_rank(environ)
    assert environ == {"A": "1", "PYTHONPATH": "/x"}


@pytest.mark.parametrize(
    ("path", "left"),
    [(FOLDER, None), (f"{FOLDER}:/x:", "/x:"), ("/x", "/x"), (f"/x:{FOLDER}", f"/x:{FOLDER}")],
)
def test_the_hook_leaves_with_it(path: str, left: str | None) -> None:
    environ = {"LAUNCH_RANK_PLAN": "{}", "PYTHONPATH": path}
    leave_outer_rank(environ)
    assert environ.get("PYTHONPATH") == left


def test_a_watched_rank_hands_the_folder_to_its_interpreter_alone(tmp_path: Path) -> None:
    """Neither to a rank inside it, nor to a program in which the hook would not start."""
    watched = {"LAUNCH_WATCH": str(tmp_path), "LAUNCH_GC": "default"}
    plan = write_plan(tmp_path, ",".join(map(str, ALLOWED)))
    script = "echo $LAUNCH_WATCH, $PYTHONPATH"
    for argv, found in (
        (["sh", "-c", script], f"{tmp_path}, {FOLDER}"),
        (["sh", "-c", 'exec "$@"', "sh", *COMMAND, "sh", "-c", script], ","),
        ([sys.executable, "-I", "-c", "import os; print('LAUNCH_WATCH' in os.environ)"], "False"),
    ):
        done = run_shim(*argv, preexec=None, LAUNCH_PLAN=str(plan), **watched)
        assert done.stdout.startswith(found), (argv, done)
