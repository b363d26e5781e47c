"""What is said of a report in a line: before a job starts, and if it is refused."""

from launcher.fit.fit_model import Change, FitReport

GIB, MIB = 1 << 30, 1 << 20
LARGEST_PARTS = 3


def explain_misfit(report: FitReport) -> str:
    """Say why a job does not fit, with the figures and the changes that make it fit."""
    request, total = report.request, report.estimate.total
    parts = sorted(report.estimate.parts, key=lambda part: part.bytes.low, reverse=True)[:LARGEST_PARTS]
    shown = ", ".join(f"{part.name} {format_bytes(part.bytes.low)}" for part in parts)
    fixes = "; or ".join(map(describe_change, report.changes)) or "no change that is known here makes it fit"
    return (
        f"{request.model.name} does not fit: {describe_device(report)}, and the training needs at least"
        f" {format_bytes(total.low)} ({shown}): {fixes}"
    )


def describe_fit(report: FitReport) -> str:
    """Say in a line how a job that is not refused stands."""
    total = report.estimate.total
    word = "is tight" if report.verdict == "tight" else "fits"
    return (
        f"{report.request.model.name} {word}: {describe_device(report)}, and the training needs about"
        f" {format_bytes(total.expected)}, at most {format_bytes(total.high)}"
    )


def describe_device(report: FitReport) -> str:
    """Say what memory there is."""
    device = report.request.device
    where = f"each GPU ({device.name})" if device.kind == "gpu" else "each rank (on CPUs)"
    return f"{where} has {format_bytes(report.capacity)}"


def describe_change(change: Change) -> str:
    """Return what to type, and the memory with it."""
    return f"{' '.join(change.settings)} (at most {format_bytes(change.total.high)})"


def format_bytes(size: int) -> str:
    """Return a size in GiB, a small one in MiB."""
    value, unit = (size / GIB, "GiB") if abs(size) >= GIB else (size / MIB, "MiB")
    return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:.1f} {unit}"
