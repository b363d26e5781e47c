"""`fit.check`: what a job's start makes of the estimate of its memory. A mistake in that ends no job."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.config.config_file import dump_masked
from launcher.config.fit_request import (
    find_fit_model,
    is_bundled_program,
    make_fit_request,
    settle_program,
)
from launcher.config.settings import FitConfig, ParallelConfig, Settings
from launcher.errors import MachineError, UsageError
from launcher.fit.choice import (
    FitReport,
    assess,
    describe_change,
    describe_choice,
    describe_fit,
    explain_misfit,
)
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Learned, ModelDimensions, Training
from launcher.plan.model import Plan

if TYPE_CHECKING:
    from launcher.launch.job import JobSpec

logger = logging.getLogger(__name__)

CHOSEN = ("batch_size", "grad_accumulation", "activation_checkpointing", "parallel")
"""Options of the bundled program that can be `auto`."""
KEPT = "what is auto is the program's own: 8 sequences, 1 micro-step, no checkpointing, ddp"
"""Where nothing could be chosen."""


def find_start_model(
    config: Settings, program: Sequence[str] | None, given: Collection[str]
) -> ModelDimensions | None:
    """Return the model to judge at a start; None if there is none, or if it makes no sense.

    `program` is what is given after `--`. Raises UsageError if the bundled program is to train a config.json.
    """
    is_bundled = is_bundled_program(config, program)
    if is_bundled and config.model.get("config") is not None:
        raise UsageError(
            f"model.config={config.model['config']} gives dimensions for the estimate of memory; the"
            " bundled program has its own: see `launch plan`, start a program of yours by `launch"
            " model.config=… -- train.py`, or choose a model such as model=llama7b"
        )
    try:
        return find_fit_model(config, program, given)
    except UsageError as error:
        if not is_bundled:  # the bundled program says so itself
            logger.warning(f"no estimate of memory: {error}")
        return None


def settle_planned(
    config: Settings,
    plan: Plan,
    model: ModelDimensions | None,
    *,
    nodes: int,
    is_bundled: bool,
    environ: Mapping[str, str],
    learned: Learned | None = None,
    judges: bool = True,
) -> Settings:
    """Return the configuration with what is chosen for the bundled program on nodes of this plan.

    Judges the job, and acts by `fit.check`, unless that is done elsewhere (`judges=False`, which says
    nothing); raises MachineError if it is refused, which it is not in a dry run. `model` is
    `find_start_model`'s.
    """

    def make(asked: Settings) -> Training | None:
        return make_fit_request(asked, plan, model, nodes=nodes, is_bundled=is_bundled, environ=environ)

    if model is None:
        return config
    if judges:
        return act_on_request(make, config, learned, is_bundled=is_bundled)
    if not is_bundled:
        return config
    try:
        return settle_program(config, make(drop_questions(config)))
    except Exception:  # whoever judges tells of it
        return config


def drop_questions(config: Settings) -> Settings:
    """Return a configuration in which `fit` and `parallel` say nothing of the training: how it will run."""
    fit = config.fit
    kept = FitConfig(gpu=fit.gpu, gpu_memory_gib=fit.gpu_memory_gib, check=fit.check, tokens=fit.tokens)
    return replace(config, fit=kept, parallel=ParallelConfig())


def settle_job(spec: "JobSpec", config: Settings) -> "JobSpec":
    """Return a job with a configuration in which values of the bundled program were chosen."""
    import yaml

    tree = yaml.safe_load(spec.config_text)
    before = tree.get("program") or {}
    chosen = {key: config.program.get(key, value) for key, value in before.items() if value == "auto"}
    if all(value == "auto" for value in chosen.values()):
        return replace(spec, config=config)
    text = dump_masked({**tree, "program": {**before, **chosen}})
    return replace(spec, config=config, config_text=text)


def act_on_request(
    make: Callable[[Settings], Training | None],
    config: Settings,
    learned: Learned | None = None,
    *,
    is_bundled: bool,
) -> Settings:
    """Judge what `make` asks of a configuration, and act by `fit.check`; raises MachineError for a refusal.

    Returns the configuration with what was chosen, which does not depend on the check. Raises UsageError for
    settings of the bundled program that make no sense.
    """
    is_off = config.fit.check == "off"
    if is_off and not is_bundled:
        return config
    try:
        request = make(drop_questions(config) if is_off else config)
        report = assess(request, learned) if request else None
        asked = bool(request and request.fixed)
        chosen = make(drop_questions(config)) if is_bundled and asked else request
    except UsageError as error:
        if is_bundled:
            raise
        logger.warning(f"no estimate of memory: {error}")
        return config
    except Exception as error:
        kept = f"; {KEPT}" if is_bundled and any(config.program.get(key) == "auto" for key in CHOSEN) else ""
        logger.warning(f"no estimate of memory ({type(error).__name__}: {error}): report it{kept}")
        return config
    if report is None:
        return config
    if chosen and chosen.free.any and (is_off or report.verdict != "does_not_fit"):
        logger.info(describe_choice(chosen, estimate_memory(chosen).total))
    if not is_off:
        act_on(report, config)
    return settle_program(config, chosen)


def act_on(report: FitReport, config: Settings) -> None:
    """Refuse a job of the bundled program that cannot fit; else warn, or say in a line that it fits.

    On CPUs nothing is refused: swap may hold what memory does not.
    """
    if report.verdict == "does_not_fit":
        message, is_refusable = explain_misfit(report), report.request.device.kind == "gpu"
        if config.fit.check == "error" and report.request.is_bundled and is_refusable and not config.dry_run:
            raise MachineError(f"{message}; fit.check=warn starts it all the same")
        logger.warning(message)
    elif report.verdict == "tight":
        more = (
            f"{describe_change(report.changes[0])} is enough"
            if report.changes
            else "`launch plan` shows more"
        )
        logger.warning(f"{describe_fit(report)}; {more}")
    elif report.verdict and report.request.device.kind == "gpu" and not report.request.free.any:
        logger.info(describe_fit(report))
