"""What the user's program finds of its placement, through the whole path."""

import json
import os
from pathlib import Path

from launcher.cpulist import parse_cpulist
from tests.launch.start_launch import start, write_program

SHOW = """
import json, os
from launcher.rank.mempolicy import get_mempolicy
policy, nodes = get_mempolicy()
found = {"cpus": sorted(os.sched_getaffinity(0)), "policy": policy, "nodes": sorted(nodes)}
print(json.dumps({**found, "threads": os.environ["OMP_NUM_THREADS"], "rank": os.environ["RANK"]}))
"""


def run_placed(folder: Path, ranks: int) -> tuple[list[dict[str, object]], list[dict[str, object]], str]:
    """Run SHOW on some ranks; return what they found, what was planned, and what `launch` said."""
    with start(folder, f"nproc_per_node={ranks}", "--", write_program(folder, SHOW)) as started:
        assert started.wait(120) == 0, started.read()
        run = started.run_dir()
    found = [json.loads((run / "logs" / "0" / f"rank-{n}.out").read_text()) for n in range(ranks)]
    (plan,) = run.glob("plan-*.json")
    return found, json.loads(plan.read_text())["ranks"], started.read()


def test_ranks_find_the_cpus_and_memory_of_their_plan(tmp_path: Path) -> None:
    ranks = min(2, len(os.sched_getaffinity(0)))
    found, planned, _ = run_placed(tmp_path, ranks)
    for told, plan in zip(found, planned, strict=True):
        memory = plan["memory"]
        assert isinstance(memory, dict)
        assert told["cpus"] == sorted(parse_cpulist(str(plan["cpus"])))
        assert told["policy"] == memory["policy"]
        assert told["nodes"] == sorted(parse_cpulist(memory["nodes"]))
        assert told["threads"] == str(plan["omp_num_threads"])
    taken = [cpu for told in found for cpu in list(told["cpus"])]  # type: ignore[call-overload]
    assert len(taken) == len(set(taken))


def test_more_ranks_than_cores_are_told_and_run(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    found, _, said = run_placed(tmp_path, len(allowed) + 1)
    assert {cpu for told in found for cpu in list(told["cpus"])} <= allowed  # type: ignore[call-overload]
    assert "warning: " in said
    assert "share" in said
