"""`run_dir=DIR` goes on with an earlier run: whether there is one, and what differs from its last start."""

import difflib
import logging
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

from launcher.config.config_file import find_changes, read_config_value
from launcher.config.run_path import RunPath
from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.launch.job import JobSpec
from launcher.runs.run_lookup import MOST_NEAR, list_runs

logger = logging.getLogger(__name__)

MAX_SHOWN = 12
"""Settings that are listed."""


def check_earlier(run_path: RunPath, runs_dir: Path) -> None:
    """Raise UsageError if `run_dir` names a directory that is no run's."""
    if run_path.key != "run_dir":
        return
    try:
        if any(entry.name.startswith("manifest") for entry in run_path.path.iterdir()):
            return
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass
    except OSError:  # of which the opening tells
        return
    shown = os.path.relpath(run_path.path)
    raise UsageError(
        f"run_dir={shown}: there is no run{suggest_runs(runs_dir, shown)}; new_run_dir={shown} makes a new"
        " one"
    )


def keep_chosen(config: Settings, run_path: RunPath) -> Settings:
    """Return the configuration of a run that goes on: what was chosen for the bundled program stays.

    Micro-steps are counted again, since the global batch stays on other nodes too.
    """
    earlier = read_config_value(run_path.path, "program") if run_path.key == "run_dir" else None
    if not isinstance(earlier, dict):
        return config
    kept = {
        key: earlier[key]
        for key in ("batch_size", "activation_checkpointing", "parallel", "global_batch")
        if config.program.get(key) == "auto" and key in earlier
    }
    return replace(config, program={**config.program, **kept}) if kept else config


def suggest_runs(runs_dir: Path, text: str) -> str:
    """Return `: did you mean …?` with the paths of near runs, or the newest; empty if there is none."""
    known = [os.path.relpath(path) for path in islice(list_runs(runs_dir), MOST_NEAR)]
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.6)
    if near:
        return f": did you mean {' or '.join(near)}?"
    return f", the newest is {known[0]}" if known else ""


def check_resume(spec: JobSpec) -> None:
    """Refuse a run that has not ended, and list the settings that differ from those of its earlier start.

    Raises UsageError, or SchedulerError if SLURM, which is to get the job, cannot tell. Nodes that are
    started by hand share their run.
    """
    if spec.run_key != "run_dir":
        return
    if spec.cluster.kind != "manual" and not spec.config.dry_run:
        from launcher.slurm.run_states import refuse_run_in_use

        refuse_run_in_use(spec.run_path, submits=spec.cluster.kind == "slurm")
    changes = find_changes(spec.run_path, spec.config_text)
    if changes:
        more = [f"and {len(changes) - MAX_SHOWN} more"] if len(changes) > MAX_SHOWN else []
        listed = ", ".join([*changes[:MAX_SHOWN], *more])
        logger.warning(f"other settings than those of the earlier start in {spec.run_path}: {listed}")
