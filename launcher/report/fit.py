"""`launch fit` for people: whether a job fits, and how fast it would be."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from launcher.fit.advice import BudgetLine, SpeedEstimate
from launcher.fit.choice import FitReport, StepFit, describe_choice, format_bytes
from launcher.fit.training import Range, Training
from launcher.report.tables import make_table, print_line
from launcher.text import clean_text, describe_time, escape_text

_VERDICTS = {"fits": "fits", "tight": "tight, it may fit", "does_not_fit": "does not fit"}
_VERDICT_STYLES = {"fits": "bold green", "tight": "bold yellow", "does_not_fit": "bold red"}
_PART_NAMES = {"optimizer": "optimizer states", "communication": "communication buffers"}
_RANGES, _NOTES = 44, 72
"""Columns that a console needs for low and high, and for how a part comes about."""
_GIB, _MIB = 1 << 30, 1 << 20
_YEAR = 365.25 * 86400
_MOST_MODULES = 8


def print_fit(console: Console, report: FitReport, *, memory_alone: bool = False) -> None:
    """Print a report: what is judged, the table, and what follows from it."""
    print_line(console, _describe_verdict(report), _VERDICT_STYLES.get(report.verdict, "bold"))
    print_line(console, _describe_request(report.request, report.speed))
    if report.request.free:
        print_line(console, describe_choice(report.request, report.estimate.total))
    _print_memory(console, report)
    if report.verdict == "does_not_fit" or report.changes:
        found = "it fits with one of these:" if report.changes else "no change that is known makes it fit"
        print_line(console, found)
    for change in report.changes:
        most = format_bytes(change.total.high)
        print_line(console, f"  {' '.join(change.settings)}  (at most {most})", "bold")
        print_line(console, f"    {change.why}", "dim")
    if report.grid:
        _print_grid(console, report)
    if memory_alone:
        return
    if report.budget:
        _print_budget(console, report.budget)
    for item in report.advice:
        gain, fix = f" ({item.gain})" if item.gain else "", f": {item.fix}" if item.fix else ""
        style = "yellow" if item.level == "warning" else "dim"
        print_line(console, f"{item.level}: {item.what}{fix}{gain}", style)
    for text in _describe_speed(report.speed, report.request) if report.speed else ():
        print_line(console, text)
    if report.learned:
        print_line(console, report.learned, "dim")


def _describe_verdict(report: FitReport) -> str:
    """Say in a line whether the job fits, and by how much."""
    estimate = report.estimate.total
    where = "each GPU" if report.request.on_gpu else "each rank"
    name = f" ({clean_text(report.request.device.name)}, {format_bytes(report.request.capacity)})"
    text = _VERDICTS.get(report.verdict, "not judged")
    needed = f"{format_bytes(estimate.expected)} expected, {format_bytes(estimate.high)} at most"
    if report.verdict == "does_not_fit":
        needed = f"{format_bytes(estimate.low)} at least"
    fewest = next((change for change in report.changes if change.settings[0].startswith("nodes=")), None)
    if fewest:
        needed += f"; {' '.join(fewest.settings)} is enough"
    return f"memory of {where}{name}: {text}; {needed}"


def _describe_request(request: Training, speed: SpeedEstimate | None) -> str:
    """Say in a line what is judged: the model, the layout and the settings."""
    layout, settings = request.layout, request.settings
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "dp")}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one replica"]
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
        f"global batch {request.step_sequences}",
    ]
    return ", ".join(part for part in parts if part)


def _choose_unit(total: Range) -> tuple[int, str]:
    """Return the bytes of the unit of a table, and its name."""
    return (_GIB, "GiB") if total.expected >= _GIB else (_MIB, "MiB")


def _write_number(value: float) -> str:
    """Return a number with what digits it deserves."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _print_memory(console: Console, report: FitReport) -> None:
    """Print the table of memory by part, with the capacity and what is left of it."""
    estimate, (unit, unit_name) = report.estimate, _choose_unit(report.estimate.total)
    has_range, has_notes = console.width >= _RANGES, console.width >= _NOTES
    numbers = ("low", "expected", "high") if has_range else ("expected",)
    table = make_table((unit_name, *numbers, *([""] if has_notes else [])), right=numbers, wrapped=("",))
    parts = [(_PART_NAMES.get(part.name, part.name), part.bytes, part.note) for part in estimate.parts]
    rows = [part for part in parts if part[1].high]
    stage = f"pipeline stage {estimate.stage}, the fullest" if estimate.stage else ""
    rows.append(("total", estimate.total, stage))
    if capacity := report.request.capacity:
        total = estimate.total
        left = Range(capacity - total.high, capacity - total.expected, capacity - total.low)
        rows += [("capacity", Range(capacity, capacity, capacity), ""), ("headroom", left, "")]
    for name, found, note in rows:
        cells = [_write_number(getattr(found, number) / unit) for number in numbers]
        notes = [Text(escape_text(note, 200), "dim")] if has_notes else []
        table.add_row(name, *cells, *notes, style="bold" if name == "total" else "")
    console.print(table)


def _print_grid(console: Console, report: FitReport) -> None:
    """Print what each micro-batch takes at most, by checkpointing and sharding, and how fast that is."""
    unit, unit_name = _choose_unit(report.estimate.total)
    columns = list(dict.fromkeys((cell.checkpointing, cell.framework) for cell in report.grid))
    found = {(cell.micro_batch, cell.checkpointing, cell.framework): cell for cell in report.grid}
    titles = [" ".join(column) for column in columns]
    every = ("micro-batch", *titles)
    table = make_table(every, right=every, wrapped=titles, widths=dict.fromkeys(titles, 10), gap=1)
    for size in dict.fromkeys(cell.micro_batch for cell in report.grid):
        row = []
        for column in columns:
            cell = found[size, *column]
            fits = cell.total.high <= report.request.capacity
            number = _write_number(cell.total.high / unit)
            text = f"{number if fits else f'({number})'}{'*' if cell.is_chosen else ''}"
            row.append(Text(text, "bold green" if cell.is_chosen else "" if fits else "dim"))
        table.add_row(str(size), *row)
    firsts = [
        next(cell for cell in report.grid if (cell.checkpointing, cell.framework) == one) for one in columns
    ]
    if firsts[0].tokens_per_second:
        ends = [cell.tokens_per_second or (0, 0) for cell in firsts]
        table.add_row("tokens/s", *(f"{_shorten(low)}-{_shorten(high)}" for low, high in ends))
    console.print()
    about = "at most, by micro-batch, checkpointing and sharding; (too much); * is what is judged"
    print_line(console, f"{unit_name} {about}")
    console.print(table)


def _shorten(number: float) -> str:
    """Return a number in three digits or so: 950, 12k, 1.5M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f}{unit}"
    return f"{number:.0f}"


def _print_budget(console: Console, lines: Sequence[BudgetLine]) -> None:
    """Print what the job needs of each node, and has."""
    has_notes = console.width >= _NOTES
    titles = ("each node", "needed", "has", *([""] if has_notes else []))
    table = make_table(titles, right=("needed", "has"), wrapped=("",))
    for line in lines:
        has = "?" if line.available is None else _write_amount(line.available, line.unit)
        lack = "few" if line.unit == "cores" else "little"
        note = line.note if line.enough else f"{line.note}: too {lack}, {line.fix}"
        cells = [line.name, _write_amount(line.needed, line.unit), has]
        notes = [Text(escape_text(note, 200))] if has_notes else []
        table.add_row(*cells, *notes, style="" if line.enough else "yellow")
    console.print(table)
    for line in () if has_notes else lines:
        if not line.enough:
            print_line(console, f"{line.name}: {line.fix}", "yellow")


def _write_amount(amount: float, unit: str) -> str:
    """Return an amount with its unit; cores are whole."""
    return f"{amount:.0f}" if unit == "cores" else f"{_write_number(amount)} {unit}"


def _describe_speed(speed: SpeedEstimate, request: Training) -> Iterator[str]:
    """Give the lines on speed: of a step, and to the budget of tokens."""
    if not speed.step_seconds:
        return
    measured = "expected" if request.step_seconds is None else "measured"
    step = _span(speed.step_seconds, _describe_long_time)
    parts = [f"{measured} speed: {step} a step of {speed.tokens_per_step:,} tokens"]
    if speed.tflops:
        parts.append(f"{_span(speed.tflops, '{:.0f}'.format)} TFLOPS a GPU")
    if speed.mfu:
        parts.append(f"MFU {_span(speed.mfu, '{:.0%}'.format)}")
    if speed.hfu and speed.hfu != speed.mfu:
        parts.append(f"HFU {_span(speed.hfu, '{:.0%}'.format)}")
    peak = f"; peak {speed.peak_tflops:g} TFLOPS ({speed.peak_source})" if speed.peak_tflops else ""
    yield ", ".join(parts) + peak
    if speed.total_seconds and speed.gpu_hours and request.tokens:
        total = _span(speed.total_seconds, _describe_long_time)
        hours = _span(speed.gpu_hours, "{:,.0f}".format)
        yield f"{request.tokens:.4g} tokens: {total}, {hours} GPU-hours"


def _span(ends: tuple[float, float], form: Callable[[float], str]) -> str:
    """Return both ends of a range, or one if they are alike."""
    low, high = (form(end) for end in sorted(ends))
    return low if low == high else f"{low} to {high}"


def _describe_long_time(seconds: float) -> str:
    """Return a time for people: `0.35 s`, `3 h 20 min`, `12.3 days`, `1.2 years`."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    if seconds < 2 * 86400:
        return describe_time(seconds)
    return f"{seconds / 86400:,.1f} days" if seconds < _YEAR else f"{seconds / _YEAR:,.3g} years"


def print_step_fit(console: Console, fit: StepFit, notes: tuple[str, ...]) -> None:
    """Print the peak of a program by category and by module, and the verdict."""
    total, (unit, name) = fit.estimate.total, _choose_unit(fit.estimate.total)
    numbers = ("low", "expected", "high")
    where = "GPU" if fit.device.kind == "gpu" else "rank"
    table = make_table((f"memory of a {where}, {name}", *numbers), right=numbers)
    for part, found in (*((part.name, part.bytes) for part in fit.estimate.parts), ("total", total)):
        cells = [f"{getattr(found, number) / unit:.2f}" for number in numbers]
        table.add_row(part, *cells, style="bold" if part == "total" else "")
    console.print(table)
    if shares := [share for share in fit.peak.modules if share.name][:_MOST_MODULES]:
        titles = ("largest modules at the peak", "number", name, "of it")
        table = make_table(titles, right=("number", name), wrapped=("of it",))
        for share in shares:
            own = ", ".join(f"{category} {size / unit:.3g}" for category, size in share.categories.items())
            table.add_row(clean_text(share.name), str(share.count), f"{share.bytes / unit:.2f}", own)
        console.print()
        console.print(table)
    console.print()
    capacity = fit.device.memory_mib << 20
    verdict = f"{total.expected / _GIB:.2f} GiB expected; the device's memory is not known"
    if capacity:
        span = f"({total.low / _GIB:.2f} to {total.high / _GIB:.2f})"
        of = f"of {capacity / _GIB:.2f} GiB of {fit.device.name}"
        said = _VERDICTS.get(fit.verdict, "not judged")
        verdict = f"{said}: {total.expected / _GIB:.2f} GiB expected {span} {of}"
    for line in filter(None, (verdict, fit.learned, *notes)):
        console.print(escape_text(clean_text(line)), markup=False, highlight=False, soft_wrap=True)
