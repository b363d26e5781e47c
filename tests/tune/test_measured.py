"""What a trial says: what its ranks measured, and what they printed of allocations that failed."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launcher.inprocess
from launcher.cli.tune import read_argument, set_argument
from launcher.tune.batch import BatchSearch
from launcher.tune.trials import (
    Loader,
    MeasureError,
    MismatchError,
    Record,
    Trial,
    find_memory_error,
    read_records,
)
from launcher.tune.workers import WorkersSearch
from tests.inprocess.hooked import WITHOUT_COMPILER
from tests.seam import clean_environ


def measure_workers(records: list[Record], workers: int, ranks: int) -> Trial:
    return WorkersSearch(9).measure(records, workers, ranks)


def measure_batch(records: list[Record], batch: int, ranks: int) -> Trial:
    return BatchSearch("--b", 8, 4096, 0, 60, 900).measure(records, batch, ranks)


_TEXTS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
LOADING, _TRAINING, _ALONE, BATCHES = (
    _TEXTS[name].replace("WITHOUT_COMPILER", WITHOUT_COMPILER)
    for name in ("loading", "training", "alone", "batches")
)
TRAINING, ALONE = LOADING + _TRAINING, LOADING + _ALONE


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
    trial = measure_workers(records, 2, 2)
    assert (trial.rate, trial.wait, trial.memory_kib, trial.steps) == (1.0, 0.4, 14, 10)
    own = make_record(loaders=(Loader(2, True, 9),))  # an IterableDataset that takes the number
    assert measure_workers([own], 2, 1).rate == 1.0
    apart = [records[0], make_record(rank=1, first=100, waits=(0.2,) * 5)]
    assert measure_workers(apart, 2, 2).wait == pytest.approx(0.2)


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
        measure_workers(records, 2, 2 if "rank" in more else 1)


def test_no_record_at_all_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="no rank trains"):
        measure_workers(read_records(tmp_path), 2, 1)
    (tmp_path / "rank-0.json").write_text('{"rank": 0}')
    with pytest.raises(MeasureError, match="cannot be read"):
        read_records(tmp_path)


LINES = tomllib.loads(Path(__file__).with_name("memory_errors.toml").read_text())


def test_memory_that_ran_out_is_seen() -> None:
    for line in LINES["memory_ran_out"]:
        found = find_memory_error([*LINES["others"], line, "torch.OutOfMemoryError: a later one"])
        assert found and len(found) <= 120 and "later" not in found and "\x1b" not in found, line
    assert find_memory_error(LINES["others"]) == ""


def test_sequences_are_those_of_all_ranks_and_micro_steps() -> None:
    """Ten loader batches of 4 in five steps of a second, on two ranks: 16 sequences a step."""
    more: dict[str, Any] = {"loaders": (Loader(2, False, 20, 4),), "batches": 10, "peak_kib": 100}
    records = [
        make_record(rank=0, **more),
        make_record(rank=1, **{**more, "times": (0.5, 1.0, 1.5, 1.0, 1.0)}),
    ]
    trial = measure_batch(records, 4, 2)
    assert (trial.rate, trial.step_seconds, trial.memory_kib, trial.loader_batch) == (16, 1.0, 200, 4)
    assert trial.error == 0
    assert measure_batch(records[1:] * 1 + [make_record(rank=0, **more)], 4, 2).rate == 16

    gpus = [{"gpu_total_kib": 80, "gpu_reserved_kib": 50, "gpu_other_kib": number} for number in (1, 9)]
    trial = measure_batch([make_record(rank=rank, **gpu) for rank, gpu in enumerate(gpus)], 4, 2)
    assert (trial.gpu_kib, trial.gpu_total_kib) == (59, 80), "the fullest GPU counts"


def test_a_short_program_fits_and_has_no_throughput() -> None:
    short: dict[str, Any] = {"times": (1.0,), "waits": (0.0,), "steps": 5, "ended": True}
    trial = measure_batch([make_record(**short)], 64, 1)
    assert (trial.verdict, trial.rate) == ("fits", 0.0) and "after 5 steps" in trial.reason
    with pytest.raises(MeasureError, match="after 1 step of rank 0, too few: it has too little data"):
        measure_batch([make_record(**{**short, "steps": 1})], 64, 1)


@pytest.mark.parametrize(
    ("line", "option", "now", "then"),
    [
        ("a.py --lr 1", "--batch-size", None, "a.py --lr 1 --batch-size 16"),
        ("a.py --batch-size 4 --lr 1", "--batch-size", "4", "a.py --batch-size 16 --lr 1"),
        ("a.py --batch-size=4 --lr 1", "--batch-size", "4", "a.py --batch-size=16 --lr 1"),
        ("a.py --lr 1", "--batch-size=", None, "a.py --lr 1 --batch-size=16"),
        ("a.py -b 4 -b 5", "-b", "5", "a.py -b 16 -b 16"),
        ("a.py data.batch_size=4", "data.batch_size=", "4", "a.py data.batch_size=16"),
        ("a.py --batch-size-eval 4", "--batch-size", None, "a.py --batch-size-eval 4 --batch-size 16"),
        ("a.py --batch-size", "--batch-size", None, "a.py --batch-size --batch-size 16"),
    ],
)
def test_an_option_is_read_and_set(line: str, option: str, now: str | None, then: str) -> None:
    assert read_argument(line.split(), option) == now
    assert set_argument(line.split(), option, 16) == tuple(then.split())


# The meter in a rank's interpreter: a real torch, real workers


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
    (record,) = read_records(tmp_path / "measured")
    assert (record.unit, record.ended, record.loaders[0].workers, record.loaders[0].iterable) == (
        "step",
        False,
        1,
        False,
    )
    assert record.first is not None and record.steps == record.first + 1 + len(record.times)
    assert 12 <= len(record.times) <= 20
    trial = measure_workers([record], 1, 1)
    assert 0 < trial.wait < 1 and 0 < trial.rate <= 1 / 0.01 * 1.01
    assert trial.memory_kib > 50_000


def test_without_an_optimizer_batches_count_and_the_end_of_a_short_program_is_its_own(tmp_path: Path) -> None:
    code, out, err = finish(start(tmp_path, "{}", "eval", "7"))
    assert (code, out, err) == (0, "the end\n", "")
    (record,) = read_records(tmp_path / "measured")
    assert (record.unit, record.ended, record.steps, len(record.times)) == ("batch", True, 8, 5)
    # A batch of the main process is 10 ms of loading to 5 of computing.
    assert measure_workers([record], 0, 1).wait > 0.3


def test_what_one_loader_reads_from_another_is_counted_once(tmp_path: Path) -> None:
    inner = "{'sampler': DataLoader(range(100), batch_size=None)}"
    assert finish(start(tmp_path, inner, "eval", "7")) == (0, "the end\n", "")
    (record,) = read_records(tmp_path / "measured")
    assert (record.steps, record.loaders) == (8, (Loader(0, False, 8, 1),))
    assert sum(record.waits) < sum(record.times)


def test_a_rank_that_is_done_goes_on_until_all_are(tmp_path: Path) -> None:
    quick = start(tmp_path, "{}", RANK="0", WORLD_SIZE="2", PACE="0.001")
    slow = start(tmp_path, "{}", RANK="1", WORLD_SIZE="2", PACE="0.3")
    assert finish(quick) == (0, "", "")
    assert (tmp_path / "measured/rank-1.json").exists()
    assert finish(slow) == (0, "", "")
    records = read_records(tmp_path / "measured")
    assert sum(records[0].times) < sum(records[1].times)
    assert measure_workers(records, 0, 2).rate < 1 / 0.3
