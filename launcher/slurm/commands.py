"""SLURM's commands, run with their errors told."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from launcher.errors import SchedulerError

FORMATS = ("SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT")
"""Beginnings of the variables by which people choose what these commands show, which is read here."""
FIXED = {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}
"""Numbers and times look the same everywhere, and those of an array's members are shown in full."""
PATIENCE = 60.0
"""Seconds that a command has; slurmctld itself gives up on a request after less (MessageTimeout)."""


def run_slurm(
    words: Sequence[str], environ: Mapping[str, str] | None = None, *, patience: float = PATIENCE
) -> str:
    """Run one of SLURM's commands and return what it prints; raises SchedulerError with its complaint.

    How it shows things is by its words alone, whatever the user's variables say.
    """
    given = os.environ if environ is None else environ
    own = {name: value for name, value in given.items() if not name.startswith(FORMATS)}
    try:
        done = subprocess.run(
            words,
            env={**own, **FIXED},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except FileNotFoundError:
        raise SchedulerError(f"there is no {words[0]} on PATH: load SLURM's module") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"{words[0]} did not answer in {patience:.0f} s: is slurmctld up (`scontrol ping`)?"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        said = said or f"ended with {done.returncode}, and printed nothing"
        raise SchedulerError(f"{words[0]}: {said}")
    return done.stdout
