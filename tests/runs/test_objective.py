"""A run's objective: its last loss, or the numbers that its program has written."""

import os
from pathlib import Path

import pytest

from launcher.runs.progress import MOST_BYTES_OF_FILE, ObjectiveError, read_objective


def write_log(run: Path, attempt: int, text: str, ending: str = "out") -> None:
    path = run / "logs" / str(attempt) / f"rank-0.{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("step 1 loss 3.5\nstep 2 loss 2.5\nstep 3 tokens/s 10\nbye\n", 2.5),
        ("step 1 loss 1,234.5\n", 1234.5),
        ("step 1 loss 1e-3", 1e-3),
        ("step 9 loss -inf\n", float("-inf")),
    ],
)
def test_the_last_loss(tmp_path: Path, text: str, loss: float) -> None:
    write_log(tmp_path, 0, text)
    assert read_objective(tmp_path, "loss") == loss


def test_it_is_that_of_the_newest_attempt_that_has_one(tmp_path: Path) -> None:
    write_log(tmp_path, 9, "step 5 loss 5\n")
    write_log(tmp_path, 10, "step 3 loss 3\n", "err")
    write_log(tmp_path, 10, "nothing\n")
    write_log(tmp_path, 11, "killed\n")
    assert read_objective(tmp_path, "loss") == 3


@pytest.mark.parametrize(("text", "numbers"), [("0.5", 0.5), (" 1e-3\n", 1e-3), ("1\n2.5 3\n", [1, 2.5, 3])])
def test_the_numbers_of_the_file(tmp_path: Path, text: str, numbers: object) -> None:
    (tmp_path / "objective.txt").write_text(text)
    assert read_objective(tmp_path, "file") == numbers


def test_what_there_is_none_in(tmp_path: Path) -> None:
    def explain(kind: str) -> str:
        with pytest.raises(ObjectiveError) as caught:
            read_objective(tmp_path, kind)
        return str(caught.value)

    assert "no line with a step and a loss" in explain("loss")
    assert "No such file" in explain("file")
    for text, told in (("", "is empty"), ("loss 3", "no number"), ("1,5", "no number")):
        (tmp_path / "objective.txt").write_text(text)
        assert told in explain("file")
    (tmp_path / "objective.txt").write_bytes(b"\xff")
    assert "no number" in explain("file")
    assert explain("loss").endswith("objective.txt: set objective=file")


def test_what_is_no_file_of_numbers_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "objective.txt"
    (tmp_path / "elsewhere").write_text("1")
    for plant in (
        lambda: path.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.write_text("1 " * MOST_BYTES_OF_FILE),
    ):
        plant()
        with pytest.raises(ObjectiveError, match="cannot be read"):
            read_objective(tmp_path, "file")
        path.unlink()
