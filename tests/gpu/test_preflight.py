"""The measured work of preflight on each GPU: values, equal bits, and nothing that stays on the GPUs."""

import json
import subprocess
import time

import pytest

from launcher.doctor.model import Facts
from launcher.preflight.checks import SECONDS, PreflightRequest, parse_answer
from tests.gpu.proof import Proof

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
HOST = "this"


def test_the_work_of_a_node(proof: Proof) -> None:
    before = [] if proof.cpu else read_memory()
    runs = {kind: check_node(proof, kind) for kind in (["light"] if proof.cpu else ["light", "deep"])}
    for kind, facts in runs.items():
        names = [f"GPU {gpu.index}" for gpu in facts.gpus]
        assert [f"{one.measure} {one.where}: {one.problem}" for one in facts.work if one.problem] == []
        for measure in () if proof.cpu else ("matmul", "copy_to", "copy_from"):
            assert [one.where for one in facts.work if one.measure == measure and one.value] == names, kind
        if len(names) > 1:
            assert {"peer_copy", "all_reduce"} <= {one.measure for one in facts.work if one.value}
    if not proof.cpu:
        assert len({one.checksum for facts in runs.values() for one in facts.work if one.checksum}) == 1
        assert all(now <= then + 64 for now, then in zip(read_memory(), before, strict=True)), before


def check_node(proof: Proof, kind: str) -> Facts:
    """Run the node's program as a job does."""
    request = PreflightRequest(kind, (HOST,), SECONDS[kind], time.time())
    command = [*request.command]
    ended = proof.run(kind, command, 0, SECONDS[kind] + 20, {"SLURMD_NODENAME": HOST})
    answers = [answer for line in ended.out.splitlines() if (answer := parse_answer(line))]
    facts = next(answer.facts for answer in answers if answer.is_final)
    proof.keep(f"preflight-{kind}.json", json.dumps([str(one) for one in facts.work], indent=1))
    for one in facts.work:
        row = {"kind": kind, "measure": one.measure, "where": one.where, "value": one.value, "unit": one.unit}
        proof.record("Preflight", {**row, "device": one.device, "remark": one.problem or one.reason})
    proof.record("Seconds of preflight", {"kind": kind, "seconds": ended.seconds})
    assert ended.seconds <= SECONDS[kind] + 2
    return facts


def read_memory() -> list[int]:
    """MiB that are used on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]
