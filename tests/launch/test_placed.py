"""What the user's program finds of its placement, through the whole path."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.cpulist import parse_cpulist
from tests.seam import start, write_program

SHOW = """
import json, os
from launcher.rank.affinity import get_mempolicy
policy, nodes = get_mempolicy()
found = {"cpus": sorted(os.sched_getaffinity(0)), "policy": policy, "nodes": sorted(nodes)}
names = [n for n in os.environ if n.startswith("LAUNCH_") and "TEST" not in n or "SHUTDOWN" in n]
found["names"] = sorted(names)
print(json.dumps({**found, "threads": os.environ["OMP_NUM_THREADS"], "rank": os.environ["RANK"]}))
"""


@dataclass(frozen=True, slots=True)
class Placed:
    """What the ranks of SHOW found, what was planned, and what `launch` said."""

    found: tuple[dict[str, object], ...]
    planned: tuple[dict[str, object], ...]
    said: str

    def cpus(self) -> list[int]:
        """All CPUs that the ranks had, those of several ranks several times."""
        return [cpu for told in self.found for cpu in list(told["cpus"])]  # type: ignore[call-overload]  # JSON


def run_placed(folder: Path, ranks: int, **variables: str) -> Placed:
    words = (f"nproc_per_node={ranks}", "--", write_program(folder, SHOW))
    with start(folder, *words, **variables) as started:
        assert started.wait(120) == 0, started.read()
        run = started.run_dir()
    found = tuple(json.loads((run / "logs" / "0" / f"rank-{n}.out").read_text()) for n in range(ranks))
    (plan,) = run.glob("plan-*.json")
    return Placed(found, tuple(json.loads(plan.read_text())["ranks"]), started.read())


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Placed:
    """Two ranks at most, and two variables of torchrun's that would start another program."""
    ranks = min(2, len(os.sched_getaffinity(0)))
    return run_placed(tmp_path_factory.mktemp("placed"), ranks, PET_MODULE="1", PET_RUN_PATH="1")


def test_ranks_find_the_cpus_and_memory_of_their_plan(placed: Placed) -> None:
    for told, plan in zip(placed.found, placed.planned, strict=True):
        memory = plan["memory"]
        assert isinstance(memory, dict)
        assert told["cpus"] == sorted(parse_cpulist(str(plan["cpus"])))
        assert told["policy"] == memory["policy"]
        assert told["nodes"] == sorted(parse_cpulist(memory["nodes"]))
        assert told["threads"] == str(plan["omp_num_threads"])
    assert len(placed.cpus()) == len(set(placed.cpus()))


def test_the_program_is_not_told_of_the_launcher(placed: Placed) -> None:
    names = ["LAUNCH_GC", "LAUNCH_NUM_WORKERS", "LAUNCH_RANK_PLAN", "LAUNCH_RUN_DIR", "LAUNCH_RUN_ID"]
    assert [told["names"] for told in placed.found] == [names] * len(placed.found)


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.slow
def test_more_ranks_than_cores_are_told_and_run(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    crowded = run_placed(tmp_path, len(allowed) + 1)
    assert set(crowded.cpus()) <= allowed
    assert "warning: " in crowded.said
    assert "share" in crowded.said
