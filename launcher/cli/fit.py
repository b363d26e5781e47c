"""`launch fit`: whether a program fits the device, by its first steps on fake tensors, or by formulas."""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.plan import plan_node
from launcher.cli.verbs import Call, print_json
from launcher.config.fit_check import find_start_model, settle_planned
from launcher.config.fit_request import (
    choose_fit_device,
    count_plan_nodes,
    find_fit_model,
    has_expandable_segments,
    is_bundled_program,
    make_fit_request,
    settle_program,
)
from launcher.config.program import find_program
from launcher.config.settings import Settings
from launcher.errors import EXIT_MACHINE, MachineError, UsageError
from launcher.fit.choice import FitReport, StepFit, assess, fit_step, fit_to_json, make_step_peak
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Learned, Training
from launcher.launch.job import render_shim
from launcher.plan.model import Plan
from launcher.protocol import LAUNCH_FIT
from launcher.runs.memory_records import fingerprint_ranks, read_measured_runs, summarize_ratios
from launcher.text import join_words, print_text

if TYPE_CHECKING:
    from launcher.cli.fit_step import StepRecord

logger = logging.getLogger(__name__)


def show_fit(call: Call) -> int:
    """Print whether a program fits; return 0, or 3 if it does not or nobody can say; raises LaunchError."""
    plan = plan_node(call.config, call.environ)
    names_model = any(key.partition(".")[0] == "model" for key in call.given)
    if names_model and not call.program and not {"program", "program.command"} & call.given:
        return _show_estimate(call, plan)
    return _show_steps(call, plan)


# By formulas


def _show_estimate(call: Call, plan: Plan) -> int:
    """Print what a model takes by the formulas, without a step; return 3 if it does not fit."""
    config = call.config
    report = estimate_fit(call, replace(config, fit=replace(config.fit, check="error")), plan)
    if report is None:
        raise UsageError(
            "the memory of the device is not known: name a GPU (fit.gpu=H100), or its memory"
            " (fit.gpu_memory_gib=N)"
        )
    if config.format == "json":
        print_json({"schema": 1, **fit_to_json(report)})
    else:
        from launcher.report.console import make_console
        from launcher.report.fit import print_fit

        print_fit(make_console(stderr=False), report, memory_alone=True)
    return EXIT_MACHINE if report.verdict == "does_not_fit" else 0


def estimate_fit(call: Call, config: Settings, plan: Plan) -> FitReport | None:
    """Judge whether a job fits on nodes of this plan; None if there is no claim. Raises UsageError."""
    request = make_fit_request(
        config,
        plan,
        find_fit_model(config, call.program, call.given),
        nodes=count_plan_nodes(config.nodes, call.environ),
        is_bundled=is_bundled_program(config, call.program),
        environ=call.environ,
    )
    if request is None or not request.device.memory_mib:
        return None
    learned = None
    if request.device.kind == "gpu":  # on CPUs the process is more than its tensors
        try:
            argv = find_program(call.program, settle_program(config, request), call.environ)
            predicted = predict_request(request)
            learned = _learn(config, argv, "gpu", request.layout.world_size, predicted)
        except UsageError:  # a program or a layout that makes no sense: others say so
            learned = None
    return assess(request, learned, grid=config.fit.grid)


def predict_request(request: Training) -> int:
    """Return the bytes that the hook of a rank is expected to measure; raises UsageError."""
    estimate = estimate_memory(request)
    return (estimate.reserved if request.device.kind == "gpu" else estimate.total).expected


def _learn(config: Settings, argv: Sequence[str], device: str, ranks: int, predicted: int) -> Learned | None:
    """Return what earlier runs of a program have measured over what is expected; None if there are none."""
    fingerprint = fingerprint_ranks(argv, device, ranks)
    runs = read_measured_runs(Path(config.runs_dir), fingerprint, device, predicted)
    if not runs:
        return None
    ratio, spread = summarize_ratios(runs)
    return Learned(ratio, spread, len(runs), ", ".join(run.run for run in runs[:2]))


# By steps on fake tensors


def _show_steps(call: Call, plan: Plan) -> int:
    """Run the program's first steps, and print the peak; return 3 if it does not fit."""
    from launcher.cli.fit_step import pretend_gpu, run_steps

    config, environ = call.config, call.environ
    nodes, local = count_plan_nodes(config.nodes, environ), len(plan.ranks)
    if is_bundled_program(config, call.program):
        config = settle_planned(
            replace(config, fit=replace(config.fit, check="off")),
            plan,
            find_start_model(config, call.program, call.given),
            nodes=nodes,
            is_bundled=True,
            environ=environ,
        )
    argv = find_program(call.program, config, environ)
    device = choose_fit_device(config, plan)
    if config.dry_run:
        print_text(f"{join_words(['env', f'{LAUNCH_FIT}=…', *render_shim(argv)])}\n")
        return 0
    ranks = local * nodes
    logger.info(f"the first two steps on fake tensors, as rank 0 of {ranks}, for {device.name or 'GPU'}")
    with tempfile.TemporaryDirectory(prefix="launch-fit-") as folder:
        gpu = pretend_gpu(device, local)
        record = run_steps(argv, environ, Path(folder), gpu, shape=(local, nodes), timeout=config.fit.timeout)
    if refused := record.refused:
        code = f": {refused.line}" if refused.line else ""
        raise MachineError(
            f"this program cannot be run on fake tensors: {refused.operator}, {refused.reason}"
            f" ({refused.place}{code}); measure it in a run instead, which the next `launch fit` reads"
        )
    peak = make_step_peak(record.peak.total, record.peak.categories, record.peak.modules)
    expandable = has_expandable_segments(config, environ)
    fit = fit_step(peak, device, ranks, expandable=expandable)
    if learned := _learn(config, argv, device.kind, ranks, fit.predicted):
        fit = fit_step(peak, device, ranks, expandable=expandable, learned=learned)
    if config.format == "json":
        print_json(_step_fit_to_json(fit, record))
    else:
        from launcher.report.console import make_console
        from launcher.report.fit import print_step_fit

        notes = (f"{record.parameters:,} parameters, {', '.join(record.optimizers)}", *record.notes)
        print_step_fit(make_console(stderr=False), fit, notes)
    return EXIT_MACHINE if fit.verdict == "does_not_fit" else 0


def _step_fit_to_json(fit: StepFit, record: "StepRecord") -> dict[str, object]:
    """Return the result for programs; keys are only ever added, and bytes are integers."""
    return {
        "schema": 1,
        "verdict": fit.verdict,
        "capacity": fit.device.memory_mib << 20,
        "device": asdict(fit.device),
        "peak": fit.peak.total,
        "categories": dict(fit.peak.categories),
        "modules": [{**asdict(share), "categories": dict(share.categories)} for share in fit.peak.modules],
        "estimate": asdict(fit.estimate),
        "learned": fit.learned,
        "parameters": record.parameters,
        "optimizers": list(record.optimizers),
        "notes": list(record.notes),
        "steps": record.steps,
        "seconds": record.seconds,
        "torch": record.torch,
    }
