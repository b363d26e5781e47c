"""Every rank of every described machine is where it was."""

from pathlib import Path

import pytest

from tests.golden.plans import CASES, path_of, render


@pytest.mark.parametrize("case", CASES)
def test_placement(case: str, here: Path) -> None:
    assert here.is_dir()
    assert render(case) == path_of(case).read_text(), (
        "if this is meant: python -m tests.golden, and read the diff"
    )
