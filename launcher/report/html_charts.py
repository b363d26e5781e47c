"""Charts as SVG with texts as text, by matplotlib; colours are variables of the page's style sheet.

A chart comes in two widths, for a page and for a telephone. What is drawn is given as plain numbers. Without
matplotlib, nothing is drawn, and the page has the numbers alone.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import nan
from typing import TYPE_CHECKING, Any

from launcher.report.inline_svg import inline_svg
from launcher.text import clean_text

if TYPE_CHECKING or find_spec("matplotlib"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

DRAWS = find_spec("matplotlib") is not None

INK, FAINT, PAPER = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0a0a{number:02x}" for number in range(1, 16))
"""Stand for the page's colours `--s1` to `--s15`; 9 to 15 are for areas."""
COLOURS = {INK: "var(--ink)", FAINT: "var(--grid)", PAPER: "var(--paper)"} | {
    colour: f"var(--s{number})" for number, colour in enumerate(SERIES, 1)
}
"""Colours that are drawn, and what they become."""
WIDE, NARROW = 900, 340
"""Pixels."""
LANE = 22
"""Pixels of the height of a kind of events."""
ROW = 22
"""Pixels of the height of a bar, with the space to the next."""
HEADING = 28
"""Pixels above each panel, for what it shows."""
BELOW = 46
"""Pixels below the axes, for numbers and unit."""
STYLE: dict[Any, object] = {  # matplotlib's keys are a type of their own since 3.11
    "svg.fonttype": "none",
    "svg.hashsalt": "launch",
    "text.parse_math": False,
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "path.simplify_threshold": 0.5,
}
UNITS = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (3 * 60, 60, "minutes"), (0, 1, "seconds"))
"""From how many seconds on a span of time is shown in a unit."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line over time, a value for each of the chart's times."""

    name: str
    values: tuple[float | None, ...]
    colour: int
    """A number of SERIES, from 1 on."""
    dashed: bool = False
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    """A band around it."""


@dataclass(frozen=True, slots=True)
class EventMark:
    """Something that happened."""

    time: float
    """Seconds on the chart's axis."""
    text: str = ""
    """For the pointer; empty for none."""
    until: float | None = None
    """When it was over; the span is shaded."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Events of a kind, marked below the lines."""

    name: str
    marks: tuple[EventMark, ...]
    colour: int
    shape: str
    """A marker of matplotlib's."""
    is_break: bool = False
    """They are drawn through the lines too."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity over time."""

    label: str
    """Of its axis, with the unit."""
    lines: tuple[Curve, ...]
    height: int = 170


@dataclass(frozen=True, slots=True)
class TimeChart:
    """Quantities over time, below each other."""

    name: str
    title: str
    description: str
    times: tuple[float, ...]
    """Seconds since the start."""
    end: float
    panels: tuple[Panel, ...]
    lanes: tuple[Lane, ...] = ()


@dataclass(frozen=True, slots=True)
class BarChart:
    """Horizontal bars of shares, the first row on top."""

    name: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    """Label, and a share of 0 to 1 for each part."""
    colours: tuple[int, ...]
    """Of the parts."""


@dataclass(slots=True)
class Drawing:
    """A figure that grows downwards, with its tooltips."""

    width: int
    height: int
    left: int
    figure: Figure = field(init=False)
    tooltips: dict[str, str] = field(default_factory=dict)
    used: int = 0

    def __post_init__(self) -> None:
        """Make the figure, 72 dots an inch, so that a dot is a pixel."""
        self.figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=72)
        FigureCanvasSVG(self.figure)

    def add_axes(self, height: int, above: int = 10) -> Axes:
        """Add axes below those that there are."""
        self.used += above + height
        bottom = 1 - self.used / self.height
        width = self.width - self.left - 14
        return self.figure.add_axes(
            (self.left / self.width, bottom, width / self.width, height / self.height)
        )

    def render(self, name: str, title: str, description: str) -> str:
        """Return the drawing as an element."""
        output = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # letters that the measuring font lacks
            self.figure.savefig(output, format="svg", metadata={"Date": None}, transparent=True)
        return inline_svg(
            output.getvalue(), name, title, description, colours=COLOURS, tooltips=self.tooltips
        )


def draw_times(chart: TimeChart) -> tuple[str, str]:
    """Draw a chart for wide pages and for narrow ones; empty if it cannot be drawn."""
    if not DRAWS:
        return "", ""
    return render_times(chart, WIDE), render_times(chart, NARROW)


def render_times(chart: TimeChart, width: int) -> str:
    """Draw a chart over time in a width."""
    lanes = len(chart.lanes) * LANE
    height = sum(panel.height + HEADING for panel in chart.panels) + (lanes + 8 if lanes else 0) + BELOW
    with mpl.rc_context():
        prepare_style()
        left = (92 if width == WIDE else 84) if lanes else 60 if width == WIDE else 52
        drawing = Drawing(width, height, left)
        unit, name = choose_unit(chart.end)
        axes = [
            draw_panel(drawing.add_axes(panel.height, HEADING), panel, chart, unit) for panel in chart.panels
        ]
        for each in axes:
            draw_breaks(each, chart.lanes, unit)
        if lanes:
            axes.append(draw_lanes(drawing, drawing.add_axes(lanes, 8), chart.lanes, unit))
        for each in axes:
            each.set_xlim(0, max(chart.end / unit, 1e-3))
            each.xaxis.set_major_locator(MaxNLocator(9 if width == WIDE else 4, steps=[1, 2, 3, 5, 6, 10]))
            each.tick_params(axis="x", labelbottom=each is axes[-1])
        axes[-1].set_xlabel(f"{name} since the start")
        suffix = "w" if width == WIDE else "n"
        return drawing.render(f"{chart.name}-{suffix}", chart.title, chart.description)


def prepare_style() -> None:
    """Set the style of charts, whatever the user's own is."""
    mpl.rcdefaults()
    mpl.rcParams.update(STYLE)


def choose_unit(seconds: float) -> tuple[int, str]:
    """Return the unit of time for a span: its seconds, and its name."""
    return next((unit, name) for least, unit, name in UNITS if seconds >= least)


def draw_panel(axes: Axes, panel: Panel, chart: TimeChart, unit: int) -> Axes:
    """Draw the lines of one quantity."""
    times = [time / unit for time in chart.times]
    for line in panel.lines:
        colour = SERIES[line.colour - 1]
        if line.low and line.high:
            axes.fill_between(
                times, fill_gaps(line.low), fill_gaps(line.high), color=colour, alpha=0.22, linewidth=0
            )
        style = "--" if line.dashed else "-"
        lonely = len([value for value in line.values if value is not None]) < 3
        axes.plot(
            times,
            fill_gaps(line.values),
            style,
            color=colour,
            linewidth=1.6,
            marker="o" if lonely else "",
            markersize=4,
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_title(panel.label, loc="left", fontsize=12, pad=4, color=INK)
    return axes


def fill_gaps(values: Sequence[float | None]) -> list[float]:
    """Return numbers, and NaN, at which a line is interrupted, for None."""
    return [nan if value is None else value for value in values]


def draw_breaks(axes: Axes, lanes: Sequence[Lane], unit: int) -> None:
    """Draw spans, and lines for what interrupts, through the axes."""
    for lane in lanes:
        for mark in lane.marks if lane.is_break else ():
            colour = SERIES[lane.colour - 1]
            if mark.until is None:
                axes.axvline(mark.time / unit, color=colour, linewidth=1.2, linestyle=":")
            else:
                axes.axvspan(mark.time / unit, mark.until / unit, color=colour, alpha=0.18, linewidth=0)


def draw_lanes(drawing: Drawing, axes: Axes, lanes: Sequence[Lane], unit: int) -> Axes:
    """Draw the events, a row for each kind."""
    for row, lane in enumerate(lanes):
        colour = SERIES[lane.colour - 1]
        plain = [mark.time / unit for mark in lane.marks if not mark.text]
        axes.plot(plain, [row] * len(plain), lane.shape, color=colour, markersize=6, linestyle="none")
        for mark in lane.marks:
            if mark.text:
                group = f"mark-{len(drawing.tooltips)}"
                drawing.tooltips[group] = clean_text(mark.text, 300)
                axes.plot([mark.time / unit], [row], lane.shape, color=colour, markersize=8, gid=group)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return axes


def draw_bars(chart: BarChart) -> tuple[str, str]:
    """Draw stacked bars for wide pages and for narrow ones; empty if they cannot be drawn."""
    if not DRAWS:
        return "", ""
    return render_bars(chart, WIDE), render_bars(chart, NARROW)


def render_bars(chart: BarChart, width: int) -> str:
    """Draw stacked bars in a width."""
    tall = len(chart.rows) * ROW
    with mpl.rc_context():
        prepare_style()
        drawing = Drawing(width, tall + 10 + BELOW, 150 if width == WIDE else 104)
        axes = drawing.add_axes(tall)
        left = [0.0] * len(chart.rows)
        for part, number in enumerate(chart.colours):
            widths = [100 * shares[part] for _, shares in chart.rows]
            axes.barh(
                range(len(left)), widths, 0.72, left, color=SERIES[number - 1], edgecolor=PAPER, linewidth=0.8
            )
            left = [begin + more for begin, more in zip(left, widths, strict=True)]
        longest = 24 if width == WIDE else 16
        axes.set_yticks(range(len(left)), [clean_text(label, longest) for label, _ in chart.rows])
        axes.set_ylim(len(left) - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(10 if width == WIDE else 4))
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("% of its time")
        suffix = "w" if width == WIDE else "n"
        return drawing.render(f"{chart.name}-{suffix}", chart.title, chart.description)


def name_colours(names: Sequence[str], colours: Mapping[str, int]) -> tuple[int, ...]:
    """Return the colours of parts by their names."""
    return tuple(colours[name] for name in names)
