"""Whether a job fits, for people: memory by part, the node's budget, advice, speed, and what would help."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.fit.choose_settings import describe_choice
from launcher.fit.fit_decision import format_bytes
from launcher.fit.fit_model import (
    Advice,
    BudgetLine,
    FitReport,
    FitRequest,
    GridCell,
    MemoryEstimate,
    Range,
    SpeedEstimate,
)
from launcher.text import clean_text, describe_time, escape_text

VERDICT_TEXTS = {"fits": "fits", "tight": "tight, it may fit", "does_not_fit": "does not fit"}
VERDICT_STYLES = {"fits": "bold green", "tight": "bold yellow", "does_not_fit": "bold red"}
PART_NAMES = {"optimizer": "optimizer states", "communication": "communication buffers"}
RANGES, NOTES = 44, 72
"""Columns that a console needs for low and high, and for how a part comes about."""
GIB, MIB = 1 << 30, 1 << 20
YEAR = 365.25 * 86400


def print_fit(console: Console, report: FitReport, *, memory_alone: bool = False) -> None:
    """Print a report: what is judged, the table, and what follows from it."""
    print_line(console, describe_verdict(report), VERDICT_STYLES.get(report.verdict, "bold"))
    print_line(console, describe_fit_request(report.request, report.speed))
    if report.request.free.any:
        print_line(console, describe_choice(report.request, report.estimate.total))
    print_memory(console, report)
    print_changes(console, report)
    print_grid(console, report)
    if memory_alone:
        return
    print_budget(console, report.budget)
    for item in report.advice:
        print_line(console, describe_advice(item), "yellow" if item.level == "warning" else "dim")
    if report.speed:
        for text in describe_speed(report.speed, report.request):
            print_line(console, text)
    if report.learned:
        print_line(console, report.learned, "dim")


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a text; a file or a pipe gets it on one line."""
    console.print(
        escape_text(text), style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal
    )


def describe_verdict(report: FitReport) -> str:
    """Say in a line whether the job fits, and by how much."""
    device, estimate = report.request.device, report.estimate.total
    where = "each GPU" if device.kind == "gpu" else "each rank"
    name = f" ({clean_text(device.name)}, {format_bytes(report.capacity)})"
    text = VERDICT_TEXTS.get(report.verdict, "not judged")
    needed = f"{format_bytes(estimate.expected)} expected, {format_bytes(estimate.high)} at most"
    if report.verdict == "does_not_fit":
        needed = f"{format_bytes(estimate.low)} at least"
    fewest = next((change for change in report.changes if change.settings[0].startswith("nodes=")), None)
    if fewest:
        needed += f"; {' '.join(fewest.settings)} is enough"
    return f"memory of {where}{name}: {text}; {needed}"


def describe_fit_request(request: FitRequest, speed: SpeedEstimate | None) -> str:
    """Say in a line what is judged: the model, the layout and the settings."""
    layout, settings = request.layout, request.settings
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "dp")}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one replica"]
    batch = settings.micro_batch * settings.accumulation * layout.dp
    lora = settings.lora
    zero = f" stage {layout.zero}" if settings.framework == "zero" else ""
    parts = [
        clean_text(request.model.name),
        f"{speed.parameters:,} parameters" if speed else "",
        f"{', '.join(shown)} by {settings.framework}{zero}",
        f"{settings.precision}, {settings.optimizer}",
        f"LoRA of rank {lora.rank} on {' '.join(lora.targets)}" if lora else "",
        f"frozen weights in {settings.quantization}" if settings.quantization != "none" else "",
        f"checkpointing {settings.checkpointing}" if settings.checkpointing != "none" else "",
        f"offload {settings.offload}" if settings.offload != "none" else "",
        "activations offloaded" if settings.activation_offload else "",
        "optimizer in backward" if settings.optimizer_in_backward else "",
        f"micro-batch {settings.micro_batch} x {settings.seq_len} tokens",
        f"global batch {batch}",
    ]
    return ", ".join(part for part in parts if part)


def print_memory(console: Console, report: FitReport) -> None:
    """Print the table of memory by part, with the capacity and what is left of it."""
    estimate, unit = report.estimate, choose_byte_unit(report.estimate.total)
    has_range, has_notes = console.width >= RANGES, console.width >= NOTES
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("GiB" if unit == GIB else "MiB", no_wrap=True)
    for title in ("low", "expected", "high") if has_range else ("expected",):
        table.add_column(title, justify="right", no_wrap=True)
    if has_notes:
        table.add_column("", overflow="fold", style="dim")
    for name, found, note in list_rows(estimate):
        cells = write_range(found, unit, has_range=has_range)
        style = "bold" if name == "total" else ""
        table.add_row(name, *cells, *([escape_text(note, 200)] if has_notes else []), style=style)
    if report.capacity:
        left = Range(
            *(
                report.capacity - each
                for each in (estimate.total.high, estimate.total.expected, estimate.total.low)
            )
        )
        table.add_row("capacity", *write_range(Range(*[report.capacity] * 3), unit, has_range=has_range))
        table.add_row("headroom", *write_range(left, unit, has_range=has_range))
    console.print(table, markup=False)


def list_rows(estimate: MemoryEstimate) -> Iterator[tuple[str, Range, str]]:
    """Give the name, the bytes and the note of each part that there is, then the total."""
    for part in estimate.parts:
        if part.bytes.high:
            yield PART_NAMES.get(part.name, part.name), part.bytes, part.note
    stage = f"pipeline stage {estimate.stage}, the fullest" if estimate.stage else ""
    yield "total", estimate.total, stage


def write_range(found: Range, unit: int, *, has_range: bool) -> list[str]:
    """Return the cells of a range."""
    values = (found.low, found.expected, found.high) if has_range else (found.expected,)
    return [write_number(value / unit) for value in values]


def write_number(value: float) -> str:
    """Return a number with what digits it deserves."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def choose_byte_unit(total: Range) -> int:
    """Return the bytes of the unit of a table."""
    return GIB if total.expected >= GIB else MIB


def print_changes(console: Console, report: FitReport) -> None:
    """Print each change that makes the job fit: what to type, the memory with it, and what it costs."""
    if report.verdict == "does_not_fit" or report.changes:
        found = bool(report.changes)
        print_line(console, "it fits with one of these:" if found else "no change that is known makes it fit")
    for change in report.changes:
        print_line(
            console, f"  {' '.join(change.settings)}  (at most {format_bytes(change.total.high)})", "bold"
        )
        print_line(console, f"    {change.why}", "dim")


def print_grid(console: Console, report: FitReport) -> None:
    """Print what each micro-batch takes at most, by checkpointing and sharding, and how fast that is."""
    if not report.grid:
        return
    unit = choose_byte_unit(report.estimate.total)
    columns = list(dict.fromkeys((cell.checkpointing, cell.framework) for cell in report.grid))
    found = {(cell.micro_batch, cell.checkpointing, cell.framework): cell for cell in report.grid}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("micro-batch", justify="right")
    for checkpointing, framework in columns:
        table.add_column(f"{checkpointing} {framework}", justify="right", max_width=10)
    for size in dict.fromkeys(cell.micro_batch for cell in report.grid):
        table.add_row(
            str(size), *(write_cell(found[size, *column], report.capacity, unit) for column in columns)
        )
    speeds = [
        next(cell for cell in report.grid if (cell.checkpointing, cell.framework) == one) for one in columns
    ]
    if speeds[0].tokens_per_second:
        ends = [cell.tokens_per_second or (0, 0) for cell in speeds]
        table.add_row("tokens/s", *(f"{shorten(low)}-{shorten(high)}" for low, high in ends))
    console.print()
    print_line(
        console,
        f"{'GiB' if unit == GIB else 'MiB'} at most, by micro-batch, checkpointing and sharding;"
        " (too much); * is what is judged",
    )
    console.print(table, markup=False)


def write_cell(cell: GridCell, capacity: int, unit: int) -> Text:
    """Return the memory of a combination: whether it fits, and whether it is the one that is judged."""
    number = write_number(cell.total.high / unit)
    fits = cell.total.high <= capacity
    text = number if fits else f"({number})"
    return Text(
        f"{text}*" if cell.is_chosen else text, "bold green" if cell.is_chosen else "" if fits else "dim"
    )


def shorten(number: float) -> str:
    """Return a number in three digits or so: 950, 12k, 1.5M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f}{unit}"
    return f"{number:.0f}"


def print_budget(console: Console, lines: Sequence[BudgetLine]) -> None:
    """Print what the job needs of each node, and has."""
    if not lines:
        return
    has_notes = console.width >= NOTES
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("each node", no_wrap=True)
    for title in ("needed", "has"):
        table.add_column(title, justify="right", no_wrap=True)
    if has_notes:
        table.add_column("", overflow="fold")
    for line in lines:
        note = f"{line.note}: too few, {line.fix}" if line.unit == "cores" and not line.enough else line.note
        if line.unit != "cores" and not line.enough:
            note = f"{line.note}: too little, {line.fix}"
        has = "?" if line.available is None else write_amount(line.available, line.unit)
        cells = [line.name, write_amount(line.needed, line.unit), has]
        style = "" if line.enough else "yellow"
        table.add_row(*cells, *([escape_text(note, 200)] if has_notes else []), style=style)
    console.print(table, markup=False)
    for line in () if has_notes else lines:
        if not line.enough:
            print_line(console, f"{line.name}: {line.fix}", "yellow")


def write_amount(amount: float, unit: str) -> str:
    """Return an amount with its unit; cores are whole."""
    return f"{amount:.0f}" if unit == "cores" else f"{write_number(amount)} {unit}"


def describe_advice(item: Advice) -> str:
    """Return an advice in a line."""
    gain = f" ({item.gain})" if item.gain else ""
    return f"{item.level}: {item.what}{f': {item.fix}' if item.fix else ''}{gain}"


def describe_speed(speed: SpeedEstimate, request: FitRequest) -> Iterator[str]:
    """Give the lines on speed: of a step, and to the budget of tokens."""
    if not speed.step_seconds:
        return
    measured = request.step_seconds is not None
    low, high = speed.step_seconds
    step = describe_span(low, high)
    parts = [
        f"{'measured' if measured else 'expected'} speed: {step} a step of {speed.tokens_per_step:,} tokens"
    ]
    if speed.tflops:
        parts.append(f"{write_span(speed.tflops, '.0f')} TFLOPS a GPU")
    if speed.mfu:
        parts.append(f"MFU {write_span(speed.mfu, '.0%')}")
    if speed.hfu and speed.hfu != speed.mfu:
        parts.append(f"HFU {write_span(speed.hfu, '.0%')}")
    peak = f"; peak {speed.peak_tflops:g} TFLOPS ({speed.peak_source})" if speed.peak_tflops else ""
    yield ", ".join(parts) + peak
    if speed.total_seconds and speed.gpu_hours and request.tokens:
        total = describe_span(*speed.total_seconds)
        yield f"{request.tokens:.4g} tokens: {total}, {write_span(speed.gpu_hours, ',.0f')} GPU-hours"


def write_span(ends: tuple[float, float], form: str) -> str:
    """Return both ends of a range, or one if they are alike."""
    low, high = (format(end, form) for end in sorted(ends))
    return low if low == high else f"{low} to {high}"


def describe_span(low: float, high: float) -> str:
    """Return both ends of a time, or one if they are alike."""
    first, last = (describe_long_time(seconds) for seconds in sorted((low, high)))
    return first if first == last else f"{first} to {last}"


def describe_long_time(seconds: float) -> str:
    """Return a time for people: `0.35 s`, `3 h 20 min`, `12.3 days`, `1.2 years`."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    if seconds < 2 * 86400:
        return describe_time(seconds)
    return f"{seconds / 86400:,.1f} days" if seconds < YEAR else f"{seconds / YEAR:,.3g} years"
