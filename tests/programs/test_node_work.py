"""The measured work, for real: on this machine's CPUs, between two processes, and what fails in it."""

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from launcher.programs.node_work import NodeWork, hash_tensor, make_matrix
from tests.seam import PATIENCE, clean_environ

CPU = torch.device("cpu")
COMMAND = (sys.executable, "-P", "-m", "launcher.programs.node_work")


def start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True, env=clean_environ())


def read_results(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What it has measured; the program ends with 0, whatever it meets."""
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return [line for line in map(json.loads, out.splitlines()) if "measure" in line]


def test_the_cpus_together_are_a_device() -> None:
    found = read_results(start("--kind", "light", "--seconds", "200"))
    assert [(one["measure"], one["where"], one["problem"]) for one in found] == [
        ("matmul", "CPU", ""),
        ("memory", "CPU", ""),
    ]
    assert all(one["value"] > 0 for one in found)
    assert found[0]["device"] == found[1]["device"] and found[0]["device"].endswith(
        f"{len(os.sched_getaffinity(0))} CPUs"
    )


def test_two_nodes_measure_what_is_between_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    words = ("--seconds", "200", "--pair", f"localhost:{port}", "--pair-name", "a-b", "--pair-rank")
    both = [start(*words, rank) for rank in "01"]
    found = [one for process in both for one in read_results(process)]
    assert [(one["measure"], one["where"], one["problem"]) for one in found] == [("pair", "a-b", "")] * 2
    assert found[0]["value"] > 0


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], NodeWork]]:
    """Begin work of so many seconds in this process, whose forks do not have the threads of other tests."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield lambda seconds: NodeWork("light", time.monotonic() + seconds, seconds, io.StringIO())
    torch.set_num_threads(count)


def list_results(work: NodeWork) -> list[dict[str, Any]]:
    assert isinstance(work.out, io.StringIO)
    return [json.loads(line) for line in work.out.getvalue().splitlines()]


def test_a_device_whose_process_is_killed_has_failed(begin: Callable[[float], NodeWork]) -> None:
    work = begin(PATIENCE)
    (one,) = work.start(is_pair=False)
    one.process.kill()
    work.measure_node([one])
    told = ("its process was ended by signal 9", None)
    assert [(found["problem"], found["value"]) for found in list_results(work)] == [told] * 2


def test_nobody_is_blamed_if_all_are_late(begin: Callable[[float], NodeWork]) -> None:
    """A device that hangs is ended in time; alone, it may be others that keep it from answering."""
    work = begin(5)
    (one,) = work.start(is_pair=False)
    assert one.process.pid
    os.kill(one.process.pid, signal.SIGSTOP)
    work.measure_node([one])
    found = list_results(work)
    assert found[0]["reason"] == "no time was left" and not found[0]["problem"], found
    one.process.join(PATIENCE)
    assert one.process.exitcode == -signal.SIGKILL


def test_devices_of_a_node_add_up_together_and_a_taken_port_says_nothing_of_the_nodes(
    begin: Callable[[float], NodeWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the GPUs of a node do."""
    create, port = socket.create_server, random.SystemRandom().randrange(20000, 30000)
    # Not one of the kernel's, which another test's connection would take in the meantime.
    monkeypatch.setattr(socket, "create_server", lambda address: create((address[0], port)))
    work = begin(PATIENCE)
    processes = [*work.start(is_pair=False), *work.start(is_pair=False)]
    work.measure_node(processes)
    with create(("", 0)) as listening:
        work.measure_pair(processes[:1], f"localhost:{listening.getsockname()[1]}", 0, "a-b")
    for process in processes:
        process.give_up("done")
    *found, pair = list_results(work)
    assert [one["measure"] for one in found] == ["matmul"] * 2 + ["memory"] * 2 + ["all_reduce"]
    assert all(one["value"] > 0 for one in found), found
    assert (found[-1]["where"], found[-1]["unit"]) == ("node", "GB/s")
    assert (pair["measure"], pair["problem"], pair["value"]) == ("pair", "", None)
    assert "address already in use" in pair["reason"].lower()


def test_matrices_are_the_same_anywhere_and_their_bits_have_a_checksum() -> None:
    small, large = (make_matrix(size, 12345, torch.bfloat16, CPU) for size in (512, 2048))
    assert small.shape == (512, 512) and large.shape == (2048, 2048)
    assert torch.equal(large[:1024, :1024], large[1024:, 1024:])
    assert -1 <= small.min() < -0.9 and 0.9 < small.max() <= 1 and len({*small.flatten().tolist()}) > 200
    assert hash_tensor(small) == hash_tensor(make_matrix(512, 12345, torch.bfloat16, CPU))
    changed = small.clone()
    changed[511, 511] += 0.5
    assert hash_tensor(changed) != hash_tensor(small) and hash_tensor(small).startswith("512:")
