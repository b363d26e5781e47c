"""The shipped machines: made of their descriptions, and planned as well as each allows."""

from tempfile import gettempdir

import pytest

from launcher.plan.model import Limits, Machine, Request, parse_machine, plan_to_json
from launcher.plan.planner import plan
from tests.plan.lab_machines import score

from .build import NAMES, SHIPPED, build_files, read_description

WANTED = (
    *("dgx_a100", "dgx_h100", "dgx_b200", "gh200", "gb200_nvl4", "oci_mi300x_8"),
    *("aws_p3_16xlarge", "aws_p4d_24xlarge", "aws_p5_48xlarge", "gcp_a3_highgpu_8g"),
    *("azure_ndv4", "azure_ndv5", "azure_ncv4", "cpu_2s"),
)


def load(name: str) -> Machine:
    """A machine as it is shipped."""
    return parse_machine((SHIPPED / f"{name}.json").read_text())


def test_what_is_shipped_is_what_is_described() -> None:
    shipped = {path.name for path in SHIPPED.iterdir()} - {"local.yaml"}
    assert shipped == {f"{name}.{kind}" for name in NAMES for kind in ("json", "yaml")}
    assert set(WANTED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_files_are_those_that_the_descriptions_give(name: str) -> None:
    for file, text in build_files(name).items():
        assert (SHIPPED / file).read_text() == text, "make them anew: python -m tests.machines"


@pytest.mark.parametrize("name", NAMES)
def test_every_measure_of_the_lab_holds(name: str) -> None:
    data = {"name": name, **read_description(name)}
    result = score.score(data, plan_to_json(plan(load(name), Request())))
    assert {measure for measure, pair in result.items() if not score.holds({measure: pair})} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_says_what_it_is_and_where_from_and_nothing_of_its_making(name: str) -> None:
    machine = load(name)
    assert machine.name and len(machine.source) > 60
    assert (machine.limits, machine.warnings) == (Limits(), ())
    assert {gpu.uuid for gpu in machine.gpus} <= {""}
    text = (SHIPPED / f"{name}.json").read_text() + (SHIPPED / f"{name}.yaml").read_text()
    assert gettempdir() not in text and "fffe:" not in text
