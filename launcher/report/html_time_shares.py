"""The report's section of where each rank's time went: stacked bars, and their figures."""

from collections.abc import Sequence

from launcher.report.html_charts import BarChart, draw_bars, name_colours
from launcher.report.html_page import Head, HtmlTable, LegendKey, Section, make_chart, pair_widths
from launcher.report.run_account import RunAccount
from launcher.report.time_series import ACTIVITIES, RankTime, average_times, order_slowest, share_time
from launcher.text import count_things

MOST_BARS = 24
"""Ranks that have a bar of their own."""
ACTIVITY_COLOURS = {
    "compute": 9,
    "waiting for others": 10,
    "data": 11,
    "saving": 12,
    "evaluating": 13,
    "starting": 14,
    "hanging": 15,
}
"""Light ones beside dark ones: they differ for eyes that see no red or no green, and in print."""


def make_times(account: RunAccount) -> Section:
    """Return where the time of each rank went."""
    hangs = [(event.time, event.until or event.time) for event in account.events if event.kind == "hang"]
    times = share_time(account.samples, hangs)
    if not times:
        return Section("time", "Where the time went")
    rows = list_bars(times)
    used = [at for at in range(len(ACTIVITIES)) if any(shares[at] >= 0.0005 for _, shares in rows)]
    names = [ACTIVITIES[at] for at in used]
    rows = [(label, tuple(shares[at] for at in used)) for label, shares in rows]
    known = all(time.knows_waits for time in times)
    chart = BarChart(
        name="time",
        title="Where the time of each rank went",
        description=describe_times(times, known),
        rows=tuple(rows),
        colours=name_colours(names, ACTIVITY_COLOURS),
    )
    labels = {name: name for name in names}
    labels |= {} if known else {"compute": "compute, or waiting for others (not told apart)"}
    legend = [LegendKey(labels[name], ACTIVITY_COLOURS[name]) for name in names]
    heads = (Head("rank"), *(Head(f"{name} (%)", True) for name in names))
    cells = tuple((label, *(f"{100 * share:.1f}" for share in shares)) for label, shares in rows)
    table = HtmlTable("Share of the time of each rank", heads, cells)
    of_all = (
        f"Of {len(times)} ranks, the {MOST_BARS} that wait least for others are shown: those wait for these."
    )
    notes = [of_all] if len(times) > MOST_BARS else []
    caption = "Share of the time of each rank"
    figure = make_chart(caption, pair_widths(draw_bars(chart)), legend, table, notes)
    return Section("time", "Where the time went", figures=(figure,))


def list_bars(times: Sequence[RankTime]) -> list[tuple[str, tuple[float, ...]]]:
    """Return a label and shares for each rank; of many, for the slowest, and for all others together."""
    if len(times) <= MOST_BARS:
        return [(f"rank {time.rank} {time.host}", find_shares(time.seconds)) for time in times]
    ordered = order_slowest(times)
    rest = ordered[MOST_BARS:]
    rows = [(f"rank {time.rank} {time.host}", find_shares(time.seconds)) for time in ordered[:MOST_BARS]]
    return [*rows, (f"{count_things(len(rest), 'other rank')}", find_shares(average_times(rest)))]


def find_shares(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return shares of the whole."""
    total = sum(seconds)
    return tuple(part / total if total else 0.0 for part in seconds)


def describe_times(times: Sequence[RankTime], known: bool) -> str:
    """Say what the chart of times shows."""
    shares = find_shares(average_times(times))
    parts = zip(ACTIVITIES, shares, strict=True)
    told = ", ".join(f"{name} {100 * share:.0f}%" for name, share in parts if share >= 0.005)
    unknown = "" if known else " Waiting for others is not known, and counts as compute."
    return f"All ranks together: {told}.{unknown}"
