"""`launch fit`: whether a program fits the device, by its first steps on fake tensors, or by formulas."""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.cli.verbs import Call, print_json
from launcher.codec import DecodeError, load
from launcher.config.program import find_program
from launcher.config.settings import Settings
from launcher.config.start import plan_node
from launcher.config.training import (
    choose_fit_device,
    count_plan_nodes,
    find_fit_model,
    find_start_model,
    has_expandable_segments,
    is_bundled_program,
    make_fit_request,
    settle_planned,
    settle_program,
)
from launcher.errors import EXIT_MACHINE, MachineError, UsageError
from launcher.files import read_file
from launcher.fit.choice import FitReport, StepFit, assess, fit_step, fit_to_json, make_step_peak
from launcher.fit.gpus import find_gpu
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Device, Learned, Training
from launcher.launch.job import render_shim
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import STOPPING, catch_signals
from launcher.plan.model import Plan
from launcher.protocol import LAUNCH_BINDING, LAUNCH_FIT, LAUNCH_QUIET, LAUNCH_RUN_DIR
from launcher.runs.records import fingerprint_ranks, read_measured_runs, summarize_ratios
from launcher.text import join_words, print_text, strip_sequences

logger = logging.getLogger(__name__)

STEPS = 2
"""Optimizer steps: states appear in the first, and the second has them from its beginning."""
LARGEST_RESULT = 64 << 20
POLL_SECONDS = 0.1
LARGEST_END = 1 << 16
"""Bytes of the program's output that are looked at."""
MOST_LINES = 20
"""Last lines of a failed program's output that are shown."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
CAPABILITIES = (
    (r"rtx pro|50[5-9]0", (12, 0)),
    (r"g?b[23]00|blackwell", (10, 0)),
    (r"gh200|h[128]00|h20|hopper", (9, 0)),
    (r"l40s?|l4|ada|40[5-9]0", (8, 9)),
    (r"a10g?|a16|a2|a40|a[456]000|30[5-9]0", (8, 6)),
    (r"t4g?|20[678]0|quadro rtx", (7, 5)),
    (r"v100s?|titan v", (7, 0)),
    (r"p100", (6, 0)),
)
"""Compute capabilities by words of names (developer.nvidia.com/cuda-gpus); 8.0, A100's, for others."""


@dataclass(frozen=True, slots=True)
class RecordedPeak:
    """The peak as the program's interpreter has recorded it, in bytes."""

    total: int
    categories: dict[str, int]
    modules: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the steps could not be run on fake tensors."""

    reason: str
    operator: str
    place: str
    line: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the program's interpreter has found."""

    device: str
    peak: RecordedPeak
    steps: int
    parameters: int
    optimizers: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    torch: str
    complete: bool = False
    refused: Refusal | None = None
    failed: Refusal | None = None
    """The exception that ended the program."""


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
    model, environ = find_fit_model(config, call.program, call.given), call.environ
    nodes, is_bundled = count_plan_nodes(config.nodes, environ), is_bundled_program(config, call.program)
    request = make_fit_request(config, plan, model, nodes, environ, is_bundled=is_bundled)
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
    config, environ = call.config, call.environ
    nodes, local = count_plan_nodes(config.nodes, environ), len(plan.ranks)
    if is_bundled_program(config, call.program):
        model = find_start_model(config, call.program, call.given)
        unchecked = replace(config, fit=replace(config.fit, check="off"))
        config = settle_planned(unchecked, plan, model, nodes, environ, is_bundled=True)
    argv = find_program(call.program, config, environ)
    device = choose_fit_device(config, plan)
    if config.dry_run:
        print_text(f"{join_words(['env', f'{LAUNCH_FIT}=…', *render_shim(argv)])}\n")
        return 0
    ranks = local * nodes
    logger.info(f"the first two steps on fake tensors, as rank 0 of {ranks}, for {device.name or 'GPU'}")
    gpu = _pretend_gpu(device, local)
    record = _run_steps(argv, environ, gpu, local=local, nodes=nodes, timeout=config.fit.timeout)
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


def _step_fit_to_json(fit: StepFit, record: StepRecord) -> dict[str, object]:
    """Return the result for programs; keys are only ever added, and bytes are integers."""
    return {
        "schema": 1,
        "verdict": fit.verdict,
        "capacity": fit.device.memory_mib << 20,
        "device": asdict(fit.device),
        "peak": fit.peak.total,
        "categories": fit.peak.categories,
        "modules": [asdict(share) for share in fit.peak.modules],
        "estimate": asdict(fit.estimate),
        "learned": fit.learned,
        "parameters": record.parameters,
        "optimizers": list(record.optimizers),
        "notes": list(record.notes),
        "steps": record.steps,
        "seconds": record.seconds,
        "torch": record.torch,
    }


def _pretend_gpu(device: Device, count: int) -> dict[str, object] | None:
    """Return the GPU that a program is to see, as `fake_step` reads it; None for CPUs.

    Its name is as the driver writes it, so that programs find it in their tables.
    """
    if device.kind != "gpu":
        return None
    pattern = r"(?<![a-z0-9])(rtx ?)?({})(?![0-9])"
    capabilities = (
        number for words, number in CAPABILITIES if re.search(pattern.format(words), device.name.lower())
    )
    found = find_gpu(device.name)
    return {
        "name": f"NVIDIA {found.name.upper()}" if found and "NVIDIA" not in device.name else device.name,
        "memory": (device.memory_mib << 20) or 80 << 30,
        "capability": next(capabilities, (8, 0)),
        "count": count,
    }


def _run_steps(
    argv: Sequence[str],
    environ: Mapping[str, str],
    gpu: Mapping[str, object] | None,
    *,
    local: int,
    nodes: int,
    timeout: float,
) -> StepRecord:
    """Run a program until its second step, and return what was found; raises MachineError.

    A signal that stops this process ends the program, too: raises SystemExit.
    `local` are the ranks of each of the nodes.
    """
    signals, parent = list[int](), os.getpid()
    with (
        tempfile.TemporaryDirectory(prefix="launch-fit-") as folder,
        open(f"{folder}/output", "w+b") as output,  # noqa: PTH123
        catch_signals() as inbox,
    ):
        result = Path(folder, "result.json")
        variables = {
            **environ,
            # The first rank of the job, as torchrun has it.
            "RANK": "0",
            "LOCAL_RANK": "0",
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(local * nodes),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_WORLD_SIZE": str(nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "fit",
            # No real GPU is touched, and no service keeps the losses.
            "CUDA_VISIBLE_DEVICES": "",
            "WANDB_MODE": "disabled",
            "PYTHONUNBUFFERED": "1",
            LAUNCH_BINDING: "none",
            LAUNCH_QUIET: "1",
            LAUNCH_RUN_DIR: folder,
            LAUNCH_FIT: json.dumps({"result": str(result), "gpu": gpu, "steps": STEPS}),
        }
        try:
            process = subprocess.Popen(
                render_shim(argv),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: prepare_agent(parent, ()),  # noqa: PLW1509 - no other thread forks here
            )
        except OSError as error:
            raise MachineError(f"the program could not be started ({error})") from None
        deadline = time.monotonic() + timeout
        try:
            while process.poll() is None and not signals and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                signals += [number for number in inbox.take() if number in STOPPING]
            status = process.returncode
        finally:
            # What is left of it, and of what it has started.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        if signals:
            raise SystemExit(128 + signals[0])
        output.seek(max(0, output.seek(0, os.SEEK_END) - LARGEST_END))
        lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
        return _judge_end(result, lines[-MOST_LINES:], status, timeout)


def _judge_end(result: Path, lines: Sequence[str], status: int | None, timeout: float) -> StepRecord:
    """Return the result; raises MachineError if there is none."""
    failed = None
    try:
        record = load(StepRecord, read_file(result, LARGEST_RESULT, own=True))
        if record.failed is None:
            return record
        failed = record.failed
    except FileNotFoundError:
        pass
    except (OSError, DecodeError) as error:
        raise MachineError(f"the program's result cannot be read ({error}): report it") from None
    if lines:
        logger.info("the end of the program's output:")
    for line in lines:
        logger.info(f"  | {strip_sequences(line)}")
    pretended = (
        "it has fake tensors and no GPU here: if it runs without `launch fit`, this cannot be pretended;"
        " measure it in a run instead, which the next `launch fit` reads"
    )
    if failed is not None:
        code = f": {failed.line}" if failed.line else ""
        subject = (
            f"the operation {failed.operator} failed" if failed.operator else "an exception ended the program"
        )
        what = f"{subject} before the second step ({failed.place}{code}): {failed.reason}; {pretended}"
    elif status is None:
        what = f"the program took no second optimizer step within fit.timeout={timeout:g} s: give more time"
    elif status == 0:
        what = (
            "the program ended without a second step of a torch.optim optimizer: give it two steps, and see"
            " that it is a Python program that trains with torch"
        )
    elif status < 0:
        what = f"the program was ended by {signal.Signals(-status).name} before its second step"
    else:
        what = f"the program ended with exit code {status} before its second step; {pretended}"
    raise MachineError(what)
