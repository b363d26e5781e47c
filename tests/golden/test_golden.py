"""The verbs answer as they answered, and every rank of every described machine is where it was."""

from pathlib import Path

import pytest

from tests.golden import outputs, plans

MEANT = "if this is meant: python -m tests.golden, and read the diff"


@pytest.mark.parametrize("name", outputs.OUTPUTS)
def test_values(name: str, here: Path) -> None:
    assert here.is_dir()
    assert outputs.render(name) == outputs.path_of(name).read_text(), MEANT


def _mark(case: str) -> object:
    """The measures of shipped machines are tested in `tests/machines`; their whole plans are slow tests."""
    return pytest.param(case, marks=pytest.mark.slow) if case.startswith("shipped/") else case


@pytest.mark.parametrize("case", [_mark(case) for case in plans.CASES])
def test_placement(case: str, here: Path) -> None:
    assert here.is_dir()
    assert plans.render(case) == plans.path_of(case).read_text(), MEANT
