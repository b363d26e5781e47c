"""Starts the ranks of a plan through the real shim, all at once as a job does, and collects their reports."""

import subprocess
import sys
from ast import literal_eval
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.cpulist import parse_cpulist
from launcher.plan.model import Machine, Plan, RankPlan

from .scenario import Scenario

LAB = Path(__file__).parents[1]
SHIM = (sys.executable, "-I", "-S", str(LAB / "launcher/rank/__main__.py"))
PROGRAM = (sys.executable, "-I", "-S", str(LAB / "guest/rank.py"))
PATIENCE = 120


def run_ranks(plan: Plan, scenario: Scenario, extra: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run every rank of the node; one report for each, in their order."""
    started = []
    for rank in plan.ranks:
        environ = {
            **scenario.environ,
            **extra,
            "LOCAL_RANK": str(rank.local_rank),
            "RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(len(plan.ranks)),
            "LAB_FAR_CPUS": " ".join(map(str, sorted(find_far(plan.machine, rank)))),
        }
        process = subprocess.Popen(
            (*SHIM, *PROGRAM), env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
    return [collect(process) for process in started]


def collect(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Wait for a rank; `program` is its own report, None where it made none."""
    out, err = process.communicate(timeout=PATIENCE)
    lines = out.splitlines()
    return {
        "pid": process.pid,
        "exit": process.returncode,
        "shim": err,
        "program": literal_eval(lines[-1]) if lines else None,
    }


def find_far(machine: Machine, rank: RankPlan) -> frozenset[int]:
    """CPUs of the job that are on other NUMA nodes than the rank's memory, by the kernel's lists."""
    near: frozenset[int] = frozenset()
    for node in rank.memory.nodes:
        near |= parse_cpulist(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
    return machine.allowed_cpus - near if rank.memory.nodes else frozenset()
