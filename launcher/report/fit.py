"""`launch fit` for people: whether a job fits, and how fast it would be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.fit.advice import BudgetLine, SpeedEstimate
from launcher.fit.choice import (
    VERDICTS,
    Change,
    FitReport,
    choose_unit,
    describe_change,
    describe_choice,
    describe_device,
    describe_need,
    format_number,
)
from launcher.fit.training import Device, Estimate, Range, Training
from launcher.report.tables import make_table, print_line
from launcher.text import clean_text, describe_time, escape_text

_STYLES = {"fits": "bold green", "tight": "bold yellow", "does_not_fit": "bold red", "": "bold"}
_PART_NAMES = {"optimizer": "optimizer states", "communication": "communication buffers"}
_NUMBERS = ("low", "expected", "high")
_NOTES = 72
"""Columns that a console needs for how a part comes about."""
_YEAR = 365.25 * 86400
_MOST_MODULES = 8


def print_fit(console: Console, report: FitReport, *, memory_alone: bool = False) -> None:
    """Print a report: what is judged, the table, and what follows from it."""
    request, total = report.request, report.estimate.total
    _print_verdict(console, total, report.verdict, request.device, report.changes)
    print_line(console, _describe_request(request, report.speed))
    if request.free:
        print_line(console, describe_choice(request, total))
    rows = [(part.name, part.bytes, part.note) for part in report.estimate.parts if part.bytes.high]
    stage = f"pipeline stage {report.estimate.stage}, the fullest" if report.estimate.stage else ""
    rows.append(("total", total, stage))
    if capacity := request.capacity:
        left = Range(capacity - total.high, capacity - total.expected, capacity - total.low)
        rows += [("capacity", Range(capacity, capacity, capacity), ""), ("headroom", left, "")]
    _print_parts(console, rows)
    if report.verdict not in ("", "fits"):
        found = "it fits with one of these:" if report.changes else "no change that is known makes it fit"
        print_line(console, found)
    for change in report.changes:
        print_line(console, f"  {describe_change(change)}", "bold")
        print_line(console, f"    {change.why}", "dim")
    if report.grid:
        _print_grid(console, report)
    if memory_alone:
        return
    _print_budget(console, report.budget)
    for item in report.advice:
        style = "yellow" if item.level == "warning" else "dim"
        print_line(console, f"{item.level}: {item.what}: {item.fix}", style)
    for text in _describe_speed(report.speed, request):
        print_line(console, text)
    if report.learned:
        print_line(console, report.learned, "dim")


def _print_verdict(
    console: Console, total: Range, verdict: str, device: Device, changes: Sequence[Change] = ()
) -> None:
    """Print in a line whether a job fits, and by how much."""
    nodes = [change.settings for change in changes if change.settings[0].startswith("nodes=")]
    more = f"; {' '.join(nodes[0])} is enough" if nodes else ""
    text = f"memory of {describe_device(device)}: {VERDICTS[verdict]}; {describe_need(total, verdict)}{more}"
    print_line(console, text, _STYLES[verdict])


def _describe_request(request: Training, speed: SpeedEstimate) -> str:
    """Say in a line what is judged: the model, the layout and the settings."""
    layout, settings, lora = request.layout, request.settings, request.settings.lora
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "dp")}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one replica"]
    zero = f" stage {layout.zero}" if layout.framework == "zero" else ""
    parts = {
        clean_text(request.model.name): True,
        f"{speed.parameters:,} parameters": True,
        f"{', '.join(shown)} by {layout.framework}{zero}": True,
        f"{settings.precision}, {settings.optimizer}": True,
        f"LoRA of rank {lora.rank} on {' '.join(lora.targets)}" if lora.rank else "": lora.rank,
        f"frozen weights in {settings.quantization}": settings.quantization != "none",
        f"checkpointing {settings.checkpointing}": settings.checkpointing != "none",
        f"offload {settings.offload}": settings.offload != "none",
        "activations offloaded": settings.activation_offload,
        "optimizer in backward": settings.optimizer_in_backward,
        f"micro-batch {settings.micro_batch} x {settings.seq_len} tokens": True,
        f"global batch {request.step_sequences}": True,
    }
    return ", ".join(text for text, is_shown in parts.items() if is_shown)


def _print_parts(console: Console, rows: Sequence[tuple[str, Range, str]]) -> None:
    """Print the table of memory by part, of which one is the total."""
    unit, unit_name = choose_unit(next(size.expected for name, size, _ in rows if name == "total"))
    notes = ("",) if console.width >= _NOTES and any(note for *_, note in rows) else ()
    table = make_table((unit_name, *_NUMBERS, *notes), right=_NUMBERS, wrapped=("",))
    for name, found, note in rows:
        cells = [format_number(getattr(found, number) / unit) for number in _NUMBERS]
        said = [Text(escape_text(note, 200), "dim")] if notes else []
        table.add_row(_PART_NAMES.get(name, name), *cells, *said, style="bold" if name == "total" else "")
    console.print(table)


def _print_grid(console: Console, report: FitReport) -> None:
    """Print what each micro-batch takes at most, by checkpointing and sharding, and how fast that is."""
    unit, unit_name = choose_unit(report.estimate.total.expected)
    found = {((cell.checkpointing, cell.framework), cell.micro_batch): cell for cell in report.grid}
    columns, sizes = (list(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    titles = [" ".join(column) for column in columns]
    every = ("micro-batch", *titles)
    table = make_table(every, right=every, wrapped=titles, widths=dict.fromkeys(titles, 10), gap=1)
    for size in sizes:
        row = []
        for cell in (found[column, size] for column in columns):
            fits, number = cell.total.high <= report.request.capacity, format_number(cell.total.high / unit)
            text = f"{number if fits else f'({number})'}{'*' if cell.is_chosen else ''}"
            row.append(Text(text, "bold green" if cell.is_chosen else "" if fits else "dim"))
        table.add_row(str(size), *row)
    speeds = [found[column, sizes[0]].tokens_per_second for column in columns]
    if all(speeds):
        table.add_row(
            "ktokens/s", *(_span(ends, lambda end: f"{end / 1000:,.0f}") for ends in speeds if ends)
        )
    console.print()
    about = "at most, by micro-batch, checkpointing and sharding; (too much); * is what is judged"
    print_line(console, f"{unit_name} {about}")
    console.print(table)


def _print_budget(console: Console, lines: Sequence[BudgetLine]) -> None:
    """Print what the job needs of each node, and has."""
    table = make_table(("each node", "needed", "has", ""), right=("needed", "has"), wrapped=("",))
    forms = {"cores": "{:.0f}".format, "GiB": lambda amount: f"{format_number(amount)} GiB"}
    for line in lines:
        amounts = (line.needed, line.available)
        needed, has = ("?" if amount is None else forms[line.unit](amount) for amount in amounts)
        note = line.note if line.enough else f"{line.note}: too little, {line.fix}"
        said = Text(escape_text(note, 200))
        table.add_row(line.name, needed, has, said, style="" if line.enough else "yellow")
    console.print(table)


def _describe_speed(speed: SpeedEstimate, request: Training) -> Iterator[str]:
    """Give the lines on speed: of a step, and to the budget of tokens."""
    if not speed.step_seconds or not speed.tflops:
        return
    measured = "expected" if request.settings.step_seconds is None else "measured"
    step = _span(speed.step_seconds, _describe_long_time)
    parts = [f"{measured} speed: {step} a step of {speed.tokens_per_step:,} tokens"]
    parts.append(f"{_span(speed.tflops, '{:.0f}'.format)} TFLOPS a GPU")
    if speed.mfu and speed.hfu:
        parts.append(f"MFU {_span(speed.mfu, '{:.0%}'.format)}")
        parts += [f"HFU {_span(speed.hfu, '{:.0%}'.format)}"] if speed.hfu != speed.mfu else []
    peak = f"; peak {speed.peak_tflops:g} TFLOPS ({speed.peak_source})" if speed.peak_tflops else ""
    yield ", ".join(parts) + peak
    if speed.total_seconds and speed.gpu_hours and request.settings.tokens:
        total = _span(speed.total_seconds, _describe_long_time)
        hours = _span(speed.gpu_hours, "{:,.0f}".format)
        yield f"{request.settings.tokens:.4g} tokens: {total}, {hours} GPU-hours"


def _span(ends: tuple[float, float], form: Callable[[float], str]) -> str:
    """Return both ends of a range, or one if they are alike."""
    low, high = (form(end) for end in sorted(ends))
    return low if low == high else f"{low} to {high}"


def _describe_long_time(seconds: float) -> str:
    """Return a time for people: `0.35 s`, `3 h 20 min`, `12.3 days`, `1.2 years`."""
    if seconds < 2 * 86400:
        return f"{seconds:.3g} s" if seconds < 10 else describe_time(seconds)
    return f"{seconds / 86400:,.1f} days" if seconds < _YEAR else f"{seconds / _YEAR:,.3g} years"


def print_step_fit(
    console: Console,
    estimate: Estimate,
    verdict: str,
    device: Device,
    modules: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> None:
    """Print the peak of a program by category and by module, and the verdict."""
    _print_verdict(console, estimate.total, verdict, device)
    _print_parts(
        console, [*((part.name, part.bytes, "") for part in estimate.parts), ("total", estimate.total, "")]
    )
    unit, name = choose_unit(estimate.total.expected)
    if shares := [share for share in modules if share["name"]][:_MOST_MODULES]:
        titles = ("largest modules at the peak", "number", name, "of it")
        table = make_table(titles, right=("number", name), wrapped=("of it",))
        for share in shares:
            own = ", ".join(f"{category} {size / unit:.3g}" for category, size in share["categories"].items())
            table.add_row(clean_text(share["name"]), str(share["count"]), f"{share['bytes'] / unit:.2f}", own)
        console.print()
        console.print(table)
    console.print()
    for line in filter(None, notes):
        console.print(escape_text(clean_text(line)), markup=False, highlight=False, soft_wrap=True)
