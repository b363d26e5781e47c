"""The shim really execs; its child tells what the kernel gave it, also in a rank inside a rank."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.cpulist import parse_cpulist
from tests.rank.start_shim import (
    ALLOWED,
    COMMAND,
    ECHO,
    KNOWN,
    SHIM,
    TELL,
    forbid,
    run_shim,
    run_words,
    tell,
    write_plan,
)
from tests.seam import LAUNCH, PATIENCE, clean_environ, drop_powers

FOLDER = str(SHIM.parents[1] / "inprocess")
CASES = tomllib.loads((Path(__file__).parents[1] / "data" / "shim.toml").read_text())["case"]


def fill(value: Any, folder: Path) -> Any:
    """Put the CPU and the folder into the texts of a case."""
    if isinstance(value, str):
        value = value.replace("{cpu}", str(ALLOWED[0])).replace("{dir}", str(folder))
        return value.replace("{python}", sys.executable)
    if isinstance(value, dict):
        return {name: fill(item, folder) for name, item in value.items()}
    return [fill(item, folder) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_the_program_runs_and_what_went_wrong_is_told(case: dict[str, Any], tmp_path: Path) -> None:
    case = fill(case, tmp_path)
    if case.get("root") and os.geteuid():
        pytest.skip("giving a file to another user needs root")
    if "calls" in case and not KNOWN:
        pytest.skip("the filter knows x86_64 alone")
    variables = case.get("variables", {})
    if "text" in case or "plan" in case:
        plan = write_plan(tmp_path, **{"cpus": str(ALLOWED[0]), **case.get("plan", {})})
        if "text" in case:
            plan.write_text(case["text"])
        variables = {"LAUNCH_PLAN": str(plan), **variables}
    subprocess.run(["sh", "-ec", case.get("before", "")], cwd=tmp_path, check=True)
    wrap = ("sh", "-c", f"cd {tmp_path}; {case['wrap']}", "sh") if "wrap" in case else ()
    calls = partial(forbid, *case["calls"], error=case["errno"]) if "calls" in case else None
    words = case.get("words", ECHO)
    done = run_shim(*words, preexec=calls, wrap=wrap, **variables)
    assert (done.returncode, done.stdout) == (case.get("code", 0), case.get("out", "ran\n")), done.stderr
    for part in case.get("says", ()):
        assert part in done.stderr
    assert case.get("lines", 1) in (-1, done.stderr.count("\n")), done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr and "\x07" not in done.stderr
    assert max(map(len, done.stderr.splitlines()), default=0) < case.get("longest", 1100)
    assert all((tmp_path / name).exists() for name in case.get("makes", ()))
    assert not any((tmp_path / name).exists() for name in case.get("lacks", ()))
    if case.get("strict"):
        strict = run_shim(*words, preexec=calls, LAUNCH_STRICT="1", **variables)
        assert (strict.returncode, strict.stdout) == (3, "")


def test_the_program_has_what_was_planned(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[-1]))
    typed = ["${run_dir}", "a$$b", '{"a": {num_workers}}', "{run_dir}x", "a={b={num_workers}}", "{}", "="]
    odd = ["a b", "c'd\"", "$(x)", "new\nline", "é", "", "--"]
    asked = {
        "{run_dir}/a=b": "/r/a=b",
        "a.b={run_dir}": "a.b=/r",
        "-x={run_dir}/{run_dir}": "-x=/r/{run_dir}",
        "{{run_dir}}/x": "{run_dir}/x",
        "x={{num_workers}}": "x={num_workers}",
        "{num_workers}": "3",
        "--n={num_workers}": "--n=3",
    }
    words = ["--", sys.executable, "-c", TELL, *typed, *odd, *asked]
    told = tell(run_shim(*words, LAUNCH_PLAN=str(plan), OMP_NUM_THREADS="1", LAUNCH_RUN_DIR="/r"))
    assert told["cpus"] == [ALLOWED[-1]]
    assert (told["policy"], told["nodes"]) == ("preferred", [0])
    assert told["argv"] == [*typed, *odd, *asked.values()]
    assert isinstance(told["env"], dict)
    assert told["env"]["OMP_NUM_THREADS"] == "5"
    assert "LAUNCH_BINDING" in run_shim("--help").stdout


def test_the_process_stays_the_same(tmp_path: Path) -> None:
    environ = {**os.environ, "LAUNCH_PLAN": str(write_plan(tmp_path, str(ALLOWED[0]))), "LOCAL_RANK": "0"}
    process = subprocess.Popen([*COMMAND, "sleep", "60"], env=environ, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == -signal.SIGTERM


def test_a_plan_file_that_is_cut_off_anywhere_or_cannot_be_read(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    whole = plan.read_bytes()
    for length in range(0, len(whole), 29):
        plan.write_bytes(whole[:length])
        done = run_shim(*ECHO, LAUNCH_PLAN=str(plan))
        assert done.stdout == "ran\n" and "cannot be read" in done.stderr
    plan.chmod(0)
    assert "Permission denied" in run_shim(*ECHO, LAUNCH_PLAN=str(plan), preexec=drop_powers).stderr


@pytest.mark.parametrize("text", ["-1", "99", "abc", "", "1.0", " 1", "\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_a_local_rank_of_any_kind(text: str) -> None:
    for size in ("2", "-1"):
        done = run_shim(*ECHO, LOCAL_RANK=text, LOCAL_WORLD_SIZE=size)
        assert (done.returncode, done.stdout) == (0, "ran\n")
        assert done.stderr.startswith("launch-rank: ") and "Traceback" not in done.stderr


def test_logs_and_record_go_to_the_run_directory(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    code = "import os, sys; print(os.get_blocking(1), os.get_blocking(2)); print('err', file=sys.stderr)"
    numbers = {"RANK": "5", "TORCHELASTIC_RESTART_COUNT": "2", "LAUNCH_ATTEMPT": "1"}
    run = {"LAUNCH_PLAN": str(plan), "LAUNCH_RECORD_DIR": str(tmp_path)}
    done = run_shim(sys.executable, "-c", code, preexec=None, **run, **numbers)
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "logs" / "3" / "rank-5.out").read_text() == "True True\n"
    assert (tmp_path / "logs" / "3" / "rank-5.err").read_text().endswith("\nerr\n")
    assert (tmp_path / "logs" / "3" / "rank-5.err").stat().st_mode & 0o777 == 0o600
    record = json.loads((tmp_path / "rank-5.applied.json").read_text())
    assert (record["rank"], record["local_rank"], record["attempt"]) == (5, 0, 3)
    assert parse_cpulist(record["cpus"]) == {ALLOWED[0]}
    assert record["memory"] == {"policy": "preferred", "nodes": "0"}
    assert record["problems"] == []
    (tmp_path / "run").mkdir(mode=0o500)
    run["LAUNCH_RECORD_DIR"] = str(tmp_path / "run")
    done = run_shim(*ECHO, **run, preexec=drop_powers)
    assert "has no log files" in done.stderr and "there is no record of what was applied" in done.stderr


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


HIDE = "mount -t tmpfs none /proc"
HIDEPID = "mount -t proc -o hidepid=2 proc /proc"


def can_unshare() -> bool:
    done = subprocess.run(["unshare", "--mount", "sh", "-c", HIDE], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="mounting in a namespace of its own is not permitted here")
@pytest.mark.parametrize(
    "mount", [HIDE, HIDEPID, f"{HIDE}; mount -t tmpfs none /sys"], ids=("proc", "hidepid", "both")
)
def test_file_systems_that_are_hidden(mount: str) -> None:
    command = ["unshare", "--mount", "sh", "-c", f'{mount}; exec "$0" "$@"', *COMMAND]
    words = ["taskset", "-c", str(ALLOWED[-1]), *command, sys.executable, "-c", TELL]
    done = run_words(words, {"PYTHONPATH": str(SHIM.parents[2])})
    assert tell(done)["cpus"] == ALLOWED[-1:]
    assert done.stderr.startswith("launch-rank: ")
    assert "Traceback" not in done.stderr


def test_an_interpreter_without_ctypes(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    code = f"import sys; sys.path.insert(0, {str(SHIM.parents[2])!r}); sys.modules['_ctypes'] = None\n"
    code += "from launcher.rank.shim import main\nsys.argv[0:1] = ['launch-rank']\nsys.exit(main())"
    words = [sys.executable, "-I", "-S", "-c", code, *ECHO]
    run = {"LAUNCH_PLAN": str(plan), "LAUNCH_QUIET": "1"}
    assert "memory policy preferred of node 0 was refused" in run_words(words, run).stderr
    done = run_words(words, {**run, "LAUNCH_RECORD_DIR": str(tmp_path)})
    assert (done.returncode, (tmp_path / "logs/0/rank-0.out").read_text()) == (0, "ran\n")


def test_an_interrupt_leaves_no_traceback() -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(SHIM.parents[2])!r})
from launcher.rank import shim
def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    raise OSError("not reached")
shim.place_rank = interrupt
sys.argv = ["launch-rank", "true"]
sys.exit(shim.main())
"""
    done = run_words([sys.executable, "-I", "-S", "-c", code], {})
    assert (done.returncode, done.stderr) == (-2, "")


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs a second CPU, so that the plan's number is another")
def test_torch_has_the_number_of_threads_that_was_set_last_before_its_import() -> None:
    shares = {"LOCAL_WORLD_SIZE": str(len(ALLOWED)), "LAUNCH_GC": "default"}
    program = """
import json, os
before = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
os.environ["OMP_NUM_THREADS"] = "2"
import torch
print(json.dumps({"mine": torch.get_num_threads(), "before": before}))
"""
    told = tell(run_shim(sys.executable, "-c", program, preexec=None, **shares))
    assert told == {"mine": 2, "before": {"OMP_NUM_THREADS": "1"}}


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


def test_the_outer_plans_values_are_made_anew_and_the_users_are_kept(tmp_path: Path) -> None:
    found = environ_of(start_nested(tmp_path))
    alone = environ_of(
        run_shim(sys.executable, "-c", TELL, preexec=lambda: os.sched_setaffinity(0, {ALLOWED[0]}))
    )
    for name in ("LAUNCH_GC", "LAUNCH_NUM_WORKERS", "OMP_NUM_THREADS"):
        assert found[name] == alone[name] != OUTER[name], name
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-7"  # it is in the outer rank, as its CPUs are
    assert found.get("PYTHONPATH", "").count(FOLDER) <= 1
    found = environ_of(start_nested(tmp_path, OMP_NUM_THREADS="4", LAUNCH_GC="default"))
    assert (found["OMP_NUM_THREADS"], found["LAUNCH_GC"]) == ("4", "default"), "from before the outer rank"
    changes = 'export OMP_NUM_THREADS=6 LAUNCH_NUM_WORKERS=0; exec "$@"'
    found = environ_of(start_nested(tmp_path, "sh", "-c", changes, "sh", *INNER))
    assert (found["OMP_NUM_THREADS"], found["LAUNCH_NUM_WORKERS"]) == ("6", "0"), "from inside it"
    assert found["LAUNCH_GC"] != OUTER["LAUNCH_GC"]
    # torchrun's agent sets OMP_NUM_THREADS=1 in the outer ranks; that is no user's value to come back to.
    found = environ_of(start_nested(tmp_path, TORCHELASTIC_RUN_ID="x", OMP_NUM_THREADS="1"))
    told = json.loads(found["LAUNCH_RANK_PLAN"])
    assert "OMP_NUM_THREADS" in told["env"] and "OMP_NUM_THREADS" not in told["env_before"]


def test_launch_in_a_rank_plans_as_if_it_were_not_in_one(tmp_path: Path) -> None:
    outer = write_plan(tmp_path, str(ALLOWED[0]), env=OUTER)
    words = ["sh", "-c", 'unset LAUNCH_PLAN; exec "$@"', "sh", *LAUNCH, "plan", "format=json"]
    words.append("env.LAUNCH_NIC=x")
    environ = {**clean_environ(), "LOCAL_RANK": "0", "LAUNCH_PLAN": str(outer), "NCCL_DEBUG": "WARN"}
    done = subprocess.run(
        [*COMMAND, *words],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    (rank,) = json.loads(done.stdout)["ranks"]
    sources = {each["name"]: each["from"] for each in rank["variables"]}
    assert sources["LAUNCH_GC"] == sources["OMP_NUM_THREADS"] == sources["LAUNCH_NUM_WORKERS"] == "plan"
    assert (sources["NCCL_DEBUG"], sources["LAUNCH_NIC"]) == ("user", "configuration")
    assert not set(rank["env"].items()) & set(OUTER.items())


def test_a_word_that_no_shim_has_left_and_odd_places_of_the_hook(tmp_path: Path) -> None:
    plan = str(write_plan(tmp_path, ",".join(map(str, ALLOWED))))
    words = ["", "{", "[]", "3", '{"env": 3}', '{"env": {"A": "1"}}', "[" * 100_000]
    paths = {"/x": "/x", FOLDER: "", f"{FOLDER}:/x:": "/x:", f"/x:{FOLDER}": f"/x:{FOLDER}"}
    for text, path in [*((text, "/x") for text in words), *(("{}", path) for path in paths)]:
        inner = {"LAUNCH_RANK_PLAN": text, "PYTHONPATH": path, "LAUNCH_PLAN": plan, "LAUNCH_GC": "default"}
        done = run_shim("sh", "-c", 'echo "$A, $PYTHONPATH"', preexec=None, A="1", **inner)
        assert done.stdout == f"1, {paths[path]}\n", (text, path)


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
