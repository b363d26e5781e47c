"""`fit.check`: what a job's start makes of the estimate of its memory. A mistake in that ends no job."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from launcher.config.fit_request import find_fit_model, is_bundled_program, make_fit_request
from launcher.config.schema import LaunchConfig
from launcher.errors import MachineError, UsageError
from launcher.fit.fit_decision import assess
from launcher.fit.fit_messages import describe_fit, explain_misfit
from launcher.fit.fit_model import FitReport, FitRequest, Learned, ModelDimensions
from launcher.plan.model import Plan

logger = logging.getLogger(__name__)


def find_start_model(
    config: LaunchConfig, program: Sequence[str] | None, given: Collection[str]
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


def check_planned(
    config: LaunchConfig,
    plan: Plan,
    model: ModelDimensions | None,
    *,
    nodes: int,
    is_bundled: bool,
    environ: Mapping[str, str],
    learned: Learned | None = None,
) -> None:
    """Judge a job on nodes of this plan, and act by `fit.check`; raises MachineError if it is refused.

    `model` is `find_start_model`'s. In a dry run nothing is refused.
    """
    if model is None or config.fit.check == "off":
        return
    act_on_request(
        lambda: make_fit_request(config, plan, model, nodes=nodes, is_bundled=is_bundled, environ=environ),
        config,
        learned,
    )


def act_on_request(
    make: Callable[[], FitRequest | None], config: LaunchConfig, learned: Learned | None = None
) -> None:
    """Judge what `make` asks, and act by `fit.check`; raises MachineError if the job is refused."""
    try:
        request = make()
        report = assess(request, learned) if request else None
    except UsageError as error:
        logger.warning(f"no estimate of memory: {error}")
        return
    except Exception as error:
        logger.warning(f"no estimate of memory ({type(error).__name__}: {error}): report it")
        return
    if report:
        act_on(report, config)


def act_on(report: FitReport, config: LaunchConfig) -> None:
    """Refuse a job of the bundled program that cannot fit; else warn, or say in a line that it fits.

    On CPUs nothing is refused: swap may hold what memory does not.
    """
    if report.verdict == "does_not_fit":
        message, is_refusable = explain_misfit(report), report.request.device.kind == "gpu"
        if config.fit.check == "error" and report.request.is_bundled and is_refusable and not config.dry_run:
            raise MachineError(f"{message}; fit.check=warn starts it all the same")
        logger.warning(message)
    elif report.verdict == "tight":
        logger.warning(f"{describe_fit(report)}; `launch plan` shows more")
    elif report.verdict and report.request.device.kind == "gpu":
        logger.info(describe_fit(report))
