"""The table of the ranks' variables, and the line in its place, as `launch plan` prints them."""

import pytest

from tests.seam import Launch

WORDS = ("plan", "machine=dgx_a100", "fit.check=off")


def read_rows(text: str) -> dict[str, list[list[str]]]:
    """The rows of the table by variable: value, ranks, who set it, why."""
    head, *lines = text[text.index("variable ") :].split("\n\n", maxsplit=1)[0].splitlines()
    starts = [head.index(title) for title in ("variable", "value", "ranks", "set by", "why")]
    found: dict[str, list[list[str]]] = {}
    for line in lines:
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        found.setdefault(cells[0], []).append(cells[1:])
    return found


def test_what_all_ranks_have_is_one_row_and_what_differs_a_row_for_each_value(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rows = read_rows(launch(*WORDS, "explain=true", "binding.nic=true", "env.MINE=x").out)
    assert rows["MINE"] == [["x", "all", "the configuration", ""]]
    assert rows["OMP_NUM_THREADS"] == [["3", "all", "you", "kept"]]
    nics = rows["NCCL_IB_HCA"]
    assert [ranks for _, ranks, *_ in nics] == [str(rank) for rank in range(8)]
    assert len({value for value, *_ in nics}) == 8
    assert {(who, why) for *_, who, why in nics} == {("the plan", "binding.nic=true")}
    shared = read_rows(launch(*WORDS, "explain=true", "binding.nic=true", "nproc_per_node=16").out)
    assert [ranks for _, ranks, *_ in shared["NCCL_IB_HCA"]] == [f"{rank},{rank + 8}" for rank in range(8)]


def test_odd_values_stay_on_their_line_and_long_ones_end(launch: Launch) -> None:
    odd, long = "env.ODD=two\nlines\x1b[31m [bold]x[/bold]", f"env.LONG={'y' * 700}"
    out = launch(*WORDS, "explain=true", odd, long).out
    assert "two\\nlines\\x1b[31m [bold]x[/bold]" in out
    assert 480 < out.count("y") < 600 and "\x1b" not in out


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
