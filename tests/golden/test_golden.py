"""The verbs answer as they answered, and every rank of every described machine is where it was."""

from pathlib import Path

import pytest

from tests.golden.outputs import OUTPUTS, path_of, render


def _mark(name: str) -> object:
    """The measures of shipped machines are tested in `tests/machines`; their whole plans are slow tests."""
    return pytest.param(name, marks=pytest.mark.slow) if name.startswith("plans/shipped/") else name


@pytest.mark.parametrize("name", [_mark(name) for name in OUTPUTS])
def test_values(name: str, here: Path) -> None:
    assert here.is_dir()
    assert render(name) == path_of(name).read_text(), "if meant: python -m tests.golden, and read the diff"
