"""The checks of nodes, for real: answers read from a process, a node's program, and its child."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.codec import convert, dump
from launcher.doctor.model import Facts
from launcher.preflight import PreflightRequest, find_rank_python, render_answer, run_checks
from launcher.preflight.__main__ import add_work
from tests.seam import PATIENCE, clean_environ, is_alive, wait_for

REQUEST = PreflightRequest("light", ("n0", "n1"), 10.0, 1000.0)
NODE = {"SLURMD_NODENAME": "n1"}
ON_WORK = 'case "$*" in *--kind*) ;; *) exit 0;; esac;'
"""An interpreter does something for the work alone: its version of torch is asked for before."""


def answer(host: str, *, is_final: bool = True, cpus: int = 0) -> str:
    return render_answer(Facts(host, 9, 1001.0, cpus=cpus, seconds=1.0 if is_final else 0.0))


def check(script: str, wakeup: int | None = None, is_stopped: Callable[[], bool] = lambda: False) -> Any:
    """Have a script carry the answers."""
    command = [sys.executable, "-I", "-S", "-u", "-c", f"import sys, time, os, signal\n{script}"]
    return run_checks(command, REQUEST, clean_environ(), wakeup=wakeup, is_stopped=is_stopped)


def test_the_newest_answer_of_each_node_counts_and_the_first_says_when_it_came() -> None:
    lines = [answer("n1", is_final=False, cpus=1), "noise\n", answer("n0"), answer("n1", cpus=2)]
    answers = check(f"for line in {lines!r}: sys.stdout.write(line); sys.stdout.flush(); time.sleep(0.05)")
    assert answers.missing == ()
    facts = answers.facts["n1"]
    assert (facts.cpus, facts.node_rank, facts.asked) == (2, 1, 1000.0)
    assert facts.answered is not None and facts.answered <= (answers.facts["n0"].answered or 0.0)


def test_what_is_no_answer_or_of_no_node_of_the_job_is_passed_over() -> None:
    whole = answer("n0").splitlines(keepends=True)
    begins = "launch-preflight: "
    lines = [
        answer("n7"),
        *(f"{begins}{text}\n" for text in ("", "{}", "[1", "n0", "n0 1/1 {}", "n0 2/2 {}", "n0 1/2 [")),
        f"{whole[0][:50]}\n",
        "".join(whole).strip(),
    ]
    flood = "sys.stdout.write('x' * (3 << 20) + chr(10)); "
    answers = check(f"{flood}sys.stdout.write({''.join(lines)!r}); sys.stderr.write('a\\n\\nb')")
    assert answers.ended and {*answers.facts} == {"n0"} and answers.missing == ("n1",)
    assert [*answers.errors] == ["a", "b"] and answers.exit_code == 0


def test_lines_of_answers_are_so_short_that_srun_leaves_them_whole_and_come_in_any_order() -> None:
    told: dict[str, Any] = {"node_rank": 9, "time": 1001.0, "cpus": 7, "seconds": 1.0}
    told["paths"] = [{"path": "/p" * 1000, "purpose": "data", "state": "ok"}]
    facts = {host: convert(Facts, {"host": host, **told}) for host in REQUEST.hosts}
    texts = [render_answer(one).splitlines() for one in facts.values()]
    assert all(len(lines) == 3 and max(map(len, lines)) <= 1000 for lines in texts)
    first, second = texts
    mixed = [first[0], second[0], second[1], first[1], first[2], second[2]]
    answers = check(f"print({mixed!r}, sep=chr(10))".replace("print([", "print(*["))
    assert answers.missing == () and [one.paths for one in answers.facts.values()] == [
        one.paths for one in facts.values()
    ]
    for torn in ([first[0], first[2], first[1]], [*first[:2], first[2][:-9]]):
        assert check(f"print(*{torn!r}, sep=chr(10))").facts == {}, "a line is missing, or its end"


def test_a_program_that_hangs_is_left_at_the_deadline_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 6 s in place of 33; a process of its own keeps its output open."""
    monkeypatch.setattr("launcher.preflight.START_MARGIN", -4.0)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    answers = check(f"{ignore}sys.stdout.write({answer('n0')!r}); signal.pause()")
    assert (answers.ended, answers.missing, answers.exit_code) == (False, ("n1",), -signal.SIGKILL)
    monkeypatch.undo()
    answers = check(f"sys.stdout.write({answer('n0')!r}); os.fork() or time.sleep(8)")
    assert (answers.ended, answers.missing, answers.exit_code) == (True, ("n1",), 0)


def test_a_signal_is_asked_about_and_ends_the_checks_if_it_says_so() -> None:
    script = f"sys.stdout.write({answer('n0') + answer('n1')!r})"
    for stops in (False, True):
        reading, writing = os.pipe()
        os.write(writing, b"x")
        asked: list[bytes] = []

        def is_stopped(end: int = reading, told: bool = stops, taken: list[bytes] = asked) -> bool:
            taken.append(os.read(end, 1))
            return told

        answers = check(f"signal.pause() if {stops} else None\n{script}", reading, is_stopped)
        assert asked == [b"x"] and (answers.missing == ()) is not stops
        os.close(reading)
        os.close(writing)


def start(request: PreflightRequest) -> "subprocess.Popen[str]":
    """The program of node n1."""
    return subprocess.Popen(
        request.command,
        cwd="/",
        env={**clean_environ(), **NODE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make_interpreter(folder: Path, script: str) -> str:
    """An executable in place of the ranks' interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_node_answers_with_facts_and_again_with_work(tmp_path: Path) -> None:
    request = replace(REQUEST, hosts=("n1",), seconds=40.0, paths=((str(tmp_path), "run directory"),))
    answers = run_checks(request.command, request, {**clean_environ(), **NODE})
    (facts,) = answers.facts.values()
    assert (answers.missing, [*answers.errors]) == ((), []) and facts.host == "n1"
    assert facts.paths[0].path == str(tmp_path) and not list(tmp_path.iterdir())
    assert {"matmul", "memory"} == {one.measure for one in facts.work}
    assert 0 < facts.seconds < 40.0 and (facts.answered or 0.0) < time.time() - 1, (
        "the first answer has no work"
    )


@pytest.mark.parametrize(
    ("number", "script"), [(signal.SIGTERM, "sleep 60 & wait"), (signal.SIGKILL, "exec sleep 60")]
)
def test_a_node_that_is_ended_takes_its_child_along(tmp_path: Path, number: int, script: str) -> None:
    python = make_interpreter(tmp_path, f"{ON_WORK} {script}")
    process = start(replace(REQUEST, seconds=60.0, python=python))
    assert process.stdout and process.stdout.readline().startswith("launch-preflight: n1 1/")
    me, count = psutil.Process(process.pid), 2 if number == signal.SIGTERM else 1
    wait_for(lambda: len(me.children(recursive=True)) >= count, "the child")
    children = me.children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert psutil.wait_procs(children, PATIENCE)[1] == []


STOPPED = """
import os, signal, subprocess, sys
class Popen(subprocess.Popen):
    def __init__(self, argv, **options):
        super().__init__(argv, **options)
        if "--kind" in argv:
            os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
from launcher.preflight.__main__ import main
sys.exit(main())
"""
"""A node's program that gets SIGTERM when it has started the work, and does not have it yet."""


def test_a_node_that_is_ended_while_it_starts_its_child_takes_it_along(tmp_path: Path) -> None:
    python = make_interpreter(tmp_path, f"{ON_WORK} sleep 60 & echo $! >{tmp_path}/pid; wait")
    request = dump(replace(REQUEST, seconds=60.0, python=python))
    words = [sys.executable, "-c", STOPPED, request]
    done = subprocess.run(words, env=clean_environ(), stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    if (tmp_path / "pid").exists():  # the work may have been ended before
        pid = int((tmp_path / "pid").read_text())
        wait_for(lambda: not is_alive(pid), "the end of the work's process", 10)


@pytest.mark.parametrize("argument", ["", "{", "{}", '{"kind": 1}'])
def test_a_request_that_is_none(argument: str) -> None:
    command = [*REQUEST.command[:-1], argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("launch: no request of preflight: ") and done.stderr.count("\n") == 1


def work(python: str, seconds: float) -> Facts:
    gpus = [{"index": at, "uuid": f"GPU-{at}", "name": "H100"} for at in range(8)]
    facts = convert(Facts, {"host": "n0", "node_rank": 0, "time": 0.0, "gpus": gpus})
    return add_work(facts, replace(REQUEST, python=python), time.monotonic() + seconds)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (f'exec {sys.executable} -S "$@"', "No module named 'torch'"),
        ("echo torn to pieces >&2; exit 3", "it ended with exit code 3: torn to pieces"),
        ("kill -SEGV $$", "it ended with signal 11"),
        ("echo '[['; echo '{\"torch\": 7}'; exit 1", "it ended with exit code 1"),
        ("yes '{\"measure\": 1}'", "it did not end in time"),
    ],
)
def test_an_interpreter_in_which_the_work_fails(tmp_path: Path, script: str, problem: str) -> None:
    facts = work(make_interpreter(tmp_path, script), 3.2 if "time" in problem else 20.0)
    (unchecked,) = facts.unchecked
    assert facts.work == () and facts.torch == ""
    assert unchecked.check == "work" and unchecked.reason.endswith(problem)


def test_work_that_cannot_begin(tmp_path: Path) -> None:
    assert work(str(tmp_path), 1.0).unchecked[0].reason == "no time was left"
    reason = work(str(tmp_path / "none"), 5.0).unchecked[0].reason
    assert reason == f"{tmp_path}/none cannot be run (No such file or directory)"


def test_results_before_the_end_count_by_nvmls_numbers(tmp_path: Path) -> None:
    """torch counts the GPUs that are visible; lines that are no results are left out."""
    names = {"GPU 1": "GPU-5", "node": "", "GPU 0": "", "GPU 9": "GPU-99"}
    lines = ['{"torch": "2.9"}', '{"torch_cuda": "13"}', "NCCL INFO hello", "[1]"]
    lines += ['{"measure": "matmul", "where": "GPU 1", "value": NaN}']
    lines += [json.dumps({"measure": "matmul", "where": one, "uuid": uuid}) for one, uuid in names.items()]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    facts = work(make_interpreter(tmp_path, f"cat {tmp_path}/lines; sleep 60"), 3.5)
    assert facts.torch == "2.9" and facts.unchecked[0].reason == "it did not end in time"
    assert [one.where for one in facts.work] == ["GPU 5", "node", "GPU 0", "GPU 9"]


def test_the_programs_folder_is_found_by_an_interpreter_with_torch_and_no_launcher(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('this torch is broken')")
    facts = work(make_interpreter(tmp_path, f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"'), 20.0)
    assert facts.unchecked[0].reason == "it ended with exit code 1: ImportError: this torch is broken"


def test_turns_of_a_node_among_three(tmp_path: Path) -> None:
    """Each turn runs the program with its partner's options; the first is the node's own work."""
    python = make_interpreter(tmp_path, f'echo "$@" >>{tmp_path}/said; echo \'{{"torch": "2.9"}}\'')
    expected = {"a": "a:4000 0 a-b, c:4032 1 c-a", "b": "a:4000 1 a-b, b:4016 0 b-c"}
    for host, turns in {**expected, "c": "b:4016 1 b-c, c:4032 0 c-a"}.items():
        (tmp_path / "said").unlink(missing_ok=True)
        facts = convert(Facts, {"host": host, "node_rank": 0, "time": 0.0})
        hosts, kind = ("a", "b", "c"), "deep"
        request = replace(REQUEST, kind=kind, hosts=hosts, endpoint="a:4000", python=python)
        add_work(facts, request, time.monotonic() + 60)
        own, *said = (tmp_path / "said").read_text().splitlines()
        assert "--pair" not in own and all("--kind deep" in line for line in (own, *said))
        pairs = [
            line.partition(" --pair ")[2].replace("--pair-rank ", "").split(" --pair-name ") for line in said
        ]
        assert ", ".join(map(" ".join, pairs)) == turns


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (("python", "train.py"), {}, "python"),
        (("/opt/venv/bin/python3.12", "-m", "train"), {}, "/opt/venv/bin/python3.12"),
        ((".venv/bin/python", "train.py"), {"PYTHON_EXEC": "/x/python"}, "/srv/job/.venv/bin/python"),
        (("train.py", "--lr", "1"), {}, ""),
        (("train.py",), {"PYTHON_EXEC": "/x/python"}, "/x/python"),
        (("-m", "launcher.programs.train"), {"PYTHON_EXEC": "python3"}, "python3"),
        (("./start.sh", "python"), {"PYTHON_EXEC": "/x/python"}, ""),
        (("pythonic",), {}, ""),
        ((), {}, ""),
    ],
)
def test_the_ranks_interpreter(argv: tuple[str, ...], environ: dict[str, str], expected: str) -> None:
    assert find_rank_python(argv, environ, "/srv/job") == expected
