"""The hook's cost is measured with the hook, and without it."""

import os
from pathlib import Path

import pytest

from launcher.rank.interpreter_hook import FOLDER
from tests.benchmarks.hook_cost import POLICIES, drop_hook, read_environ, time_optimizers
from tests.conftest import clean_environ


def test_one_environment_has_the_hook_and_the_other_lacks_it_alone(tmp_path: Path) -> None:
    hooked = read_environ({**clean_environ(), "PYTHONPATH": str(tmp_path)})
    assert hooked["PYTHONPATH"].split(os.pathsep) == [FOLDER, str(tmp_path)]
    assert drop_hook(hooked) == {**hooked, "PYTHONPATH": str(tmp_path)}
    assert "PYTHONPATH" not in drop_hook({**hooked, "PYTHONPATH": FOLDER})


def test_without_a_hook_there_is_nothing_to_measure() -> None:
    with pytest.raises(RuntimeError, match="no hook"):
        read_environ({**clean_environ(), "LAUNCH_GC": "default"})


def test_steps_are_timed_in_pairs_in_a_process_that_has_the_hook(tmp_path: Path) -> None:
    times = time_optimizers(tmp_path, POLICIES["every 50 steps"], "--steps=5", "--pairs=3")
    assert set(times) == {"SGD, 1 tensor", "AdamW, 100 tensors"}
    assert all(len(pairs) == 3 and min(min(pair) for pair in pairs) > 0 for pairs in times.values())
