"""The file in which `launch tune` keeps its choice: an option of the group `dataloader` or `program`."""

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from launcher.cli.output_files import check_target, explain, write_file
from launcher.config.settings import DataloaderConfig
from launcher.errors import UsageError
from launcher.files import open_file
from launcher.report.fit import tabulate
from launcher.tune.search import Trial

USUAL = "conf/dataloader/tuned.yaml"
"""Found from the working directory by later runs."""
MADE = (USUAL, "conf/program/tuned.yaml")
"""Files whose folders are made."""
MARK = "# Written by `launch tune "
"""Beginning of a file that may be replaced; the subject follows."""


def check_override(name: str | None, *, replaces: bool) -> str:
    """Return the file to write; raises UsageError if it cannot be written, or is not `launch tune`'s."""
    path = Path(USUAL if name is None else name)
    if name is not None and name not in MADE:
        check_target("save", name)
    if path.exists() and not replaces and not is_ours(path):
        raise UsageError(
            f"{path} is there already, and `launch tune` has not written it: name another with save=FILE, or"
            " set yes=true to replace it"
        )
    near = next(folder for folder in path.absolute().parents if folder.exists())
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise UsageError(
            f"{path} cannot be written ({near} is no folder to write to): name another, save=FILE"
        )
    return str(path)


def is_ours(path: Path) -> bool:
    """Tell whether a file is an earlier choice, or empty."""
    try:
        with os.fdopen(open_file(path, follow=True), "rb") as file:
            first = file.read(len(MARK))
    except OSError:
        return False
    return first in (b"", MARK.encode())


def render_override(
    trials: Sequence[Trial], chosen: Trial, loader: DataloaderConfig, *, name: str, origin: str
) -> str:
    """Return the file's text: YAML, with what was measured in comments; `origin` says where and of what."""
    values = {
        "workload": Path(name).stem,
        "num_workers": chosen.workers,
        "worker_gib": loader.worker_gib,
        "worker_shm_mib": loader.worker_shm_mib,
        "default": "true",
        "measured": "true",
    }
    lines = [*render_comments("dataloader", tabulate(trials), origin)]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in values.items())]) + "\n"


def render_comments(subject: str, rows: Sequence[Sequence[str]], origin: str) -> list[str]:
    """Return the comments that a file begins with: when it was written, and what was measured."""
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    cells = (zip(row, widths, strict=True) for row in rows)
    table = ("#   " + "  ".join(cell.rjust(width) for cell, width in row) for row in cells)
    # What ends a line must not end a comment if it is among the program's words.
    return [" ".join(line.splitlines()).rstrip() for line in (f"{MARK}{subject}`, {when}: {origin}", *table)]


def save_override(name: str, text: str) -> None:
    """Write the file, whole or not at all; raises UsageError or MachineError."""
    path = Path(name)
    try:
        if name in MADE:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain("save", name, error) from None
    write_file("save", name, text.encode("utf-8", "replace"))


def describe_use(name: str, program: str, group: str = "dataloader") -> str:
    """Say how later runs use the file; `program` is `-- PROGRAM …` after a space, or nothing."""
    path = Path(name).absolute()
    option = f"{group}={path.stem}"
    if path.suffix != ".yaml" or path.parent.name != group:
        return f"put it into conf/{group}/ as NAME.yaml, and `launch {group}=NAME{program}` uses it"
    if path.parent.parent == Path("conf").absolute():
        return f"`launch {option}{program}` uses it"
    return f"`launch --config-dir {os.path.relpath(path.parent.parent)} {option}{program}` uses it"
