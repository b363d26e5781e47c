"""`launch` without a verb: runs a program where the configuration says."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.agent.read_ahead import reading_ahead
from launcher.cli.allocator_check import settle_allocator, unset_settings
from launcher.cli.config_programs import name_files, report_config_programs
from launcher.cli.early_start import EarlyStart
from launcher.cli.resume import check_earlier, check_resume, keep_chosen
from launcher.cli.unused_settings import (
    warn_elsewhere,
    warn_overruled,
    warn_unforked,
    warn_unused,
    warn_visible,
)
from launcher.config.compose import Composed, read_values, resolve
from launcher.config.config_file import render_config
from launcher.config.environment_files import fill_env, read_env_files
from launcher.config.program import BUNDLED, clear_sections, describe_interpreter, find_program, find_unused
from launcher.config.rules import Context, check, check_placed
from launcher.config.run_path import RunPath, choose_run_path
from launcher.config.settings import Settings
from launcher.config.start import check_command, choose_agent, choose_cluster
from launcher.errors import LaunchError
from launcher.launch.job import Job, JobSpec, render_start
from launcher.plan.model import plan_to_json
from launcher.protocol import name_host
from launcher.runs.memory_records import keep_prediction
from launcher.runs.run_directory import RunIdTakenError
from launcher.text import join_words, print_text

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.fit.training import ModelDimensions
    from launcher.launch.agent_process import Agent, AgentRequest
    from launcher.plan.model import Plan
    from launcher.report.viewer import OutputViewer
    from launcher.runs.run_directory import RunDir


def run_job(
    composed: Composed, program: tuple[str, ...] | None, argv: Sequence[str], early: EarlyStart
) -> int:
    """Run a program where the configuration says, and return the exit code; raises LaunchError.

    `program` is the one on the command line, None for the configured one; `argv` is the whole command line.
    `early` may have a process from which the ranks can be forked.
    """
    return try_anew(lambda: start_job(composed, program, argv, early))


def start_job(
    composed: Composed, program: tuple[str, ...] | None, argv: Sequence[str], early: EarlyStart
) -> int:
    """Run a program once; raises LaunchError, or RunIdTakenError before anything is started."""
    run_path = choose_run_path(composed, program, submits=is_for_slurm(composed))
    spec = specify_job(composed, program, run_path, os.environ)
    check_resume(spec)
    if spec.cluster.kind in ("slurm", "allocation"):
        early.close()
    elif not may_fork(spec):
        early.drop_warm()
    name_files(composed.own_files)
    report_config_programs([spec], composed.own_files)
    if spec.cluster.kind == "slurm":
        from launcher.slurm.submission import submit_jobs

        return submit_jobs([spec], argv)
    if spec.cluster.kind == "allocation":
        from launcher.slurm.allocation import run_allocation

        return run_allocation(spec, argv)
    if spec.config.dry_run:
        _, job = check_local_fit(spec, plan_job(spec))
        return preview_job(job)
    program_argv = find_program(spec.program, spec.config, spec.environ)
    mode = spec.config.start.read_ahead
    reader = early.take_reader(program_argv, mode)
    with reading_ahead(mode, program_argv, spec.environ, reader) as helpers:
        spec, job = check_local_fit(spec, plan_job(spec))
        return execute_here(spec, job, argv, helpers, early)


def may_fork(spec: JobSpec) -> bool:
    """Tell whether ranks can be forked from a process that has imported torch and nothing else."""
    start = spec.config.start
    return spec.agent.kind == "direct" and start.warm != "off" and not start.preload


def try_anew(start: Callable[[], int]) -> int:
    """Start a run, again as long as another of its name has begun in the same second and has its ID."""
    while True:
        try:
            return start()
        except RunIdTakenError:
            continue


def is_for_slurm(composed: Composed) -> bool:
    """Tell whether a job is to be submitted, before its configuration is resolved."""
    values = read_values(composed, ("cluster.kind", "nodes"))
    kind = str(values["cluster.kind"])
    if kind == "auto":
        kind = choose_cluster("auto", values["nodes"], None, None, os.environ).kind
    return kind == "slurm"


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
    config = resolve(composed, run_path.path)
    variables = read_env_files(config)
    config = fill_env(config, variables)
    check_earlier(run_path, Path(config.runs_dir))
    config = keep_chosen(config, run_path)
    context = Context(config, verb, given, composed.sources)
    check(context)
    merged = {**environ, **config.env}
    if verb == "launch":
        warn_overruled(merged, given)
    cluster = choose_cluster(
        config.cluster.kind,
        config.nodes,
        config.node_rank,
        config.rdzv_endpoint,
        merged,
        spares=config.cluster.spares,
    )
    if cluster.kind == "slurm" and not config.dry_run:
        check_command("sbatch", cluster.why, merged)
    check_placed(context, cluster)
    agent = choose_agent(config, cluster, merged)
    argv = find_program(program, config, merged)
    if program and (remark := describe_interpreter(program)):
        logger.info(remark)
    warn_unused(config, cluster, given)
    warn_visible(config, cluster, given)
    warn_unforked(config, agent.kind, given)
    if cluster.kind != "slurm":
        warn_elsewhere(config, environ)
    fit_model = find_job_model(config, program, given)
    if program is not None and "model" in given:
        name = composed.choices.get("model")
        use = "says what the job needs of memory, and is not passed on" if fit_model else "is not used"
        logger.info(f"model={name} {use}: the program has its own arguments")
    left_out = settle_allocator(config, argv, merged, given)
    unused = find_unused(config, program, given)
    return JobSpec(
        config=unset_settings(clear_sections(config, unused), left_out),
        config_text=render_config(composed, unused),
        choices={key: option for key, option in composed.choices.items() if key not in unused},
        given=given,
        overrides=composed.overrides,
        program=program,
        cluster=cluster,
        agent=agent,
        environ=merged,
        file_variables=variables,
        unset_allocator=left_out,
        name=run_path.name,
        run_path=run_path.path,
        run_key=run_path.key,
        fit_model=fit_model,
        is_bundled=not program and config.program.get("command") == list(BUNDLED),
    )


def find_job_model(
    config: Settings, program: tuple[str, ...] | None, given: Collection[str]
) -> "ModelDimensions | None":
    """Return the model whose memory is judged before the start; None if there is no claim."""
    asked = any(key.partition(".")[0] == "model" for key in given)
    is_bundled = not program and config.program.get("command") == list(BUNDLED)
    if (config.fit.check == "off" and not is_bundled) or not config.model or (program and not asked):
        return None
    from launcher.config.fit_check import find_start_model

    return find_start_model(config, program, given)


def check_local_fit(spec: JobSpec, job: Job) -> tuple[JobSpec, Job]:
    """Return a job with what is chosen of the bundled program; raises MachineError if it cannot fit here."""
    if spec.fit_model is None:
        return spec, job
    from launcher.config.fit_check import settle_job, settle_planned

    config = settle_planned(
        spec.config,
        job.plan,
        spec.fit_model,
        nodes=spec.cluster.min_nodes,
        is_bundled=spec.is_bundled,
        environ=spec.environ,
    )
    return settle_job(spec, config), replace(
        job, config=config, program=find_program(spec.program, config, spec.environ)
    )


def plan_job(spec: JobSpec) -> Job:
    """Plan this node for a job; raises UsageError or MachineError."""
    from launcher.cli.plan import plan_node

    return Job(
        config=spec.config,
        program=find_program(spec.program, spec.config, spec.environ),
        cluster=spec.cluster,
        plan=plan_node(spec.config, spec.environ),
        environ=spec.environ,
        host=name_host(spec.environ),
        agent=spec.agent,
    )


def execute_here(
    spec: JobSpec, job: Job, argv: Sequence[str], helpers: Sequence[int], early: EarlyStart
) -> int:
    """Run a planned job on this machine to its end, and return the exit code; raises LaunchError.

    `helpers` are PIDs of processes of ours.
    """
    from launcher.launch import local_run
    from launcher.launch.torchrun_agent import check_open_files
    from launcher.probe.limits import count_oom_kills

    check_open_files()
    run, manifest = local_run.prepare_run(spec, argv, [job.host])
    local_run.write_plan(spec, run, job.host, plan_to_json(job.plan))
    keep_local_prediction(spec, job, run)
    if spec.config.preflight.kind not in ("off", "auto"):
        from launcher.cli.run_preflight import check_before_run  # only if it is asked for

        if status := check_before_run(job, run, manifest):
            return status
    return local_run.execute_job(
        job,
        run,
        manifest,
        make_local_viewer,
        count_oom_kills,
        make_direct=partial(make_agent_on_machine, early=early),
        helpers=helpers,
    )


def make_agent_on_machine(request: "AgentRequest", early: EarlyStart | None = None) -> "Agent":
    """Return the agent for ranks on this machine that `launch` starts itself."""
    from launcher.agent.local_agent import make_local_agent

    return make_local_agent(request, early.take if early else None)


def keep_local_prediction(spec: JobSpec, job: Job, run: "RunDir") -> None:
    """Keep in the run directory what the job is expected to take, for later estimates to learn from."""
    device = "gpu" if any(rank.gpu for rank in job.plan.ranks) else "cpu"
    ranks = job.world_size
    keep_prediction(run, job.program, device, ranks, predict_local(spec, job.plan) if spec.fit_model else 0)


def predict_local(spec: JobSpec, plan: "Plan") -> int:
    """Return the bytes that a rank is expected to take, 0 if that is not known."""
    from launcher.cli.measured_fit import predict_request
    from launcher.config.fit_request import make_fit_request

    try:
        request = make_fit_request(
            spec.config,
            plan,
            spec.fit_model,
            nodes=spec.cluster.min_nodes,
            is_bundled=spec.is_bundled,
            environ=spec.environ,
        )
        return predict_request(request) if request else 0
    except LaunchError:  # `check_local_fit` has told of it
        return 0
    except Exception as error:  # a mistake of the estimate ends no run
        what = f"{type(error).__name__}: {error}"
        logger.warning(f"later estimates learn nothing of this run ({what}): report it")
        return 0


def preview_job(job: Job) -> int:
    """Show the plan and the command, and start nothing: `dry_run=true`."""
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement

    print_placement(make_console(), job.plan, explain=job.config.explain)
    logger.info(f"{describe_agent(job)}:")
    print_text(join_words(render_start(job, "RUN_ID")) + "\n")
    return 0


def describe_agent(job: Job) -> str:
    """Say what starts the ranks, and why."""
    starter = (
        "launch starts each rank" if job.agent.kind == "direct" else f"{job.agent.kind} starts the ranks"
    )
    return (
        f"{starter} ({job.agent.why})"
        if job.agent.why.startswith("agent=")
        else f"{starter} (agent={job.agent.kind}: {job.agent.why})"
    )


def make_local_viewer(job: "Job", run: "RunDir") -> "OutputViewer":
    """Return what shows a job that runs on this machine."""
    from launcher.launch.monitor import STARTING, describe_job
    from launcher.report.viewer import OutputViewer, ViewOptions
    from launcher.runs.rank_logs import Follower, measure_logs

    alone = job.world_size == 1
    options = ViewOptions(
        job.config.logs.console,
        None if alone else lambda _: job.host,
        heading=(*describe_job(job, run), *((describe_agent(job),) if job.config.explain else ())),
        plan=job.plan,
        explain=job.config.explain,
        notice=STARTING if job.config.logs.console != "none" and job.cluster.max_nodes == 1 else "",
    )
    return OutputViewer(run, Follower(measure_logs(run.path)), options)
