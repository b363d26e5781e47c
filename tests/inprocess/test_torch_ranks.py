"""The hook in ranks with torch: steps, collections, heartbeats, loaders; many are forks of one process."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.inprocess.hooked import PROGRAMS, QUICK, check_table, run_code
from tests.rank.start_shim import ALLOWED


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU has no room for workers of their own")
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_what_ranks_with_torch_do(tmp_path: Path) -> None:
    check_table("torch_ranks.toml", tmp_path)
    record = json.loads((tmp_path / "rank-0.memory.json").read_text())
    assert record["steps"] == 8
    assert record["resident"] > 1 << 20


@pytest.mark.slow
def test_compiled_steps_have_no_more_graphs_nor_breaks(tmp_path: Path) -> None:
    def run(policy: str | None) -> object:
        folder = tmp_path / str(policy is None)
        folder.mkdir()
        return run_code(PROGRAMS["compiled"], folder, policy, python=(sys.executable,))

    with ThreadPoolExecutor() as pool:
        with_hook, without = pool.map(run, (QUICK, None))
    assert isinstance(with_hook, list) and isinstance(without, list)
    assert with_hook[0] == without[0]
    assert without[0]["stats"]["unique_graphs"] > 1
    assert (with_hook[1], without[1]) == (True, False)
