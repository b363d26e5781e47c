"""`allocator.host`: the library serves malloc in the ranks, and nowhere else."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.probe.machine import SONAMES, locate_malloc
from tests.seam import Result, run_outside

TELL = """
import json, os
def read_libraries(pid):
    with open(f"/proc/{pid}/maps") as file:
        return sorted({line.split()[-1] for line in file if "malloc" in line})
print(json.dumps([read_libraries("self"), read_libraries(os.getppid()), os.environ.get("LD_PRELOAD")]))
"""
NEEDED = pytest.mark.parametrize(
    "word",
    [
        pytest.param(
            word,
            marks=pytest.mark.skipif(
                not locate_malloc(word, {}, "/"),
                reason=f"needs {word}: apt-get install libtcmalloc-minimal4 libjemalloc2",
            ),
        )
        for word in SONAMES
    ],
)
"""Each library that this machine has."""


def hear(text: str) -> list[list[str]]:
    """What each rank has told of its own libraries, its parent's, and LD_PRELOAD."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("[[")]


@NEEDED
def test_ranks_have_it_and_their_agent_has_not(here: Path, word: str) -> None:
    (here / "tell.py").write_text(TELL)
    words = ["nproc_per_node=2", f"allocator.host={word}", "new_run_dir=run", "--", "tell.py"]
    done = run_outside(words, here, {"CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    assert done.code == 0, done.err
    path = locate_malloc(word, os.environ, "/") or ""
    told = hear("".join((here / f"run/logs/0/rank-{rank}.out").read_text() for rank in (0, 1)))
    assert len(told) == 2
    for own, agents, preload in told:
        assert [os.path.realpath(path)] == [os.path.realpath(library) for library in own]
        assert not agents and str(preload) == path
    (plan,) = (here / "run").glob("plan-*.json")
    assert [rank["env"]["LD_PRELOAD"] for rank in json.loads(plan.read_text())["ranks"]] == [path] * 2


def test_where_it_is_not_the_job_runs_with_a_warning(
    launch: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.probe.machine.SONAMES", {})
    result = launch("plan", "format=json", "allocator.host=jemalloc")
    assert result.code == 0
    data = json.loads(result.out)
    assert [text for text in data["warnings"] if "allocator.host=jemalloc" in text and "libjemalloc2" in text]
    assert not [rank for rank in data["ranks"] if "LD_PRELOAD" in rank["env"]]
