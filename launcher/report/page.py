"""`launch report`: a run as one HTML page that needs nothing else, neither network nor scripts.

The template takes the values of the run, of watching and of the doctor as they are; here is what it computes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from launcher.cpulist import format_cpulist
from launcher.doctor.machine import BindingTrial, Case, judge_plan, judge_run_records
from launcher.doctor.model import Facts, Finding, found
from launcher.plan.model import Plan
from launcher.report.charts import AREAS, LINES, Curve, draw_bars, draw_times, inline_svg
from launcher.report.machine import DRAWS, render_machine
from launcher.report.runs import shorten_time
from launcher.report.timeline import (
    ACTIVITIES,
    EVENT_KINDS,
    Bins,
    Event,
    RankTime,
    RunAccount,
    Series,
    bin_values,
    choose_bins,
    find_spread,
    order_slowest,
    share_time,
)
from launcher.report.watch import describe_process
from launcher.runs.manifest import read_time, take_dict, take_list
from launcher.runs.run_records import compare_rank
from launcher.runs.secrets import mask_words
from launcher.text import (
    clean_text,
    count_things,
    describe_time,
    join_words,
    name_some,
    shorten_cpulist,
    tame_text,
)
from launcher.watch.metrics import METRICS
from launcher.watch.model import RankEvidence, Stack

_GIB = 1 << 30
_CHART_FACTORS = {"share": 100, "bytes": 1 / _GIB}
"""What a value is multiplied by in a chart, by its unit."""
_LEVELS = ("error", "warning", "note")
_STRAGGLER_FIXES = {
    "data": "give it more DataLoader workers (`launch tune dataloader` finds the number), or faster storage",
    "run_delay": "end what else runs on its cores, or keep binding=exclusive and ask for whole nodes",
    "cpu_quota": "raise the CPU limit of the container or the cgroup, or ask for as many CPUs as it needs",
    "memory_pressure": "ask for more memory, or use fewer DataLoader workers",
    "page_faults": "lock or preload what it maps, and keep its memory on its own NUMA node",
    "gpu_clock": "see to the node's cooling and power: `nvidia-smi -q -d PERFORMANCE` names the reason",
    "pcie": "have the GPU reseated, or leave the node out until its link has its full width",
    "nic": "have the link looked at, or leave the node out",
    "program": "profile this rank: its own code takes longer than the others'",
}
"""What helps, by the cause of a straggler."""
_LONGEST = 2000
"""Characters of a text."""
_MOST_ALIKE = 4
"""Warnings with one reason and one fix that are named."""
_MOST_LINES = 8
"""Ranks that have a line of their own; of more, the spread is shown."""
_MOST_BARS = 24
"""Ranks that have a bar of their own."""
_MOST_ROWS, _MOST_EVENTS, _MOST_FIGURES = 64, 24, 16
"""Rows of tables: of ranks and attempts, of events, of the figures behind a chart."""
_MOST_PICTURES, _MOST_PUS = 3, 2048
"""Machines that are drawn, and the PUs of one."""
_MOST_STACKS, _MOST_FRAMES = 16, 60
"""Different stacks of a hang, and frames of one."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table; the first cell of a row names it."""

    caption: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers alone."""
        cells = [row[column] for row in self.rows]
        return column > 0 and all(re.fullmatch(r"-|\?|-?[\d.]+(e[+-]\d+)?", cell) for cell in cells)


@dataclass(frozen=True, slots=True)
class _Figure:
    """A picture with what explains it."""

    caption: str
    svg: str
    """Empty where nothing can be drawn."""
    table: _Table | None = None
    """The figures behind it."""
    note: str = ""


def render_report(account: RunAccount, plans: Mapping[str, Plan]) -> bytes:
    """Return the page of a run, UTF-8; `plans` are those that can be read, by host.

    Every text is escaped, and control characters are shown as escapes; pictures are our own.
    """
    bins = choose_bins(account)
    page = {
        "warnings": _list_warnings(account, plans),
        "hangs": account.hangs,
        "steps": _draw_steps(account, bins),
        "time": _draw_time_shares(share_time(account)),
        "gpu": _draw_quantities(account, bins, "gpu"),
        "cpu": _draw_quantities(account, bins, "cpu"),
        "events": _tabulate_events(account),
        "machines": list(_draw_machines(plans)) if DRAWS else [],
        "placement": _tabulate_placement(account),
        "attempts": _tabulate_attempts(account),
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_tame, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _FILTERS
    folder = files("launcher.report").joinpath("html_page")
    status, manifest = account.status, account.manifest
    planned = sum(len(host.planned) for host in account.records.hosts)
    text = environment.from_string(folder.joinpath("page.html.jinja").read_text("utf-8")).render(
        account=account,
        status=status,
        manifest=manifest,
        git=take_dict(manifest, "git"),
        packages=take_dict(manifest, "packages"),
        last_lines=take_list(status.first_failure or {}, "last_lines")[-30:],
        ranks=max(planned, len({state.rank for one in account.reports for state in one.ranks})),
        step=_format_step(account),
        lead=_describe_end(account),
        page=page,
        draws=DRAWS,
        now=datetime.now().astimezone(),
        style=Markup(folder.joinpath("page.css").read_text("utf-8")),  # noqa: S704 - our own file
    )
    return text.encode("utf-8", "backslashreplace")


def _tame(value: object) -> object:
    """Return a value for the page; what would act on a terminal or turn the direction of writing is shown."""
    return tame_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


# What ran


def _describe_end(account: RunAccount) -> str:
    """Say in a sentence or two how the run stands or ended."""
    status, seconds = account.status, describe_time(account.end - account.begin)
    step = f" at step {_format_step(account)}" if _format_step(account) else ""
    if status.is_live:
        head = f"It is {status.state}{step}, {seconds} after its start; this is what there is so far."
    else:
        verb = "is" if status.state in ("lost", "unknown") else "has"
        head = f"It {verb} {status.state} after {seconds}{step}."
    reason = f"{status.reason[:1].upper()}{status.reason[1:]}"
    return clean_text(f"{head} {reason}{'.' if reason and not reason.endswith('.') else ''}", _LONGEST)


def _format_step(account: RunAccount) -> str:
    """Return the step that the run has come to: `120/400`."""
    status = account.status
    if status.step is not None:
        return f"{status.step}/{status.total}" if status.total else str(status.step)
    steps = [account.job.step if account.job else 0]
    steps += [state.step for report in account.samples for state in report.ranks]
    return str(max(steps)) if max(steps) else ""


def _show_time(text: str) -> str:
    """Return a time of the manifest's with its zone, to the second."""
    zone = text[-6:] if text[-6:-5] in ("+", "-") else ""
    return f"{shorten_time(text)} {clean_text(zone)}".strip() if text else ""


def _tabulate_attempts(account: RunAccount) -> _Table | None:
    """Return the table of the starts of the job."""
    status = account.status
    restarts = [event.time for event in account.events if event.kind == "restart"]
    rows = []
    for number, attempt in enumerate(status.attempts):
        begin, end = read_time(attempt.started), read_time(attempt.ended)
        until = account.end if end is None else end
        rows.append(
            (
                str(number),
                _show_time(attempt.started),
                _show_time(attempt.ended) or ("goes on" if status.is_live else "not known"),
                "?" if begin is None else describe_time(max(0.0, until - begin)),
                str(sum(begin is not None and begin + 1 < when <= until for when in restarts)),
                status.state if attempt.state == "running" else attempt.state,
                clean_text(attempt.reason, _LONGEST),
            )
        )
    heads = ("attempt", "started", "ended", "duration", "ranks restarted", "state", "reason")
    return _Table("Starts of the job", heads, rows[-_MOST_ROWS:]) if rows else None


# Warnings with their fixes


def _list_warnings(account: RunAccount, plans: Mapping[str, Plan]) -> list[tuple[Finding, str, list[str]]]:
    """Return what slowed or endangered the run, the worst first.

    Each has the hosts in its text, and what else was found by the same rule and has the same fix.
    """
    hosts: dict[Finding, list[str]] = {}
    for host, finding in _judge_run(account, plans):
        if finding.level in _LEVELS:
            hosts.setdefault(finding, []).append(host)
    several = max(account.status.nodes, len(account.reports), len(plans)) > 1
    groups: dict[tuple[str, str, str], list[tuple[Finding, str]]] = {}
    for finding, names in hosts.items():
        known = [clean_text(name) for name in dict.fromkeys(names) if name] if several else []
        what = f"{name_some(known, 4)}: {finding.what}" if known else finding.what
        groups.setdefault((finding.level, finding.rule, finding.fix), []).append((finding, what))
    listed: list[tuple[Finding, str, list[str]]] = []
    for (_, _, fix), alike in groups.items():
        if len(alike) <= _MOST_ALIKE or not fix:
            listed += [(finding, what, []) for finding, what in alike]
        else:
            also = [what for _, what in alike[1:_MOST_ALIKE]]
            listed.append((*alike[0], [*also, f"and {len(alike) - _MOST_ALIKE} more of the kind"]))
    return sorted(listed, key=lambda entry: _LEVELS.index(entry[0].level))


def _judge_run(account: RunAccount, plans: Mapping[str, Plan]) -> Iterator[tuple[str, Finding]]:
    """Give findings with their host: of plans, of records against them, and of what the watchers saw."""
    for host, plan in plans.items():
        for finding in judge_plan(Case(plan, Facts(host, 0, 0.0), BindingTrial())):
            yield host, finding
    for finding in judge_run_records(account.records, is_live=account.status.is_live):
        yield "", finding
    for one in account.job.stragglers if account.job else ():
        fix = _STRAGGLER_FIXES.get(one.cause, "")
        values = {"rank": one.rank, "where": one.host, "excess": one.excess, "detail": one.detail, "fix": fix}
        steps = {"first_step": one.first_step, "last_step": one.last_step}
        yield "", found("watch.straggler", "warning", **values, **steps)
    for note in account.job.notes if account.job else ():
        yield "", found("watch.note", "note", note=note)
    for report in account.reports:
        for note in (*report.notes, *(note for state in report.ranks for note in state.notes)):
            yield report.host, found("watch.note", "note", note=note)
        for state in report.ranks:
            if state.gpu and state.gpu.xids:
                xids = tuple(state.gpu.xids[:8])
                values = {"gpu": state.gpu.index, "rank": state.rank, "xids": xids}
                yield report.host, found("watch.xids", "warning", **values)


# Hangs: what the template asks of the evidence


def _format_stack(stack: Stack) -> str:
    """Return a stack, innermost call first."""
    lines = [f"{frame.file}:{frame.line}, {frame.function}" for frame in stack.frames[:_MOST_FRAMES]]
    lines += ["…"] if len(stack.frames) > _MOST_FRAMES else []
    return "\n".join(clean_text(line, 400) for line in lines)


def _describe_process(rank: RankEvidence) -> str:
    """Say what the kernel says of a rank's process."""
    return clean_text(f"{describe_process(rank.process)}, {rank.process.cpu:.2f} cores in use", 400)


def _list_stacks(rank: RankEvidence) -> Iterator[tuple[str, str]]:
    """Give the stacks of a rank and its children with their titles, the main thread's first."""
    for process in (rank.process, *rank.children[:8]):
        child = "" if process is rank.process else f"child {process.command} (PID {process.pid}), "
        for stack in sorted(process.stacks, key=lambda one: not one.is_current)[:12]:
            thread = "main thread" if stack.is_current else f"thread {stack.thread}"
            yield clean_text(f"{child}{thread}", 400), _format_stack(stack)


def _gather_stacks(ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, str]]:
    """Give the main threads' stacks, each once with the ranks that have it, the most common first."""
    found: dict[str, set[int]] = {}
    for rank in ranks:
        stacks = sorted(rank.process.stacks, key=lambda one: not one.is_current)
        text = _format_stack(stacks[0]) if stacks else f"no stack; {_describe_process(rank)}"
        found.setdefault(text, set()).add(rank.rank)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), min(item[1])))
    for text, having in ordered[:_MOST_STACKS]:
        names = format_cpulist(frozenset(having))
        yield clean_text(f"{count_things(len(having), 'rank')}: {names}", 400), text
    if len(ordered) > _MOST_STACKS:
        yield f"{len(ordered) - _MOST_STACKS} more stacks are in the run directory", ""


_FILTERS: dict[str, Callable[..., object]] = {
    "clean": clean_text,
    "command": lambda words: join_words(mask_words(words)),
    "time": _show_time,
    "seconds": lambda seconds: describe_time(max(0.0, seconds)),
    "picture": Markup,
    "ranks": lambda evidence: [rank for node in evidence for rank in node.ranks],
    "process": _describe_process,
    "stacks": _list_stacks,
    "gather": _gather_stacks,
    "count": count_things,
}


# Charts over time


def _format_figure(value: float) -> str:
    """Return a number with four digits; a dash for none."""
    return "-" if np.isnan(value) else f"{value:.4g}"


def _tabulate_series(caption: str, bins: Bins, columns: Mapping[str, Series]) -> _Table:
    """Return rows for bins with something in them, evenly over the run."""
    filled = [at for at in range(bins.count) if not all(np.isnan(column[at]) for column in columns.values())]
    most, centers = min(_MOST_FIGURES, len(filled)), bins.list_centers()
    rows = []
    for number in range(most):
        at = filled[number * (len(filled) - 1) // max(most - 1, 1)]
        rows.append((describe_time(centers[at]), *(_format_figure(each[at]) for each in columns.values())))
    return _Table(caption, ("time since the start", *columns), rows)


def _list_chart_events(account: RunAccount) -> list[Event]:
    """Return the events within the run, their times counted from its start."""
    return [
        replace(
            event,
            time=event.time - account.begin,
            until=None if event.until is None else min(event.until, account.end) - account.begin,
        )
        for event in account.events
        if account.begin <= event.time <= account.end
    ]


def _draw_steps(account: RunAccount, bins: Bins) -> _Figure | None:
    """Return the step time over time, with what happened."""
    low, middle, high = find_spread(bin_values(account, bins, lambda rank: rank.p50), bins.count)
    worst = find_spread(bin_values(account, bins, lambda rank: rank.p99), bins.count)[2]
    if np.isnan(middle).all():
        return None
    table = _tabulate_series("Time of a step", bins, {"p50 (s)": middle, "p99 (s)": worst})
    events = _list_chart_events(account)
    counts = [(kind, sum(event.kind == kind for event in events)) for kind in EVENT_KINDS]
    told = ", ".join(count_things(number, kind) for kind, number in counts if number) or "no events"
    title = f"The median step takes {_format_figure(float(np.nanmedian(middle)))} s; {told}."
    curves = (
        Curve("slow steps (p99), 95th percentile of the ranks", worst, LINES[1], dashed=True),
        Curve("median step (p50), with the spread over ranks", middle, LINES[0], band=(low, high)),
    )
    span = account.end - account.begin
    panels = [("time of a step (s)", curves)]
    svg = draw_times("steps", title, bins.list_centers(), span, panels, events) if DRAWS else ""
    return _Figure("Time of a step over the run", svg, table)


def _tabulate_events(account: RunAccount) -> _Table | None:
    """Return the events in words."""
    told = [event for event in account.events if event.text]
    rows = [
        (describe_time(max(0.0, event.time - account.begin)), event.kind, clean_text(event.text, 600))
        for event in told[:_MOST_EVENTS]
    ]
    left = f", the first {_MOST_EVENTS} of {len(told)}" if len(told) > _MOST_EVENTS else ""
    return _Table(f"Events{left}", ("time since the start", "event", "what"), rows) if rows else None


def _draw_quantities(account: RunAccount, bins: Bins, name: str) -> _Figure | None:
    """Return curves of quantities of each rank, those that nodes reported; of many ranks their spread."""
    found = {}
    for metric in METRICS:
        if metric.chart and metric.is_gpu is (name == "gpu"):
            values = bin_values(account, bins, metric.read, _CHART_FACTORS.get(metric.unit, 1.0))
            if any(np.nansum(line) for line in values.values()):
                found[metric.chart] = values
    if not found:
        return None
    ranks = sorted({rank for values in found.values() for rank in values})
    panels, medians, words = [], {}, []
    for label, values in found.items():
        low, middle, high = find_spread(values, bins.count)
        medians[f"{label}, median"] = middle
        words.append(f"{label}: median {_format_figure(float(np.nanmedian(middle)))}")
        summed = f"median of {count_things(len(ranks), 'rank')}, with 5th to 95th percentile"
        curves = [Curve(summed, middle, LINES[0], band=(low, high))]
        if len(ranks) <= _MOST_LINES:
            none = np.full(bins.count, np.nan)
            curves = [
                Curve(f"rank {rank}", values.get(rank, none), LINES[number], dashed=number >= 4)
                for number, rank in enumerate(ranks)
            ]
        panels.append((label, curves))
    title, span = "; ".join(words), account.end - account.begin
    svg = draw_times(name, title, bins.list_centers(), span, panels) if DRAWS else ""
    caption = "Each rank over the run" if len(ranks) <= _MOST_LINES else "All ranks over the run"
    table = _tabulate_series("GPU" if name == "gpu" else "CPU and memory", bins, medians)
    return _Figure(caption, svg, table)


def _draw_time_shares(times: Sequence[RankTime]) -> _Figure | None:
    """Return where the time of each rank went; of many, of the slowest, and of all others together."""
    if not times:
        return None
    shown = times if len(times) <= _MOST_BARS else order_slowest(times)
    rows = [(f"rank {one.rank} {one.host}", one.shares) for one in shown[:_MOST_BARS]]
    note = ""
    if rest := shown[_MOST_BARS:]:
        seconds = np.mean([one.seconds for one in rest], axis=0)
        rows.append((count_things(len(rest), "other rank"), seconds / seconds.sum()))
        note = (
            f"Of {len(times)} ranks, the {_MOST_BARS} that wait least for others are shown: those wait for"
            " these."
        )
    used = [at for at in range(len(ACTIVITIES)) if any(shares[at] >= 0.0005 for _, shares in rows)]
    heads = ("rank", *(f"{ACTIVITIES[at]} (%)" for at in used))
    cells = [(label, *(f"{100 * shares[at]:.1f}" for at in used)) for label, shares in rows]
    labels = {name: name for name in ACTIVITIES}
    if not all(one.knows_waits for one in times):
        labels["compute"] = "compute, or waiting for others (not told apart)"
        note += " Waiting for others is not known, and counts as compute."
    mean = np.mean([one.seconds for one in times], axis=0)
    parts = zip(ACTIVITIES, mean / mean.sum(), strict=True)
    told = ", ".join(f"{name} {100 * share:.0f}%" for name, share in parts if share >= 0.005)
    colours = {labels[ACTIVITIES[at]]: AREAS[at] for at in used}
    bars = [(label, shares[used]) for label, shares in rows]
    svg = draw_bars("time", f"All ranks together: {told}.", bars, colours) if DRAWS else ""
    caption = "Share of the time of each rank"
    return _Figure(caption, svg, _Table(caption, heads, cells), note.strip())


# Where the ranks ran


def _draw_machines(plans: Mapping[str, Plan]) -> Iterator[_Figure]:
    """Draw the machines with their ranks, those that look alike once."""
    alike: dict[object, list[str]] = {}
    for host, plan in plans.items():
        machine = plan.machine
        ranks = tuple((rank.cpus, rank.worker_cpus, rank.nic, rank.memory) for rank in plan.ranks)
        gpus = tuple((gpu.pci, gpu.node, gpu.name) for gpu in machine.gpus)
        if len(machine.cpus) <= _MOST_PUS:
            alike.setdefault((machine.cpus, machine.allowed_cpus, gpus, ranks), []).append(host)
    kinds = list(alike.values())
    for number, hosts in enumerate(kinds[:_MOST_PICTURES]):
        plan = plans[hosts[0]]
        more = f", and on {count_things(len(hosts) - 1, 'more host')} like it" if len(hosts) > 1 else ""
        title = f"{count_things(len(plan.ranks), 'rank')} on {clean_text(hosts[0])}{more}"
        left = len(kinds) - _MOST_PICTURES if number == _MOST_PICTURES - 1 else 0
        note = f"{count_things(left, 'other kind')} of hosts are not drawn." if left > 0 else ""
        picture = render_machine(plan, "", "svg")
        about = f"{title}: packages, NUMA nodes, caches, cores, GPUs and NICs in the colours of their ranks."
        yield _Figure(title, inline_svg(picture, f"machine{number}", about), note=note)


def _tabulate_placement(account: RunAccount) -> _Table | None:
    """Return a row for each rank that left a record, and whether it had what was planned for it."""
    rows = []
    for host in account.records.hosts:
        planned = {rank.local_rank: rank for rank in host.planned}
        for record in host.records:
            plan = planned.get(record.local_rank)
            gpu = f"{plan.gpu.index} {plan.gpu.pci}" if plan and plan.gpu and record.gpu is not None else ""
            differs = record.problems or (plan and any(compare_rank(plan, record)))
            cells = (
                str(record.rank),
                record.host,
                gpu or "none",
                record.cpus,
                f"node {shorten_cpulist(record.memory.nodes)}" if record.memory.nodes else "any node",
                "?" if record.num_workers is None else str(record.num_workers),
                (plan.nic if plan else None) or "none",
                "no plan" if plan is None else "no" if differs else "yes",
            )
            rows.append(tuple(clean_text(cell, 120) for cell in cells))
    left = f", the first {_MOST_ROWS} of {len(rows)}" if len(rows) > _MOST_ROWS else ""
    heads = ("rank", "host", "GPU", "CPUs", "memory on", "workers", "NIC", "as planned")
    return _Table(f"What the ranks had{left}", heads, rows[:_MOST_ROWS]) if rows else None
