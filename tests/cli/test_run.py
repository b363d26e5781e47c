"""A run: what is said before and after it, what a run that goes on keeps, the process that starts early."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import doctor
from launcher.cli.main import find_early_program, parse_command
from launcher.config import rules
from launcher.doctor.model import Facts, PathFacts
from launcher.preflight import PreflightRequest, render_answer
from launcher.probe import limits
from tests.data_files import read_data, write
from tests.launch.terminals import launch_on_terminal
from tests.seam import LAUNCH, Launch, clean_environ, find_working_in, run_outside, specify, wait_for
from tests.strangers import give_away

LINES = read_data("command_lines")


# The allocator


def test_programs_that_share_gpu_memory_are_warned_of_in_a_container_that_may_not_trace(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("nodes=2", "cluster=slurm", "dry_run=true", "--", "python", "-m", "verl.trainer.main_ppo")
    monkeypatch.setattr(rules, "CONTAINER_MARKS", ())
    assert "165685" not in launch(*words).err
    contained = launch("cluster.container.image=a.sif", *words)
    assert contained.code == 0
    assert "pytorch/issues/165685" in contained.err and "--cap-add=SYS_PTRACE to have both" in contained.err
    monkeypatch.setattr(rules, "CONTAINER_MARKS", ("/",))
    for capabilities in (0, 1 << 19):
        monkeypatch.setattr(limits, "read_capabilities", lambda _, found=capabilities: found)
        said = launch("nproc_per_node=1", "dry_run=true", "--", "echo", "verl.trainer").err
        assert ("165685" in said) == (capabilities == 0)


@pytest.mark.usefixtures("quick_agent")
def test_what_does_not_go_with_a_program_is_left_out_and_it_runs(here: Path) -> None:
    """Left out of the configuration, so that it does not go to the nodes of a submitted job either."""
    (here / "train.py").write_text("pass")
    for words, left in ((["--use-nccl-ub"], {}), ([], {"expandable_segments": True})):
        config = specify([], ("train.py", *words), {}).config
        assert config.allocator == {**left, "host": "system"}
    words = ["nproc_per_node=1", "new_run_dir=run", "--", "train.py", "--use-nccl-ub"]
    done = run_outside(words, here, {"CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0 and done.err.count("--use-nccl-ub: Megatron-LM refuses") == 1, done


# Secrets, and what configuration files bring


def test_secrets_that_ps_shows_while_launch_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x.env").write_text("HF_TOKEN=abc\n")
    for words, told in LINES["shown_by_ps"]:
        specify(words, ("true",))
        said = capsys.readouterr().err
        assert told in said and ("env.from_file=FILE" in said) == bool(told), words
        assert "abc" not in said


def run_installed(here: Path, *words: str) -> str:
    """Run `launch` as its entry point does, the working directory not on its path; return what it says."""
    command = [sys.executable, "-P", "-m", "launcher", *words]
    with (here / "said").open("w+b") as said:
        done = subprocess.run(command, cwd=here, env=clean_environ(), stdout=said, stderr=said, check=False)
        said.seek(0)
        text = said.read().decode()
    assert done.returncode == 0, text
    return text


def test_a_users_configuration_is_named_before_it_runs(here: Path) -> None:
    write(here / "conf/program/train.yaml", "command: [sh, -c, 'cat said > seen']\n")
    run_installed(here, "nproc_per_node=1")
    assert "configuration from conf/program/train.yaml" in (here / "seen").read_text()


@pytest.mark.slow
def test_a_folder_of_the_launchers_name_does_not_take_the_bundled_programs_place(here: Path) -> None:
    write(here / "launcher/__init__.py", "raise SystemExit('planted')\n")
    assert " -P -m launcher.programs.train " in run_installed(here, "dry_run=true")
    assert "planted" not in run_installed(here, "nproc_per_node=1", "program.steps=1", "model.layers=1")


def test_whose_a_configuration_is(launch: Launch, here: Path) -> None:
    write(here / "conf/launch_defaults.yaml", "defaults: [launch_schema]\nnproc_per_node: 1\n")
    assert "launch: configuration from conf/launch_defaults.yaml\n" in launch("plan").err
    give_away(here / "conf/launch_defaults.yaml")
    said = launch("plan").err
    assert "configuration from conf/launch_defaults.yaml (of " in said and "65534" in said


# A configuration that stays, and a run that goes on


def test_the_settings_that_differ_are_listed_without_secrets(here: Path, launch: Launch) -> None:
    path = here / "runs/train/20310203-040506"
    write(path / "manifest.json", "{}")
    first = specify(["new_run_dir=x", "env.HF_TOKEN=one"], ("true",))
    write(path / "config.yaml", first.config_text)
    words = [f"run_dir={path}", "logs.tail=7", "env.HF_TOKEN=two", "dry_run=true", "--", "true"]
    said = launch(*words).err
    assert "other settings than those of the earlier start" in said
    assert "logs.tail 20 -> 7" in said and "two" not in said and "one" not in said.replace("none", "")
    write(path / "config.yaml", "a: &a [*a]\n" * 3)
    assert "other settings" not in launch(*words).err


def test_a_program_of_the_users_own_leaves_nothing_of_the_bundled_one(here: Path) -> None:
    spec = specify([], ("true",))
    written = yaml.safe_load(spec.config_text)
    assert not {"model", "data", "program"} & (written.keys() | spec.choices.keys())
    assert (spec.config.model, spec.config.data, spec.config.program) == ({}, {}, {})
    bundled = specify([])
    assert bundled.choices["model"] == "tiny" and yaml.safe_load(bundled.config_text)["model"]


# Checks of the machine before the start

CHECKED = ("nproc_per_node=1", "name=x", "preflight=light", "watch.enabled=false")
STARTED = "would start a job"
"""What the tests' guard says of a run that gets that far."""
STUCK = PathFacts("/data", "data", "stuck", 5.0)
FACTS = Facts(os.uname().nodename, 0, time.time(), cpus=1, paths=(STUCK,), seconds=1.0)
SICK = f"print({render_answer(FACTS)!r})"


Check = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def check_first(launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs with another program that answers for the machine; returns code, stderr and manifest."""

    def check(script: str, *words: str) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(PreflightRequest, "command", [sys.executable, "-I", "-S", "-c", script])
        done = launch(*CHECKED, *words, "--", "true")
        (path,) = (here / "runs").glob("*/*/manifest.json")
        return done.code, done.err, json.loads(path.read_text())

    return check


def test_a_sick_machine_is_told_and_the_run_starts(check_first: Check, here: Path) -> None:
    _, said, manifest = check_first(SICK)
    assert STARTED in said and "preflight: sick: " in said and "/data" in said and "1 sick" in said
    assert manifest["outcome"]["state"] == "running" and len(manifest["preflight"]["sick"]) == 1
    (report,) = (here / "runs").glob("*/*/preflight/0/report.json")
    assert json.loads(report.read_text())["kind"] == "light"


@pytest.mark.parametrize("on_failure", ["stop", "exclude"])
def test_a_sick_machine_ends_the_run_with_3(check_first: Check, on_failure: str) -> None:
    code, said, manifest = check_first(SICK, f"preflight.on_failure={on_failure}")
    assert code == 3 and "launch: error: preflight found this machine sick" in said and STARTED not in said
    outcome = manifest["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "sick_node", 3)


def test_checks_that_fail_by_themselves_are_a_warning(check_first: Check) -> None:
    script = "import sys; sys.exit('ModuleNotFoundError: no torch')"
    _, said, manifest = check_first(script, "preflight.on_failure=stop")
    assert STARTED in said and "not checked: ModuleNotFoundError: no torch" in said
    assert manifest["preflight"]["problem"] == "ModuleNotFoundError: no torch"


@pytest.mark.parametrize("fails", [False, True], ids=["by themselves", "with a mistake of their own"])
def test_checks_that_a_signal_ends_do_not_start_the_run(
    check_first: Check, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("a mistake of the checks' own")

    if fails:
        monkeypatch.setattr(doctor, "run_checks", fail)
    script = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    code, said, manifest = check_first(script)
    assert code == 128 + signal.SIGTERM and STARTED not in said
    assert (manifest["outcome"]["state"], manifest["outcome"]["signal"]) == ("stopped", "SIGTERM")


# What a newcomer stumbles over, as real runs: the words that say so, and what the program gets


PROGRAM = """\
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def test_odd_words_and_surroundings(here: Path) -> None:
    """Keys after the program, secrets, left variables, a file named as a module."""
    (here / "train.py").write_text("import torch\n" + PROGRAM)
    (here / "asyncio.base_events.cover").touch()
    words = ["lr=3", "nproc_per_node=2", "--pw", "hidden-one", "--cred", "hidden-two"]
    left = {"LAUNCH_WARM": "nonsense", "LAUNCH_TERMINAL": "nonsense"}
    result = run_outside(["nproc_per_node=1", "name=odd", "train.py", *words], here, left)
    assert (result.code, json.loads(result.out.splitlines()[-1])) == (0, words), result
    assert "launch: nproc_per_node=2 after the program" in result.err
    for word in ("lr=3 ", "terminal", "warm process", "asyncio", "by exec"):
        assert word not in result.err
    (run,) = (here / "runs/odd").iterdir()
    assert (run / "manifest.json").is_file()
    for file in run.rglob("*"):
        assert not file.is_file() or file.name == "rank-0.out" or b"hidden-" not in file.read_bytes(), file

    (here / "train.py").write_text(PROGRAM)
    result = run_outside(["nproc_per_node=1", "train.py", "lr=3", "model=x"], here)
    assert result.code == 0 and "after the program" not in result.err


@pytest.mark.parametrize("agent", ["direct", "torchrun"])
def test_a_breakpoint_in_several_ranks_ends_them_and_says_why(tmp_path: Path, agent: str) -> None:
    """No rank of several reads from the terminal, so that nobody's typing is torn between two debuggers."""
    program = "import sys\nassert not sys.stdin.isatty()\nbreakpoint()\n"
    with launch_on_terminal(tmp_path, program, "nproc_per_node=2", f"agent={agent}") as terminal:
        assert terminal.finish(120) == 1
        assert "bdb.BdbQuit" in terminal.text()


def test_the_words_of_an_end(here: Path) -> None:
    """One rank's traceback is shown once, few steps are counted right, a resume is no restart."""
    (here / "boom.py").write_text("raise ValueError('no data')\n")
    result = run_outside(["nproc_per_node=1", "boom.py"], here)
    said = [line for line in result.err.splitlines() if not line.startswith("launch: run directory")]
    assert (result.code, result.err.count("Traceback")) == (1, 1), result
    assert re.fullmatch(r"launch: rank 0 on \S+ exited with code 1", said[-2]), result
    assert re.fullmatch(r"launch: failed after [\d.]+ s", said[-1]) and result.err.count("failed") == 1

    (here / "few.py").write_text("print('step 0 loss 1.4687')\n")
    result = run_outside(["nproc_per_node=1", "new_run_dir=few", "few.py"], here)
    assert "loss 1.4687 at step 0\n" in result.err, result
    (here / "few.py").write_text("for n in range(4): print(f'step {n} loss {4 - n}')\n")
    result = run_outside(["nproc_per_node=1", "run_dir=few", "few.py"], here)
    assert "loss 4 to 1 over 4 steps" in result.err, result
    (run,) = json.loads(run_outside(["status", "few", "format=json"], here).out)["runs"]
    assert (run["state"], run["restarts"], len(run["attempts"])) == ("succeeded", 0, 2)


@pytest.fixture
def folder(here: Path) -> Path:
    """A working directory with a program that uses torch, and one that does not."""
    (here / "x.py").write_text("import torch\n")
    (here / "plain.py").write_text("import os\n")
    return here


def find(line: str, **variables: str) -> tuple[str, ...] | None:
    words = line.replace("{python}", sys.executable).split()
    return find_early_program(parse_command(words), {**clean_environ(), **variables})


def test_which_command_lines_name_a_program(folder: Path) -> None:
    for line in LINES["early"]:
        argv = find(line)
        assert argv and argv[0] == sys.executable, line
    for line in LINES["others"]:
        assert find(line) is None, line
    assert find("agent=direct x.py", PYTHON_EXEC="/usr/bin/env") is None
    # What a configuration of one's own may change is composed first.
    Path("conf").mkdir()
    assert find("agent=direct x.py") and find("") is None


LOOK = """
from pathlib import Path
def train():
    import torch
def holds(entry):
    try:
        here = (entry / "cwd").readlink() == Path.cwd()
        return here and any("launch-warm" in str(link.readlink()) for link in (entry / "fd").iterdir())
    except OSError:
        return False
print("WARM", sum(holds(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()), flush=True)
"""


@pytest.mark.parametrize("word", ["agent=torchrun", "start.warm=off", "env.OPENBLAS_VERBOSE=1"])
def test_a_process_of_no_use_is_gone_before_the_program_runs(word: str, folder: Path) -> None:
    (folder / "x.py").write_text(LOOK)
    done = run_outside([word, "nproc_per_node=1", "x.py"], folder)
    assert done.code == 0 and "WARM 0\n" in done.out, done


def test_nothing_is_left_of_a_start_that_fails(folder: Path) -> None:
    (folder / "file").touch()
    run_outside(["agent=direct", "runs_dir=file", "x.py"], folder).assert_error(3, "runs_dir")
    assert find_working_in(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_nothing_is_left_of_a_start_that_is_stopped_while_it_composes(number: int, folder: Path) -> None:
    script = f"""
import os, sys
from launcher.config import compose
def wait(*_):
    print("composes", flush=True)
    while True:
        os.read(0, 1)
compose.compose = wait
{LAUNCH[2]}
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", script, "agent=direct", "x.py"]
    with subprocess.Popen(command, env=clean_environ(), **pipes) as launcher:  # type: ignore[call-overload]  # its own
        assert launcher.stdout.readline() == b"composes\n"
        assert len(find_working_in(folder)) > 1
        launcher.send_signal(number)
        assert launcher.wait(60) in (-number, 128 + number)
    wait_for(lambda: not find_working_in(folder), "the end of all that was started")


def test_the_ranks_are_forked_from_the_process_that_was_started_early(folder: Path) -> None:
    """`LAUNCH` runs this program's interpreter; a process that composes slowly has imported torch by then."""
    program = "import sys\nimport torch\nprint('forked', not hasattr(sys, 'set_by_site'))\n"
    (folder / "x.py").write_text(program)
    script = f"""
import sys
from launcher.launch import supervisor
from launcher.launch.warm.process import WarmProcess
def refuse(*_):
    raise AssertionError("another warm process, or a rank by exec")
def start_once(*values):
    WarmProcess.start = refuse
    return start(*values)
start, WarmProcess.start, supervisor.spawn_rank = WarmProcess.start, start_once, refuse
exec({LAUNCH[2]!r})
"""
    words = ["agent=direct", "nproc_per_node=2", "restarts=1", "logs.console=all", "x.py"]
    command, environ = [sys.executable, "-c", script, *words], clean_environ()
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.count("forked True")) == (0, 2), done
    assert find_working_in(folder) == []
