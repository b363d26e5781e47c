"""Where the program begins on a command line, with `--` and without."""

from pathlib import Path

import pytest

from launcher.cli.arguments import parse_command
from tests.seam import Launch


@pytest.fixture
def files(here: Path) -> Path:
    """A folder with a script, an executable, and files that are named as other words are."""
    for name in ("train.py", "train", "plan", "conf=x", "x=1.py", "llama"):
        (here / name).touch()
    (here / "package").mkdir()
    return here


def split(line: str) -> tuple[str, str, str | None]:
    """The verb, the words before the program, and the program."""
    command = parse_command(line.split())
    program = None if command.program is None else " ".join(command.program)
    return command.verb, " ".join(command.words), program


@pytest.mark.parametrize(
    ("line", "words", "program"),
    [
        ("train.py --lr 1e-4", "", "train.py --lr 1e-4"),
        ("nothere.py", "", "nothere.py"),
        ("nproc_per_node=2 train.py a=1 plan -- b", "nproc_per_node=2", "train.py a=1 plan -- b"),
        ("nodes=1 train -x", "nodes=1", "train -x"),
        ("./train", "", "./train"),
        ("-- train.py -- x", "", "train.py -- x"),
        ("a=1 -- python train.py", "a=1", "python train.py"),
        ("conf=x", "conf=x", None),
        ("x=1.py train.py", "x=1.py", "train.py"),
        ("~a.py train.py", "~a.py", "train.py"),
        ("-cd train nodes=1 train.py", "-cd train nodes=1", "train.py"),
        ("--cfg job train.py", "--cfg job", "train.py"),
        ("-i train.py", "-i", "train.py"),
        ("-i config train.py", "-i config", "train.py"),
        ("--nproc-per-node 2 train.py --nnodes 2", "--nproc-per-node 2", "train.py --nnodes 2"),
        ("--standalone train.py", "--standalone", "train.py"),
        ("--unknown train.py", "--unknown", "train.py"),
        ("--unknown 3 train.py", "--unknown 3", "train.py"),
        ("package", "package", None),
        ("-m package.train --lr 1", "", "-m package.train --lr 1"),
        ("nodes=1 -m package a=1", "nodes=1", "-m package a=1"),
        ("-m lr=1,2 train.py", "-m lr=1,2", "train.py"),
        ("-m lr=1,2 -m package", "-m lr=1,2", "-m package"),
        ("lr=1,2 -m train.py --x", "lr=1,2 -m", "train.py --x"),
        ("lr=1,2 -m", "lr=1,2 -m", None),
        ("-m -cd x lr=1,2", "-m -cd x lr=1,2", None),
        ("-m +model=gpt2,tiny", "-m +model=gpt2,tiny", None),
        ("-m ~model", "-m ~model", None),
        ("-m -- train.py", "-m", "train.py"),
        ("--multirun package", "--multirun package", None),
    ],
)
def test_where_the_program_begins(files: Path, line: str, words: str, program: str | None) -> None:
    assert split(line) == ("run", words, program)
    assert split(f"plan {line}") == ("plan", words, program)
    assert split(f"tune dataloader {line}") == ("tune", words, program)


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
