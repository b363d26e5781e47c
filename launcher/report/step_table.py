"""Whether a program fits, for people: its peak by category and by module, and what comes on top."""

from rich.console import Console
from rich.table import Table

from launcher.fit.fit_model import Range
from launcher.fit.step_fit import ModuleShare, StepFit
from launcher.text import clean_text, escape_text

MOST_MODULES = 8
VERDICTS = {"fits": "fits", "tight": "tight: it may fit", "does_not_fit": "does not fit", "": "not judged"}
GIB, MIB = 1 << 30, 1 << 20


def print_step_fit(console: Console, fit: StepFit, notes: tuple[str, ...]) -> None:
    """Print the tables and the verdict."""
    unit, name = (GIB, "GiB") if fit.estimate.total.expected >= GIB else (MIB, "MiB")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"memory of a {'GPU' if fit.device.kind == 'gpu' else 'rank'}, {name}")
    for header in ("low", "expected", "high"):
        table.add_column(header, justify="right")
    for part in fit.estimate.parts:
        table.add_row(part.name, *show_range(part.bytes, unit))
    table.add_row("total", *show_range(fit.estimate.total, unit), style="bold")
    console.print(table)
    if shares := [share for share in fit.peak.modules if share.name][:MOST_MODULES]:
        console.print()
        console.print(make_module_table(shares, unit, name))
    console.print()
    for line in (describe_step_verdict(fit), fit.learned, *notes):
        if line:
            console.print(escape_text(clean_text(line)), markup=False, highlight=False, soft_wrap=True)


def make_module_table(shares: list[ModuleShare], unit: int, name: str) -> Table:
    """Return the table of the modules with most memory at the peak."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("largest modules at the peak")
    table.add_column("number", justify="right")
    table.add_column(name, justify="right")
    table.add_column("of it")
    for share in shares:
        own = ", ".join(f"{category} {size / unit:.3g}" for category, size in share.categories)
        table.add_row(clean_text(share.name), str(share.count), f"{share.bytes / unit:.2f}", own)
    return table


def show_range(value: Range, unit: int) -> list[str]:
    """Return the three numbers of a range."""
    return [f"{size / unit:.2f}" for size in (value.low, value.expected, value.high)]


def describe_step_verdict(fit: StepFit) -> str:
    """Say in a line whether it fits."""
    capacity, total = fit.device.memory_mib << 20, fit.estimate.total
    if not capacity:
        return f"{total.expected / GIB:.2f} GiB expected; the device's memory is not known"
    return (
        f"{VERDICTS[fit.verdict]}: {total.expected / GIB:.2f} GiB expected ({total.low / GIB:.2f} to"
        f" {total.high / GIB:.2f}) of {capacity / GIB:.2f} GiB of {fit.device.name}"
    )
