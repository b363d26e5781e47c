"""The report's charts: steps with events, where the time went, GPUs, CPUs and memory; with their figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.report.html_charts import (
    Curve,
    EventMark,
    Lane,
    Panel,
    TimeChart,
    draw_times,
)
from launcher.report.html_page import Head, HtmlTable, LegendKey, Section, make_chart, pair_widths
from launcher.report.run_account import RunAccount
from launcher.report.run_events import KINDS, Event
from launcher.report.time_series import (
    Bins,
    Spread,
    Take,
    bin_values,
    choose_bins,
    fill_line,
    find_rank_spread,
    is_sound,
)
from launcher.text import clean_text, count_things, describe_time
from launcher.watch.watch_model import GpuSample

MOST_LINES = 8
"""Ranks that have a line of their own; of more, the spread is shown."""
MOST_EVENTS = 24
"""Rows of the table of events."""
MOST_MARKS = 120
"""Marks of a kind of events; of more, those that would touch the one before are left out."""
MOST_FIGURES = 16
"""Rows of the table of a chart over time."""
GIB = 1 << 30
SHAPES = {
    "hang": ("hangs", 2, "X", True),
    "straggler": ("stragglers", 5, "D", False),
    "restart": ("restarts", 4, "^", True),
    "requeue": ("requeues", 8, "s", True),
    "checkpoint": ("checkpoints", 3, "o", False),
}
"""Name, colour and marker of each kind of events, and whether it interrupts the steps."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that is reported of each rank over time."""

    label: str
    """With its unit."""
    take: Take


def take_gpu(name: str, factor: float = 1.0) -> Take:
    """Return what takes a field of a rank's GPU."""

    def take(state: object) -> float | None:
        gpu: GpuSample | None = getattr(state, "gpu", None)
        value = getattr(gpu, name, None)
        return None if value is None else value * factor

    return take


def take_field(name: str, factor: float = 1.0) -> Take:
    """Return what takes a field of a rank's state."""

    def take(state: object) -> float | None:
        value = getattr(state, name)
        return None if value is None else value * factor

    return take


GPU = (
    Quantity("GPU utilization (%)", take_gpu("utilization", 100)),
    Quantity("SM activity (%)", take_gpu("sm_activity", 100)),
    Quantity("GPU memory in use (GiB)", take_gpu("memory_used", 1 / GIB)),
    Quantity("GPU power (W)", take_gpu("power")),
    Quantity("GPU temperature (°C)", take_gpu("temperature")),
    Quantity("SM clock (MHz)", take_gpu("sm_clock")),
)
CPU = (
    Quantity("CPU in use (cores)", take_field("cpu")),
    Quantity("Threads waiting for a core (seconds a second)", take_field("run_delay")),
    Quantity("Memory in use, RSS (GiB)", take_field("rss", 1 / GIB)),
    Quantity("Major page faults (per second)", take_field("major_faults")),
)


def make_steps(account: RunAccount) -> Section:
    """Return the step time over time, with what happened."""
    bins = choose_bins(account.samples, account.begin, account.end)
    middle = bin_values(account.samples, bins, take_field("p50"))
    slow = bin_values(account.samples, bins, take_field("p99"))
    spread, worst = find_rank_spread(middle, bins.count), find_rank_spread(slow, bins.count)
    lanes = tuple(make_lanes(account.events, account.begin, account.end))
    if not middle:
        return Section("steps", "Step time", tables=make_event_tables(account))
    lines = (
        Curve("p99", worst.high, 2, dashed=True),
        Curve("p50", spread.middle, 1, low=spread.low, high=spread.high),
    )
    chart = TimeChart(
        name="steps",
        title="Time of a step",
        description=describe_steps(spread, account.events),
        times=tuple(bins.list_centers()),
        end=account.end - account.begin,
        panels=(Panel("time of a step (s)", lines, 230),),
        lanes=lanes,
    )
    legend = [LegendKey("median step (p50), with the spread over ranks", 1, "line")]
    legend += [LegendKey("slow steps (p99), 95th percentile of the ranks", 2, "dashed")]
    legend += [LegendKey("hang", 2, "span")] if any(event.kind == "hang" for event in account.events) else []
    heads = (Head("time since the start"), Head("p50 (s)", True), Head("p99 (s)", True))
    rows = pick_rows(bins, (spread.middle, worst.high))
    table = HtmlTable("Time of a step", heads, tuple(rows))
    figure = make_chart("Time of a step over the run", pair_widths(draw_times(chart)), legend, table)
    return Section("steps", "Step time", figures=(figure,), tables=make_event_tables(account))


def describe_steps(spread: Spread, events: Sequence[Event]) -> str:
    """Say what the chart of steps shows."""
    known = [value for value in spread.middle if value is not None]
    counts = [(SHAPES[kind][0], sum(event.kind == kind for event in events)) for kind in KINDS]
    told = ", ".join(f"{number} {name}" for name, number in counts if number) or "no events"
    return f"The median step takes {format_figure(median(known))} s; {told}."


def make_lanes(events: Sequence[Event], begin: float, end: float) -> Iterator[Lane]:
    """Give the kinds of events that occurred."""
    for kind in KINDS:
        name, colour, shape, is_break = SHAPES[kind]
        found = [event for event in events if event.kind == kind and begin <= event.time <= end]
        nearest = (end - begin) / MOST_MARKS if len(found) > MOST_MARKS else 0.0
        marks: list[EventMark] = []
        for event in found:
            at = event.time - begin
            if not marks or at - marks[-1].time >= nearest:
                until = None if event.until is None else min(event.until, end) - begin
                marks.append(EventMark(at, event.text, until))
        if marks:
            yield Lane(name, tuple(marks), colour, shape, is_break)


def make_event_tables(account: RunAccount) -> tuple[HtmlTable, ...]:
    """Return the events in words."""
    told = [event for event in account.events if event.text]
    rows = tuple(
        (describe_time(max(0.0, event.time - account.begin)), event.kind, clean_text(event.text, 600))
        for event in told[:MOST_EVENTS]
    )
    left = f", the first {MOST_EVENTS} of {len(told)}" if len(told) > MOST_EVENTS else ""
    heads = (Head("time since the start"), Head("event"), Head("what"))
    return (HtmlTable(f"Events{left}", heads, rows),) if rows else ()


def make_resources(account: RunAccount, name: str, title: str, quantities: Sequence[Quantity]) -> Section:
    """Return curves of quantities of each rank, those that nodes reported."""
    bins = choose_bins(account.samples, account.begin, account.end)
    found = [(one, bin_values(account.samples, bins, one.take)) for one in quantities]
    found = [(one, values) for one, values in found if any(any(line.values()) for line in values.values())]
    if not found:
        return Section(name, title)
    ranks = sorted({rank for _, values in found for rank in values})
    spreads = [find_rank_spread(values, bins.count) for _, values in found]
    panels = [
        Panel(one.label, tuple(make_lines(values, spread, ranks, bins.count)), 130)
        for (one, values), spread in zip(found, spreads, strict=True)
    ]
    chart = TimeChart(
        name=name,
        title=title,
        description=describe_resources(found, spreads),
        times=tuple(bins.list_centers()),
        end=account.end - account.begin,
        panels=tuple(panels),
    )
    labels = [one.label for one, _ in found]
    heads = (Head("time since the start"), *(Head(f"{label}, median", True) for label in labels))
    table = HtmlTable(title, heads, tuple(pick_rows(bins, [spread.middle for spread in spreads])))
    caption = "Each rank over the run" if len(ranks) <= MOST_LINES else "All ranks over the run"
    figure = make_chart(caption, pair_widths(draw_times(chart)), make_rank_legend(ranks), table)
    return Section(name, title, figures=(figure,))


def make_lines(
    values: dict[int, dict[int, float]], spread: Spread, ranks: Sequence[int], count: int
) -> Iterator[Curve]:
    """Give a line for each of a few ranks, or the median of many with their spread."""
    if len(ranks) > MOST_LINES:
        yield Curve("median", spread.middle, 1, low=spread.low, high=spread.high)
        return
    for number, rank in enumerate(ranks):
        line = fill_line(values.get(rank, {}), count)
        yield Curve(f"rank {rank}", line, number % MOST_LINES + 1, dashed=number >= 4)


def make_rank_legend(ranks: Sequence[int]) -> list[LegendKey]:
    """Return the legend of `make_lines`."""
    if len(ranks) > MOST_LINES:
        return [
            LegendKey(f"median of {count_things(len(ranks), 'rank')}, with 5th to 95th percentile", 1, "line")
        ]
    return [
        LegendKey(f"rank {rank}", number + 1, "dashed" if number >= 4 else "line")
        for number, rank in enumerate(ranks)
    ]


def describe_resources(
    found: Sequence[tuple[Quantity, dict[int, dict[int, float]]]], spreads: Sequence[Spread]
) -> str:
    """Say what the chart of resources shows."""
    parts = []
    for (one, _), spread in zip(found, spreads, strict=True):
        known = [value for value in spread.middle if value is not None]
        parts.append(f"{one.label}: median {format_figure(median(known))}")
    return "; ".join(parts) + "."


def pick_rows(bins: Bins, columns: Sequence[Sequence[float | None]]) -> Iterator[tuple[str, ...]]:
    """Give rows of a table for bins with something in them, evenly over the run."""
    filled = [at for at in range(bins.count) if any(column[at] is not None for column in columns)]
    most = min(MOST_FIGURES, len(filled))
    centers = bins.list_centers()
    for number in range(most):
        at = filled[number * (len(filled) - 1) // max(most - 1, 1)]
        yield describe_time(centers[at]), *(format_figure(column[at]) for column in columns)


def format_figure(value: float | None) -> str:
    """Return a number with four digits; a dash for none."""
    return f"{value:.4g}" if is_sound(value) and value is not None else "-"
