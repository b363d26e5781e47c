"""A job as `launch` specifies it before it plans or starts anything."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cli.run import specify_job
from launcher.config.compose import compose
from launcher.config.run_path import RunPath, choose_run_path
from launcher.config.words import find_sources
from launcher.launch.job import JobSpec


def specify(
    overrides: Sequence[str],
    program: tuple[str, ...] | None = None,
    environ: Mapping[str, str] = os.environ,
    run_dir: Path | None = None,
) -> JobSpec:
    """Specify the job of a command line; its run directory is as `launch` chooses it, or given."""
    composed = compose(find_sources(None, None, None), overrides)
    path = RunPath("test", run_dir, "new_run_dir") if run_dir else choose_run_path(composed, program)
    return specify_job(composed, program, path, environ)
