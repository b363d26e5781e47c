"""The table of the ranks' variables, and the line in its place."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from launcher.plan.model import Memory, RankPlan, Variable
from launcher.report.placement_table import count_variables, print_variables
from tests.seam import Launch

NOTHING = frozenset[int]()
RANK = RankPlan(0, None, NOTHING, NOTHING, Memory("default"), 1, 1)
ALIKE = (Variable("A", "1", "configuration"), Variable("B", "2", "plan", "a reason"))


def make_ranks(*variables: tuple[Variable, ...]) -> list[RankPlan]:
    return [replace(RANK, local_rank=at, variables=own) for at, own in enumerate(variables)]


def show(ranks: list[RankPlan], width: int = 100) -> list[str]:
    file = io.StringIO()
    print_variables(Console(file=file, width=width), ranks)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_what_all_ranks_have_is_one_row() -> None:
    assert show(make_ranks(ALIKE, ALIKE)) == [
        "variable  value  set by             why",
        "A         1      the configuration",
        "B         2      the plan           a reason",
    ]


def test_what_differs_has_a_row_for_each_value() -> None:
    own = [(*ALIKE, Variable("NIC", name, "user", "kept")) for name in ("x", "y", "x")]
    assert show(make_ranks(*own)) == [
        "variable  value  ranks  set by             why",
        "A         1      all    the configuration",
        "B         2      all    the plan           a reason",
        "NIC       x      0,2    you                kept",
        "NIC       y      1      you                kept",
    ]


def test_odd_values_stay_on_their_line_and_long_ones_fold() -> None:
    odd = (Variable("A", "two\nlines\x1b[31m [bold]x[/bold]", "user"), Variable("B", "y" * 700, "plan"))
    lines = show(make_ranks(odd), width=80)
    assert "two\\nlines\\x1b[31m [bold]x[/bold]" in lines[1]
    assert max(map(len, lines)) <= 80
    assert sum(line.count("y") for line in lines[2:]) == 496


def test_nothing_is_shown_of_nothing() -> None:
    assert show([RANK]) == []
    assert count_variables([RANK]) == ""


def test_the_line_counts_names_by_who_set_them() -> None:
    own = [(*ALIKE, Variable("NIC", name, "plan")) for name in ("x", "y")]
    assert count_variables(make_ranks(*own)) == (
        "3 variables set: 2 by the plan, 1 by the configuration (explain=true lists them)"
    )
    assert (
        count_variables(make_ranks(ALIKE[:1]))
        == "1 variable set: 1 by the configuration (explain=true lists them)"
    )


def test_the_plan_has_the_line_and_explain_the_table(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = ("plan", "machine=dgx_a100", "env.HF_TOKEN=hf-secret", "env.URL=http://me:secret@host/")
    short, long = launch(*words).out, launch(*words, "explain=true").out
    assert "by the plan, 2 by the configuration, 1 by you (explain=true lists them)" in short
    assert "set by" not in short and "explain=true" not in long
    rows = [line.split() for line in long.splitlines()]
    assert ["HF_TOKEN", "***", "all", "the", "configuration"] in rows
    assert ["URL", "http://***@host/", "all", "the", "configuration"] in rows
    assert ["OMP_NUM_THREADS", "3", "all", "you", "kept"] in rows
    assert "secret" not in short + long + launch(*words, "format=json").out
