"""A scenario's job: probe, plan, and start the ranks."""

import json
from pathlib import Path
from typing import Any

from launcher.plan.model import BindingConfig, Request, plan_to_json
from launcher.plan.planner import plan
from launcher.plan.variables import HONOURED
from launcher.probe.machine import probe
from launcher.protocol import find_user_set

from .cgroups import enter_cgroup
from .ranks import run_ranks
from .scenario import Scenario
from .syscalls import refuse_mempolicy

PLAN = Path("/tmp/plan.json")


def run_job(scenario: Scenario, version: int) -> dict[str, Any]:
    """Start the ranks by the plan; then, where asked for, once more without it."""
    if scenario.in_cgroup:
        enter_cgroup(scenario, version)
    if scenario.deny_mempolicy:
        refuse_mempolicy()
    request = Request(
        nproc_per_node=scenario.nproc_per_node,
        binding=BindingConfig(scenario.binding),
        environ=find_user_set(scenario.environ, HONOURED),
    )
    made = plan(probe("/"), request)
    PLAN.write_text(json.dumps(plan_to_json(made)))
    binding = {"LAUNCH_BINDING": scenario.binding}
    return {
        "plan": plan_to_json(made),
        "ranks": run_ranks(made, scenario, {"LAUNCH_PLAN": str(PLAN)}),
        "alone": run_ranks(made, scenario, binding) if scenario.alone else [],
    }
