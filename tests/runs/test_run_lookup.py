"""Which run a text means, as `launch status` takes it."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.make_runs import make_run
from tests.seam import Launch, run_inside


def names(*words: str) -> list[str]:
    result = run_inside(["status", *words, "format=json"])
    assert result.code == 0, result
    return [run["run"] for run in json.loads(result.out)["runs"]]


def test_the_newest_come_first_whatever_their_names(here: Path) -> None:
    runs = here / "runs"
    for name, stamp in (("b", "20260801-120000"), ("a", "20260801-120001"), ("b", "20260801-120000-2")):
        make_run(runs, name, stamp)
    make_run(runs, "b", "20260801-120000-10")
    os.utime(make_run(runs, "c", "by-hand"), (0, 0))
    (runs / "a" / "20270101-000000").mkdir()
    (runs / "stray").write_text("")
    assert names() == [
        "a/20260801-120001",
        "b/20260801-120000-10",
        "b/20260801-120000-2",
        "b/20260801-120000",
        "c/by-hand",
    ]


def test_what_a_text_means(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = here / "runs"
    make_run(runs, "llama", "20260801-120000", slurm={"job_id": "12"})
    make_run(runs, "llama", "20260801-130000")
    make_run(runs, "gpt", "20260801-110000", slurm={"job_id": "123"})
    away = make_run(here / "away", "x", "y")
    assert names("llama") == ["llama/20260801-130000"]
    assert names("llama/20260801-120000") == ["llama/20260801-120000"]
    assert names("20260801-110000") == ["gpt/20260801-110000"]
    assert names("runs/gpt/20260801-110000/") == ["gpt/20260801-110000"]
    assert names("12") == ["llama/20260801-120000"]
    assert names(str(away)) == ["x/y"]
    monkeypatch.chdir(away)
    assert names(".") == ["x/y"]
    monkeypatch.chdir(away.parent)
    assert names("y") == ["x/y"]


def test_a_job_array_is_all_of_its_members_and_the_newest_of_a_number_that_came_again(here: Path) -> None:
    for member in (10, 2, 1):
        make_run(here / "runs", "m", f"20260801-12000{member % 10}", slurm={"job_id": f"7_{member}"})
    make_run(here / "runs", "m", "20250101-000000", slurm={"job_id": "7_2"})
    make_run(here / "runs", "m", "20260701-000000", slurm={"job_id": "9"})
    make_run(here / "runs", "m", "20260702-000000", slurm={"job_id": "9"})
    assert names("7") == ["m/20260801-120001", "m/20260801-120002", "m/20260801-120000"]
    assert names("7_2") == ["m/20260801-120002"]
    assert names("9") == ["m/20260702-000000"]
    assert len(names("7", "7_1", "9")) == 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lama", ["'lama'", "did you mean llama"]),
        ("20260801-12000", ["did you mean", "20260801-120000"]),
        ("99", ["no job '99'", "the newest is llama/20260801-120001"]),
        ("99_4", ["no job '99_4'"]),
        ("zzz", ["the newest is llama/20260801-120001"]),
        ("..", ["no run '..'"]),
        ("x" * 300, ["no run"]),
        ("nowhere/at/all", ["no run"]),
        ("20260801-120000", ["the ID of 2 runs", "gpt/20260801-120000, llama/20260801-120000"]),
    ],
)
def test_what_is_unknown_or_ambiguous_is_said_with_the_near_names(
    launch: Launch, here: Path, text: str, parts: list[str]
) -> None:
    for name in ("llama", "gpt"):
        make_run(here / "runs", name, "20260801-120000")
    make_run(here / "runs", "llama", "20260801-120001")
    launch("status", text).assert_error(2, *parts)


def test_a_number_that_is_a_job_and_a_name(launch: Launch, here: Path) -> None:
    make_run(here / "runs", "12", "20260801-120000")
    assert names("12") == ["12/20260801-120000"]
    make_run(here / "runs", "tiny", "20260801-120000", slurm={"job_id": "12"})
    launch("status", "12").assert_error(2, "write NAME/ID")


def test_nothing_is_there_yet(launch: Launch) -> None:
    launch("status", "tiny").assert_error(2, "none is below runs_dir=")


def test_damaged_manifests_are_passed_over_in_the_search_for_a_job(here: Path) -> None:
    for number, text in enumerate(
        ['"12"', '{"slurm": "12"}', '["12"]', '{"slurm": {"job_id": "12', "\xff12"]
    ):
        (make_run(here / "runs", "bad", f"2026080{number + 1}-120000") / "manifest.json").write_text(text)
    make_run(here / "runs", "good", "20260101-120000", slurm={"job_id": "12"})
    assert names("12") == ["good/20260101-120000"]


def test_of_thousands_of_runs_the_newest_is_found_without_a_look_at_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3000):
        (here / "runs/many" / f"20260801-{number:06}").mkdir(parents=True)
    make_run(here / "runs", "many", "20260802-000000")
    looks: list[Path] = []
    is_file = Path.is_file

    def note(path: Path) -> bool:
        looks.append(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", note)
    assert names("many") == ["many/20260802-000000"]
    assert len([path for path in looks if "runs/many" in str(path)]) < 10
