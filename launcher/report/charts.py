"""The charts of a page by matplotlib, as SVG with texts as text; a page without matplotlib has none.

A chart has one width and a viewBox: the page scales it. Its colours are those of light paper.
"""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.report.timeline import EVENT_KINDS, Event, Series
from launcher.text import clean_text, tame_text

if TYPE_CHECKING or find_spec("matplotlib"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

WIDTH = 900
"""Pixels, at 72 dots an inch."""
LINES = ("#0072b2", "#d55e00", "#00875f", "#b85c94", "#b87d00", "#2f93cc", "#6b6f76", "#5b3f9e")
"""Colours of lines and events; Okabe and Ito's, of which some are darkened to be read on white."""
AREAS = ("#0072b2", "#ecc94b", "#c44a00", "#4fc3a1", "#9ccdf0", "#80868f", "#7b2d8e")
"""Light ones beside dark ones: they differ for eyes that see no red or no green, and in print."""
_STYLE = Path(__file__).with_name("html_page") / "charts.mplstyle"
_UNITS = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (3 * 60, 60, "minutes"), (0, 1, "seconds"))
"""From how many seconds on a span of time is shown in a unit."""
_MOST_MARKS = 120
"""Marks of a kind of events; of more, those that would touch the one before are left out."""
_LANES = {  # name, colour, marker, and whether it is drawn through the lines too
    "hang": ("hangs", LINES[1], "X", True),
    "straggler": ("stragglers", LINES[4], "D", False),
    "restart": ("restarts", LINES[3], "^", True),
    "requeue": ("requeues", LINES[7], "s", True),
    "checkpoint": ("checkpoints", LINES[2], "o", False),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A line over time: a value for each of the chart's times, NaN where it is interrupted."""

    name: str
    values: Series
    colour: str
    dashed: bool = False
    band: tuple[Series, Series] | None = None
    """The low and the high end of what is shaded around it."""


@contextmanager
def _drawing(height: float) -> Iterator["Figure"]:
    """Give a figure of our own style, whatever the user's is."""
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the measuring font lacks
        mpl.rcdefaults()
        mpl.rcParams.update(mpl.rc_params_from_file(_STYLE, use_default_template=False))
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def inline_svg(document: bytes, name: str, title: str) -> str:
    """Return an SVG of matplotlib's as an element of a page: with identifiers of its own, and a title."""
    text = document.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    size = re.compile(r' (?:width|height)="[\d.]+pt"')
    return size.sub("", text, count=2).replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _save(figure: "Figure", name: str, title: str, tooltips: Sequence[str] = ()) -> str:
    """Return a figure as an element; `tooltips` belong to the groups `mark-0`, `mark-1` and so on."""
    mpl.rcParams["svg.hashsalt"] = name
    output = io.BytesIO()
    figure.savefig(output, format="svg", metadata={"Date": None}, transparent=True)
    svg = inline_svg(output.getvalue(), name, title)
    for number, text in enumerate(tooltips):
        group = f'<g id="{name}-mark-{number}">'
        svg = svg.replace(group, f"{group}<title>{escape(tame_text(clean_text(text, 300)))}</title>")
    return svg


def draw_times(
    name: str,
    title: str,
    times: Sequence[float],
    end: float,
    panels: Sequence[tuple[str, Sequence[Curve]]],
    events: Sequence[Event] = (),
) -> str:
    """Draw quantities over time below each other, events below them; `times` and `end` count from the start.

    Each panel is a label with its unit, and lines. The legend is that of the first panel.
    """
    kinds = [kind for kind in EVENT_KINDS if any(event.kind == kind for event in events)]
    heights = [230.0 if len(panels) == 1 else 150.0] * len(panels) + (
        [22.0 * len(kinds) + 6] if kinds else []
    )
    unit, unit_name = next((unit, word) for least, unit, word in _UNITS if end >= least)
    tooltips: list[str] = []
    with _drawing(sum(heights) + 60) as figure:
        grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
        axes: list[Axes] = list(grid[:, 0])
        for each, (label, curves) in zip(axes, panels, strict=False):
            for curve in curves:
                _draw_curve(each, [at / unit for at in times], curve)
            each.set_ylim(bottom=0)
            each.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
            each.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            each.set_title(label, loc="left", fontsize=12)
        for kind in kinds:
            _, colour, _, breaks = _LANES[kind]
            for event in events:
                for each in axes[: len(panels)] if breaks and event.kind == kind else ():
                    if event.until is None:
                        each.axvline(event.time / unit, color=colour, linewidth=1.2, linestyle=":")
                    else:
                        each.axvspan(event.time / unit, event.until / unit, color=colour, alpha=0.18, lw=0)
        for row, kind in enumerate(kinds):
            found = [event for event in events if event.kind == kind]
            _draw_lane(axes[-1], row, kind, found, end, unit, tooltips)
        if kinds:
            axes[-1].set_ylim(len(kinds) - 0.5, -0.5)
            axes[-1].set_yticks(range(len(kinds)), [_LANES[kind][0] for kind in kinds])
            axes[-1].tick_params(axis="y", length=0)
        axes[-1].set_xlim(0, max(end / unit, 1e-3))
        axes[-1].xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 3, 5, 6, 10]))
        axes[-1].set_xlabel(f"{unit_name} since the start")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
        return _save(figure, name, title, tooltips)


def _draw_curve(axes: "Axes", times: Sequence[float], curve: Curve) -> None:
    if curve.band:
        axes.fill_between(times, *curve.band, color=curve.colour, alpha=0.22, linewidth=0)
    lonely = (curve.values == curve.values).sum() < 3
    axes.plot(
        times,
        curve.values,
        "--" if curve.dashed else "-",
        label=curve.name,
        color=curve.colour,
        linewidth=1.6,
        marker="o" if lonely else "",
        markersize=4,
    )


def _draw_lane(
    axes: "Axes", row: int, kind: str, found: Sequence[Event], end: float, unit: float, tooltips: list[str]
) -> None:
    """Mark the events of one kind, those with a text as groups of their own."""
    _, colour, marker, _ = _LANES[kind]
    nearest = end / _MOST_MARKS if len(found) > _MOST_MARKS else 0.0
    last = -1.0 - nearest
    for event in found:
        if event.time - last < nearest:
            continue
        last = event.time
        group = f"mark-{len(tooltips)}" if event.text else None
        size = 8 if event.text else 6
        axes.plot([event.time / unit], [row], marker, color=colour, markersize=size, gid=group)
        tooltips += [event.text] if event.text else []


def draw_bars(name: str, title: str, rows: Sequence[tuple[str, Series]], parts: dict[str, str]) -> str:
    """Draw stacked bars of shares, 0 to 1, the first row on top; `parts` are names with their colours."""
    with _drawing(22 * len(rows) + 90) as figure:
        axes = figure.subplots()
        left = [0.0] * len(rows)
        for part, (label, colour) in enumerate(parts.items()):
            widths = [100 * float(shares[part]) for _, shares in rows]
            places = range(len(rows))
            axes.barh(places, widths, 0.72, left, label=label, color=colour, edgecolor="white", linewidth=0.8)
            left = [begin + more for begin, more in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [clean_text(label, 24) for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("% of its time")
        figure.legend(loc="outside upper left", ncols=4)
        return _save(figure, name, title)
