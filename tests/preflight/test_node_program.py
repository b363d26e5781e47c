"""A node's program, for real: its answers, its child in the ranks' interpreter, its end."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from launcher.doctor.node_facts import GpuFacts, NodeFacts, WorkResult
from launcher.preflight.node_program import list_turns, rename_gpus
from launcher.preflight.preflight_request import NeededPath, NodeAnswer, PreflightRequest, parse_answer
from launcher.preflight.work_child import GpuOfTorch, parse_output, run_work
from tests.seam import clean_environ

REQUEST = PreflightRequest("light", ("n1", "n2"), 10.0, 123.0)
ON_WORK = 'case "$*" in *--kind*) ;; *) exit 0;; esac;'
"""An interpreter does something for the work alone: its version of torch is asked for before."""


def start(request: PreflightRequest) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.preflight", request.to_json()],
        cwd="/",
        env={**clean_environ(), "SLURMD_NODENAME": "n2"},
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


def test_it_answers_with_facts_and_again_with_work(tmp_path: Path) -> None:
    request = replace(REQUEST, seconds=40.0, paths=(NeededPath(str(tmp_path), "run directory"),))
    process = start(request)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")
    first, last = (parse_answer(line) for line in out.splitlines())
    assert isinstance(first, NodeAnswer) and isinstance(last, NodeAnswer)
    assert (first.is_final, last.is_final) == (False, True)
    assert (last.facts.host, last.facts.node_rank, last.facts.asked) == ("n2", 1, 123.0)
    assert first.facts.paths[0].path == str(tmp_path) and first.facts.work == ()
    assert {"matmul", "memory"} == {one.measure for one in last.facts.work}
    assert last.facts.seconds < 40.0
    assert not list(tmp_path.iterdir())


def test_a_signal_ends_its_child_too(tmp_path: Path) -> None:
    process = start(
        replace(REQUEST, seconds=60.0, python=make_interpreter(tmp_path, f"{ON_WORK} sleep 60 & wait"))
    )
    assert process.stdout and parse_answer(process.stdout.readline())
    me, end = psutil.Process(process.pid), time.monotonic() + 30
    while len(found := me.children(recursive=True)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    psutil.wait_procs(found, 10)
    assert len(found) == 2 and not [one for one in found if one.is_running()]


def test_a_killed_program_takes_its_child_along(tmp_path: Path) -> None:
    process = start(
        replace(REQUEST, seconds=60.0, python=make_interpreter(tmp_path, f"{ON_WORK} exec sleep 60"))
    )
    assert process.stdout and parse_answer(process.stdout.readline())
    me, end = psutil.Process(process.pid), time.monotonic() + 30
    while not (found := me.children()) and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=30)
    assert found and psutil.wait_procs(found, 10)[1] == []


@pytest.mark.parametrize("argument", ["", "{", "{}", '{"kind": 1}'])
def test_a_request_that_is_none(argument: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.preflight", argument],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("launch: no request of preflight: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (f'exec {sys.executable} -S "$@"', "has no torch"),
        ("sleep 60", "it did not end in time"),
        ("echo torn to pieces >&2; exit 3", "it ended with exit code 3: torn to pieces"),
        ("kill -SEGV $$", "it ended with signal 11"),
        ("yes '{\"measure\": 1}'", "it did not end in time"),
        ("echo '[['; echo '{\"torch\": 7}'; exit 1", "it ended with exit code 1"),
    ],
)
def test_an_interpreter_in_which_the_work_fails(tmp_path: Path, script: str, problem: str) -> None:
    found = run_work(make_interpreter(tmp_path, script), "light", 0.7 if "time" in problem else 20.0)
    assert found.results == () and found.torch == "" and found.problem.endswith(problem)


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    found = run_work(str(tmp_path / "none"), "light", 5.0)
    assert found.problem == f"{tmp_path}/none cannot be run (No such file or directory)"


def test_results_before_the_end_count(tmp_path: Path) -> None:
    line = json.dumps(asdict(WorkResult("matmul", "CPU 0", 1.0)))
    script = f"echo '{{\"torch\": \"2.9\"}}'; echo '{line}'; sleep 60"
    found = run_work(make_interpreter(tmp_path, script), "light", 1.5)
    assert (found.torch, found.problem) == ("2.9", "it did not end in time")
    assert [one.where for one in found.results] == ["CPU 0"]


def test_lines_of_the_child_are_read_by_their_types() -> None:
    lines = [
        b'{"gpus": [{"index": 1, "name": "H100", "uuid": "GPU-a", "pci": ""}]}',
        b'{"gpus": 7}',
        b"NCCL INFO hello",
        b'{"measure": "matmul", "where": "GPU 1", "value": NaN}',
        b'{"measure": "matmul", "where": "GPU 1", "value": null, "problem": "lost"}',
        b"\xff{",
    ]
    found = parse_output(b"\n".join(lines))
    assert found.gpus == (GpuOfTorch(1, "H100", "GPU-a", ""),)
    assert [(one.where, one.value, one.problem) for one in found.results] == [("GPU 1", None, "lost")]


def test_gpus_have_the_numbers_of_nvml() -> None:
    """torch counts the GPUs that are visible."""
    facts = NodeFacts("n", 0, 0.0, gpus=tuple(GpuFacts(at, f"GPU-{at}", "H100") for at in range(8)))
    gpus = tuple(GpuOfTorch(at, "H100", f"GPU-{at + 4}", "") for at in range(4))
    names = ["GPU 1", "GPU 0-3", "node", "GPU 9", "GPU 99999"]
    found = [rename_gpus(WorkResult("matmul", name, 1.0), gpus, facts).where for name in names]
    assert found == ["GPU 5", "GPU 4-7", "node", "GPU 9", "GPU 99999"]


def test_turns_of_a_node_among_three() -> None:
    request = replace(REQUEST, kind="deep", hosts=("a", "b", "c"), endpoint="a:4000")
    turns = {host: list(list_turns(request, host)) for host in request.hosts}
    assert [turn[1] for turn in turns["a"]] == ["a:4000", "c:4032"]
    assert [turn[1::2] for turn in turns["b"]] == [("a:4000", "1", "a-b"), ("b:4016", "0", "b-c")]
    assert [turn[1::2] for turn in turns["c"]] == [("b:4016", "1", "b-c"), ("c:4032", "0", "c-a")]


def test_the_programs_folder_is_found_by_another_interpreter(tmp_path: Path) -> None:
    """It has torch, but no `launcher`."""
    hidden = tmp_path / "torch"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError('this torch is broken')")
    script = f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"'
    found = run_work(make_interpreter(tmp_path, script), "light", 20.0)
    assert found.problem.endswith("it ended with exit code 1: ImportError: this torch is broken")
