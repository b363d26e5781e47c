"""The generated parts of docs/ are what the generator writes."""

import pytest

from launcher.plan.variables import HONOURED, REASONS
from tests.docs.generate import DOCS, PAGES, fill


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert fill(text, PAGES[name]()) == text, "run python -m tests.docs.generate"


@pytest.mark.parametrize("name", PAGES)
def test_every_row_says_something(name: str) -> None:
    rows = [line for line in PAGES[name]().splitlines() if line.startswith(("| `", "- `"))]
    assert len(rows) > 8
    assert len(rows) == len(set(rows))


def test_the_variables_of_others_are_described() -> None:
    text = (DOCS / "environment-variables.md").read_text(encoding="utf-8")
    assert [name for name in (*HONOURED, *REASONS) if f"`{name}`" not in text] == []
