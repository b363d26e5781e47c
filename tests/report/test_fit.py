"""The table of a report on memory, at several widths, without colours and block characters."""

import io
import re
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console

from launcher.fit.advice import Advice
from launcher.fit.choice import FitReport, assess
from launcher.fit.training import Learned, Range
from launcher.report.fit import print_fit
from tests.fit.made_requests import NODE, REQUEST
from tests.fuzzing import Terminal, assert_harmless

SMALL_NODE = replace(NODE, memory_kib=256 << 20)
REPORT = assess(replace(REQUEST, tokens=1e12, node=SMALL_NODE), Learned(0.97, 0.01, 1, "tiny/1"))


def show(report: FitReport, width: int, *, terminal: bool = False) -> str:
    stream = Terminal() if terminal else io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, highlight=False)
    print_fit(console, report)
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def test_a_report_in_a_pipe() -> None:
    lines = show(REPORT, 160).splitlines()
    starts = ["memory of each GPU", "llama7b, 6,738,415,616 parameters", "GiB", "weights", "total"]
    starts += ["capacity", "headroom", "it fits with one of these:", "each node", "CPU memory", "expected"]
    at = [next(n for n, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert at == sorted(at) and f"{REPORT.estimate.total.low / (1 << 30):.1f} GiB at least" in lines[0]
    assert all(f"  {' '.join(change.settings)}  (at most " in "\n".join(lines) for change in REPORT.changes)


def test_nothing_is_wider_than_the_terminal() -> None:
    for width in (20, 34, 43, 44, 60, 71, 72, 80, 120, 250):
        shown = show(REPORT, width, terminal=True)
        assert_harmless(shown)
        plain = re.sub(r"\x1b\[[^m]*m", "", shown)
        assert max(cell_len(line) for line in plain.splitlines()) <= width
        joined = " ".join(plain.split())
        assert "does not fit" in joined and REPORT.changes[0].settings[0] in joined
        has_range = ["GiB", "low", "expected", "high"] in [line.split() for line in plain.splitlines()]
        assert has_range is (44 <= width < 72) or width >= 72
        assert ("sharded: nothing" in plain.partition("GiB  ")[2]) is (width >= 72)
        assert width >= 72 or "CPU memory: " in joined


def test_texts_of_others_are_harmless() -> None:
    hostile = "\x1b[2J\x9b31m[bold]\u202e\n"
    names = {"model": replace(REQUEST.model, name=hostile), "device": replace(REQUEST.device, name=hostile)}
    parts = (replace(REPORT.estimate.parts[0], note=hostile),)
    report = replace(
        REPORT,
        request=replace(REQUEST, **names),  # type: ignore[arg-type]  # fields by name
        estimate=replace(REPORT.estimate, parts=parts),
        advice=(Advice("note", hostile, hostile, hostile),),
        learned=hostile,
    )
    for width in (30, 80):
        shown = show(report, width, terminal=True)
        assert_harmless(shown)
        assert "[bold]" in shown.replace("\n", "")


def test_what_fits_and_a_small_model_in_mib() -> None:
    small = replace(REPORT.estimate, total=Range(1 << 20, 2 << 20, 3 << 20))
    shown = show(replace(REPORT, verdict="fits", changes=(), estimate=small), 120)
    assert "one of these" not in shown and ": fits; 2.0 MiB expected, 3.0 MiB at most" in shown
    assert shown.splitlines()[2].startswith("MiB")
