"""The columns of `launch watch`: what each shows of a rank, and which of a node's ranks is worst in it."""

from collections.abc import Callable
from dataclasses import dataclass

from launcher.report.tables import (
    shorten_age,
    shorten_bytes,
    shorten_seconds,
)
from launcher.text import clean_text
from launcher.watch.run_reader import NodeView
from launcher.watch.watch_model import GpuSample, RankState

LONGEST_NAME = 16
"""Characters of a host's name, and of other texts."""
WARN, ALARM = "yellow", "bold red"
REASONS = {
    "gpu_idle": "",
    "applications_clocks_setting": "app clocks",
    "sw_power_cap": "power cap",
    "hw_slowdown": "hw slowdown",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "thermal",
    "hw_thermal_slowdown": "hw thermal",
    "hw_power_brake": "power brake",
    "hw_power_brake_slowdown": "power brake",
    "display_clock_setting": "display",
}
"""NVML's names of why clocks are low, shortened."""
HARMLESS = ("sw_power_cap", "applications_clocks_setting", "sync_boost", "display_clock_setting")
"""Reasons that are no fault."""


def shorten_share(share: float) -> str:
    """Return a share in percent: `7%`."""
    return f"{share * 100:.0f}%"


def shorten_number(number: float) -> str:
    """Return a number with two digits at least: `0.05`, `3.2`, `48`."""
    return f"{number:.2f}" if number < 0.1 else f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a rank, or a node with its ranks."""

    view: NodeView
    ranks: tuple[RankState, ...]
    """The slowest first; one in a rank's row."""
    is_node: bool = False

    @property
    def host(self) -> str:
        """The node."""
        return self.view.report.host


@dataclass(frozen=True, slots=True)
class Cell:
    """What a column shows of a row."""

    text: str
    value: float | str
    """Orders rows."""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column."""

    title: str
    letter: str
    """Sorts by it."""
    meaning: str
    read: Callable[[Row], Cell | None]
    width: int
    """Least characters, so that columns stay where they are."""
    is_text: bool = False
    ascending: bool = False
    """The worst, which comes first, is the least."""


def make_number_reader(
    get: Callable[[RankState], float | None],
    show: Callable[[float], str],
    *,
    least: bool = False,
    warn: float | None = None,
    alarm: float | None = None,
) -> Callable[[Row], Cell | None]:
    """Return what reads a figure of the worst of a row's ranks: the greatest, or the least."""
    worst = min if least else max

    def read(row: Row) -> Cell | None:
        values = [value for rank in row.ranks if (value := get(rank)) is not None]
        if not values:
            return None
        value = worst(values)
        level = ALARM if alarm is not None and value >= alarm else WARN
        return Cell(show(value), value, level if warn is not None and value >= warn else "")

    return read


def of_gpu(get: Callable[[GpuSample], float | None]) -> Callable[[RankState], float | None]:
    """Return what reads a figure of a rank's GPU."""
    return lambda rank: None if rank.gpu is None else get(rank.gpu)


def measure_own_time(rank: RankState) -> float | None:
    """Return the seconds of a step that a rank does not wait for others; all of them if that is unknown."""
    if rank.p50 is None:
        return None
    return rank.p50 * (1 - min(1.0, rank.wait_share or 0.0))


def measure_gpu_memory(gpu: GpuSample) -> float | None:
    """Return the share of a GPU's memory that is used."""
    return gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else None


def make_rank_cell(row: Row) -> Cell | None:
    """Show the rank; of a node the slowest one."""
    return Cell(str(row.ranks[0].rank), row.ranks[0].rank) if row.ranks else None


def make_node_cell(row: Row) -> Cell | None:
    """Show the node."""
    return Cell(clean_text(row.host, LONGEST_NAME), row.view.report.node_rank)


def read_phase(row: Row) -> Cell | None:
    """Show what the rank does, and that it, or its node, is gone; of several ranks the one that is unlike."""
    if row.view.is_silent:
        return Cell(f"silent {shorten_age(row.view.age)}", "!silent", ALARM)
    if not row.ranks:
        return Cell("no ranks", "", "dim")
    rank = min(row.ranks, key=order_phase)
    if rank.exit_code:
        return Cell(f"exit {rank.exit_code}", "!exit", ALARM)
    style = {"training": "", "ended": "dim", "exited": "dim", "unwatched": "dim"}.get(rank.phase, "cyan")
    return Cell(clean_text(rank.phase, LONGEST_NAME), rank.phase, style)


def order_phase(rank: RankState) -> tuple[bool, bool, int]:
    """Order ranks by what to tell of them first: failed, in another phase than training, the rest."""
    return not rank.exit_code, rank.phase == "training", rank.rank


def make_age_cell(row: Row) -> Cell | None:
    """Show how long ago the last step was."""
    ages = [row.view.measure_step_age(rank.step_age) for rank in row.ranks if rank.step_age is not None]
    if not ages:
        return None
    age, limit = max(ages), row.view.report.limit
    late = limit is not None and age > limit
    return Cell(shorten_age(age), age, ALARM if late else "")


def read_reasons(row: Row) -> Cell | None:
    """Show why clocks are low."""
    names = dict.fromkeys(name for rank in row.ranks if rank.gpu for name in rank.gpu.event_reasons)
    if not names:
        return None
    shown = ", ".join(REASONS.get(name, clean_text(name.replace("_", " "))) for name in names)
    style = "" if all(name in HARMLESS for name in names) else ALARM
    return Cell(clean_text(shown, LONGEST_NAME), ("" if style else "~") + shown, style)


def read_xids(row: Row) -> Cell | None:
    """Show the XID errors of its GPUs."""
    xids = dict.fromkeys(str(xid) for rank in row.ranks if rank.gpu for xid in rank.gpu.xids)
    return Cell(clean_text(",".join(xids), LONGEST_NAME), -len(xids), ALARM) if xids else None


def read_network(row: Row) -> Cell | None:
    """Show what all NICs of the node receive and send."""
    rates = row.view.report.nic_rates
    rate = sum(rate for _, rate in rates)
    return Cell(f"{shorten_bytes(rate)}/s", rate) if rates else None


COLUMNS = (
    Column("rank", "R", "the rank; of a node the slowest one", make_rank_cell, 4, ascending=True),
    Column("node", "N", "its node", make_node_cell, 6, is_text=True, ascending=True),
    Column("phase", "H", "what it does, or since when its node is silent", read_phase, 8, True, True),
    Column(
        "step",
        "S",
        "steps so far",
        make_number_reader(lambda rank: rank.step or None, str, least=True),
        6,
        ascending=True,
    ),
    Column("last", "L", "how long ago its last step was", make_age_cell, 4),
    Column(
        "p50", "P", "time of a step, median", make_number_reader(lambda rank: rank.p50, shorten_seconds), 5
    ),
    Column(
        "p99", "Q", "time of a step, 99th percentile", make_number_reader(lambda r: r.p99, shorten_seconds), 5
    ),
    Column(
        "own",
        "O",
        "time of a step without waiting for other ranks",
        make_number_reader(measure_own_time, shorten_seconds),
        5,
    ),
    Column(
        "data",
        "D",
        "share of the time that it waits for data",
        make_number_reader(lambda rank: rank.data_share, shorten_share, warn=0.1, alarm=0.3),
        4,
    ),
    Column(
        "others",
        "W",
        "share of the time that it waits for other ranks",
        make_number_reader(lambda rank: rank.wait_share, shorten_share, least=True),
        4,
        ascending=True,
    ),
    Column("cpu", "C", "cores that it uses", make_number_reader(lambda rank: rank.cpu, shorten_number), 4),
    Column(
        "delay",
        "Y",
        "share of the time that its threads wait for a core",
        make_number_reader(lambda rank: rank.run_delay, shorten_share, warn=0.1, alarm=0.5),
        4,
    ),
    Column(
        "rss", "M", "memory of the processes", make_number_reader(lambda rank: rank.rss, shorten_bytes), 4
    ),
    Column(
        "gpu",
        "G",
        "share of the time with a kernel on its GPU",
        make_number_reader(of_gpu(lambda gpu: gpu.utilization), shorten_share, least=True),
        4,
        ascending=True,
    ),
    Column(
        "sm",
        "A",
        "share of its multiprocessors that are active",
        make_number_reader(of_gpu(lambda gpu: gpu.sm_activity), shorten_share, least=True),
        4,
        ascending=True,
    ),
    Column(
        "mem",
        "E",
        "share of its GPU's memory that is used",
        make_number_reader(of_gpu(measure_gpu_memory), shorten_share, warn=0.95, alarm=0.99),
        4,
    ),
    Column(
        "power", "J", "watts", make_number_reader(of_gpu(lambda gpu: gpu.power), lambda w: f"{w:.0f}W"), 4
    ),
    Column(
        "temp",
        "T",
        "of its GPU",
        make_number_reader(of_gpu(lambda gpu: gpu.temperature), lambda t: f"{t:.0f}C"),
        4,
    ),
    Column(
        "clock",
        "K",
        "of its multiprocessors in MHz",
        make_number_reader(of_gpu(lambda gpu: gpu.sm_clock), str, least=True),
        4,
        ascending=True,
    ),
    Column("held by", "B", "why its clocks are low", read_reasons, 8, True, True),
    Column("xid", "X", "errors of its GPU", read_xids, 3, ascending=True),
    Column("net", "I", "what the node's NICs receive and send", read_network, 6),
)
"""From left to right."""
