"""What a program is expected to take, and what earlier runs of it have taken."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.config.fit_request import settle_program
from launcher.config.program import find_program
from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.fit.choice import StepFit
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Learned, Training
from launcher.runs.memory_records import (
    MeasuredRun,
    fingerprint_ranks,
    read_measured_runs,
    summarize_ratios,
)


def learn_ratio(runs_dir: Path, argv: Sequence[str], ranks: int, fit: StepFit) -> Learned | None:
    """Return what earlier runs have measured over what is expected now; None if there are none."""
    device = fit.device.kind
    fingerprint = fingerprint_ranks(argv, device, ranks)
    return make_learned(read_measured_runs(runs_dir, fingerprint, device, fit.predicted))


def make_learned(runs: Sequence[MeasuredRun]) -> Learned | None:
    """Return what runs have measured over what was expected; None for no runs."""
    if not runs:
        return None
    ratio, spread = summarize_ratios(runs)
    return Learned(ratio, spread, len(runs), ", ".join(run.run for run in runs[:2]))


def learn_for_request(
    config: Settings, program: Sequence[str] | None, request: Training, environ: Mapping[str, str]
) -> Learned | None:
    """Return what earlier runs of a program with a known model have measured; None if there are none.

    On CPUs the process is more than its tensors, and nothing is learned for the formulas.
    """
    if request.device.kind != "gpu":
        return None
    try:
        argv = find_program(tuple(program) if program else None, settle_program(config, request), environ)
        device = request.device.kind
        fingerprint = fingerprint_ranks(argv, device, request.layout.world_size)
        runs = read_measured_runs(Path(config.runs_dir), fingerprint, device, predict_request(request))
    except UsageError:  # a program or a layout that makes no sense: others say so
        return None
    return make_learned(runs)


def predict_request(request: Training) -> int:
    """Return the bytes that the hook of a rank is expected to measure; raises UsageError."""
    estimate = estimate_memory(request)
    return (estimate.reserved if request.device.kind == "gpu" else estimate.total).expected
