"""`launch fit`: runs a program's first steps on fake tensors, and says whether it fits the device."""

import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from launcher.cli.fit_step import StepRecord, pretend_gpu, run_steps
from launcher.cli.measured_fit import learn_ratio
from launcher.cli.plan import assess_plan, plan_node
from launcher.cli.verbs import VerbCall
from launcher.config.fit_check import find_start_model, settle_planned
from launcher.config.fit_request import (
    choose_fit_device,
    count_plan_nodes,
    has_expandable_segments,
    is_bundled_program,
)
from launcher.config.program import find_program
from launcher.config.settings import Settings
from launcher.errors import EXIT_MACHINE, MachineError, UsageError
from launcher.fit.choice import StepFit, fit_step, make_step_peak
from launcher.fit.training import Device
from launcher.launch.job import render_shim
from launcher.plan.model import Plan
from launcher.protocol import LAUNCH_FIT
from launcher.text import join_words, print_text

logger = logging.getLogger(__name__)


def show_fit(call: VerbCall) -> int:
    """Print whether a program fits; return 0, or 3 if it does not or nobody can say; raises LaunchError."""
    config, environ = call.config, call.environ
    plan = plan_node(config, environ)
    if names_model_alone(call):
        return show_estimate(call, plan)
    nodes = count_plan_nodes(config.nodes, environ)
    if is_bundled_program(config, call.program):
        config = settle_planned(
            replace(config, fit=replace(config.fit, check="off")),
            plan,
            find_start_model(config, call.program, call.given),
            nodes=nodes,
            is_bundled=True,
            environ=environ,
        )
    argv = find_program(tuple(call.program) or None, config, environ)
    device = choose_fit_device(config, plan)
    shape = len(plan.ranks), nodes
    if config.dry_run:
        print_text(f"{join_words(['env', f'{LAUNCH_FIT}=…', *render_shim(argv)])}\n")
        return 0
    logger.info(
        f"the first two steps on fake tensors, as rank 0 of {shape[0] * shape[1]}, for {device.name or 'GPU'}"
    )
    with tempfile.TemporaryDirectory(prefix="launch-fit-") as folder:
        gpu = pretend_gpu(device, len(plan.ranks))
        record = run_steps(argv, environ, Path(folder), gpu, shape=shape, timeout=config.fit.timeout)
    check_record(record)
    fit = judge_record(config, record, device, shape[0] * shape[1], argv, environ=environ)
    print_fit_step(config, fit, record)
    return EXIT_MACHINE if fit.verdict == "does_not_fit" else 0


def names_model_alone(call: VerbCall) -> bool:
    """Tell whether a model is named and no program, neither on the command line nor of the configuration."""
    asked = {key.partition(".")[0] for key in call.given}
    return not call.program and "model" in asked and "program" not in asked


def show_estimate(call: VerbCall, plan: Plan) -> int:
    """Print what a model takes by the formulas, without a step; return 3 if it does not fit."""
    config = call.config
    report = assess_plan(replace(call, config=replace(config, fit=replace(config.fit, check="error"))), plan)
    if report is None:
        raise UsageError(
            "the memory of the device is not known: name a GPU (fit.gpu=H100), or its memory"
            " (fit.gpu_memory_gib=N)"
        )
    if config.format == "json":
        from launcher.fit.choice import fit_to_json

        sys.stdout.write(json.dumps({"schema": 1, **fit_to_json(report)}, indent=1) + "\n")
    else:
        from launcher.report.console import make_console
        from launcher.report.fit import print_fit

        print_fit(make_console(stderr=False), report, memory_alone=True)
    return EXIT_MACHINE if report.verdict == "does_not_fit" else 0


def check_record(record: StepRecord) -> None:
    """Raise MachineError if the program's steps could not be run without values."""
    refused = record.refused
    if refused is None:
        return
    code = f": {refused.line}" if refused.line else ""
    raise MachineError(
        f"this program cannot be run on fake tensors: {refused.operator}, {refused.reason}"
        f" ({refused.place}{code}); measure it in a run instead, which the next `launch fit` reads"
    )


def judge_record(
    config: Settings,
    record: StepRecord,
    device: Device,
    world_size: int,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
) -> StepFit:
    """Judge a peak, twice if earlier runs have measured something: the first time tells what to compare."""
    peak = make_step_peak(record.peak.total, record.peak.categories, record.peak.modules)
    expandable = has_expandable_segments(config, environ)
    first = fit_step(peak, device, world_size, expandable=expandable)
    learned = learn_ratio(Path(config.runs_dir), argv, world_size, first)
    if learned is None:
        return first
    return fit_step(peak, device, world_size, expandable=expandable, learned=learned)


def print_fit_step(config: Settings, fit: StepFit, record: StepRecord) -> None:
    """Print the result as a table or as JSON."""
    if config.format == "json":
        sys.stdout.write(json.dumps(step_fit_to_json(fit, record), indent=1) + "\n")
        return
    from launcher.report.console import make_console
    from launcher.report.fit import print_step_fit

    notes = (f"{record.parameters:,} parameters, {', '.join(record.optimizers)}", *record.notes)
    print_step_fit(make_console(stderr=False), fit, notes)


def step_fit_to_json(fit: StepFit, record: StepRecord) -> dict[str, object]:
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


HELP = """\
usage: launch fit [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Runs a program up to its second optimizer step, as rank 0, on tensors that
have a shape and no data: no GPU is used, and none is needed. Shows the peak
of memory by category and by module, and whether it fits. The program is not
changed. Saving, torch.compile and DataLoader processes are left out; what it
writes by itself before the second step is written. What it reads, it reads.
If earlier runs of the same program have measured their memory, that counts.
With a model and no program, the formulas of `launch plan` answer at once, about
memory alone; program=train runs the bundled program's steps.

  fit.gpu=NAME         a GPU by name (H100, A100-40GB); the machine's by default
  fit.gpu_memory_gib=N its memory
  nproc_per_node=N     ranks of a node, and `nodes`: DDP and FSDP shard by them
  fit.grid=true        for a model: micro-batch by checkpointing by sharding
  fit.timeout=S        seconds until the second step (600)
  format=table|json    json: {"schema": 1, "verdict": "fits", "peak": N, ...}
  dry_run=true         show the command that would be run

Exit code 3: it does not fit, or torch cannot say, as if shapes depend on data.

  launch fit fit.gpu=H100 train.py --batch-size 16
  launch fit +model=llama7b machine=dgx_h100 nodes=4
  launch fit fit.gpu=A100-40GB nproc_per_node=8 nodes=4 train.py
"""
