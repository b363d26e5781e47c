"""Mistakes on the command line, from `tests/data/errors.toml`: words in, one line of error out."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.data_files import prepare, read_cases
from tests.seam import run_inside


@pytest.mark.parametrize("mistake", read_cases("errors", "mistake"), ids=lambda mistake: mistake["about"])
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(mistake, here, monkeypatch)
    before = sorted(here.rglob("*"))
    wrong = []
    for line, *says in mistake["lines"]:
        words = f"{line} {mistake.get('after', '')}".replace("{here}", str(here))
        done = run_inside(shlex.split(words))
        one = done.err.startswith("launch: error: ") and done.err.count("\n") == 1
        named = all(part.replace("{here}", str(here)) in done.err for part in says)
        hidden = not any(part in done.err for part in mistake.get("hides", ()))
        if (done.code, done.out, one, named, hidden) != (mistake.get("code", 2), "", True, True, True):
            wrong.append(f"{line}: {says} is not in {done}")
        elif (now := sorted(here.rglob("*"))) != before:
            wrong.append(f"{line} leaves {now}")
    assert not wrong, "\n".join(wrong)
