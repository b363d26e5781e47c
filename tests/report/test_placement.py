"""The placement table and the summary, as people read them."""

import io

import pytest
from rich.console import Console

from launcher.plan.model import Gpu, Machine, Memory, Plan, RankPlan
from launcher.report.placement import print_placement
from launcher.report.summary import describe_progress, describe_time
from launcher.runs.progress import Progress

MACHINE = Machine((), (), (), frozenset(), frozenset())
GPU = Gpu(3, "GPU-3", "0000:07:00.0", 1)
FIRST = RankPlan(
    0,
    GPU,
    frozenset(range(8)),
    frozenset(range(12)),
    Memory("preferred", frozenset({1})),
    2,
    6,
    notes=("8 cores: [bold]why[/bold]",),
)
SECOND = RankPlan(1, None, frozenset({8}), frozenset({8}), Memory("default"), 10, 1)


def show(plan: Plan, *, explain: bool = False, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_placement(Console(file=file, width=160), plan, explain=explain)
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def test_a_row_for_each_rank() -> None:
    rows = [line.split() for line in show(Plan(MACHINE, (FIRST, SECOND)))]
    assert rows == [
        ["rank", "gpu", "pci", "cpus", "workers", "on", "memory", "workers", "threads"],
        ["0", "3", "0000:07:00.0", "0-7", "0-11", "preferred", "1", "2", "6"],
        ["1", "-", "-", "8", "8", "default", "10", "1"],
    ]


def test_columns_of_numbers_are_right_aligned() -> None:
    header, first, second = show(Plan(MACHINE, (FIRST, SECOND)))
    assert first.rstrip().endswith(" 2        6") and second.rstrip().endswith("10        1")
    assert header.index("threads") + len("threads") == len(first.rstrip())


def test_explanations_come_when_asked_for_and_are_no_markup() -> None:
    assert "why" not in "".join(show(Plan(MACHINE, (FIRST,))))
    assert show(Plan(MACHINE, (FIRST,)), explain=True)[-1] == "rank 0: 8 cores: [bold]why[/bold]"


def test_warnings_are_printed_as_they_are() -> None:
    assert (
        show(Plan(MACHINE, (FIRST,), ("node [0] has [red]no memory",)))[-1]
        == "warning: node [0] has [red]no memory"
    )


def test_an_ascii_terminal_shows_the_table() -> None:
    assert len(show(Plan(MACHINE, (FIRST, SECOND)), encoding="ascii")) == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (41.25, "41.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (725, "12 min 5 s"),
        (3599.6, "1 h 0 min"),
        (12000, "3 h 20 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert describe_time(seconds) == text


def step(number: int, **metrics: str) -> Progress:
    return Progress(number, 200, tuple((name.replace("_", "/"), value) for name, value in metrics.items()))


def test_the_summary_goes_from_first_to_last() -> None:
    steps = [
        step(1, loss="5.55", tokens_s="9"),
        step(100, loss="3.0", tokens_s="12345", tflops="0.5", mfu="3%"),
        step(200, loss="2.41"),
    ]
    assert describe_progress(steps) == "loss 5.55 to 2.41 over 200 steps, 12345 tokens/s, 0.5 TFLOPS, MFU 3%"
    assert describe_progress([]) == ""
    assert describe_progress([step(1, lr="3")]) == ""
