"""The runs that a command line means."""

from collections.abc import Sequence
from pathlib import Path

from launcher.config.schema import LaunchConfig
from launcher.errors import UsageError
from launcher.runs.find import RunLookupError, choose_runs


def choose_named(config: LaunchConfig, names: Sequence[str]) -> list[Path]:
    """Return the runs that are named, each once; raises UsageError with the near names."""
    try:
        return choose_runs(Path(config.runs_dir), names)
    except RunLookupError as error:
        raise UsageError(str(error)) from None


def choose_one(config: LaunchConfig, names: Sequence[str], verb: str) -> Path:
    """Return the one run that is named; raises UsageError for none and for several."""
    if not names:
        raise UsageError(f"launch {verb} of which run? `launch status` lists them: launch {verb} NAME/ID")
    found = choose_named(config, names)
    if len(found) > 1:
        raise UsageError(
            f"{' '.join(names)} are {len(found)} runs, and launch {verb} takes one, such as {found[0]}"
        )
    return found[0]
