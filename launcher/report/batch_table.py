"""What `launch tune batch` shows: each trial as it ends, then the table of them."""

from collections.abc import Sequence

from rich.console import Console

from launcher.report.tune_table import format_rate, print_rows
from launcher.text import format_size
from launcher.tune.batch_search import FAILED, FITS, BatchChoice, BatchTrial, measure_use
from launcher.tune.search import UNITS

HOW = {FITS: "fits", FAILED: "fails, not for memory"}
"""A verdict in a line; `does not fit` is the third."""


def describe_batch_size(trial: BatchTrial) -> str:
    """Return a trial in a line."""
    if trial.verdict != FITS:
        return f"batch {trial.batch}: {HOW.get(trial.verdict, 'does not fit')}: {trial.reason}"
    use = f", {format_size(measure_use(trial))}" if measure_use(trial) else ""
    if not trial.rate:
        return f"batch {trial.batch}: fits{use}: {trial.reason}"
    rate = f"{format_rate(trial.rate)} sequences/s"
    return f"batch {trial.batch}: {rate}{use} ({trial.steps} {UNITS[trial.unit]})"


def tabulate_batches(trials: Sequence[BatchTrial]) -> list[tuple[str, ...]]:
    """Return the rows of the table with its head, in the order of the size."""
    rows: list[tuple[str, ...]] = [("batch", "sequences/s", "±", "step", "memory", "of")]
    for trial in sorted(trials, key=lambda trial: trial.batch):
        rate = [format_rate(trial.rate), f"{trial.error:.1%}"] if trial.rate else ["-", "-"]
        step = f"{trial.step_seconds:.3g} s" if trial.step_seconds else "-"
        use = format_size(measure_use(trial)) if measure_use(trial) else "-"
        total = format_size(trial.gpu_total_kib) if trial.gpu_total_kib else "-"
        rows.append((str(trial.batch), *rate, step, use, total))
    return rows


def print_batches(console: Console, trials: Sequence[BatchTrial], choice: BatchChoice | None) -> None:
    """Print the table of the trials, each with what it is; the limit of a CPU's memory is the machine's."""
    rows = tabulate_batches(trials)
    if all(row[-1] in ("of", "-") for row in rows):
        rows = [row[:-1] for row in rows]
    print_rows(console, rows, {str(trial.batch): remark_batch(trial, choice) for trial in trials})


def remark_batch(trial: BatchTrial, choice: BatchChoice | None) -> str:
    """Return what stands behind a trial in the table."""
    if trial.verdict != FITS:
        return HOW.get(trial.verdict, "does not fit")
    if choice is None:
        return ""
    sizes = {
        "largest": choice.largest,
        "largest with 5% to spare": choice.largest_safe,
        "fastest": choice.fastest,
    }
    return ", ".join(name for name, size in sizes.items() if size == trial.batch)
