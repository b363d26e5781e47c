"""Where ranks are placed on machines of all shapes: the cases of placements.toml."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.model import Plan, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe, load, masks, memory, workers

CASES = tomllib.loads(Path(__file__).with_name("placements.toml").read_text())["case"]
NUMBER = re.compile(r"\d[\d,.-]*(?<=\d)")


def make(case: dict[str, Any]) -> Plan:
    machine = case["machine"]
    if isinstance(machine, str):
        data = load(machine)
    else:
        more = {key: value for key, value in machine.items() if key not in ("cpus", "gpus")}
        data = describe(machine["cpus"], machine["gpus"], **more)
    return plan(convert(data), Request(**case.get("request", {})))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_placement(case: dict[str, Any]) -> None:
    made = make(case)
    assert masks(made) == case["cpus"]
    assert workers(made) == case.get("workers", case["cpus"])
    assert memory(made) == case["memory"]
    assert [rank.num_workers for rank in made.ranks] == case["num_workers"]
    assert [rank.omp_num_threads for rank in made.ranks] == case["threads"]
    gpus = [rank.gpu.index for rank in made.ranks if rank.gpu]
    assert gpus == case.get("gpus", list(range(len(gpus))))
    assert [NUMBER.findall(warning) for warning in made.warnings] == case.get("warnings", [])
