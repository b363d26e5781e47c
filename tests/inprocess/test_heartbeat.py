"""Heartbeats of ranks with and without torch, whatever their programs do to themselves."""

from pathlib import Path

import pytest

from tests.inprocess.hooked import check_table, run_code


@pytest.mark.timeout(600)
def test_what_heartbeats_tell(tmp_path: Path) -> None:
    check_table("heartbeat.toml", tmp_path)


def test_a_program_without_torch_and_steps_leaves_nothing(tmp_path: Path) -> None:
    code = """
import json, os, sys
loaded = [name for name in ("mmap", "faulthandler", "ctypes", "signal", "torch") if name in sys.modules]
tasks = os.listdir("/proc/self/task")
print(json.dumps([loaded, len(tasks), "LAUNCH_WATCH" in os.environ, os.listdir("beats")]))
"""
    (tmp_path / "beats").mkdir()
    watched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LAUNCH_WATCH": str(tmp_path / "beats")}
    assert run_code(code, tmp_path, "default", **watched) == [[], 1, False, []]
