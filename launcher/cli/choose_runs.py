"""The runs that a command line means."""

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.runs.run_lookup import RunLookupError, choose_runs, list_runs, name_run
from launcher.runs.run_status import read_status

logger = logging.getLogger(__name__)

MOST_RUNS = 1000
"""Newest runs that are looked through for one that has not ended."""


def choose_named(config: Settings, names: Sequence[str]) -> list[Path]:
    """Return the runs that are named, each once; raises UsageError with the near names."""
    try:
        return choose_runs(Path(config.runs_dir), names)
    except RunLookupError as error:
        raise UsageError(str(error)) from None


def choose_live(config: Settings, names: Sequence[str], verb: str) -> Path:
    """Return the one run that is named; if none is, the newest that has not ended, or else the newest.

    Raises UsageError for several.
    """
    newest = islice(list_runs(Path(config.runs_dir)), MOST_RUNS) if not names else ()
    live = next((path for path in newest if read_status(path).is_live), None)
    if live is None:
        return choose_one(config, names, verb)
    logger.info(f"{verb} of {name_run(live)}, the newest run that has not ended")
    return live


def choose_one(config: Settings, names: Sequence[str], verb: str) -> Path:
    """Return the one run that is named, the newest if none is; raises UsageError for several."""
    if not names:
        newest = next(list_runs(Path(config.runs_dir)), None)
        if newest is None:
            raise UsageError(f"launch {verb}: no run below runs_dir={config.runs_dir} yet")
        logger.info(f"{verb} of {name_run(newest)}, the newest run")
        return newest
    found = choose_named(config, names)
    if len(found) > 1:
        raise UsageError(
            f"{' '.join(names)} are {len(found)} runs, and launch {verb} takes one, such as {found[0]}"
        )
    return found[0]
