"""The charts of a page by matplotlib, as SVG with texts as text; without matplotlib there are none.

A chart has one width and a viewBox: the page scales it. Its colours are those of light paper.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from launcher.report.timeline import ACTIVITIES, Bins, RunAccount, Series, bin_values, find_spread, share_time
from launcher.text import clean_text, count_things
from launcher.watch.metrics import METRICS

if TYPE_CHECKING or find_spec("matplotlib"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

_WIDTH = 900
"""Pixels, at 72 dots an inch."""
_LINES = ("#0072b2", "#d55e00", "#00875f", "#b85c94", "#b87d00", "#2f93cc", "#6b6f76", "#5b3f9e")
"""Colours of lines; Okabe and Ito's, of which some are darkened to be read on white."""
_AREAS = ("#0072b2", "#ecc94b", "#c44a00", "#4fc3a1", "#9ccdf0", "#80868f", "#7b2d8e")
"""Light ones beside dark ones: they differ for eyes that see no red or no green, and in print."""
_LANES = {
    "hang": (_LINES[1], "X"),
    "straggler": (_LINES[4], "D"),
    "restart": (_LINES[3], "^"),
    "checkpoint": (_LINES[2], "o"),
    "requeue": (_LINES[7], "s"),
}
"""Colour and marker of an event, by kind."""
_STYLE = Path(__file__).with_name("html_page") / "charts.mplstyle"
_UNITS = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (3 * 60, 60, "minutes"), (0, 1, "seconds"))
"""From how many seconds on a span of time is shown in a unit."""
_FACTORS = {"share": 100, "bytes": 1 / (1 << 30)}
"""What a value is multiplied by in a chart, by its unit."""
_MOST_LINES = 8
"""Ranks that have a line of their own; of more, the spread is shown."""
_MOST_BARS = 24
"""Ranks that have a bar of their own, the slowest; of others the mean is shown."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with what explains it."""

    caption: str
    title: str
    """What it shows, in words."""
    svg: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Curve:
    """A line over time: a value for each bin, NaN where it is interrupted."""

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
        figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def inline_svg(document: bytes, name: str, title: str) -> str:
    """Return an SVG of matplotlib's as an element of a page: with identifiers of its own, and a title."""
    text = document.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    size = re.compile(r' (?:width|height)="[\d.]+pt"')
    return size.sub("", text, count=2).replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _save(figure: "Figure", name: str, title: str) -> str:
    """Return a figure as an element."""
    mpl.rcParams["svg.hashsalt"] = name
    output = io.BytesIO()
    figure.savefig(output, format="svg", metadata={"Date": None}, transparent=True)
    return inline_svg(output.getvalue(), name, title)


def _format(value: float) -> str:
    """Return a number with four digits; a dash for none."""
    return "-" if np.isnan(value) else f"{value:.4g}"


def draw_steps(account: RunAccount, bins: Bins) -> Chart | None:
    """Return the step time over time, with what happened."""
    low, middle, high = find_spread(bin_values(account, bins, lambda rank: rank.p50), bins.count)
    worst = find_spread(bin_values(account, bins, lambda rank: rank.p99), bins.count)[2]
    if np.isnan(middle).all():
        return None
    counts = [(kind, sum(event.kind == kind for event in account.events)) for kind in _LANES]
    told = ", ".join(count_things(number, kind) for kind, number in counts if number) or "no events"
    title = f"The median step takes {_format(float(np.nanmedian(middle)))} s; {told}."
    curves = (
        _Curve("slow steps (p99), 95th percentile of the ranks", worst, _LINES[1], dashed=True),
        _Curve("median step (p50), with the spread over ranks", middle, _LINES[0], band=(low, high)),
    )
    svg = _draw_times("steps", title, account, bins, {"time of a step (s)": curves}, shows_events=True)
    return Chart("Time of a step over the run", title, svg)


def draw_quantities(account: RunAccount, bins: Bins, *, of_gpus: bool) -> Chart | None:
    """Return curves of quantities of each rank, those that nodes reported; of many ranks their spread."""
    found = {}
    for metric in METRICS:
        if metric.chart and metric.is_gpu is of_gpus:
            values = bin_values(account, bins, metric.read, _FACTORS.get(metric.unit, 1.0))
            if any(np.nansum(line) for line in values.values()):
                found[metric.chart] = values
    if not found:
        return None
    ranks = sorted({rank for values in found.values() for rank in values})
    panels: dict[str, Sequence[_Curve]] = {}
    words = []
    for label, values in found.items():
        low, middle, high = find_spread(values, bins.count)
        words.append(f"{label}: median {_format(float(np.nanmedian(middle)))}")
        summed = f"median of {count_things(len(ranks), 'rank')}, with 5th to 95th percentile"
        panels[label] = [_Curve(summed, middle, _LINES[0], band=(low, high))]
        if len(ranks) <= _MOST_LINES:
            none = np.full(bins.count, np.nan)
            panels[label] = [
                _Curve(f"rank {rank}", values.get(rank, none), _LINES[number], dashed=number >= 4)
                for number, rank in enumerate(ranks)
            ]
    title = "; ".join(words)
    svg = _draw_times("gpu" if of_gpus else "cpu", title, account, bins, panels)
    caption = "Each rank over the run" if len(ranks) <= _MOST_LINES else "All ranks over the run"
    return Chart(caption, title, svg)


def _draw_times(
    name: str,
    title: str,
    account: RunAccount,
    bins: Bins,
    panels: Mapping[str, Sequence[_Curve]],
    *,
    shows_events: bool = False,
) -> str:
    """Draw quantities over time below each other, events below them. The legend is that of the first."""
    begin, span = account.begin, account.end - account.begin
    events = [event for event in account.events if begin <= event.time <= account.end and shows_events]
    kinds = [kind for kind in _LANES if any(event.kind == kind for event in events)]
    heights = [230.0 if len(panels) == 1 else 150.0] * len(panels) + [22.0 * len(kinds) + 6] * bool(kinds)
    unit, unit_name = next((unit, word) for least, unit, word in _UNITS if span >= least)
    times = [at / unit for at in bins.list_centers()]
    with _drawing(sum(heights) + 60) as figure:
        grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
        axes: list[Axes] = list(grid[:, 0])
        for each, (label, curves) in zip(axes, panels.items(), strict=False):
            for curve in curves:
                if curve.band:
                    each.fill_between(times, *curve.band, color=curve.colour, alpha=0.22, linewidth=0)
                lonely = np.isfinite(curve.values).sum() < 3
                (line,) = each.plot(times, curve.values, "--" if curve.dashed else "-", label=curve.name)
                line.set(color=curve.colour, linewidth=1.6, marker="o" if lonely else "", markersize=4)
            each.set_ylim(bottom=0)
            each.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
            each.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            each.set_title(label, loc="left", fontsize=12)
        for event in events:
            colour, marker = _LANES[event.kind]
            start = (event.time - begin) / unit
            axes[-1].plot([start], [kinds.index(event.kind)], marker, color=colour, markersize=8)
            for each in axes[:-1]:
                if event.until is not None:
                    until = (min(event.until, account.end) - begin) / unit
                    each.axvspan(start, until, color=colour, alpha=0.18, lw=0)
                elif event.kind in ("restart", "requeue"):
                    each.axvline(start, color=colour, linewidth=1.2, linestyle=":")
        if kinds:
            axes[-1].set_ylim(len(kinds) - 0.5, -0.5)
            axes[-1].set_yticks(range(len(kinds)), [f"{kind}s" for kind in kinds])
            axes[-1].tick_params(axis="y", length=0)
        axes[-1].set_xlim(0, max(span / unit, 1e-3))
        axes[-1].xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 3, 5, 6, 10]))
        axes[-1].set_xlabel(f"{unit_name} since the start")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
        return _save(figure, name, title)


def draw_time_shares(account: RunAccount) -> Chart | None:
    """Return where the time of each rank went; of many, of the slowest, and of all others together."""
    times = share_time(account)
    if not times:
        return None
    rows = [(f"rank {one.rank} {one.host}", one.seconds / one.seconds.sum()) for one in times[:_MOST_BARS]]
    note = ""
    if rest := times[_MOST_BARS:]:
        seconds = np.sum([one.seconds for one in rest], axis=0)
        rows.append((count_things(len(rest), "other rank"), seconds / seconds.sum()))
        note = f"Of {len(times)} ranks, those that wait least for others are shown: others wait for these."
    else:
        order = {f"rank {one.rank} {one.host}": one.rank for one in times}
        rows.sort(key=lambda row: order[row[0]])
    total = np.sum([one.seconds for one in times], axis=0)
    parts = zip(ACTIVITIES, total / total.sum(), strict=True)
    told = ", ".join(f"{name} {100 * share:.0f}%" for name, share in parts if share >= 0.005)
    title = f"All ranks together: {told}."
    with _drawing(22 * len(rows) + 90) as figure:
        axes = figure.subplots()
        places, left = range(len(rows)), np.zeros(len(rows))
        for at, activity in enumerate(ACTIVITIES):
            widths = np.array([100 * shares[at] for _, shares in rows])
            if widths.max() >= 0.05:
                bars = axes.barh(places, widths, 0.72, left, label=activity, color=_AREAS[at])
                for bar in bars:
                    bar.set(edgecolor="white", linewidth=0.8)
            left += widths
        axes.set_yticks(places, [clean_text(label, 24) for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("% of its time")
        figure.legend(loc="outside upper left", ncols=4)
        return Chart("Share of the time of each rank", title, _save(figure, "time", title), note)
