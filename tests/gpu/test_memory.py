"""GPU memory under the policies of collection, and with and without expandable segments."""

import json
from typing import Any

import pytest
import torch

from tests.gpu.proof import Proof, together

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
LITTER = {
    "4 micro-steps, 400 evaluations": (("60", "4", "400"), ("default", "synchronized", "frozen", "disabled")),
    "40 micro-steps": (("60", "40", "0"), ("default", "synchronized")),
}
"""Steps, micro-steps and evaluations of a program, and the policies under which it runs."""
ALLOCATORS = ("default", "expandable")
BATCHES = (2, 4, 8, 16, 32)


@pytest.mark.parametrize("program", LITTER)
def test_collections_in_step_take_no_more_memory_than_pythons(proof: Proof, program: str) -> None:
    words, policies = LITTER[program]
    if proof.cpu:
        words, policies = ("40", "2", "0"), ("default", "synchronized")
    found: dict[str, dict[str, float]] = {}
    for policy in policies:
        ended = proof.program(policy, "litter", *words, settings=[f"gc={policy}"], limit=60)
        found[policy] = json.loads(ended.read_rank().splitlines()[-1])
        proof.record(f"Garbage with 8 MB tensors, {program}", {"gc": policy, **found[policy]})
    kinds = ("resident_mib",) if proof.cpu else ("allocated_mib", "reserved_mib")
    for kind in kinds:
        assert 0 < found["synchronized"][kind] <= 1.10 * found["default"][kind], kind


def test_expandable_segments_leave_less_unused(proof: Proof) -> None:
    """The largest batch that fits under each allocator, and the memory at one that fits under both."""
    cap = 4.0
    if not proof.cpu:  # all batches of a round share the GPU, each with 0.7 GiB outside torch's allocator
        cap = min(cap, 0.95 * torch.cuda.mem_get_info()[0] / 2**30 / (len(BATCHES) * len(ALLOCATORS)) - 0.7)

    def fill(pair: tuple[str, int]) -> dict[str, Any]:
        allocator, batch = pair
        words = (str(batch), "1" if proof.cpu else "40", str(cap))
        settings = [f"allocator={allocator}"]
        ended = proof.program(f"{allocator}-{batch}", "fill", *words, settings=settings, limit=100)
        result: dict[str, Any] = json.loads(ended.read_rank().splitlines()[-1])
        return result

    batches = BATCHES[:1] if proof.cpu else BATCHES
    pairs = [(allocator, batch) for allocator in ALLOCATORS for batch in batches]
    tried = dict(zip(pairs, together(fill, pairs, len(pairs)), strict=True))
    if not proof.cpu:  # between the largest that fits both and the next one
        good, bad = find_largest(tried), 2 * max(find_largest(tried), 1)
        more = range(good + max(1, good // 4), bad, max(1, good // 4))
        pairs = [(allocator, batch) for allocator in ALLOCATORS for batch in more]
        tried |= dict(zip(pairs, together(fill, pairs, max(1, len(pairs))), strict=True))
    common = find_largest(tried)
    assert common > 0
    for name in ALLOCATORS:
        largest = max(batch for (one, batch), filled in tried.items() if one == name and filled["fits"])
        proof.record("Sequences of varying length", {"allocator": name, "largest batch that fits": largest,
                                                     "batch": common, **tried[name, common]})  # fmt: skip
        assert proof.cpu or 0 < tried[name, common]["allocated_mib"] <= tried[name, common]["reserved_mib"]


def find_largest(tried: dict[tuple[str, int], dict[str, Any]]) -> int:
    """The largest batch that fits under all allocators."""
    batches = {batch for _, batch in tried}
    return max(
        (batch for batch in batches if all(tried[name, batch]["fits"] for name in ALLOCATORS)), default=0
    )
