"""The LAUNCH_* variables against the code that sets and reads them."""

import re
from pathlib import Path

import launcher
from launcher import protocol

PACKAGE = Path(launcher.__file__).parent
NAME = re.compile(r"\bLAUNCH_[A-Z_]*[A-Z]\b")
OTHERS = {"LAUNCH_FAILED"}
"""A state of SLURM's."""
NAMES = {name for name in vars(protocol) if name.startswith("LAUNCH_")}


def list_texts() -> list[Path]:
    """Every file that is shipped, but for the list itself."""
    folders = (PACKAGE, PACKAGE.parent / "slurm", PACKAGE.parent / "conf")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix != ".pyc" and path.name != "protocol.py"]


def test_every_name_anywhere_is_listed_and_every_one_is_used() -> None:
    found = {name for path in list_texts() for name in NAME.findall(path.read_text(encoding="utf-8"))}
    assert found - OTHERS == NAMES


def test_names_are_the_values_and_those_that_no_user_sets_are_among_them() -> None:
    assert all(getattr(protocol, name) == name for name in NAMES)
    assert set(protocol.OWN_VARIABLES) < NAMES
