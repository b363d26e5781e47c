"""Forked ranks beside ranks by exec and by torchrun: CUDA, its allocator, the loss."""

import json
from typing import Any

import pytest

from tests.gpu.proof import Ended, Proof

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
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
