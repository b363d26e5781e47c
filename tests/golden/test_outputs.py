"""The verbs answer with the values that they answered with."""

from pathlib import Path

import pytest

from tests.golden.outputs import OUTPUTS, path_of, render


@pytest.mark.parametrize("name", OUTPUTS)
def test_values(name: str, here: Path) -> None:
    assert here.is_dir()
    assert render(name) == path_of(name).read_text(), (
        "if this is meant: python -m tests.golden, and read the diff"
    )
