"""`launch tune dataloader` on a program with pinned memory and a GPU's work."""

import json

import pytest

from tests.gpu.proof import PROGRAMS, Proof

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(140)]


def test_tuned_workers_make_it_faster_and_a_run_takes_them(proof: Proof) -> None:
    size = ("tune.max_workers=2", "tune.steps=10") if proof.cpu else ("tune.max_workers=6", "tune.steps=24")
    words = ("tune", "dataloader", "nproc_per_node=1", *size, "tune.timeout=60", "format=json")
    found = json.loads(proof.verb("tune", *words, "--", PROGRAMS, "load", "9999", limit=100).out)
    trials = {trial["workers"]: trial for trial in found["trials"]}
    names = ("workers", "steps_per_second", "wait_share", "steps", "failure")
    for _, trial in sorted(trials.items()):
        proof.record("Loading with pinned memory", {name: trial[name] for name in names})
    assert [trial["failure"] for trial in trials.values() if trial["failure"]] == []
    assert found["complete"] is True
    chosen = found["num_workers"]
    assert chosen and trials[chosen]["steps_per_second"] > trials[0]["steps_per_second"]
    tuned = proof.program("tune", "load", "20", settings=["dataloader=tuned"])
    assert f"workers {chosen}," in "".join(
        line for line in tuned.err.splitlines() if "launch-rank: rank 0" in line
    )
