"""The meter in a rank's interpreter: a real torch, real workers."""

import json
import subprocess
import sys
from pathlib import Path

import launcher.inprocess
from launcher.tune.trials import Loader, read_records
from tests.seam import clean_environ
from tests.tune.programs import ALONE
from tests.tune.test_measured import measure_workers

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
