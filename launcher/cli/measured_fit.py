"""What a program was expected to take, kept in its run directory, and what earlier runs of it have taken."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.program import find_program
from launcher.config.schema import LaunchConfig
from launcher.errors import UsageError
from launcher.fit.fit_fingerprint import fingerprint_program
from launcher.plan.model import Plan
from launcher.runs.measured_memory import (
    MeasuredRun,
    Prediction,
    read_measured_runs,
    summarize_ratios,
    write_prediction,
)
from launcher.runs.run_directory import RunDir

if TYPE_CHECKING:
    from launcher.fit.fit_model import FitRequest, Learned
    from launcher.fit.step_fit import StepFit


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Which runs are of one program with the same memory."""

    fingerprint: str
    device: str
    """`gpu` or `cpu`."""


def describe_program_memory(argv: Sequence[str], device_kind: str, world_size: int) -> ProgramMemory:
    """Return what stands for a program on a number of ranks.

    The GPU's type is left out: the tensors are the same on another.
    """
    return ProgramMemory(fingerprint_program(argv, [device_kind, f"ranks={world_size}"]), device_kind)


def learn_ratio(runs_dir: Path, memory: ProgramMemory, fit: "StepFit") -> "Learned | None":
    """Return what earlier runs have measured over what is expected now; None if there are none."""
    from launcher.fit.step_fit import predict_reserved

    runs = read_measured_runs(runs_dir, memory.fingerprint, memory.device, predict_reserved(fit))
    return make_learned(runs)


def make_learned(runs: Sequence[MeasuredRun]) -> "Learned | None":
    """Return what runs have measured over what was expected; None for no runs."""
    if not runs:
        return None
    from launcher.fit.fit_model import Learned

    ratio, spread = summarize_ratios(runs)
    return Learned(ratio, spread, len(runs), ", ".join(run.run for run in runs[:2]))


def learn_for_request(
    config: LaunchConfig, program: Sequence[str] | None, request: "FitRequest", environ: Mapping[str, str]
) -> "Learned | None":
    """Return what earlier runs of a program with a known model have measured; None if there are none.

    On CPUs the process is more than its tensors, and nothing is learned for the formulas.
    """
    if request.device.kind != "gpu":
        return None
    try:
        argv = find_program(tuple(program) if program else None, config, environ)
        memory = describe_program_memory(argv, request.device.kind, request.layout.world_size)
        runs = read_measured_runs(
            Path(config.runs_dir), memory.fingerprint, memory.device, predict_request(request)
        )
    except UsageError:  # a program or a layout that makes no sense: others say so
        return None
    return make_learned(runs)


def predict_request(request: "FitRequest") -> int:
    """Return the bytes that the hook of a rank is expected to measure; raises UsageError."""
    from launcher.fit.memory_estimate import estimate_memory

    estimate = estimate_memory(request)
    return (estimate.reserved if request.device.kind == "gpu" else estimate.total).expected


def keep_prediction(run: RunDir, argv: Sequence[str], plan: Plan, nodes: int, expected: int = 0) -> None:
    """Keep in a run directory which program it is, and what it was expected to take; 0 is not known."""
    kind = "gpu" if any(rank.gpu for rank in plan.ranks) else "cpu"
    memory = describe_program_memory(argv, kind, len(plan.ranks) * nodes)
    with contextlib.suppress(OSError):
        write_prediction(run, Prediction(memory.fingerprint, expected, memory.device))
