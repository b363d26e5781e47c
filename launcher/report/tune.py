"""`launch tune` for people: the trials that say what is fastest."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.text import Text

from launcher.report.console import make_console
from launcher.report.tables import make_table
from launcher.runs.progress import Progress
from launcher.text import format_size, redirect_log
from launcher.tune.trials import FAILED, FITS, TOO_LARGE, Trial

_VERDICTS = {FITS: "fits", TOO_LARGE: "does not fit", FAILED: "fails, not for memory"}


class TrialViewer:
    """Shows what is being tried, on a terminal alone, and nothing of what the trial prints or logs."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.showing = ExitStack()

    def start(self) -> None:
        """Show it: not before the agent's start, since a thread must not hold locks in a fork."""
        console = make_console()
        if console.is_terminal:
            spinner = "dots" if console.encoding.startswith("utf") else "line"
            self.showing.enter_context(console.status(Text(self.text), spinner=spinner))
        self.showing.callback(redirect_log(lambda _: None))

    def ignore(self, *_: object, **__: object) -> None:
        """A trial has no terminal, and what it prints is not shown."""

    use_terminal = notify = watch_rank = ignore

    def release_log(self) -> None:
        """Let what is logged be seen."""
        self.showing.close()

    def finish(self, *, patient: bool = True) -> Sequence[Progress]:
        return ()

    def close(self) -> bool:
        """Take the line down."""
        self.showing.close()
        return True


def _format_rate(trial: Trial) -> str:
    return "-" if not trial.rate else f"{trial.rate:.3g}" if trial.rate < 1000 else f"{trial.rate:.0f}"


_COLUMNS: Mapping[str, Callable[[Trial], str]] = {
    "±": lambda trial: f"{trial.error:.1%}" if trial.error else "",
    "waiting for data": lambda trial: f"{trial.wait:.0%}" if trial.rate else "",
    "step": lambda trial: f"{trial.step_seconds:.3g} s" if trial.step_seconds else "",
    "memory": lambda trial: format_size(trial.use_kib) if trial.use_kib else "",
    "of": lambda trial: format_size(trial.gpu_total_kib) if trial.gpu_total_kib else "",
}
"""Without a GPU the memory has no limit in it, which is then the machine's."""


def describe_trial(trial: Trial, argument: str) -> str:
    """Return a trial in a line."""
    use = f", {format_size(trial.use_kib)}" if trial.use_kib else ""
    if trial.verdict != FITS or not trial.rate:
        return f"{argument}: {_VERDICTS[trial.verdict]}{use}: {trial.reason}"
    rate = f"{_format_rate(trial)} {trial.unit}/s, {trial.wait:.0%} of the time waiting for data"
    return f"{argument}: {rate}{use} ({trial.steps} steps)"


def tabulate_trials(trials: Sequence[Trial], title: str) -> list[tuple[str, ...]]:
    """Return the rows of the table with its head, in the order of the values."""
    ordered = sorted(trials, key=lambda trial: trial.value)
    unit = next((trial.unit for trial in ordered if trial.rate), "steps")
    shown = {head: get for head, get in _COLUMNS.items() if any(map(get, ordered))}
    rows: list[tuple[str, ...]] = [(title, f"{unit}/s", *shown)]
    for trial in ordered:
        rows.append((str(trial.value), _format_rate(trial), *(get(trial) or "-" for get in shown.values())))
    return rows


def print_trials(console: Console, trials: Sequence[Trial], title: str, remarks: Mapping[int, str]) -> None:
    """Print the table of the trials, each with what it is."""
    head, *body = tabulate_trials(trials, title)
    table = make_table((*head, ""), right=head, wrapped=("",))
    for row, trial in zip(body, sorted(trials, key=lambda trial: trial.value), strict=True):
        remark = remarks.get(trial.value, "") if trial.verdict == FITS else _VERDICTS[trial.verdict]
        table.add_row(*row, Text(remark))
    console.print(table)
