"""Where a search for a micro-batch begins, and what it keeps to."""

from collections.abc import Collection, Mapping, Sequence

from launcher.cli.batch_option import BatchOption
from launcher.config.fit_request import find_fit_model, is_bundled_program, make_fit_request
from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.fit.memory import estimate_memory
from launcher.launch.job import Job, JobSpec
from launcher.plan.model import Plan
from launcher.probe.available_memory import find_usable_memory
from launcher.tune.batch_guess import guess_batch
from launcher.tune.batch_search import FIRST_BATCH, BatchBounds


def find_bounds(spec: JobSpec, job: Job, option: BatchOption) -> BatchBounds:
    """Return what the search keeps to; raises UsageError if it begins above tune.max_batch.

    It begins with the size that the command line sets, else with one that is expected to fill a GPU, else
    with the configured program's, else with FIRST_BATCH.
    """
    tune = job.config.tune
    asked = option.start if spec.program is not None or option.name in spec.given else None
    if asked is not None and asked > tune.max_batch:
        raise UsageError(
            f"{option.render(asked)} is above tune.max_batch={tune.max_batch}: give a larger one"
        )
    expected = None if asked else expect_batch(job.config, job.plan, spec.program, spec.given, job.environ)
    start = min(asked or expected or option.start or FIRST_BATCH, tune.max_batch)
    memory_kib = find_usable_memory(job.plan.machine)
    return BatchBounds(start, tune.max_batch, memory_kib, tune.seconds, tune.timeout)


def expect_batch(
    config: Settings,
    plan: Plan,
    program: Sequence[str] | None,
    given: Collection[str],
    environ: Mapping[str, str],
) -> int | None:
    """Return a size that is expected to fill the GPU of a rank; None without a GPU or a known model.

    On CPUs the memory is no measure of what is fast: a step that fills it can take minutes.
    """
    if config.fit.check == "off" or not all(rank.gpu for rank in plan.ranks):
        return None
    try:
        model = find_fit_model(config, program, given)
        bundled = is_bundled_program(config, program)
        request = make_fit_request(config, plan, model, nodes=1, is_bundled=bundled, environ=environ)
        return guess_batch(request, estimate_memory, config.tune.max_batch) if request else None
    except UsageError:  # settings of `fit` that make no training are no reason not to measure
        return None
