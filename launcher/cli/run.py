"""`launch` without a verb: runs a program where the configuration says, or the jobs of a sweep."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.main import Call, add_pet, call_composed
from launcher.config.compose import Composed, compose, name_files, read_values, resolve
from launcher.config.program import fill_env, find_program, find_unused, runs_bundled
from launcher.config.rules import (
    check,
    check_placed,
    settle_allocator,
    warn_elsewhere,
    warn_job,
    warn_overruled,
)
from launcher.config.run_path import (
    RunPath,
    choose_run_path,
    find_changes,
    read_config_value,
    render_config,
    use_sweep_folder,
)
from launcher.config.settings import Settings
from launcher.config.start import check_command, choose_agent, choose_cluster, guess_kind
from launcher.config.words import read_section
from launcher.errors import UsageError
from launcher.launch.job import Job, JobSpec, render_start
from launcher.plan.model import plan_to_json
from launcher.protocol import name_host
from launcher.runs.run_directory import RunIdTakenError
from launcher.runs.secrets import mask_words
from launcher.text import join_words, name_some, print_text, suggest

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.config.training import FitJob
    from launcher.config.words import Flags
    from launcher.launch.terminal import Terminal
    from launcher.launch.warm.process import WarmProcess
    from launcher.plan.model import Plan
    from launcher.report.viewer import OutputViewer
    from launcher.runs.run_directory import RunDir

MAX_CHANGES = 12
"""Settings that are listed as changed since a run's earlier start."""


def run_job(call: Call) -> int:
    """Run a program where the configuration says, and return the exit code; raises LaunchError."""
    return try_again(lambda: _start_job(call))


def _start_job(call: Call) -> int:
    """Run a program once; raises LaunchError, or RunIdTakenError before anything is started."""
    composed, argv, early = call.composition, call.argv, call.early
    run_path = choose_run_path(composed, call.program, submits=is_for_slurm(composed))
    spec = specify_job(composed, call.program, run_path, os.environ)
    check_resume(spec)
    config, kind = spec.config, spec.cluster.kind
    if early and (kind in ("slurm", "allocation") or spec.agent.kind != "direct"):
        early.close()
    name_files(composed.own_files)
    if kind == "slurm":
        from launcher.slurm.submission import submit_jobs

        return submit_jobs([spec], argv)
    if kind == "allocation":
        from launcher.slurm.submission import run_allocation

        return run_allocation(spec, argv)
    if config.dry_run:
        from launcher.report.placement import print_placement
        from launcher.report.tables import make_console

        _, job = settle_fit(spec, plan_job(spec))
        print_placement(make_console(), job.plan, explain=job.config.explain)
        logger.info(f"{_describe_agent(job)}:")
        print_text(join_words(render_start(job, "RUN_ID")) + "\n")
        return 0
    from launcher.launch.warm.read_ahead import read_ahead

    read_ahead(config.start.read_ahead, find_program(spec.program, config, spec.environ), spec.environ)
    spec, job = settle_fit(spec, plan_job(spec))
    return _execute_here(spec, job, argv, early)


def try_again(start: Callable[[], int]) -> int:
    """Start a run, again as long as another of its name has begun in the same second and has its ID."""
    while True:
        with contextlib.suppress(RunIdTakenError):
            return start()


def is_for_slurm(composed: Composed) -> bool:
    """Tell whether a job is to be submitted, before its configuration is resolved."""
    values = read_values(composed, ("cluster.kind", "nodes"))
    kind = str(values["cluster.kind"])
    return (guess_kind(values["nodes"], os.environ)[0] if kind == "auto" else kind) == "slurm"


def specify_job(
    composed: Composed,
    program: tuple[str, ...] | None,
    run_path: RunPath,
    environ: Mapping[str, str],
    verb: str = "launch",
) -> JobSpec:
    """Resolve and check a job, and decide where it runs; raises UsageError or MachineError, writes nothing.

    `verb` is the command that was given.
    """
    given = composed.given
    config = fill_env(resolve(composed, run_path.path))
    if run_path.key == "run_dir":
        _check_earlier(run_path.path, Path(config.runs_dir))
        config = _keep_chosen(config, run_path.path)
    check(config, verb, given)
    merged = {**environ, **config.env}
    if verb == "launch":
        warn_overruled(merged, given)
    cluster = choose_cluster(config, merged)
    if cluster.kind == "slurm" and not config.dry_run:
        check_command("sbatch", cluster.why, merged)
    check_placed(config, cluster)
    agent = choose_agent(config, cluster, merged)
    argv = find_program(program, config, merged)
    warn_job(config, cluster, given)
    if cluster.kind != "slurm":
        warn_elsewhere(config, environ)
    fit_model = None  # no claim on memory is made
    asks_model = "model" in map(read_section, given)
    is_judged = config.fit.check != "off" or runs_bundled(config, program)
    if config.model and is_judged and (asks_model or not program):
        from launcher.config.training import find_fit_model

        fit_model = find_fit_model(config, program, given, starts=True)
    if program is not None and "model" in given:
        name = composed.choices.get("model")
        use = "says what the job needs of memory, and is not passed on" if fit_model else "is not used"
        logger.info(f"model={name} {use}: the program has its own arguments")
    unused = find_unused(config, program, given)
    cleared: dict[str, Any] = {section: {} for section in unused}
    return JobSpec(
        config=settle_allocator(replace(config, **cleared), argv, merged, given),
        config_text=render_config(composed, unused),
        choices={key: option for key, option in composed.choices.items() if key not in unused},
        given=given,
        overrides=composed.overrides,
        program=program,
        cluster=cluster,
        agent=agent,
        environ=merged,
        name=run_path.name,
        run_path=run_path.path,
        run_key=run_path.key,
        fit_model=fit_model,
    )


# A run that goes on: `run_dir=DIR`


def _check_earlier(path: Path, runs_dir: Path) -> None:
    """Raise UsageError if a directory is no run's, with the paths of near runs."""
    try:
        if any(entry.name.startswith("manifest") for entry in path.iterdir()):
            return
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass
    except OSError:  # of which the opening tells
        return
    from launcher.runs.run_status import MOST_NEAR, list_runs

    shown = os.path.relpath(path)
    known = [os.path.relpath(path) for path in islice(list_runs(runs_dir), MOST_NEAR)]
    near = suggest(shown, known) or ":"
    raise UsageError(f"run_dir={shown}: there is no run{near} new_run_dir={shown} makes a new one")


def _keep_chosen(config: Settings, path: Path) -> Settings:
    """Return the configuration of a run that goes on: what was chosen for the bundled program stays.

    Micro-steps are counted again, since the global batch stays on other nodes too.
    """
    earlier = read_config_value(path, "program")
    if not isinstance(earlier, dict):
        return config
    kept = {
        key: earlier[key]
        for key in ("batch_size", "activation_checkpointing", "parallel", "global_batch")
        if config.program.get(key) == "auto" and key in earlier
    }
    return replace(config, program={**config.program, **kept}) if kept else config


def check_resume(spec: JobSpec) -> None:
    """Refuse a run that has not ended, and list the settings that differ from those of its earlier start.

    Raises UsageError, or SchedulerError if SLURM, which is to get the job, cannot tell. Nodes that are
    started by hand share their run.
    """
    if spec.run_key != "run_dir":
        return
    if spec.cluster.kind != "manual" and not spec.config.dry_run:
        from launcher.slurm.run_states import refuse_run_in_use

        refuse_run_in_use(spec.run_path, submits=spec.cluster.kind == "slurm")
    if changes := list(find_changes(spec.run_path, spec.config_text)):
        listed = name_some(changes, MAX_CHANGES)
        logger.warning(f"other settings than those of the earlier start in {spec.run_path}: {listed}")


# A job on this machine


def plan_job(spec: JobSpec) -> Job:
    """Plan this node for a job; raises UsageError or MachineError."""
    from launcher.config.start import plan_node

    return Job(
        config=spec.config,
        program=find_program(spec.program, spec.config, spec.environ),
        cluster=spec.cluster,
        plan=plan_node(spec.config, spec.environ),
        environ=spec.environ,
        host=name_host(spec.environ),
        agent=spec.agent,
    )


def settle_fit(spec: JobSpec, job: Job) -> tuple[JobSpec, Job]:
    """Return a job with what is chosen of the bundled program; raises MachineError if it cannot fit here."""
    if spec.fit_model is None:
        return spec, job
    from launcher.config.training import settle_job, settle_training

    config = settle_training(_describe_fit(spec, job.plan))
    return settle_job(spec, config), replace(
        job, config=config, program=find_program(spec.program, config, spec.environ)
    )


def _execute_here(spec: JobSpec, job: Job, argv: Sequence[str], early: "WarmProcess | None") -> int:
    """Run a planned job on this machine to its end, and return the exit code; raises LaunchError."""
    from launcher.launch import local_run
    from launcher.runs.records import keep_prediction

    run, manifest = local_run.prepare_run(spec, argv, [job.host], plan_to_json(job.plan))
    # What the job is expected to take, for later estimates to learn from.
    device = "gpu" if any(rank.gpu for rank in job.plan.ranks) else "cpu"
    predicted = 0
    if spec.fit_model:
        from launcher.cli.fit import predict_memory

        predicted = predict_memory(_describe_fit(spec, job.plan))
    keep_prediction(run, job.program, device, job.world_size, predicted)
    if spec.config.preflight.kind not in ("off", "auto"):
        from launcher.cli.doctor import check_before_run  # only if it is asked for

        if status := check_before_run(job, run, manifest):
            return status
    return local_run.execute_job(job, run, manifest, _make_viewer, early)


def _describe_fit(spec: JobSpec, plan: "Plan") -> "FitJob":
    """Return what is judged of a job whose nodes have this plan."""
    from launcher.config.training import FitJob

    return FitJob.of_plan(spec.config, plan, spec.fit_model, spec.cluster.min_nodes, spec.environ)


def _describe_agent(job: Job) -> str:
    """Say what starts the ranks, and why."""
    kind, why = job.agent.kind, job.agent.why
    starter = "launch starts each rank" if kind == "direct" else f"{kind} starts the ranks"
    return f"{starter} ({why})" if why.startswith("agent=") else f"{starter} (agent={kind}: {why})"


def _make_viewer(job: "Job", run: "RunDir", terminal: "Terminal | None") -> "OutputViewer":
    """Return what shows a job that runs on this machine."""
    from launcher.launch.job import STARTING, describe_job
    from launcher.report.viewer import OutputViewer, ViewOptions
    from launcher.runs.rank_logs import Follower, measure_logs

    alone = job.world_size == 1
    options = ViewOptions(
        job.config.logs.console,
        None if alone else lambda _: job.host,
        heading=(*describe_job(job, run), *((_describe_agent(job),) if job.config.explain else ())),
        plan=job.plan,
        explain=job.config.explain,
        notice=STARTING if job.config.logs.console != "none" and job.cluster.max_nodes == 1 else "",
    )
    return OutputViewer(run, Follower(measure_logs(run.path)), options, terminal)


# Sweeps


def run_sweep(flags: "Flags", call: Call) -> int:
    """Run the jobs of a sweep; return the first exit code that is not 0."""
    from launcher.config.sweep import expand_sweep
    from launcher.launch.signals import STOPPING

    sweep = compose(flags.sources, add_pet(flags.overrides, os.environ), sweep=True)
    if sweep.sweeper != "basic":
        return run_plugin(sweep, call)
    jobs = expand_sweep(sweep)
    # A mistake in the last job shows before the first runs.
    composed = [compose(flags.sources, overrides, number) for number, overrides in enumerate(jobs)]
    folder = sweep.sweep_dir
    for number, each in enumerate(composed if folder and call.verb == "run" else ()):
        use_sweep_folder(each.tree, f"{folder}/{number}")
    if call.verb == "run" and all(map(is_for_slurm, composed)):
        return try_again(lambda: submit_all(composed, call)[0])
    first = 0
    for number, (each, overrides) in enumerate(zip(composed, jobs, strict=True), 1):
        logger.info(f"job {number} of {len(jobs)}: {' '.join(mask_words(overrides))}")
        status = call_composed(call, each)
        first = first or status
        if status - 128 in STOPPING:
            break
    return first


def submit_all(composed: Sequence[Composed], call: Call) -> tuple[int, list[JobSpec]]:
    """Submit jobs, several as one array, each with a run directory of its own; raises LaunchError.

    Returns the exit code, and what was submitted.
    """
    from launcher.slurm.submission import submit_jobs

    specs: list[JobSpec] = []
    for each in composed:
        taken = {spec.run_path for spec in specs}
        run_path = choose_run_path(each, call.program, submits=True, taken=taken)
        specs.append(specify_job(each, call.program, run_path, os.environ))
    for spec in specs:
        check_resume(spec)
    name_files(list(dict.fromkeys(name for each in composed for name in each.own_files)))
    return submit_jobs(specs, call.argv), specs


def run_plugin(sweep: Composed, call: Call) -> int:
    """Run the trials that a plugin of Hydra's asks for; raises LaunchError.

    It says first which files the sweep is from.
    """
    from launcher.config.sweep import run_trials
    from launcher.runs.progress import read_objective

    sweeper = f"hydra/sweeper={sweep.sweeper}"
    what = f"{sweeper} chooses trials by the results of runs"
    if call.verb != "run":
        raise UsageError(f"{what}: leave it out for `launch {call.verb}`")
    if sweep.tree.dry_run:
        raise UsageError(f"{what}, and dry_run=true starts none: leave one of them out")
    name_files(sweep.own_files)
    return run_trials(sweep, lambda batch: run_batch(batch, call), read_objective)


def run_batch(batch: Sequence[Composed], call: Call) -> Iterator[int]:
    """Run trials to their ends, on a cluster all of them at the same time, and give their exit codes.

    The process exits if the user stops a trial or leaves it to the queue.
    """
    from launcher.launch.signals import STOPPING
    from launcher.runs.manifest import CLOSED, read_manifest

    if not all(map(is_for_slurm, batch)):
        for each in batch:
            code = call_composed(call, each)
            if code - 128 in STOPPING:
                sys.exit(code)
            yield code
        return
    for each in batch:
        each.tree.follow = True
    status, specs = submit_all(batch, call)
    for spec in specs:
        outcome = read_manifest(spec.run_path).last.outcome
        if outcome.state not in CLOSED:
            logger.info(f"the sweep stops here, since {spec.run_path} has not ended")
            sys.exit(status)
        yield outcome.exit_code or 0
