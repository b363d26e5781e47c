"""Where the program begins on a command line, with `--` and without."""

import tomllib
from pathlib import Path

import pytest

from launcher.cli.arguments import parse_command
from tests.data_files import DATA
from tests.seam import Launch


@pytest.fixture
def files(here: Path) -> Path:
    """A folder with a script, an executable, and files that are named as other words are."""
    for name in ("train.py", "train", "plan", "conf=x", "x=1.py", "llama"):
        (here / name).touch()
    (here / "package").mkdir()
    return here


def test_where_the_program_begins(files: Path) -> None:
    lines = tomllib.loads((DATA / "command_lines.toml").read_text())["lines"]
    for line, words, *program in lines:
        for verb, first in (("run", ""), ("plan", "plan "), ("tune", "tune dataloader ")):
            command = parse_command(f"{first}{line}".split())
            found = (command.verb, " ".join(command.words), command.program)
            assert found == (verb, words, tuple(program[0].split()) if program else None), line


def test_a_program_without_dashes_is_the_one_with_them(launch: Launch, files: Path) -> None:
    (files / "package/train.py").touch()
    for words in (["train.py", "--lr", "1e-4", "--", "nodes=x"], ["-m", "package.train", "--help"]):
        without = launch("dry_run=true", "nproc_per_node=2", *words)
        assert without.code == 0 and without.out
        assert without == launch("dry_run=true", "nproc_per_node=2", "--", *words)
    assert launch("plan", "train.py", "--help").out == launch("plan", "--", "train.py").out
    tuned = launch("tune", "dataloader", "dry_run=true", "train.py", "--lr", "1")
    assert (tuned.code, tuned) == (
        0,
        launch("tune", "dataloader", "dry_run=true", "--", "train.py", "--lr", "1"),
    )
