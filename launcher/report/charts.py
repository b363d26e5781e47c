"""Pictures by matplotlib, if it is there: the charts of a run's page, and a machine with its ranks.

A chart is SVG with texts as text, of one width and with a viewBox: the page scales it. Its colours are those
of light paper. Times are seconds since the epoch.
"""

import io
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from launcher.cpulist import format_cpulist
from launcher.errors import MachineError
from launcher.plan.model import Cpu, Plan
from launcher.report.machine import describe_device, describe_machine, divide, list_devices, name_node
from launcher.report.placement import list_cells
from launcher.text import clean_text, count_things
from launcher.watch.metrics import METRICS
from launcher.watch.model import UNWATCHED, NodeReport, Rank

DRAWS = find_spec("matplotlib") is not None
if TYPE_CHECKING or DRAWS:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import get_registered_canvas_class
    from matplotlib.colors import ListedColormap, to_hex
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

Series = NDArray[np.float64]

_STYLE = Path(__file__).with_name("html_page") / "charts.mplstyle"


@contextmanager
def _drawing(width: float, height: float, name: str) -> Iterator["Figure"]:
    """Give a figure of our own style, whatever the user's is; its size is in pixels, at 72 dots an inch."""
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the measuring font lacks
        mpl.rcdefaults()
        mpl.rcParams.update(mpl.rc_params_from_file(_STYLE, use_default_template=False))
        mpl.rcParams["svg.hashsalt"] = name
        yield Figure((width / 72, height / 72), dpi=72, layout="constrained")


def _save(figure: "Figure", form: str, dpi: int = 72, **options: Any) -> bytes:  # noqa: ANN401 - matplotlib's
    """Return a figure as a file, which has no date.

    It is laid out here, since `savefig` draws a figure that has a layout twice.
    """
    output, metadata = io.BytesIO(), {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    get_registered_canvas_class(form)(figure)  # whose letters are measured
    figure.dpi = dpi
    if layout := figure.get_layout_engine():
        layout.execute(figure)
        figure.set_layout_engine(None)
    figure.savefig(output, format=form, dpi=dpi, metadata=metadata.get(form), **options)
    return output.getvalue()


# The machine

_FREE, _FORBIDDEN, _ISOLATED = "#ffffff", "#e0e0e0", "#c0c0c0"
"""Colours of what is no rank's; outside the job's cpuset; set apart at boot, and left alone."""
_OTHERS = {
    _FORBIDDEN: "not allowed: outside this job's cpuset",
    _ISOLATED: "isolated at boot, left alone",
    _FREE: "no rank's",
}
_MOST_RANKS, _LONGEST_LINE = 64, 120
"""Ranks that are listed below a picture, characters of a line in it."""
_FEWEST_CORES, _MOST_CORES = 22, 36
"""Cores side by side, for which there is room."""
_CORE, _LINE = 35, 16
"""Width of a core and height of a line in pixels."""


def draw_machine(plan: Plan, note: str, form: str) -> bytes:
    """Draw a plan's machine and its ranks as `svg`, `png` or `pdf`; `note` stands below the title.

    Raises MachineError without matplotlib.
    """
    if not DRAWS:
        install = "pip install 'launch-ranks[report]'"
        raise MachineError(f"a picture needs matplotlib, which is not installed: {install}")
    machine, owners = plan.machine, _find_owners(plan)
    numbers = sorted({cpu.node for cpu in machine.cpus} | {node.id for node in machine.nodes})
    titles = {node: _describe_place(plan, node) for node in (*numbers, None)}
    rows = {node: _arrange_cells([cpu for cpu in machine.cpus if cpu.node == node]) for node in titles}
    shown = [node for node in titles if rows[node] or list_devices(machine, node)]
    listed = []
    for rank in plan.ranks[:_MOST_RANKS]:
        cells = [f"{title} {cell}" for title, cell in list_cells(rank, machine).items() if cell]
        listed.append((_find_colour(rank.local_rank), "   ".join(clean_text(cell, 48) for cell in cells)))
    if left := len(plan.ranks) - len(listed):
        listed.append((_FREE, f"and {left} more ranks: launch plan lists them all"))
    if workers := [colour for colour, label in owners.values() if label.startswith("w")]:
        listed.append((workers[0], "light: cores of a rank's DataLoader workers alone"))
    listed += [(colour, text) for colour, text in _OTHERS.items() if (colour, "") in owners.values()]
    name, *words = describe_machine(machine)
    told = ", ".join(filter(None, [*words, count_things(len(plan.ranks), "rank"), note]))
    widest = max(_FEWEST_CORES, *(len(row) for node in shown for row in rows[node]))
    heights = [len(rows[node]) for node in shown]
    lines = sum(heights) + sum(titles[node].count("\n") + 2 for node in shown) + len(listed) + 4
    with _drawing(_CORE * widest, _LINE * lines, "launch") as figure:
        figure.suptitle(f"{name[:_LONGEST_LINE]}\n{told[:_LONGEST_LINE]}", x=0.01, ha="left", fontsize=12)
        ratios = [height or 0.1 for height in heights]
        grid = figure.subplots(len(shown), 1, squeeze=False, height_ratios=ratios)[:, 0]
        for axes, node, height in zip(grid, shown, heights, strict=True):
            axes.set_title(titles[node], loc="left", fontsize=9)
            axes.set_axis_off()
            axes.set(xlim=(0, widest), ylim=(height, 0))
            for y, row in enumerate(rows[node]):
                colours = [owners[pu][0] for pu in row]
                places, look = range(len(row) + 1), ListedColormap(colours)
                axes.pcolormesh(places, (y, y + 1), [places[:-1]], cmap=look, edgecolor="#888888")
                for x, pu in enumerate(row):
                    ink = "#ffffff" if sum(bytes.fromhex(colours[x][1:])) < 400 else "#222222"
                    text = f"{owners[pu][1]}:{pu}".removeprefix(":")
                    axes.text(x + 0.5, y + 0.5, text, fontsize=7, color=ink, ha="center", va="center")
        marks = [Patch(facecolor=colour, edgecolor="#888888", label=text) for colour, text in listed]
        figure.legend(handles=marks, loc="outside lower left", fontsize=9)
        return _save(figure, form, dpi=144, facecolor="white")


def _arrange_cells(cpus: Sequence[Cpu]) -> list[list[int]]:
    """Return rows of PUs: those of a core below each other, cores of a cache side by side."""
    cores = [core for share in divide(cpus, "l3").values() for core in divide(share, "core").values()]
    rows = []
    for at in range(0, len(cores), _MOST_CORES):
        some = cores[at : at + _MOST_CORES]
        for level in range(max(map(len, some))):
            rows.append([core[level].id for core in some if level < len(core)])
    return rows


def _describe_place(plan: Plan, place: int | None) -> str:
    """Return lines on a NUMA node and its devices, or on devices of unknown place, with who uses them."""
    lines = ["devices of unknown place" if place is None else ", ".join(name_node(plan.machine, place))]
    for device in list_devices(plan.machine, place):
        used = [
            rank.local_rank
            for rank in plan.ranks
            if rank.nic == device.name or (rank.gpu and rank.gpu.pci == device.pci)
        ]
        words = ", ".join(describe_device(device))
        lines.append(f"{_name_ranks('R', used)}: {words}" if used else words)
    return "\n".join(line[:_LONGEST_LINE] for line in lines)


def _find_owners(plan: Plan) -> dict[int, tuple[str, str]]:
    """Return by PU its colour, that of the first of its ranks, and a short name of them."""
    machine, owners = plan.machine, dict[int, tuple[str, str]]()
    for pu in (cpu.id for cpu in machine.cpus):
        ranks = [rank.local_rank for rank in plan.ranks if pu in rank.cpus]
        workers = [rank.local_rank for rank in plan.ranks if pu in rank.worker_cpus]
        owners[pu] = (_FREE if pu in machine.allowed_cpus else _FORBIDDEN), ""
        if ranks:
            owners[pu] = _find_colour(min(ranks)), _name_ranks("R", ranks)
        elif pu in machine.isolated:
            owners[pu] = _ISOLATED, ""
        elif workers:
            owners[pu] = _find_colour(min(workers), light=True), _name_ranks("w", workers)
    return owners


def _find_colour(rank: int, *, light: bool = False) -> str:
    """Return one of nine colours, or its light tint; the grey of matplotlib's pairs is none of them."""
    pairs = [*mpl.color_sequences["tab20"]]
    del pairs[14:16]
    return to_hex(pairs[2 * rank % len(pairs) + light])


def _name_ranks(letter: str, ranks: Collection[int]) -> str:
    """Return a short name for some ranks: `R0`, `w2-5`; `R0+3` is rank 0 and three more."""
    text = format_cpulist(frozenset(ranks))
    return f"{letter}{text if len(text) <= 5 else f'{min(ranks)}+{len(ranks) - 1}'}"


# The charts

_WIDTH = 900
"""Pixels."""
_LINES = ("#0072b2", "#d55e00", "#00875f", "#b85c94", "#b87d00", "#2f93cc", "#6b6f76", "#5b3f9e")
"""Colours of lines; Okabe and Ito's, of which some are darkened to be read on white."""
_AREAS = ("#0072b2", "#ecc94b", "#c44a00", "#4fc3a1", "#9ccdf0", "#80868f", "#7b2d8e")
"""Light ones beside dark ones: they differ for eyes that see no red or no green, and in print."""
_EVENTS = dict(zip(("hang", "straggler", "restart", "checkpoint", "requeue"), _LINES[1:], strict=False))
"""Colour of an event, by kind."""
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
    **dict.fromkeys(UNWATCHED, ""),
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
    svg: str


def make_chart(name: str, caption: str, title: str, picture: bytes) -> Chart:
    """Return an SVG of matplotlib's as an element of a page: with identifiers of its own, and a title."""
    text = picture.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    return Chart(caption, text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1))


@dataclass(frozen=True, slots=True)
class _Curve:
    """A line over time: a value for each bin, NaN where it is interrupted."""

    name: str
    values: Series
    colour: str
    style: str = "-"
    band: tuple[Series, Series] | None = None
    """The low and the high end of what is shaded around it."""


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
        found: dict[int, list[tuple[int, float]]] = {}
        for sample in self.samples:
            place = (sample.time - self.begin) / self.width
            for state in sample.ranks if 0 <= place < self.count + 1 else ():
                value = read(state)
                if value is not None and 0 <= value * factor < _LARGEST_VALUE:
                    at = min(int(place), self.count - 1)
                    found.setdefault(state.rank, []).append((at, value * factor))
        binned = {}
        with np.errstate(invalid="ignore"):
            for rank in sorted(found):
                places, values = zip(*found[rank], strict=True)
                counts = np.bincount(places, minlength=self.count)
                binned[rank] = np.bincount(places, values, self.count) / counts
        return binned

    def find_spread(self, values: Mapping[int, Series]) -> Series:
        """Return the 5th percentile, the median and the 95th over the ranks in each bin: three rows.

        Each is the value of one rank, the nearest; NaN where there is none.
        """
        table = np.array([*values.values()] or [np.full(self.count, np.nan)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # bins without a value
            spread: Series = np.nanquantile(table, (0.05, 0.5, 0.95), axis=0, method="nearest")
        return spread

    def draw_steps(self) -> Chart | None:
        """Return the step time over time, with what happened."""
        low, middle, high = self.find_spread(self.bin_values(lambda rank: rank.p50))
        worst = self.find_spread(self.bin_values(lambda rank: rank.p99))[2]
        if np.isnan(middle).all():
            return None
        counts = [(kind, sum(event.kind == kind for event in self.events)) for kind in _EVENTS]
        told = ", ".join(count_things(number, kind) for kind, number in counts if number) or "no events"
        title = f"The median step takes {np.nanmedian(middle):.4g} s; {told}."
        curves = (
            _Curve("slow steps (p99), 95th percentile of the ranks", worst, _LINES[1], "--"),
            _Curve("median step (p50), with the spread over ranks", middle, _LINES[0], band=(low, high)),
        )
        panels = {"time of a step (s)": curves}
        return self._draw_times("steps", "Time of a step over the run", title, panels, self.events)

    def draw_quantities(self, *, of_gpus: bool) -> Chart | None:
        """Return curves of quantities of each rank, those that nodes reported; of many ranks their spread."""
        found = {}
        for metric in METRICS:
            if metric.chart and (metric.owner == "gpu") is of_gpus:
                values = self.bin_values(metric.read, _FACTORS.get(metric.unit, 1.0))
                if any(np.nansum(line) for line in values.values()):
                    found[metric.chart] = values
        ranks = sorted({rank for values in found.values() for rank in values})
        panels: dict[str, Sequence[_Curve]] = {}
        words = []
        for label, values in found.items():
            low, middle, high = self.find_spread(values)
            words.append(f"{label}: median {np.nanmedian(middle):.4g}")
            summed = f"median of {count_things(len(ranks), 'rank')}, with 5th to 95th percentile"
            panels[label] = [_Curve(summed, middle, _LINES[0], band=(low, high))]
            if len(ranks) <= _MOST_LINES:
                styles = zip(_LINES, "----::::", strict=True)
                panels[label] = [
                    _Curve(f"rank {rank}", values[rank], colour, style)
                    for rank, (colour, style) in zip(ranks, styles, strict=False)
                    if rank in values
                ]
        caption = "Each rank over the run" if len(ranks) <= _MOST_LINES else "All ranks over the run"
        name = "gpu" if of_gpus else "cpu"
        return self._draw_times(name, caption, "; ".join(words), panels) if panels else None

    def _draw_times(
        self,
        name: str,
        caption: str,
        title: str,
        panels: Mapping[str, Sequence[_Curve]],
        events: Sequence[Event] = (),
    ) -> Chart:
        """Draw quantities over time below each other, with events; they have one legend."""
        unit, unit_name = next((unit, word) for least, unit, word in _UNITS if self.end - self.begin >= least)
        times = [(at + 0.5) * self.width / unit for at in range(self.count)]
        with _drawing(_WIDTH, 170 * len(panels) + 100, name) as figure:
            grid: list[Axes] = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
            marks: dict[str, Any] = {}
            for axes, (label, curves) in zip(grid, panels.items(), strict=True):
                for curve in curves:
                    if curve.band:
                        axes.fill_between(times, *curve.band, color=curve.colour, alpha=0.22, linewidth=0)
                    lonely = np.isfinite(curve.values).sum() < 3
                    (line,) = axes.plot(times, curve.values, curve.style, color=curve.colour)
                    line.set(linewidth=1.6, marker="o" if lonely else "", markersize=4)
                    marks[curve.name] = line
                axes.set_ylim(bottom=0)
                axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.set_title(label, loc="left", fontsize=12)
                for event in events:
                    ends = [(at - self.begin) / unit for at in (event.time, event.until or event.time)]
                    alpha = 0.3 if event.until else 0.9
                    marks[f"{event.kind}s"] = axes.axvspan(*ends, color=_EVENTS[event.kind], alpha=alpha)
            grid[-1].set_xlim(0, max((self.end - self.begin) / unit, 1e-3))
            grid[-1].xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 3, 5, 6, 10]))
            grid[-1].set_xlabel(f"{unit_name} since the start")
            figure.legend(list(marks.values()), list(marks), loc="outside upper left", ncols=4)
            return make_chart(name, caption, title, _save(figure, "svg", transparent=True))

    def draw_time_shares(self) -> Chart | None:
        """Return where the time of each rank went; of many, of the slowest, and of all others together."""
        times = self.share_time()
        if not times:
            return None
        caption, rest = "Share of the time of each rank", times[_MOST_BARS:]
        shown = times[:_MOST_BARS] if rest else sorted(times, key=lambda one: one[0])
        rows = {clean_text(f"rank {rank} {host}", 24): seconds for rank, host, seconds in shown}
        if rest:
            rows[count_things(len(rest), "other rank")] = np.sum([seconds for _, _, seconds in rest], axis=0)
            caption += f": of {len(times)}, those that wait least for others, who wait for these"
        table = np.array([seconds / seconds.sum() for seconds in rows.values()]) * 100
        total = np.sum([seconds for _, _, seconds in times], axis=0)
        parts = zip(_ACTIVITIES, 100 * total / total.sum(), strict=True)
        told = ", ".join(f"{name} {share:.0f}%" for name, share in parts if share >= 0.5)
        with _drawing(_WIDTH, 22 * len(rows) + 90, "time") as figure:
            axes, left = figure.subplots(), np.zeros(len(rows))
            for activity, widths, colour in zip(_ACTIVITIES, table.T, _AREAS, strict=True):
                if widths.max() >= 0.05:
                    bars = axes.barh([*rows], widths, 0.72, left, label=activity, color=colour)
                    for bar in bars:
                        bar.set(edgecolor="white", linewidth=0.8)
                left += widths
            axes.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5), xlabel="% of its time")
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
            figure.legend(loc="outside upper left", ncols=4)
            picture = _save(figure, "svg", transparent=True)
        title = f"All ranks together: {told}."
        return make_chart("time", caption, title, picture)

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
    whole = _PHASES.get(state.phase)
    if hanging and whole != "":
        whole = "hanging"
    if whole is not None:
        return np.array([float(activity == whole) for activity in _ACTIVITIES])
    loading = 1.0 if state.phase == "loading" else state.data_share
    waits, data = (
        min(max(share, 0.0), 1.0) if share is not None and isfinite(share) else 0.0
        for share in (state.wait_share, loading)
    )
    data = min(data, 1.0 - waits)
    return np.array([1.0 - waits - data, waits, data, 0.0, 0.0, 0.0, 0.0])
