"""`launch report`: a run as one HTML page that needs nothing else, neither network nor scripts.

The template takes the values of the run, of watching and of the doctor as they are; here is what it computes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from launcher.cpulist import format_cpulist
from launcher.doctor.machine import judge_plan, judge_run_records
from launcher.doctor.model import Finding, found
from launcher.plan.model import Plan
from launcher.report.charts import DRAWS, Chart, Charts, Event, draw_machine, make_chart
from launcher.report.tables import shorten_time
from launcher.report.watch import describe_process
from launcher.runs.manifest import Run, read_manifest, read_time
from launcher.runs.records import RunRecords, compare_rank, read_run
from launcher.runs.run_status import RunStatus, add_progress, read_status
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
from launcher.watch.metrics import MetricsEvent, read_metrics
from launcher.watch.model import Hang, JobState, NodeEvidence, NodeReport, RankEvidence, Stack
from launcher.watch.run_files import ReportCache, read_value

_FOLDER = files("launcher.report").joinpath("html_page")
_LEVELS = ("error", "warning", "note")
_STRAGGLER_FIXES = {
    "data": "give it more DataLoader workers (`launch tune dataloader` finds the number), or faster storage",
    "run_delay": "end what else runs on its cores, or keep binding=exclusive and ask for whole nodes",
    "cpu_quota": "raise the CPU limit of the container or the cgroup, or ask for as many CPUs as it needs",
    "memory_pressure": "ask for more memory, or use fewer DataLoader workers",
    "page_faults": "lock or preload what it maps, and keep its memory on its own NUMA node",
    "gpu_clock": "see to the node's cooling and power: `nvidia-smi -q -d PERFORMANCE` names the reason",
    "pcie": "have the GPU reseated, or leave the node out until its link has its full width",
    "program": "profile this rank: its own code takes longer than the others'",
}
"""What helps, by the cause of a straggler."""
_MOST_STATES = 60_000
"""States of ranks that are read of all nodes' metrics: some seconds' work."""
_FEWEST_SAMPLES, _MOST_SAMPLES = 12, 2000
"""Samples of a node that are read."""
_MOST_HANGS = 20
"""Hangs whose evidence is read."""
_MOST_STACKS, _MOST_FRAMES = 16, 60
"""Different stacks of a hang, and frames of one, that are shown; all are in the run directory."""


@dataclass(frozen=True, slots=True)
class RunAccount:
    """A run, as far as its directory tells."""

    status: RunStatus
    manifest: Run
    records: RunRecords
    reports: tuple[NodeReport, ...]
    """The last one of each node."""
    samples: tuple[NodeReport, ...]
    """What nodes reported over time, a selection of it if that is much; by time."""
    job: JobState | None
    hangs: tuple[tuple[Hang, tuple[NodeEvidence, ...]], ...]
    """Each with what the nodes gathered for it."""
    events: tuple[Event, ...]
    begin: float
    end: float
    """When it ended, or now."""


def read_account(path: Path) -> RunAccount:
    """Read a run's directory; nothing raises."""
    now = time.time()
    status = add_progress(read_status(path))
    cache = ReportCache(path)
    reports = tuple(one.value for one in cache.read_reports())
    ranks = sum(len(report.ranks) for report in reports) or 8
    rows, told = read_metrics(path, max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, _MOST_STATES // ranks)))
    newest = {row.host: row.time for row in sorted(rows, key=lambda row: row.time)}
    # A run that has ended early has the nodes' last reports alone.
    rows += [one for one in reports if one.time > newest.get(one.host, 0.0)]
    samples = sorted({(row.host, row.time): row for row in rows}.values(), key=lambda row: row.time)

    starts = [found for one in status.attempts if (found := read_time(one.started)) is not None]
    ended = None if status.is_live else read_time(status.ended)
    begin = min(starts, default=min((sample.time for sample in samples), default=now))
    last = max((sample.time for sample in samples if sample.time <= now), default=begin)
    end = max(ended or (now if status.is_live else last), begin)
    stored = cache.read(JobState)
    job = stored.value if stored else None
    hangs = _list_hangs(path, job)
    events = _list_events(status, job, told, hangs, end)
    return RunAccount(
        status=status,
        manifest=read_manifest(path),
        records=read_run(path),
        reports=reports,
        samples=tuple(samples),
        job=job,
        hangs=tuple(
            (one, ReportCache(path, one.folder).read_evidence(one.number) or cache.read_evidence(one.number))
            for one in hangs[:_MOST_HANGS]
        ),
        events=tuple(sorted(events, key=lambda event: event.time)),
        begin=begin,
        end=end,
    )


def _list_hangs(path: Path, job: JobState | None) -> list[Hang]:
    """Return the hangs of all attempts by number: those with a folder, and those that the job's state has."""
    written = (read_value(Hang, file) for file in path.glob("hang-*/verdict.json"))
    found = [*(job.hangs if job else ()), *filter(None, written)]
    # Of the same hang, what tells that steps went on is newer.
    hangs = {hang.number: hang for hang in sorted(found, key=lambda hang: hang.recovered is not None)}
    return [hangs[number] for number in sorted(hangs)]


def _list_events(
    status: RunStatus,
    job: JobState | None,
    told: Sequence[MetricsEvent],
    hangs: Sequence[Hang],
    end: float,
) -> Iterator[Event]:
    """Give all that is known to have happened; `told` are the events of the nodes' metrics."""
    for before, attempt in pairwise(status.attempts):
        if (start := read_time(attempt.started)) is not None:
            kind = "requeue" if before.state == "requeued" else "restart"
            why = f" ({before.reason})" if before.reason else ""
            yield Event(kind, start, f"started again after it was {before.state}{why}")
    better: Mapping[str, object] = {"hang": hangs, "straggler": job, "restart": None, "checkpoint": None}
    for one in told:
        if one.event in better and not better[one.event]:
            yield Event(one.event, one.time, one.sentence)
    for hang in hangs:
        until = end if hang.recovered is None else hang.recovered
        lasted = describe_time(max(0.0, until - hang.stalled_since))
        text = f"hang {hang.number}, {lasted}: {hang.verdict.sentence}"
        yield Event("hang", hang.stalled_since, text, until)
    for slow in job.stragglers if job else ():
        text = f"rank {slow.rank} on {slow.host}, {100 * slow.excess:.0f}% slower: {slow.detail}"
        yield Event("straggler", slow.time, text)


# The page


def render_report(account: RunAccount, plans: Mapping[str, Plan]) -> bytes:
    """Return the page of a run, UTF-8; `plans` are those that can be read, by host.

    Every text is escaped, and control characters are shown as escapes; pictures are our own.
    """
    page: dict[str, object] = {
        **dict.fromkeys(("steps", "time", "gpu", "cpu", "machine")),
        "warnings": _list_warnings(account, plans),
        "hangs": account.hangs,
        "events": [event for event in account.events if event.text],
        "placement": any(host.records for host in account.records.hosts),
        "attempts": account.status.attempts,
    }
    if DRAWS:
        charts = Charts(account.samples, account.events, account.begin, account.end)
        page["steps"], page["time"] = charts.draw_steps(), charts.draw_time_shares()
        page["gpu"], page["cpu"] = (charts.draw_quantities(of_gpus=of_gpus) for of_gpus in (True, False))
        page["machine"] = _draw_machine(plans)
    status, manifest = account.status, account.manifest
    planned = sum(len(host.planned) for host in account.records.hosts)
    steps = [state.step for report in account.samples for state in report.ranks]
    text = _read_template().render(
        account=account,
        status=status,
        manifest=manifest,
        git=manifest.git or {},
        packages=manifest.packages or {},
        ranks=max(planned, len({state.rank for one in account.reports for state in one.ranks})),
        steps=max(steps, default=0),
        page=page,
        draws=DRAWS,
        now=datetime.now().astimezone(),
        style=Markup(_FOLDER.joinpath("page.css").read_text("utf-8")),  # noqa: S704 - our own file
    )
    return text.encode("utf-8", "backslashreplace")


@cache
def _read_template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_tame, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _FILTERS
    return environment.from_string(_FOLDER.joinpath("page.html.jinja").read_text("utf-8"))


def _tame(value: object) -> object:
    """Return a value for the page; what would act on a terminal or turn the direction of writing is shown."""
    return tame_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


# What ran


def _show_time(text: str) -> str:
    """Return a time of the manifest's with its zone, to the second."""
    zone = text[-6:] if text[-6:-5] in ("+", "-") else ""
    return f"{shorten_time(text)} {clean_text(zone)}".strip() if text else ""


# Warnings with their fixes


def _list_warnings(account: RunAccount, plans: Mapping[str, Plan]) -> list[tuple[Finding, str]]:
    """Return what slowed or endangered the run, the worst first, with the hosts in its text."""
    hosts: dict[Finding, list[str]] = {}
    for host, finding in _judge_run(account, plans):
        if finding.level in _LEVELS:
            hosts.setdefault(finding, []).append(host)
    several = max(account.status.nodes, len(account.reports), len(plans)) > 1
    listed = []
    for finding, names in hosts.items():
        known = [clean_text(name) for name in dict.fromkeys(names) if name] if several else []
        listed.append((finding, f"{name_some(known, 4)}: {finding.what}" if known else finding.what))
    return sorted(listed, key=lambda entry: _LEVELS.index(entry[0].level))


def _judge_run(account: RunAccount, plans: Mapping[str, Plan]) -> Iterator[tuple[str, Finding]]:
    """Give findings with their host: of plans, of records against them, and of what the watchers saw."""
    for host, plan in plans.items():
        for finding in judge_plan(plan):
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
        for state in report.ranks:
            for note in state.notes:
                yield report.host, found("watch.note", "note", note=note)
            if state.gpu and state.gpu.xids:
                xids = tuple(state.gpu.xids[:8])
                values = {"gpu": state.gpu.index, "rank": state.rank, "xids": xids}
                yield report.host, found("watch.xids", "warning", **values)


# Hangs: what the template asks of the evidence


def _format_stack(stack: Stack) -> str:
    """Return a stack, innermost call first."""
    lines = [f"{frame.file}:{frame.line}, {frame.function}" for frame in stack.frames[:_MOST_FRAMES]]
    return "\n".join(clean_text(line, 400) for line in lines)


def _describe_process(rank: RankEvidence) -> str:
    """Say what the kernel says of a rank's process."""
    return clean_text(f"{describe_process(rank.process)}, {rank.cpu or 0:.2f} cores in use", 400)


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


_FILTERS: dict[str, Callable[..., object]] = {
    "clean": clean_text,
    "stamp": read_time,
    "cpulist": shorten_cpulist,
    "differs": lambda plan, record: bool(record.problems) or any(compare_rank(plan, record)),
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


# Where the ranks ran


def _draw_machine(plans: Mapping[str, Plan]) -> Chart | None:
    """Draw the first node with its ranks."""
    if not plans:
        return None
    host, plan = next(iter(plans.items()))
    more = f"; of {count_things(len(plans), 'node')}, one is drawn" if len(plans) > 1 else ""
    title = f"{count_things(len(plan.ranks), 'rank')} on {clean_text(host)}{more}"
    about = f"{title}: NUMA nodes, cores, GPUs and NICs in the colours of their ranks."
    return make_chart("machine", title, about, draw_machine(plan, "", "svg"))
