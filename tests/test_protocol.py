"""The table of the LAUNCH_* variables against the code that sets and reads them."""

import ast
import re
from pathlib import Path

import launcher
from launcher import protocol
from launcher.protocol import VARIABLES

PACKAGE = Path(launcher.__file__).parent
NAME = re.compile(r"\bLAUNCH_[A-Z_]*[A-Z]\b")
OTHERS = {"LAUNCH_FAILED"}
"""A state of SLURM's."""
NAMES = {variable.name for variable in VARIABLES}


def list_texts() -> list[Path]:
    """Every file that is shipped, but for the table itself."""
    folders = (PACKAGE, PACKAGE.parent / "slurm", PACKAGE.parent / "conf")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix != ".pyc" and path.name != "protocol.py"]


def list_literals(path: Path) -> set[str]:
    """The names that a file holds as whole strings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)} & NAMES


def test_every_name_anywhere_is_in_the_table_and_every_row_is_used() -> None:
    found = {name for path in list_texts() for name in NAME.findall(path.read_text(encoding="utf-8"))}
    assert found - OTHERS == NAMES


def test_the_hook_which_cannot_import_the_table_agrees_with_it() -> None:
    found = set().union(*map(list_literals, (PACKAGE / "inprocess").rglob("*.py")))
    assert found == {variable.name for variable in VARIABLES if protocol.HOOK in variable.read_by}


def test_names_of_files_are_read_back() -> None:
    assert protocol.parse_plan_file(protocol.name_plan_file("node-1.x")) == "node-1.x"
