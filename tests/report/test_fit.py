"""The table of a report on memory, at several widths, without colours and block characters."""

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from launcher.fit.advice import Advice, BudgetLine, SpeedEstimate
from launcher.fit.choice import Change, FitReport
from launcher.fit.training import Estimate, MemoryPart, Range
from launcher.report.fit import print_fit
from tests.fit.made_requests import REQUEST
from tests.fuzzing import Terminal, assert_harmless

GIB = 1 << 30


def gib(low: float, expected: float, high: float) -> Range:
    return Range(*(round(value * GIB) for value in (low, expected, high)))


PARTS = (
    MemoryPart("weights", gib(25, 25.1, 25.1), "fp32"),
    MemoryPart("optimizer", gib(50, 50.2, 50.2), "two moments in fp32"),
    MemoryPart("activations", gib(20, 22, 25), "34 bytes of each token and layer"),
    MemoryPart("communication", gib(0, 0, 0)),
    MemoryPart("context", gib(0.5, 0.75, 1)),
)
TOTAL = gib(95.5, 98.05, 101.3)
REPORT = FitReport(
    REQUEST,
    Estimate(PARTS, TOTAL, TOTAL, TOTAL),
    "does_not_fit",
    (Change(("parallel.zero=3",), "weights are sharded: up to 10% slower", gib(40, 41, 42)),),
    (
        BudgetLine("CPU cores", 28, 112, "cores", enough=True, note="8 x (1 + 2 workers) + 4"),
        BudgetLine("CPU memory", 637, 256, "GiB", enough=False, note="the GPUs' sum", fix="ask for more"),
        BudgetLine("/dev/shm", 0.3, None, "GiB", enough=True),
    ),
    (Advice("warning", "the vocabulary is odd", "set 32000", "up to 5%"),),
    SpeedEstimate(
        parameters=6738415616,
        active_parameters=6738415616,
        tokens_per_step=262144,
        flops_per_step=1e16,
        peak_tflops=989,
        peak_source="NVIDIA H100 data sheet",
        step_seconds=(3.1, 4.2),
        mfu=(0.35, 0.5),
        hfu=(0.35, 0.5),
        tflops=(346, 494),
        total_seconds=(4.0e6, 5.1e6),
        gpu_hours=(8900, 11300),
    ),
    "1 run had 97% of the computed memory",
)
WIDE = (Path(__file__).parents[1] / "data/fit_report.txt").read_text()


def show(report: FitReport, width: int, *, terminal: bool = False) -> str:
    stream = Terminal() if terminal else io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, highlight=False)
    print_fit(console, report)
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def test_a_report_in_a_pipe() -> None:
    assert show(replace(REPORT, request=replace(REQUEST, tokens=1e12)), 160) == WIDE


def test_nothing_is_wider_than_the_terminal() -> None:
    for width in (20, 34, 43, 44, 60, 71, 72, 80, 120, 250):
        shown = show(REPORT, width, terminal=True)
        assert_harmless(shown)
        plain = re.sub(r"\x1b\[[^m]*m", "", shown)
        assert max(cell_len(line) for line in plain.splitlines()) <= width
        joined = " ".join(plain.split())
        assert "does not fit" in joined and "parallel.zero=3" in joined
        has_range = ["GiB", "low", "expected", "high"] in [line.split() for line in plain.splitlines()]
        assert has_range is (44 <= width < 72) or width >= 72
        assert ("fp32" in plain.partition("GiB  ")[2]) is (width >= 72)
        assert width >= 72 or "CPU memory: ask for more" in joined


def test_texts_of_others_are_harmless() -> None:
    hostile = "\x1b[2J\x9b31m[bold]\u202e\n"
    request = replace(
        REQUEST, model=replace(REQUEST.model, name=hostile), device=replace(REQUEST.device, name=hostile)
    )
    parts = (replace(PARTS[0], note=hostile),)
    report = replace(
        REPORT,
        request=request,
        estimate=replace(REPORT.estimate, parts=parts),
        advice=(Advice("note", hostile, hostile, hostile),),
        learned=hostile,
    )
    for width in (30, 80):
        shown = show(report, width, terminal=True)
        assert_harmless(shown)
        assert "[bold]" in shown.replace("\n", "")


def test_what_fits_and_a_small_model_in_mib() -> None:
    shown = show(replace(REPORT, verdict="fits", changes=(), speed=None, learned=""), 120)
    assert "one of these" not in shown
    assert "fits; 98.0 GiB expected, 101.3 GiB at most" in shown
    small = gib(0.01, 0.02, 0.03)
    estimate = Estimate((MemoryPart("weights", small),), small, small, small)
    assert show(replace(REPORT, estimate=estimate, verdict="fits"), 80).splitlines()[2].startswith("MiB")
