"""The charts of a page by matplotlib, as SVG with texts as text; without matplotlib there are none.

A chart has one width and a viewBox: the page scales it. Its colours are those of light paper. Times are
seconds since the epoch.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from launcher.text import clean_text, count_things
from launcher.watch.metrics import METRICS
from launcher.watch.model import NodeReport, Rank

if TYPE_CHECKING or find_spec("matplotlib"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

Series = NDArray[np.float64]

_WIDTH = 900
"""Pixels, at 72 dots an inch."""
_LINES = ("#0072b2", "#d55e00", "#00875f", "#b85c94", "#b87d00", "#2f93cc", "#6b6f76", "#5b3f9e")
"""Colours of lines; Okabe and Ito's, of which some are darkened to be read on white."""
_AREAS = ("#0072b2", "#ecc94b", "#c44a00", "#4fc3a1", "#9ccdf0", "#80868f", "#7b2d8e")
"""Light ones beside dark ones: they differ for eyes that see no red or no green, and in print."""
_EVENTS = dict(zip(("hang", "straggler", "restart", "checkpoint", "requeue"), _LINES[1:], strict=False))
"""Colour of an event, by kind."""
_STYLE = Path(__file__).with_name("html_page") / "charts.mplstyle"
_UNITS = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (3 * 60, 60, "minutes"), (0, 1, "seconds"))
"""From how many seconds on a span of time is shown in a unit."""
_FACTORS = {"share": 100, "bytes": 1 / (1 << 30)}
"""What a value is multiplied by in a chart, by its unit."""
_MOST_LINES = 8
"""Ranks that have a line of their own; of more, the spread is shown."""
_MOST_BARS = 24
"""Ranks that have a bar of their own, the slowest; of others the mean is shown."""


_MOST_BINS = 160
"""Bins of a chart: more than one for each six pixels of it are not told apart."""
_LARGEST_VALUE = 1e15
"""Numbers above this are damage: no bytes, seconds or watts of a rank."""
_LONGEST_GAP = 3.0
"""Intervals between two reports that count as time of the later one; what is longer is a gap."""
_ACTIVITIES = ("compute", "waiting for others", "data", "saving", "evaluating", "starting", "hanging")
"""Where a rank's time goes, in the order in which the chart has it; waiting that is not known is compute."""
_PHASES = {
    **dict.fromkeys(("starting", "joining", "compiling"), "starting"),
    **dict.fromkeys(("ended", "exited", "unwatched"), ""),
    "saving": "saving",
    "evaluating": "evaluating",
}
"""Phases that take all of a rank's time, with the activity that they are; none for a rank that is gone."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    kind: str
    """`hang`, `straggler`, `restart`, `checkpoint` or `requeue`."""
    time: float
    text: str
    until: float | None = None
    """When it was over; None if it took no time worth showing."""


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


class Charts:
    """Draws what nodes reported of a run, and the events, from its begin to its end."""

    def __init__(
        self, samples: Sequence[NodeReport], events: Sequence[Event], begin: float, end: float
    ) -> None:
        """Choose bins as fine as the reports are dense, _MOST_BINS at most; there is one at least."""
        self.samples, self.events, self.begin, self.end = samples, events, begin, end
        self.nodes: dict[str, list[NodeReport]] = {}
        for sample in samples:
            self.nodes.setdefault(sample.host, []).append(sample)
        pairs = [pair for reports in self.nodes.values() for pair in pairwise(reports)]
        gaps = [later.time - earlier.time for earlier, later in pairs if later.time > earlier.time]
        self.interval = max(median(gaps), 0.1) if gaps else 5.0
        """The usual seconds between two reports of a node."""
        span = max(end - begin, 1.0)
        self.count = max(1, min(_MOST_BINS, int(span / self.interval)))
        self.width = span / self.count
        """Of a bin, in seconds."""

    def bin_values(self, read: Callable[[Rank], float | None], factor: float = 1.0) -> dict[int, Series]:
        """Return for each rank the mean of a quantity in each bin, by rank; NaN where it was not reported.

        Values that cannot be are left out.
        """
        totals: dict[int, Series] = {}
        counts: dict[int, Series] = {}
        for sample in self.samples:
            place = (sample.time - self.begin) / self.width
            for state in sample.ranks if 0 <= place < self.count + 1 else ():
                value, at = read(state), min(int(place), self.count - 1)
                if value is not None and isfinite(value) and 0 <= value * factor < _LARGEST_VALUE:
                    totals.setdefault(state.rank, np.zeros(self.count))[at] += value * factor
                    counts.setdefault(state.rank, np.zeros(self.count))[at] += 1
        with np.errstate(invalid="ignore"):
            return {rank: totals[rank] / counts[rank] for rank in sorted(totals)}

    def find_spread(self, values: Mapping[int, Series]) -> Series:
        """Return the 5th percentile, the median and the 95th over the ranks in each bin: three rows.

        Each is the value of one rank, the nearest; NaN where there is none.
        """
        spread = np.full((3, self.count), np.nan)
        if values:
            table = np.array(list(values.values()))
            known = ~np.isnan(table).all(axis=0)
            spread[:, known] = np.nanquantile(table[:, known], (0.05, 0.5, 0.95), axis=0, method="nearest")
        return spread

    def draw_steps(self) -> Chart | None:
        """Return the step time over time, with what happened."""
        low, middle, high = self.find_spread(self.bin_values(lambda rank: rank.p50))
        worst = self.find_spread(self.bin_values(lambda rank: rank.p99))[2]
        if np.isnan(middle).all():
            return None
        counts = [(kind, sum(event.kind == kind for event in self.events)) for kind in _EVENTS]
        told = ", ".join(count_things(number, kind) for kind, number in counts if number) or "no events"
        title = f"The median step takes {_format(float(np.nanmedian(middle)))} s; {told}."
        curves = (
            _Curve("slow steps (p99), 95th percentile of the ranks", worst, _LINES[1], dashed=True),
            _Curve("median step (p50), with the spread over ranks", middle, _LINES[0], band=(low, high)),
        )
        svg = self._draw_times("steps", title, {"time of a step (s)": curves}, self.events)
        return Chart("Time of a step over the run", title, svg)

    def draw_quantities(self, *, of_gpus: bool) -> Chart | None:
        """Return curves of quantities of each rank, those that nodes reported; of many ranks their spread."""
        found = {}
        for metric in METRICS:
            if metric.chart and metric.is_gpu is of_gpus:
                values = self.bin_values(metric.read, _FACTORS.get(metric.unit, 1.0))
                if any(np.nansum(line) for line in values.values()):
                    found[metric.chart] = values
        if not found:
            return None
        ranks = sorted({rank for values in found.values() for rank in values})
        none = np.full(self.count, np.nan)
        panels: dict[str, Sequence[_Curve]] = {}
        words = []
        for label, values in found.items():
            low, middle, high = self.find_spread(values)
            words.append(f"{label}: median {_format(float(np.nanmedian(middle)))}")
            summed = f"median of {count_things(len(ranks), 'rank')}, with 5th to 95th percentile"
            panels[label] = [_Curve(summed, middle, _LINES[0], band=(low, high))]
            if len(ranks) <= _MOST_LINES:
                panels[label] = [
                    _Curve(f"rank {rank}", values.get(rank, none), _LINES[number], dashed=number >= 4)
                    for number, rank in enumerate(ranks)
                ]
        title = "; ".join(words)
        svg = self._draw_times("gpu" if of_gpus else "cpu", title, panels)
        caption = "Each rank over the run" if len(ranks) <= _MOST_LINES else "All ranks over the run"
        return Chart(caption, title, svg)

    def _draw_times(
        self, name: str, title: str, panels: Mapping[str, Sequence[_Curve]], events: Sequence[Event] = ()
    ) -> str:
        """Draw quantities over time below each other, with events; they have one legend."""
        unit, unit_name = next((unit, word) for least, unit, word in _UNITS if self.end - self.begin >= least)
        times = [(at + 0.5) * self.width / unit for at in range(self.count)]
        with _drawing(170 * len(panels) + 100) as figure:
            grid: list[Axes] = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
            marks: dict[str, Any] = {}
            for axes, (label, curves) in zip(grid, panels.items(), strict=True):
                for curve in curves:
                    if curve.band:
                        axes.fill_between(times, *curve.band, color=curve.colour, alpha=0.22, linewidth=0)
                    lonely = np.isfinite(curve.values).sum() < 3
                    (line,) = axes.plot(times, curve.values, "--" if curve.dashed else "-")
                    line.set(color=curve.colour, linewidth=1.6, marker="o" if lonely else "", markersize=4)
                    marks[curve.name] = line
                axes.set_ylim(bottom=0)
                axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.set_title(label, loc="left", fontsize=12)
                for event in events:
                    start, until = (
                        (at - self.begin) / unit for at in (event.time, event.until or event.time)
                    )
                    colour = _EVENTS[event.kind]
                    marks[f"{event.kind}s"] = axes.axvspan(
                        start, until, color=colour, alpha=0.3 if event.until else 0.9
                    )
            grid[-1].set_xlim(0, max((self.end - self.begin) / unit, 1e-3))
            grid[-1].xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 3, 5, 6, 10]))
            grid[-1].set_xlabel(f"{unit_name} since the start")
            figure.legend(list(marks.values()), list(marks), loc="outside upper left", ncols=4)
            return _save(figure, name, title)

    def draw_time_shares(self) -> Chart | None:
        """Return where the time of each rank went; of many, of the slowest, and of all others together."""
        times = self.share_time()
        if not times:
            return None
        note, rest = "", times[_MOST_BARS:]
        shown = times[:_MOST_BARS] if rest else sorted(times, key=lambda one: one[0])
        rows = [(f"rank {rank} {host}", seconds / seconds.sum()) for rank, host, seconds in shown]
        if rest:
            seconds = np.sum([seconds for _, _, seconds in rest], axis=0)
            rows.append((count_things(len(rest), "other rank"), seconds / seconds.sum()))
            note = (
                f"Of {len(times)} ranks, those that wait least for others are shown: others wait for these."
            )
        total = np.sum([seconds for _, _, seconds in times], axis=0)
        parts = zip(_ACTIVITIES, total / total.sum(), strict=True)
        told = ", ".join(f"{name} {100 * share:.0f}%" for name, share in parts if share >= 0.005)
        title = f"All ranks together: {told}."
        with _drawing(22 * len(rows) + 90) as figure:
            axes = figure.subplots()
            places, left = range(len(rows)), np.zeros(len(rows))
            for at, activity in enumerate(_ACTIVITIES):
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

    def share_time(self) -> list[tuple[int, str, Series]]:
        """Return each rank with its host and the seconds of each of _ACTIVITIES, the slowest first.

        The one that others wait for waits least itself. The time from one report of a node to the next is
        counted by what the later one says: all of it for the phase that the rank is in, and while it trains
        by its shares of waiting.
        """
        hangs = [(event.time, event.until or event.time) for event in self.events if event.kind == "hang"]
        found: dict[int, tuple[int, str, Series]] = {}
        for host, reports in self.nodes.items():
            before = None
            for report in reports:
                past = report.interval if before is None else report.time - before
                seconds, before = min(max(past, 0.0), _LONGEST_GAP * self.interval), report.time
                hanging = any(begin <= report.time <= end for begin, end in hangs)
                for state in report.ranks:
                    known = found.setdefault(state.rank, (state.rank, host, np.zeros(len(_ACTIVITIES))))
                    known[2][:] += _share_activities(state, hanging) * seconds
        waits = _ACTIVITIES.index("waiting for others")
        times = [one for one in found.values() if one[2].sum()]
        return sorted(times, key=lambda one: (one[2][waits] / one[2].sum(), one[0]))


def _share_activities(state: Rank, hanging: bool) -> Series:
    """Return the share of each of _ACTIVITIES in what a rank does; all 0 for one that is gone."""
    shares = dict.fromkeys(_ACTIVITIES, 0.0)
    if (whole := _PHASES.get(state.phase)) is not None or hanging:
        if name := ("hanging" if hanging and whole != "" else whole):
            shares[name] = 1.0
    else:
        waits = _limit_share(state.wait_share)
        data = min(_limit_share(1.0 if state.phase == "loading" else state.data_share), 1.0 - waits)
        shares |= {"compute": 1.0 - waits - data, "waiting for others": waits, "data": data}
    return np.array(list(shares.values()))


def _limit_share(value: float | None) -> float:
    """Return a share between 0 and 1; 0 for none."""
    return min(max(value, 0.0), 1.0) if value is not None and isfinite(value) else 0.0
