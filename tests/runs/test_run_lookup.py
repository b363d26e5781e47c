"""Which run a text means."""

import os
import re
from itertools import islice
from pathlib import Path

import pytest

from launcher.runs.run_lookup import RunLookupError, choose_runs, find_runs, list_runs, name_run
from tests.cli.make_runs import make_run


def names(runs: Path, text: str) -> list[str]:
    return [name_run(path) for path in find_runs(runs, text)]


def test_the_newest_come_first_whatever_their_names(tmp_path: Path) -> None:
    for name, stamp in (("b", "20260801-120000"), ("a", "20260801-120001"), ("b", "20260801-120000-2")):
        make_run(tmp_path, name, stamp)
    make_run(tmp_path, "b", "20260801-120000-10")
    old = make_run(tmp_path, "c", "by-hand")
    os.utime(old, (0, 0))
    (tmp_path / "a" / "20270101-000000").mkdir()
    (tmp_path / "stray").write_text("")
    assert [name_run(path) for path in list_runs(tmp_path)] == [
        "a/20260801-120001",
        "b/20260801-120000-10",
        "b/20260801-120000-2",
        "b/20260801-120000",
        "c/by-hand",
    ]
    assert list(list_runs(tmp_path / "nowhere")) == []


def test_what_a_text_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    make_run(runs, "llama", "20260801-120000", slurm={"job_id": "12"})
    make_run(runs, "llama", "20260801-130000")
    make_run(runs, "gpt", "20260801-110000", slurm={"job_id": "123"})
    away = make_run(tmp_path / "away", "x", "y")
    assert names(runs, "llama") == ["llama/20260801-130000"]
    assert names(runs, "llama/20260801-120000") == ["llama/20260801-120000"]
    assert names(runs, "20260801-110000") == ["gpt/20260801-110000"]
    assert names(runs, "runs/gpt/20260801-110000/") == ["gpt/20260801-110000"]
    assert names(runs, "12") == ["llama/20260801-120000"]
    assert find_runs(runs, str(away)) == (away,)
    monkeypatch.chdir(away)
    assert find_runs(runs, ".") == (away,)
    monkeypatch.chdir(away.parent)
    assert find_runs(runs, "y") == (away,)


def test_a_job_array_is_all_of_its_members_and_the_newest_of_a_number_that_came_again(tmp_path: Path) -> None:
    for member in (10, 2, 1):
        make_run(tmp_path, "m", f"20260801-12000{member % 10}", slurm={"job_id": f"7_{member}"})
    make_run(tmp_path, "m", "20250101-000000", slurm={"job_id": "7_2"})
    make_run(tmp_path, "m", "20260701-000000", slurm={"job_id": "9"})
    newest = make_run(tmp_path, "m", "20260702-000000", slurm={"job_id": "9"})
    assert names(tmp_path, "7") == ["m/20260801-120001", "m/20260801-120002", "m/20260801-120000"]
    assert names(tmp_path, "7_2") == ["m/20260801-120002"]
    assert find_runs(tmp_path, "9") == (newest,)
    assert len(choose_runs(tmp_path, ["7", "7_1", "9"])) == 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lama", ["'lama'", "did you mean llama"]),
        ("20260801-12000", ["did you mean", "20260801-120000"]),
        ("99", ["no job '99'", "the newest is llama/20260801-120001"]),
        ("99_4", ["no job '99_4'"]),
        ("zzz", ["the newest is llama/20260801-120001"]),
        ("", ["no run ''"]),
        ("..", ["no run '..'"]),
        ("x" * 300, ["no run"]),
        ("a\0b", ["no run"]),
        ("nowhere/at/all", ["no run"]),
        ("20260801-120000", ["the ID of 2 runs", "gpt/20260801-120000, llama/20260801-120000"]),
    ],
)
def test_what_is_unknown_or_ambiguous_is_said_with_the_near_names(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    for name in ("llama", "gpt"):
        make_run(tmp_path, name, "20260801-120000")
    make_run(tmp_path, "llama", "20260801-120001")
    with pytest.raises(RunLookupError) as caught:
        find_runs(tmp_path, text)
    for part in parts:
        assert part in str(caught.value)


def test_a_number_that_is_a_job_and_a_name(tmp_path: Path) -> None:
    make_run(tmp_path, "12", "20260801-120000")
    assert names(tmp_path, "12") == ["12/20260801-120000"]
    make_run(tmp_path, "tiny", "20260801-120000", slurm={"job_id": "12"})
    with pytest.raises(RunLookupError, match=re.escape("write NAME/ID")):
        find_runs(tmp_path, "12")


def test_nothing_is_there_yet(tmp_path: Path) -> None:
    with pytest.raises(RunLookupError, match="none is below runs_dir="):
        find_runs(tmp_path / "runs", "tiny")


def test_damaged_manifests_are_passed_over_in_the_search_for_a_job(tmp_path: Path) -> None:
    for number, text in enumerate(
        ['"12"', '{"slurm": "12"}', '["12"]', '{"slurm": {"job_id": "12', "\xff12"]
    ):
        (make_run(tmp_path, "bad", f"2026080{number + 1}-120000") / "manifest.json").write_text(text)
    good = make_run(tmp_path, "good", "20260101-120000", slurm={"job_id": "12"})
    assert find_runs(tmp_path, "12") == (good,)


def test_of_thousands_of_runs_the_newest_are_found_without_a_look_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3000):
        (tmp_path / "many" / f"20260801-{number:06}").mkdir(parents=True)
        (tmp_path / "many" / f"20260801-{number:06}" / "manifest.json").touch()
    looks: list[Path] = []
    is_file = Path.is_file

    def note(path: Path) -> bool:
        looks.append(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", note)
    assert [path.name for path in islice(list_runs(tmp_path), 3)] == [
        f"20260801-00{n}" for n in (2999, 2998, 2997)
    ]
    assert len(looks) == 3
