"""What commands end with, from `tests/data/exit_codes.toml`, and what the documents say of it."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import errors
from tests.data_files import prepare, read_cases
from tests.docs.generate import DOCS
from tests.seam import Launch, in_shell

RANK = f'launch-rank() {{ LOCAL_RANK=0 {sys.executable} -m launcher.rank "$@"; }}'
EXITS = read_cases("exit_codes", "exit")


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize("exit_", EXITS, ids=lambda exit_: exit_["cause"])
def test_a_command_ends_with_its_code(
    exit_: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(exit_, here, monkeypatch)
    done = in_shell(f"{RANK}; {exit_['line']}", here)
    assert done.code == exit_["code"], done
    assert "internal error" not in done.err


def test_a_defect_of_ours_has_a_code_of_its_own(launch: Launch) -> None:
    """The tests' guard raises in place of starting the job."""
    launch("nproc_per_node=1", "watch.enabled=false", "--", "true")
    assert launch("nproc_per_node=1", "--", "true").code == errors.EXIT_DEFECT


def test_the_documents_have_each_code_of_ours() -> None:
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    table = text.partition("| exit code | meaning |")[2].partition("\n\n")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) ", table, re.MULTILINE)}
    ours = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == {0, 1, *ours} and "128+n" in table
    held = {each["code"] for each in EXITS if each["line"].startswith(("launch ", "PATH="))}
    assert codes <= held | {errors.EXIT_HANG, errors.EXIT_DEFECT}
