"""What plans have on machines of all shapes: cases in TOML, and the lab's score."""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.plan.model import Plan, plan_to_json
from launcher.plan.planner import plan

from .lab_machines import (
    NAMES,
    Data,
    ask,
    convert,
    describe_machine,
    describe_overlap,
    load,
    make_machine,
    masks,
    memory,
    score,
    workers,
)

FOLDER = Path(__file__).parent
NUMBER = re.compile(r"\d[\d,.-]*(?<=\d)")


def read_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = tomllib.loads((FOLDER / name).read_text())["case"]
    return cases


def list_rows() -> Iterator[Any]:
    for case in read_cases("settings.toml"):
        for number, (request, expected) in enumerate(case["rows"]):
            yield pytest.param(case["machine"], request, expected, id=f"{case['name']} {number}")


@pytest.mark.parametrize("case", read_cases("placements.toml"), ids=lambda case: case["name"])
def test_placement(case: dict[str, Any]) -> None:
    made = plan(make_machine(case["machine"]), ask(**case.get("request", {})))
    assert masks(made) == case["cpus"]
    assert workers(made) == case.get("workers", case["cpus"])
    assert memory(made) == case["memory"]
    assert [rank.num_workers for rank in made.ranks] == case["num_workers"]
    assert [rank.omp_num_threads for rank in made.ranks] == case["threads"]
    gpus = [rank.gpu.index for rank in made.ranks if rank.gpu]
    assert gpus == case.get("gpus", list(range(len(gpus))))
    assert [NUMBER.findall(str(warning)) for warning in made.warnings] == case.get("warnings", [])


@pytest.mark.parametrize(("machine", "request_", "expected"), [*list_rows()])
def test_settings(machine: Any, request_: dict[str, Any], expected: dict[str, Any]) -> None:
    try:
        made = plan(make_machine(machine), ask(**request_))
    except LaunchError as error:
        assert expected["error"] in str(error)
        return
    found = read_plan(made, expected.get("rank", 0))
    for key, value in expected.items():
        match key:
            case "rank":
                continue
            case "env" | "variables":
                assert {name: found[key].get(name) for name in value} == value
            case "unset":
                assert not found["env"].keys() & set(value)
            case "says":
                assert [text for text in value if text not in found["notes"]] == []
            case "silent":
                assert [text for text in value if text in found["notes"]] == []
            case "warned":
                assert len(found["warnings"]) == len(value), found["warnings"]
                for text, warning in zip(value, found["warnings"], strict=True):
                    assert text in warning
            case _:
                assert found[key] == value, key


def read_plan(made: Plan, number: int) -> dict[str, Any]:
    """What cases may hold of a plan: of all ranks, and of one."""
    rank = made.ranks[number]
    gpus = [rank.gpu for rank in made.ranks if rank.gpu]
    return {
        "cpus": masks(made),
        "workers": workers(made),
        "memory": memory(made),
        "policy": rank.memory.policy,
        "num_workers": [rank.num_workers for rank in made.ranks],
        "threads": [rank.omp_num_threads for rank in made.ranks],
        "gpus": [gpu.index for gpu in gpus],
        "uuids": [gpu.uuid for gpu in gpus],
        "nics": [rank.nic or "" for rank in made.ranks],
        "env": dict(rank.env),
        "all_env": dict(rank.env),
        "variables": {item.name: [item.value, item.source, item.why] for item in rank.variables},
        "why": rank.notes[0].split("; "),
        "notes": "\n".join(rank.notes),
        "warnings": list(map(str, made.warnings)),
    }


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
@pytest.mark.parametrize("seed", range(100))
def test_random_machines_reach_every_bound(seed: int, describe: Callable[[Random], Data]) -> None:
    random = Random(seed)
    data = describe(random)
    machine = convert(data)
    ranks = (
        random.randint(1, 20) if random.random() < 0.3 else len(machine.gpus) or random.choice([1, 2, 4, 8])
    )
    assert find_shorts(data, plan(machine, ask(ranks))) == set()
