"""Ranks on a GPU: each way to start them, exit codes, errors and their words, NCCL, launch-rank by itself."""

import json
import sys
from typing import Any

import pytest

from tests.gpu.programs import EXIT_CODE
from tests.gpu.proof import PROGRAMS, Ended, Proof

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
RECORDER = {"TORCH_FR_BUFFER_SIZE": "1234", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_DEBUG": "WARN"}
"""Variables that a user sets for the flight recorder."""
WAYS = {
    "torchrun": ("agent=torchrun",),
    "exec": ("agent=direct", "start.warm=off"),
    "warm": ("agent=direct",),
}


def read_found(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.read_rank().splitlines()[-1])
    return found


@pytest.mark.parametrize("setting", ["", "allocator.max_split_size_mb=128"])
def test_each_way_to_start_gives_the_same(proof: Proof, setting: str) -> None:
    found = {}
    for way, words in WAYS.items():
        ended = proof.program(way, "start", settings=[*words, *setting.split()])
        found[way] = read_found(ended)
        row = {"way": way, "setting": setting, "seconds": ended.seconds, "device": found[way].get("device")}
        proof.record("Starts", {**row, "torch was imported": found[way]["was_imported"]})
    imported = {way: one.pop("was_imported") for way, one in found.items()}
    assert imported == {"torchrun": False, "exec": False, "warm": True}, ended.err + ended.read_rank("err")
    assert found["warm"] == found["exec"] == found["torchrun"]
    assert found["warm"]["initialized_before"] is False


def test_a_process_that_has_opened_the_gpu_is_not_forked(proof: Proof) -> None:
    proof.need_gpu()
    (proof.folder / "opens_gpu.py").write_text("import torch\ntorch.zeros(1, device='cuda')\n")
    words = ("agent=direct", "start.preload=[opens_gpu]")
    ended = proof.program("opening", "start", settings=words, PYTHONPATH=str(proof.folder))
    assert "the ranks are not forked from a process with torch" in ended.err
    assert not read_found(ended)["was_imported"]


def test_an_exit_code_passes_through(proof: Proof) -> None:
    ended = proof.program("exit", "leave", code=EXIT_CODE)
    assert f" exited with code {EXIT_CODE}" in ended.err
    (line,) = (line for line in ended.err.splitlines() if "launch-rank: rank 0" in line)
    proof.record("Lines of ranks", line)
    applied = json.loads((ended.run / "rank-0.applied.json").read_text())
    assert not applied.get("problems")


@pytest.mark.parametrize(
    ("program", "on_gpu", "on_cpu"),
    [
        ("fail", "device-side assert", "index 9 is out of bounds"),
        ("exhaust", "CUDA out of memory", "can't allocate memory"),
    ],
)
def test_an_error_is_shown_with_its_rank(proof: Proof, program: str, on_gpu: str, on_cpu: str) -> None:
    ended = proof.program("error", program, code=None)
    assert ended.code in (1, 134)  # a device-side assert may end the interpreter by SIGABRT
    assert "launch: rank 0 on " in ended.err
    assert (on_cpu if proof.cpu else on_gpu) in ended.err


def test_nccl_adds_up_and_the_flight_recorder_has_it(proof: Proof) -> None:
    ended = proof.program("collective", "collect", **RECORDER)
    found = json.loads(ended.read_rank().splitlines()[-1])
    assert (found["total"], found["backend"]) == (3 * 1024, "gloo" if proof.cpu else "nccl")
    assert {name: found["environ"].get(name) for name in RECORDER} == RECORDER
    assert proof.cpu or found["recorded"]
    names = [name for name in found["environ"] if name.startswith(("TORCH_FR_", "TORCH_NCCL_", "NCCL_"))]
    told = " ".join(f"{name}={found['environ'][name]}" for name in names)
    proof.record(
        "Collectives", {"backend": found["backend"], "recorded": found["recorded"], "variables": told}
    )


def test_launch_rank_under_torchrun_plans_by_itself(proof: Proof) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python", "launch-rank"]
    command = [sys.executable, "-m", *torchrun, sys.executable, PROGRAMS, "show"]
    ended = proof.run("launch-rank", command, 0, 60, {})
    found = json.loads(ended.out.strip().splitlines()[-1])
    (line,) = (line for line in ended.err.splitlines() if "launch-rank: rank 0" in line)
    proof.record("Lines of ranks", line)
    assert proof.cpu or (found["devices"] and found["environ"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID")
