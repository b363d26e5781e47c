"""`launch fit`: whether a program fits the device, by its first steps on fake tensors, or by formulas."""

import contextlib
import json
import logging
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.cli.child import run_child
from launcher.cli.main import Call, print_json
from launcher.codec import DecodeError, load
from launcher.config.program import find_program
from launcher.config.settings import Settings, refuse
from launcher.config.start import plan_node
from launcher.config.training import (
    FitJob,
    count_plan_nodes,
    find_fit_model,
    make_training,
    settle_program,
    settle_training,
)
from launcher.config.words import read_section
from launcher.errors import EXIT_MACHINE, MachineError, UsageError
from launcher.files import read_file
from launcher.fit.choice import (
    FitReport,
    assess,
    correct_estimate,
    describe_learned,
    estimate_step,
    estimate_to_json,
    fit_to_json,
    judge_total,
)
from launcher.fit.gpus import find_gpu
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Device, Learned, ModelDimensions
from launcher.launch.job import render_shim
from launcher.plan.model import Plan
from launcher.protocol import LAUNCH_BINDING, LAUNCH_FIT, LAUNCH_QUIET, LAUNCH_RUN_DIR
from launcher.runs.rank_logs import read_tail
from launcher.runs.records import fingerprint_ranks, read_measured_runs
from launcher.text import join_words, print_text, strip_sequences

logger = logging.getLogger(__name__)

STEPS = 2
"""Optimizer steps: states appear in the first, and the second has them from its beginning."""
LARGEST_RESULT = 64 << 20
MOST_LINES = 20
"""Last lines of a failed program's output that are shown."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
CATEGORIES = ("weights", "buffers", "gradients", "optimizer", "activations", "temporary")
"""In the order in which they are shown."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Of a module, in its name."""


@dataclass(frozen=True, slots=True)
class RecordedPeak:
    """The peak as the program's interpreter has recorded it, in bytes."""

    total: int
    categories: dict[str, int]
    modules: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the steps could not be run on fake tensors, or the exception that ended the program."""

    reason: str
    operator: str
    place: str
    line: str

    @property
    def where(self) -> str:
        """The line of the program."""
        return f"{self.place}: {self.line}" if self.line else self.place


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
    refused: Failure | None = None
    failed: Failure | None = None


def show_fit(call: Call) -> int:
    """Print whether a program fits; return 0, or 3 if it does not or nobody can say; raises LaunchError."""
    plan = plan_node(call.config, call.environ)
    names_model = "model" in map(read_section, call.given)
    if not names_model or call.program or {"program", "program.command"} & call.given:
        return _show_steps(call, plan)
    report = estimate_fit(call, replace(call.config, fit=replace(call.config.fit, check="error")), plan)
    if report is None:
        raise refuse("fit_memory")
    if call.config.format == "json":
        print_json({"schema": 1, **fit_to_json(report)})
    else:
        from launcher.report.fit import print_fit
        from launcher.report.tables import make_console

        print_fit(make_console(stderr=False), report, memory_alone=True)
    return EXIT_MACHINE if report.verdict == "does_not_fit" else 0


def _describe_job(call: Call, config: Settings, plan: Plan, model: ModelDimensions | None = None) -> FitJob:
    """Return the job that is judged."""
    config = replace(config, program={}) if call.program else config  # which is for no program of the user's
    return FitJob.of_plan(config, plan, model, count_plan_nodes(config.nodes, call.environ), call.environ)


def estimate_fit(call: Call, config: Settings, plan: Plan) -> FitReport | None:
    """Judge whether a job fits on nodes of this plan; None if there is no claim. Raises UsageError."""
    model = find_fit_model(config, call.program, call.given)
    training, learned = make_training(_describe_job(call, config, plan, model)), None
    if training is None or not training.device.memory_mib:
        return None
    if training.on_gpu:  # on CPUs the process is more than its tensors
        with contextlib.suppress(UsageError):  # a program or a layout that makes no sense: others say so
            argv = find_program(call.program, settle_program(config, training), call.environ)
            predicted = estimate_memory(training).reserved.expected
            learned = _learn(config, argv, "gpu", training.layout.world_size, predicted)
    return assess(training, learned, grid=config.fit.grid)


def predict_memory(job: FitJob) -> int:
    """Return the bytes that the hook of a rank is expected to measure, 0 if not known."""
    try:
        if (training := make_training(job)) is None:
            return 0
        estimate = estimate_memory(training)
    except UsageError:  # of which the job's own estimate has told
        return 0
    except Exception as error:  # a mistake of the estimate ends no run
        what = f"{type(error).__name__}: {error}"
        logger.warning(f"later estimates learn nothing of this run ({what}): report it")
        return 0
    return (estimate.reserved if training.on_gpu else estimate.total).expected


def _learn(config: Settings, argv: Sequence[str], device: str, ranks: int, predicted: int) -> Learned | None:
    """Return what earlier runs of a program have measured over what is expected; None if there are none."""
    fingerprint = fingerprint_ranks(argv, device, ranks)
    names, ratio, spread = read_measured_runs(Path(config.runs_dir), fingerprint, device, predicted)
    return Learned(ratio, spread, len(names), ", ".join(names[:2])) if names else None


def _show_steps(call: Call, plan: Plan) -> int:
    """Run the program's first steps on fake tensors, and print the peak; return 3 if it does not fit."""
    config, job = call.config, _describe_job(call, call.config, plan)
    if job.is_bundled:
        model = find_fit_model(config, call.program, call.given, starts=True)
        unchecked = replace(config, fit=replace(config.fit, check="off"))
        config = settle_training(replace(job, config=unchecked, model=model))
    argv = find_program(call.program, config, call.environ)
    device, ranks = job.find_device(), job.ranks * job.nodes
    if config.dry_run:
        print_text(f"{join_words(['env', f'{LAUNCH_FIT}=…', *render_shim(argv)])}\n")
        return 0
    logger.info(f"the first two steps on fake tensors, as rank 0 of {ranks}, for {device.name or 'GPU'}")
    record = _run_steps(argv, call.environ, job, device)
    peak = record.peak.categories
    categories = {name: peak[name] for name in CATEGORIES if name in peak}
    estimate = estimate_step(categories, device, ranks, expandable=job.expandable)
    on_gpu = device.kind == "gpu"
    predicted = (estimate.reserved if on_gpu else estimate.total).expected
    learned = _learn(config, argv, device.kind, ranks, predicted)
    estimate = correct_estimate(estimate, learned, on_gpu=on_gpu)
    verdict, told = judge_total(estimate.total, device.memory_mib << 20), describe_learned(learned)
    # Modules that differ by a number alone are added up.
    counts, sizes = Counter[str](), dict[str, Counter[str]]()
    for name, own in record.peak.modules.items():
        key = NUMBER.sub("*", name)
        counts[key] += 1
        sizes.setdefault(key, Counter()).update(own)
    modules = [
        {"name": name, "count": counts[name], "bytes": own.total(), "categories": dict(own)}
        for name, own in sorted(sizes.items(), key=lambda item: (-item[1].total(), item[0]))
    ]
    if config.format == "json":
        found = {name: getattr(record, name) for name in ("parameters", "optimizers", "notes", "steps")}
        found |= {"verdict": verdict, "capacity": device.memory_mib << 20, "device": asdict(device)}
        found |= {"peak": record.peak.total, "categories": categories, "modules": modules}
        found |= {"estimate": estimate_to_json(estimate), "learned": told}
        print_json({"schema": 1, **found, "seconds": record.seconds, "torch": record.torch})
    else:
        from launcher.report.fit import print_step_fit
        from launcher.report.tables import make_console

        notes = (told, f"{record.parameters:,} parameters, {', '.join(record.optimizers)}", *record.notes)
        print_step_fit(make_console(stderr=False), estimate, verdict, device, modules, notes)
    return EXIT_MACHINE if verdict == "does_not_fit" else 0


def _run_steps(argv: Sequence[str], environ: Mapping[str, str], job: FitJob, device: Device) -> StepRecord:
    """Run a program until its second step, and return what was found; raises MachineError.

    A signal that stops this process ends the program, too: raises SystemExit.
    """
    gpu, known, timeout = None, find_gpu(device.name), job.config.fit.timeout
    if device.kind == "gpu":
        # The name is as the driver writes it, so that programs find it in their tables.
        name = f"NVIDIA {known.name.upper()}" if known and "NVIDIA" not in device.name else device.name
        capability, memory = known.capability if known else (8, 0), (device.memory_mib << 20) or 80 << 30
        gpu = {"name": name, "memory": memory, "capability": capability, "count": job.ranks}
    with (
        tempfile.TemporaryDirectory(prefix="launch-fit-") as folder,
        open(f"{folder}/output", "wb") as output,  # noqa: PTH123
    ):
        result = Path(folder, "result.json")
        variables = {
            **environ,
            # The first rank of the job, as torchrun has it.
            **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
            "WORLD_SIZE": str(job.ranks * job.nodes),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "GROUP_WORLD_SIZE": str(job.nodes),
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
            status, _ = run_child(render_shim(argv), variables, output, timeout, GRACE)
        except OSError as error:
            raise MachineError(f"the program could not be started ({error})") from None
        lines = read_tail(Path(output.name), MOST_LINES)
        try:
            found = load(StepRecord, read_file(result, LARGEST_RESULT, own=True)) if result.exists() else None
        except (OSError, DecodeError) as error:
            raise MachineError(f"the program's result cannot be read ({error}): report it") from None
    if found and found.refused:
        raise refuse("fit_refused", MachineError, refused=found.refused)
    if found and not found.failed:
        return found
    if lines:
        logger.info("the end of the program's output:")
    for line in lines:
        logger.info(f"  | {strip_sequences(line)}")
    if found and (failed := found.failed):
        subject = f"the operation {failed.operator} failed" if failed.operator else "an exception ended it"
        raise refuse("fit_failed", MachineError, subject=subject, failed=failed)
    if status is None:
        raise refuse("fit_timeout", MachineError, timeout=timeout)
    if status == 0:
        raise refuse("fit_no_step", MachineError)
    shown = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
    raise refuse("fit_ended", MachineError, shown=shown)
