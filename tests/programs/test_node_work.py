"""The measured work, for real: on this machine's CPUs, between two processes, and what fails in it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from launcher.programs.device_work import NotMeasuredError, choose_size, hash_tensor, make_matrix
from launcher.programs.node_work import SLACK, NodeWork, WorkProcess, ask_all
from tests.seam import clean_environ

CPUS = sorted(os.sched_getaffinity(0))
CPU = torch.device("cpu")
COMMAND = (sys.executable, "-P", "-m", "launcher.programs.node_work")


def start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True, env=clean_environ())


def read_results(process: "subprocess.Popen[str]") -> list[dict[str, object]]:
    """What it has measured; the program ends with 0, whatever it meets."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [line for line in map(json.loads, out.splitlines()) if "measure" in line]


def test_the_cpus_together_are_a_device() -> None:
    found = read_results(start("--kind", "light", "--seconds", "20"))
    assert [(one["measure"], one["where"], one["problem"]) for one in found] == [
        ("matmul", "CPU", ""),
        ("memory", "CPU", ""),
    ]
    assert all(float(str(one["value"])) > 0 for one in found)
    assert found[0]["device"] == found[1]["device"] and str(found[0]["device"]).endswith(f"{len(CPUS)} CPUs")


def test_a_device_whose_process_is_killed_has_failed() -> None:
    process = start("--kind", "light", "--seconds", "20")
    assert process.stdout and "torch" in json.loads(process.stdout.readline())
    me = psutil.Process(process.pid)
    end = time.monotonic() + 30
    while not (workers := me.children()) and time.monotonic() < end:
        time.sleep(0.01)
    workers[0].send_signal(signal.SIGKILL)
    found = read_results(process)
    assert [(one["problem"], one["value"]) for one in found] == [
        ("its process was ended by signal 9", None)
    ] * 2
    assert psutil.wait_procs(workers, 30)[1] == []


def test_two_nodes_measure_what_is_between_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    words = ("--seconds", "20", "--pair", f"localhost:{port}", "--pair-name", "a-b", "--pair-rank")
    both = [start(*words, rank) for rank in "01"]
    found = [one for process in both for one in read_results(process)]
    assert [(one["measure"], one["where"], one["problem"]) for one in found] == [("pair", "a-b", "")] * 2
    assert float(str(found[0]["value"])) > 0


def test_a_taken_port_says_nothing_of_the_nodes() -> None:
    with socket.create_server(("", 0)) as listening:
        pair = f"localhost:{listening.getsockname()[1]}"
        (found,) = read_results(start("--seconds", "10", "--pair", pair, "--pair-rank", "0"))
    assert found["problem"] == "" and found["value"] is None
    assert "address already in use" in str(found["reason"]).lower()


def test_matrices_are_the_same_anywhere_and_their_bits_have_a_checksum() -> None:
    small, large = (make_matrix(size, 12345, torch.bfloat16, CPU) for size in (512, 2048))
    assert small.shape == (512, 512) and large.shape == (2048, 2048)
    assert torch.equal(large[:1024, :1024], large[1024:, 1024:])
    assert -1 <= small.min() < -0.9 and 0.9 < small.max() <= 1 and len({*small.flatten().tolist()}) > 200
    assert hash_tensor(small) == hash_tensor(make_matrix(512, 12345, torch.bfloat16, CPU))
    changed = small.clone()
    changed[511, 511] += 0.5
    assert hash_tensor(changed) != hash_tensor(small) and hash_tensor(small).startswith("512:")


@pytest.mark.parametrize(("gib", "size"), [(78, 8192), (4.9, 4096), (1.5, 4096), (1.0, 2048), (0.01, 1024)])
def test_matrices_take_an_eighth_of_the_free_memory(gib: float, size: int) -> None:
    assert choose_size(int(gib * 2**30)) == size


def double(state: int, number: int) -> int:
    return state * number


def end_hard(state: int, number: int) -> None:
    os._exit(3)


def sleep_long(state: int, number: int) -> int:
    time.sleep(60 if state == 1 else 0)
    return state


def fail(state: int, number: int) -> None:
    raise RuntimeError("CUDA error:\n  an illegal memory access " + "x" * 1000)


def skip(state: int, number: int) -> None:
    raise NotMeasuredError("there is no peer")


def test_processes_that_answer_fail_end_and_hang() -> None:
    processes = [WorkProcess(state) for state in (1, 2)]
    pids = [one.process.pid for one in processes]

    def give(number: int) -> tuple[object, ...]:
        return (number + 10,)

    assert [one.value for one in ask_all(processes, double, give, 20)] == [10, 22]
    failed = ask_all(processes, fail, give, 20)
    assert (
        failed[0].problem.startswith("RuntimeError: CUDA error: an illegal") and len(failed[0].problem) == 300
    )
    assert [one.reason for one in ask_all(processes, skip, give, 20)] == ["there is no peer"] * 2
    hung = ask_all(processes, sleep_long, give, 1.0)
    assert [(one.value, one.problem, one.is_late) for one in hung] == [
        (None, "no answer within 1 s", True),
        (2, "", False),
    ]
    ended = ask_all(processes, end_hard, give, 20)
    assert [one.problem for one in ended] == ["no answer within 1 s", "its process ended with exit code 3"]
    again = ask_all(processes, double, give, 20)
    assert [one.problem for one in again] == [one.problem for one in ended]
    for one in processes:
        one.process.join(20)
    assert not [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("left", "least", "problem", "reason"),
    [
        (0.7, 5.0, "", "no time was left"),  # it may be the others' load
        (0.7, 0.2, "no answer within 1 s", ""),  # others have answered for long
        (9.0, 5.0, "no answer within 1 s", ""),
    ],
)
def test_being_late_speaks_against_a_device_after_its_grace(
    left: float, least: float, problem: str, reason: str
) -> None:
    processes = [WorkProcess(state) for state in (1, 2)]
    ask_all(processes, double, lambda _: (0,), 60)  # they have started, whatever else this machine does
    session = NodeWork("light", time.monotonic() + SLACK + left, 10.0, sys.stdout)
    late, good = session.ask(processes, sleep_long, lambda _: (0,), 0.1, grace=0.9, least=least)
    assert (late.problem, late.reason, good.value) == (problem, reason, 2)
    for one in processes:
        one.give_up("it is not needed any more")
        one.process.join(20)


def test_nobody_is_blamed_if_all_are_late() -> None:
    session = NodeWork("light", time.monotonic() + SLACK + 0.5, 10.0, sys.stdout)
    processes = [WorkProcess(1)]
    assert [one.reason for one in session.ask(processes, sleep_long, lambda _: (0,), 0.1, least=0.1)] == [
        "no time was left"
    ]
    processes[0].process.join(20)
