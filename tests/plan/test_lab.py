"""The planner against the lab's score: its machines, and random ones."""

from collections.abc import Callable
from random import Random

import pytest

from launcher.plan.model import Plan, plan_to_json
from launcher.plan.planner import plan

from .lab_machines import NAMES, Data, ask, convert, load, score
from .random_machines import describe_machine, describe_overlap


def find_shorts(data: Data, made: Plan) -> set[str]:
    """Measures that miss their bound."""
    result = score.score(data, plan_to_json(made))
    return {name for name, pair in result.items() if not score.holds({name: pair})}


@pytest.mark.parametrize("name", NAMES)
def test_every_measure_of_the_lab_holds(name: str) -> None:
    data = load(name)
    made = plan(convert(data), ask(len(data.get("gpus", [])) or 4))
    assert find_shorts(data, made) == set()


def test_the_score_sees_a_bad_plan() -> None:
    data = load("dgx-a100")
    made = plan(convert(data), ask(8, binding="numa"))
    assert {"EXC", "SMT", "BAL", "L3", "IDLE"} >= find_shorts(data, made) >= {"EXC", "IDLE"}


@pytest.mark.parametrize("describe", [describe_machine, describe_overlap])
@pytest.mark.parametrize("seed", range(200))
def test_random_machines_reach_every_bound(seed: int, describe: Callable[[Random], Data]) -> None:
    random = Random(seed)
    data = describe(random)
    machine = convert(data)
    ranks = (
        random.randint(1, 20) if random.random() < 0.3 else len(machine.gpus) or random.choice([1, 2, 4, 8])
    )
    assert find_shorts(data, plan(machine, ask(ranks))) == set()
