"""Mistakes on the command line, from `tests/data/errors.toml`: words in, one line of error out."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.seam import Result

CASES = tomllib.loads((Path(__file__).parents[1] / "data" / "errors.toml").read_text())["case"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_mistake_is_one_line(case: dict[str, Any], here: Path, launch: Callable[..., Result]) -> None:
    for name, text in case.get("files", {}).items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text, "latin-1")
    launch(*case["words"]).assert_error(case.get("code", 2), *case["says"])
    assert not (here / "runs").exists()
