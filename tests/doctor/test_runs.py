"""The last run: which one it is, and what its records say against its plans."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor.facts import Health
from launcher.doctor.finding import BindingTrial, Case, Finding
from launcher.doctor.placement_checks import judge_last_run
from launcher.plan.json_form import plan_to_json
from launcher.runs.run_records import find_last_run, read_run
from tests.doctor.test_pure import make_case
from tests.seam import Result, drop_powers, run_outside


def plan_json() -> dict[str, Any]:
    """A plan of two ranks with a GPU each."""
    return dict(plan_to_json(make_case().plan))


def make_record(entry: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The record of a rank that got what was planned."""
    record = {
        "schema": 1,
        "host": "a",
        "rank": entry["local_rank"],
        "local_rank": entry["local_rank"],
        "attempt": 0,
        "pid": 10,
        "agent": 9,
        "time": 1.0,
        "cpus": entry["cpus"],
        "memory": entry["memory"],
        "gpu": entry["gpu"]["uuid"],
        "num_workers": entry["num_workers"],
        "env": entry["env"],
        "problems": [],
    }
    return {**record, **values}


def write_run(path: Path, host: str = "a", first: int = 0, **values: Any) -> Path:
    """Write one host's plan and records into a run directory."""
    path.mkdir(parents=True, exist_ok=True)
    plan = plan_json()
    (path / f"plan-{host}.json").write_text(json.dumps(plan))
    (path / "manifest.json").write_text(json.dumps({"outcome": {"state": "succeeded"}}))
    for entry in plan["ranks"]:
        rank = first + entry["local_rank"]
        write_record(path, make_record(entry, host=host, rank=rank, **values))
    return path


def write_record(path: Path, record: dict[str, Any]) -> None:
    (path / f"rank-{record['rank']}.applied.json").write_text(json.dumps(record))


def change_record(path: Path, rank: int, /, **values: Any) -> None:
    """Tamper with a record."""
    file = path / f"rank-{rank}.applied.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def judge_path(path: Path) -> list[Finding]:
    """The findings about a run directory."""
    case = make_case()
    return list(judge_last_run(Case(case.plan, Health(live=True), BindingTrial(1), run=read_run(path))))


def problems(path: Path) -> list[tuple[str, str]]:
    """Level and text of the findings that matter."""
    return [(one.level, one.what) for one in judge_path(path) if one.level in ("error", "warning")]


def test_a_run_as_planned_passes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_run(path, host="b", first=2)
    (finding,) = judge_path(path)
    assert finding.level == "ok"
    assert finding.what == f"{path}, succeeded: applied equals planned on 4 ranks of 2 hosts"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cpus": "0-63"}, "a: rank 1 runs on CPUs 0-63, planned 8-15"),
        (
            {"memory": {"policy": "default", "nodes": ""}},
            "a: rank 1 has memory policy default, planned preferred 0",
        ),
        ({"gpu": "GPU-0"}, "a: rank 1 has GPU GPU-0, planned GPU-1"),
        ({"gpu": None}, "a: rank 1 has GPU none, planned GPU-1"),
        ({"num_workers": 7}, "a: rank 1 has 7 DataLoader workers, planned 2"),
    ],
)
def test_a_difference_is_an_error_with_both_values(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    path = write_run(tmp_path / "run")
    change_record(path, 1, **values)
    assert problems(path) == [("error", says)]


def test_other_variables_are_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    env = dict(plan_json()["ranks"][0]["env"])
    change_record(path, 0, env={**env, "OMP_NUM_THREADS": "99", "MORE": "1"})
    planned = env["OMP_NUM_THREADS"]
    assert problems(path) == [
        ("error", "a: rank 0 has MORE 1, planned unset"),
        ("error", f"a: rank 0 has OMP_NUM_THREADS 99, planned {planned}"),
    ]


def test_problems_of_the_shim_are_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    change_record(path, 0, problems=["memory policy was refused"])
    assert problems(path) == [("warning", "a: rank 0: memory policy was refused")]


def test_a_rank_without_a_record_is_missed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "rank-1.applied.json").unlink()
    assert problems(path) == [("warning", "a: local rank 1 left no record of its placement")]
    (path / "manifest.json").write_text(json.dumps({"outcome": {"state": "running"}}))
    assert problems(path) == []
    assert "a: local rank 1 has no record of its placement yet" in [one.what for one in judge_path(path)]


def test_the_last_attempt_counts_on_each_host(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", attempt=1)
    write_run(path, host="b", first=2, attempt=0)
    assert problems(path) == []
    change_record(path, 1, attempt=0)
    assert problems(path) == [("warning", "a: local rank 1 left no record of its placement in attempt 1")]


def test_a_new_start_by_hand_counts_attempts_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", attempt=0, time=9.0)
    entry = plan_json()["ranks"][1]
    write_record(path, make_record(entry, rank=7, cpus="3", attempt=4, time=2.0))
    assert problems(path) == []


def test_the_newest_record_of_a_local_rank_counts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", time=5.0)
    entry = plan_json()["ranks"][0]
    write_record(path, make_record(entry, rank=9, cpus="3", time=1.0))
    assert problems(path) == []
    change_record(path, 9, time=9.0)
    assert problems(path) == [("error", "a: rank 9 runs on CPUs 3, planned 0-7")]


def test_records_without_a_plan_are_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    entry = plan_json()["ranks"][0]
    write_record(path, make_record(entry, rank=5, host="c"))
    write_record(path, make_record(entry, rank=6, local_rank=6))
    assert problems(path) == [
        ("warning", "a: rank 6 ran as local rank 6, which is not planned"),
        ("warning", "ranks 5 ran on c, which has no plan"),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"ranks": []}',
        b'{"ranks": [1]}',
        b"{}",
        b"1e999",
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["plan-a.json", "rank-0.applied.json", "manifest.json"])
def test_damaged_files_are_told(tmp_path: Path, name: str, content: bytes) -> None:
    path = write_run(tmp_path / "run")
    (path / name).write_bytes(content)
    found = problems(path)
    assert [what for level, what in found if what.startswith(f"{name} cannot be read (")], found
    assert not [level for level, _ in found if level == "error"]


@pytest.mark.parametrize(
    "value", [None, [], {}, "x", -1, 1e999, 10**400, {"policy": []}], ids=lambda value: repr(value)[:20]
)
@pytest.mark.parametrize(
    "key", ["rank", "attempt", "host", "cpus", "memory", "env", "problems", "time", "gpu"]
)
def test_a_wrong_value_in_a_record_is_no_traceback(tmp_path: Path, key: str, value: object) -> None:
    path = write_run(tmp_path / "run")
    change_record(path, 0, **{key: value})
    assert all(isinstance(finding.what, str) for finding in judge_path(path))


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1e999, 10**400], ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("key", ["local_rank", "gpu", "cpus", "worker_cpus", "memory", "env", "num_workers"])
def test_a_wrong_value_in_a_plan_is_no_traceback(tmp_path: Path, key: str, value: object) -> None:
    path = write_run(tmp_path / "run")
    plan = plan_json()
    plan["ranks"][0][key] = value
    (path / "plan-a.json").write_text(json.dumps(plan))
    assert all(isinstance(finding.what, str) for finding in judge_path(path))


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "rank-0.applied.json").unlink()
    os.mkfifo(path / "rank-0.applied.json")
    assert ("warning", "rank-0.applied.json cannot be read (no regular file): left out") in problems(path)


def test_a_plan_of_random_bytes_is_told_in_words(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "plan-a.json").write_bytes(b"\xff" + bytes(range(256)))
    told = [what for _, what in problems(path) if "plan-a.json" in what]
    assert told == [
        "plan-a.json cannot be read ('utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte): left out"
    ]


def test_a_run_of_somebody_else_is_told(here: Path) -> None:
    write_run(here / "run").chmod(0o300)
    done = run_outside(["doctor", "run_dir=run"], here, preexec_fn=drop_powers)
    done.assert_error(2, "run_dir=run cannot be read (Permission denied): ask its owner")


@pytest.mark.parametrize("name", [".", "file", "nothing"])
def test_what_is_no_run_is_told(name: str, here: Path, launch: Callable[..., Result]) -> None:
    (here / "file").touch()
    launch("doctor", f"run_dir={name}").assert_error(2, f"run_dir={name} holds no plan-HOST.json")


def test_a_missing_manifest_is_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "manifest.json").unlink()
    assert problems(path) == [("warning", "manifest.json cannot be read (not there): left out")]
    (path / "manifest-1.json").write_text('{"outcome": {"state": "running"}}')
    assert problems(path) == []


def test_the_last_run_is_the_one_planned_last(tmp_path: Path) -> None:
    assert find_last_run(tmp_path / "runs") is None
    for number, name in enumerate(("train/1", "other/2", "train/3")):
        path = write_run(tmp_path / "runs" / name)
        os.utime(path / "plan-a.json", (number, 100 - number))
    (tmp_path / "runs" / "train" / "4").mkdir()
    assert find_last_run(tmp_path / "runs") == tmp_path / "runs" / "train" / "1"
