"""Who set each variable of a rank, in the plan, in its JSON and read back."""

import json

import pytest

from launcher import codec
from launcher.plan.json_form import plan_to_json, rank_to_json
from launcher.plan.model import RankPlan, Request, Variable
from launcher.plan.planner import plan
from launcher.runs.run_records import read_ranks
from tests.plan.lab_machines import convert, load

MACHINE = convert(load("dgx-a100"))


def find(made: RankPlan, name: str) -> Variable | None:
    return next((variable for variable in made.variables if variable.name == name), None)


def plan_first(
    environ: dict[str, str], configured: dict[str, str] | None = None, devices: str = "all"
) -> RankPlan:
    merged = {**environ, **(configured or {})}
    request = Request(
        devices=devices, environ=tuple(merged.items()), configured=tuple((configured or {}).items())
    )
    return plan(MACHINE, request).ranks[0]


def test_all_that_the_plan_sets_is_its_own_and_says_why() -> None:
    made = plan_first({})
    assert {variable.name: variable.value for variable in made.variables} == dict(made.env)
    assert {variable.source for variable in made.variables} == {"plan"}
    assert [variable.name for variable in made.variables] == sorted(dict(made.env))
    for name in ("CUDA_DEVICE_ORDER", "LAUNCH_NUM_WORKERS", "OMP_NUM_THREADS", "LAUNCH_GC"):
        variable = find(made, name)
        assert variable is not None and variable.why, name


def test_what_is_kept_is_whose_it_is() -> None:
    made = plan_first({"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}, {"LAUNCH_NUM_WORKERS": "5", "A": "1"})
    assert find(made, "OMP_NUM_THREADS") == Variable("OMP_NUM_THREADS", "3", "user", "kept")
    assert find(made, "NCCL_DEBUG") == Variable("NCCL_DEBUG", "INFO", "user")
    assert find(made, "LAUNCH_NUM_WORKERS") == Variable("LAUNCH_NUM_WORKERS", "5", "configuration", "kept")
    assert find(made, "A") == Variable("A", "1", "configuration")
    assert made.num_workers == 5


@pytest.mark.parametrize(("configured", "whose"), [(False, "the user's"), (True, "the configuration's")])
def test_what_is_replaced_is_told(configured: bool, whose: str) -> None:
    given = {"OMP_NUM_THREADS": "many"}
    made = plan_first({} if configured else given, given if configured else {})
    variable = find(made, "OMP_NUM_THREADS")
    assert variable is not None
    assert (variable.value, variable.source) == (dict(made.env)["OMP_NUM_THREADS"], "plan")
    assert variable.why.endswith(f"in place of {whose} many")


def test_a_gpu_of_its_own_is_the_plans_word() -> None:
    variable = find(plan_first({"CUDA_VISIBLE_DEVICES": "1,0"}, devices="own"), "CUDA_VISIBLE_DEVICES")
    assert variable is not None and variable.source == "plan"
    assert variable.value == MACHINE.gpus[1].uuid
    assert variable.why == "devices=own, in place of the user's 1,0"


def test_a_value_that_the_plan_has_taken_in() -> None:
    rank = RankPlan(
        **{
            name: getattr(plan_first({}), name)
            for name in RankPlan.__slots__
            if name not in ("env", "variables")
        },
        env=(("LD_PRELOAD", "/lib/libjemalloc.so:/lib/mine.so"),),
    )
    from launcher.plan.environment import list_variables

    (variable,) = list_variables(Request(environ=(("LD_PRELOAD", "/lib/mine.so"),)), rank)
    assert variable.why == "allocator.host, with the user's /lib/mine.so in it"


def test_the_json_has_them_beside_what_the_format_fixes_and_is_read_back() -> None:
    made = plan_first({"OMP_NUM_THREADS": "3"}, {"A": "1"})
    entry = json.loads(json.dumps(rank_to_json(made)))
    assert entry["env"] == dict(made.env)
    assert {"name": "A", "value": "1", "from": "configuration"} in entry["variables"]
    assert {"name": "OMP_NUM_THREADS", "value": "3", "from": "user", "why": "kept"} in entry["variables"]
    assert codec.load(RankPlan, json.dumps(entry)).variables == made.variables


def test_a_plan_of_an_earlier_version_has_none() -> None:
    data = json.loads(json.dumps(plan_to_json(plan(MACHINE, Request()))))
    for entry in data["ranks"]:
        del entry["variables"]
    assert [rank.variables for rank in read_ranks(json.dumps(data).encode())] == [()] * 8
    data["ranks"][0]["variables"] = {"A": "1"}
    with pytest.raises(codec.DecodeError, match="variables"):
        read_ranks(json.dumps(data).encode())
