"""The meter in a rank's interpreter: a real torch, real workers."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launcher.inprocess
from launcher.tune.trial_records import (
    Loader,
    MeasureError,
    MismatchError,
    Record,
    measure_trial,
    read_record,
    read_trial_records,
)
from tests.seam import clean_environ
from tests.tune.programs import ALONE

HOOK = str(Path(launcher.inprocess.__file__).parent)


def start(folder: Path, *words: str, **more: str) -> "subprocess.Popen[str]":
    """Start the program as the shim does for a trial of `launch tune`."""
    (folder / "alone.py").write_text(ALONE)
    (folder / "measured").mkdir(exist_ok=True)
    order = {"folder": str(folder / "measured"), "steps": 16, "seconds": 60}
    environ = {"PYTHONPATH": HOOK, "LAUNCH_METER": json.dumps(order), "RANK": "0", "WORLD_SIZE": "1", **more}
    return subprocess.Popen(
        [sys.executable, "alone.py", *words],
        cwd=folder,
        env={**clean_environ(), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def list_living(folder: Path) -> list[str]:
    """Processes that work in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            found += [str(path)] if path.samefile(folder) else []
        except OSError:
            continue
    return found


def test_it_ends_a_program_with_workers_and_says_what_it_waited_for(tmp_path: Path) -> None:
    assert finish(start(tmp_path, "{'num_workers': 1}")) == (0, "", "")
    assert list_living(tmp_path) == []
    record = read_record(tmp_path / "measured/rank-0.json")
    assert (record.unit, record.ended, record.loaders[0].workers, record.loaders[0].iterable) == (
        "step",
        False,
        1,
        False,
    )
    assert record.first is not None and record.steps == record.first + 1 + len(record.times)
    assert 12 <= len(record.times) <= 20
    trial = measure_trial([record], 1, 1)
    assert 0 < trial.wait < 1 and 0 < trial.rate <= 1 / 0.01 * 1.01
    assert trial.memory_kib > 50_000


def test_without_an_optimizer_batches_count_and_the_end_of_a_short_program_is_its_own(tmp_path: Path) -> None:
    code, out, err = finish(start(tmp_path, "{}", "eval", "7"))
    assert (code, out, err) == (0, "the end\n", "")
    (record,) = read_trial_records(tmp_path / "measured")
    assert (record.unit, record.ended, record.steps, len(record.times)) == ("batch", True, 8, 5)
    # A batch of the main process is 10 ms of loading to 5 of computing.
    assert measure_trial([record], 0, 1).wait > 0.3


def test_what_one_loader_reads_from_another_is_counted_once(tmp_path: Path) -> None:
    inner = "{'sampler': DataLoader(range(100), batch_size=None)}"
    assert finish(start(tmp_path, inner, "eval", "7")) == (0, "the end\n", "")
    (record,) = read_trial_records(tmp_path / "measured")
    assert (record.steps, record.loaders) == (8, (Loader(0, False, 8, 1),))
    assert sum(record.waits) < sum(record.times)


def test_a_rank_that_is_done_goes_on_until_all_are(tmp_path: Path) -> None:
    quick = start(tmp_path, "{}", RANK="0", WORLD_SIZE="2", PACE="0.001")
    slow = start(tmp_path, "{}", RANK="1", WORLD_SIZE="2", PACE="0.3")
    assert finish(quick) == (0, "", "")
    assert (tmp_path / "measured/rank-1.json").exists()
    assert finish(slow) == (0, "", "")
    records = read_trial_records(tmp_path / "measured")
    assert sum(records[0].times) < sum(records[1].times)
    assert measure_trial(records, 0, 2).rate < 1 / 0.3


def test_a_failing_program_fails(tmp_path: Path) -> None:
    code, out, err = finish(start(tmp_path, "{'nonsense': 1}"))
    assert (code, out) == (1, "")
    assert "unexpected keyword argument 'nonsense'" in err


def make_record(**more: Any) -> Record:
    values = {
        "rank": 0,
        "unit": "step",
        "steps": 10,
        "first": 4,
        "times": (1.0,) * 5,
        "waits": (0.5,) * 5,
        "loaders": (Loader(2, False, 9),),
        "memory_kib": 7,
        "ended": False,
    }
    return Record(**{**values, **more})


def test_a_trial_is_as_slow_as_its_slowest_rank_and_waits_for_each() -> None:
    waits = [(0.5, 0.0, 0.5, 0.0, 0.0), (0.0, 0.5, 0.0, 0.5, 0.0)]
    records = [make_record(rank=rank, waits=each) for rank, each in enumerate(waits)]
    trial = measure_trial(records, 2, 2)
    assert (trial.rate, trial.wait, trial.memory_kib, trial.steps) == (1.0, 0.4, 14, 10)
    apart = [records[0], make_record(rank=1, first=100, waits=(0.2,) * 5)]
    assert measure_trial(apart, 2, 2).wait == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("more", "kind", "part"),
    [
        ({"loaders": ()}, MeasureError, "nothing to tune"),
        ({"loaders": (Loader(4, False, 9),)}, MismatchError, "num_workers=4 itself"),
        ({"loaders": (Loader(0, True, 9),)}, MismatchError, "IterableDataset"),
        ({"times": (1.0,), "waits": (0.0,), "steps": 5}, MeasureError, "ended after 5 steps"),
        ({"times": (), "waits": (), "steps": 1, "first": None, "unit": "batch"}, MeasureError, "1 batch"),
        ({"rank": 1}, MeasureError, "neither an optimizer nor a DataLoader"),
    ],
)
def test_what_says_nothing_is_told(more: Mapping[str, Any], kind: type[Exception], part: str) -> None:
    records = [make_record(**more)]
    with pytest.raises(kind, match=part):
        measure_trial(records, 2, 2 if "rank" in more else 1)


def test_no_record_at_all_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="no rank trains"):
        measure_trial(read_trial_records(tmp_path), 2, 1)
    (tmp_path / "rank-0.json").write_text('{"rank": 0}')
    with pytest.raises(MeasureError, match="cannot be read"):
        read_trial_records(tmp_path)
