"""The planner against the lab's score: its twelve machines, and random ones."""

from random import Random

import pytest

from launcher.plan.codec import plan_to_json
from launcher.plan.model import Plan, Request
from launcher.plan.planner import plan

from .plan_lab import NAMES, Data, convert, fsroot, load, score
from .plan_random import describe_machine

SURE = ("ROB", "LOC", "SPAN", "MEM", "IDLE")
"""Measures whose bounds can be met even where localities overlap: for the others, the score takes each
locality's cores to be its own, and so counts some twice."""


def find_shorts(data: Data, made: Plan) -> set[str]:
    """Measures that miss their bound."""
    result = score.score(data, plan_to_json(made))
    return {name for name, pair in result.items() if not score.holds({name: pair})}


@pytest.mark.parametrize("name", NAMES)
def test_every_measure_of_the_lab_holds(name: str) -> None:
    data = load(name)
    made = plan(convert(data), Request(len(data.get("gpus", [])) or 4))
    assert find_shorts(data, made) == set()


def test_the_score_sees_a_bad_plan() -> None:
    data = load("dgx-a100")
    made = plan(convert(data), Request(8, binding="numa"))
    assert {"EXC", "SMT", "BAL", "L3", "IDLE"} >= find_shorts(data, made) >= {"EXC", "IDLE"}


@pytest.mark.parametrize("seed", range(300))
def test_random_machines_reach_every_bound_that_can_be_met(seed: int) -> None:
    random = Random(seed)
    data = describe_machine(random)
    machine = convert(data)
    ranks = (
        random.randint(1, 20) if random.random() < 0.3 else len(machine.gpus) or random.choice([1, 2, 4, 8])
    )
    made = plan(machine, Request(ranks))
    shorts = find_shorts(data, made)
    assert shorts.intersection(SURE) == set()
    assert overlaps(data, made) or shorts == set()


def overlaps(data: Data, made: Plan) -> bool:
    """Whether two ranks' nearest nodes are different, but not disjoint."""
    lab = fsroot.Description(data)
    usable = score.usable(lab)
    by_pci = {gpu["bdf"]: gpu for gpu in lab.gpus}
    homes = {score.home(lab, by_pci[rank.gpu.pci] if rank.gpu else None, usable) for rank in made.ranks}
    return any(a != b and a & b for a in homes for b in homes)
