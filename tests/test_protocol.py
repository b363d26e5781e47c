"""The table of the LAUNCH_* variables against the code that sets and reads them."""

import ast
import re
from pathlib import Path

import pytest

import launcher
from launcher import protocol
from launcher.protocol import VARIABLES

PACKAGE = Path(launcher.__file__).parent
NAME = re.compile(r"\bLAUNCH_[A-Z_]*[A-Z]\b")
OTHERS = {"LAUNCH_FAILED"}
"""A state of SLURM's."""
NAMES = {variable.name for variable in VARIABLES}
CONSTANTS = {name: value for name, value in vars(protocol).items() if NAME.fullmatch(name)}


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


def test_a_constant_has_the_name_of_its_variable() -> None:
    assert {*CONSTANTS.values()} == NAMES
    assert all(name == value for name, value in CONSTANTS.items())


def test_the_table_is_sorted_and_names_a_variable_once() -> None:
    assert [variable.name for variable in VARIABLES] == sorted(NAMES)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_row_says_who_sets_and_reads_it(variable: protocol.ProtocolVariable) -> None:
    parties = {protocol.LAUNCHER, protocol.SLURM_JOB, protocol.SHIM, protocol.HOOK, protocol.PROGRAM}
    assert {*variable.read_by} <= parties and variable.read_by
    assert variable.set_by in parties or variable.is_settable
    assert variable.meaning.endswith(".") and ". " not in variable.meaning and variable.form


def test_the_code_has_the_names_from_the_table() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "protocol.py" and "inprocess" not in path.parts:
            assert not list_literals(path), path


def test_the_hook_which_cannot_import_the_table_agrees_with_it() -> None:
    found = set().union(*map(list_literals, (PACKAGE / "inprocess").rglob("*.py")))
    assert found == {variable.name for variable in VARIABLES if protocol.HOOK in variable.read_by}


def test_names_of_files_are_read_back() -> None:
    assert protocol.parse_plan_file(protocol.name_plan_file("node-1.x")) == "node-1.x"
