"""How a job gets onto SLURM: by sbatch, or as a step over the nodes of the job that `launch` is in."""

import contextlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.start import parse_nproc, plan_node
from launcher.errors import MachineError, SchedulerError, UsageError
from launcher.files import LARGEST, read_file
from launcher.launch.job import JobSpec
from launcher.launch.local_run import prepare_run, refuse_run
from launcher.protocol import LAUNCH_SECRETS, name_host
from launcher.runs.manifest import Outcome, Run, SlurmJob, read_manifest, write_manifest
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import RunDir, write_private
from launcher.runs.secrets import mask_words
from launcher.slurm import first_node, sbatch
from launcher.slurm.attempt import Attempt
from launcher.slurm.commands import list_job_hosts, name_job
from launcher.slurm.job_request import REQUEST_FILE, hold_manifest, make_job_request, write_job_request
from launcher.slurm.sbatch import JobOptions, Script
from launcher.text import join_words, print_text, quote_word

if TYPE_CHECKING:
    from launcher.plan.model import Plan

logger = logging.getLogger(__name__)

SCRIPT = "submission.sh"
"""The batch script's file in the run directory."""
WRITTEN_FILES = ("config.yaml", "manifest.json", REQUEST_FILE, SCRIPT)
"""What a submission writes."""
PACKAGE = Path(__file__).parents[1] / "__init__.py"
ISOLATED = ("-I", "-P")
"""Ways to keep Python from importing what lies in the working directory, the first that finds us winning.

-I leaves PYTHONPATH out too, whose empty entries are the working directory, and which modules set.
"""


def submit_jobs(specs: Sequence[JobSpec], argv: Sequence[str]) -> int:
    """Submit a job, or several as one job array, and say how to go on; returns the exit code.

    With dry_run=true, show the script and the plan. Raises LaunchError, leaving no new run directory.
    """
    dry_run = any(spec.config.dry_run for spec in specs)
    if dry_run and len(specs) > 1:
        logger.warning(f"of these {len(specs)} jobs, the script of the first is shown")
    specs = [*specs[:1]] if dry_run else [*specs]
    first, paths = specs[0], [spec.run_path for spec in specs]
    if len(paths) > len(set(paths)):
        raise UsageError(
            f"{first.run_key}={paths[0]} is one directory for {len(paths)} jobs of a sweep: leave it out, and"
            " each gets its own"
        )
    # What takes a process each is asked for at the same time.
    with ThreadPoolExecutor() as pool:
        sources, python = pool.submit(describe_sources, Path.cwd()), pool.submit(find_python)
        chosen = sbatch.choose_job_options(specs, os.environ, dry_run=dry_run)
    for place, spec in enumerate(specs):
        if spec.fit_model and (plan := _plan_snapshot(spec, chosen)):
            specs[place] = _judge_plan(spec, plan, spec.cluster.min_nodes)
        elif spec.fit_model:
            _judge_partition(spec, chosen)
    made_by = f"Made by: {shlex.join(mask_words(['launch', *argv]))}"
    script = Script(chosen.options, made_by, tuple(first.config.cluster.setup), python.result())
    if dry_run:
        text, left_out = sbatch.render_dry_run(script, specs[0], argv)
        plan = _plan_snapshot(specs[0], chosen)
        _show_plan(plan, first) if plan else logger.info(
            "each node makes its own plan: cluster.machine=NAME shows it for a shipped machine or for a"
            " snapshot that `launch topo save=FILE` wrote on such a node"
        )
        if left_out:
            logger.info(f"the script leaves out {', '.join(left_out)}: export them before sbatch")
        for warning in chosen.warnings:
            logger.warning(warning)
        sys.stderr.flush()
        print_text(text)
        return 0
    with contextlib.ExitStack() as undo:
        secrets = [stage_run(spec, argv, sources.result(), undo) for spec in specs]
        text = sbatch.render_script(script, list(map(str, paths)))
        job_id = _send_script(paths, text, secrets, chosen)
        undo.pop_all()
    numbers = [job_id] if len(specs) == 1 else [f"{job_id}_{number}" for number in range(len(specs))]
    for warning in chosen.warnings:  # if a job is refused, its error alone is said
        logger.warning(warning)
    if paths[0].is_relative_to("/tmp"):  # noqa: S108 - to warn of
        logger.warning(
            f"the run directory {paths[0]} is below /tmp, which every node has its own of as a rule:"
            " runs_dir=DIR chooses a shared one"
        )
    for path, number in zip(paths, numbers, strict=True):
        try:
            write_job_id(path, number)
        except (OSError, ValueError) as error:
            logger.warning(f"{path}/manifest.json does not tell the job's number {number} ({error})")
    if any(spec.fit_model for spec in specs):
        logger.info("the first node judges whether the model fits: cluster.machine=NAME does it before")
    _print_submitted(paths, numbers, job_id, chosen)
    if not any(spec.config.follow for spec in specs):
        return 0
    from launcher.slurm.run_states import follow_jobs

    sys.stdout.flush()
    return follow_jobs(list(zip(paths, numbers, strict=True)))


def _show_plan(plan: "Plan", spec: JobSpec) -> None:
    """Show a node's plan on stderr."""
    from launcher.report.placement import print_placement
    from launcher.report.tables import make_console

    print_placement(make_console(), plan, explain=spec.config.explain)


def stage_run(
    spec: JobSpec, argv: Sequence[str], sources: Mapping[str, dict[str, Any]], undo: contextlib.ExitStack
) -> Mapping[str, object]:
    """Make or open the run directory, with configuration, manifest and request in it; raises MachineError.

    Returns what `job.json` must not hold; `sources` is for the manifest, and `undo` leaves all as it was.
    """
    fresh = [folder for folder in (spec.run_path, *spec.run_path.parents) if not folder.exists()]
    before: dict[str, str] = {}
    for name in WRITTEN_FILES:
        with contextlib.suppress(OSError):
            before[name] = read_file(spec.run_path / name, LARGEST).decode("utf-8", "surrogateescape")
    run, manifest = prepare_run(spec, argv, [])

    @undo.callback
    def restore() -> None:
        with contextlib.suppress(OSError):
            for name in WRITTEN_FILES:
                (run.path / name).unlink(missing_ok=True)
            for name, text in before.items():
                write_private(run.path / name, text)
            for folder in fresh:  # the innermost first
                (shutil.rmtree if folder == run.path else Path.rmdir)(folder)

    try:
        secrets = write_job_request(make_job_request(spec, argv), run.path)
        manifest.last.outcome = Outcome("submitted")
        manifest.add_sources(sources)
        write_manifest(run, manifest)
    except OSError as error:
        raise refuse_run(spec, error) from None
    return secrets


def write_job_id(path: Path, job_id: str) -> None:
    """Add the job's number to a run's manifest, unless the job has done so; raises OSError or ValueError."""
    with hold_manifest(path):
        found = read_manifest(path)
        if not found.id:
            raise ValueError("it cannot be read")
        if found.last.outcome.state == "submitted":
            found.last.slurm = SlurmJob(job_id)
            write_manifest(RunDir(path), found)


def _send_script(
    paths: Sequence[Path], text: str, secrets: Sequence[Mapping[str, object]], chosen: JobOptions
) -> str:
    """Write the script into each run directory, submit it, and return the job's id."""
    try:
        for path in paths:
            write_private(path / SCRIPT, text)
    except OSError as error:
        raise MachineError(f"{error.filename} cannot be written ({error.strerror})") from None
    environ = sbatch.clean_for_sbatch(os.environ, [option.name for option in chosen.options])
    carried = {str(path): each for path, each in zip(paths, secrets, strict=True)}
    if all(each == secrets[0] for each in secrets):
        carried = {"": secrets[0]}  # one value for all
    try:
        return submit_script(paths[0] / SCRIPT, {**environ, **_carry(carried)})
    except SchedulerError as error:
        raise sbatch.explain_refusal(str(error), chosen, environ) from None


def _carry(secrets: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return the variable that carries what the requests leave out, by run directory."""
    found = {path: each for path, each in secrets.items() if each}
    return {LAUNCH_SECRETS: json.dumps(found)} if found else {}


def submit_script(script: Path, environ: Mapping[str, str]) -> str:
    """Submit a script in this environment, which the job gets too, and return the job's id.

    sbatch is called by submitit, whose `SlurmJob(RUN_DIR, JOB_ID)` works with the run directory. Its executor
    would pickle a function, start it in a step, pass this process's environment on as it is, give all members
    of an array one folder, and requeue by its own rules. Raises SchedulerError with what sbatch complained
    of, in one line.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.helpers import CommandFunction

    if not shutil.which("srun"):
        raise SchedulerError("there is no srun on PATH beside sbatch: load SLURM's module")
    try:
        # submitit prints sbatch's complaints, which are to be part of one error.
        with contextlib.redirect_stderr(io.StringIO()):
            output = CommandFunction(["sbatch", str(script)], verbose=False, env=dict(environ))()
        return SlurmExecutor._get_job_id_from_submission_command(output)
    except (FailedJobError, FailedSubmissionError) as error:
        lines = [re.sub(r"^\s*(sbatch: )?((error|fatal): )?", "", line) for line in str(error).splitlines()]
        told = "; ".join(dict.fromkeys(filter(None, lines))) or "it failed, and said nothing"
    raise SchedulerError(f"sbatch: {told}")


def find_python() -> tuple[str, ...]:
    """Return this interpreter, and the option by which it finds this very package; raises MachineError."""
    code = f"import launcher, sys; sys.exit(launcher.__file__ != {str(PACKAGE)!r})"
    for option in ISOLATED:
        done = subprocess.run([sys.executable, option, "-c", code], capture_output=True, check=False)
        if done.returncode == 0:
            return (sys.executable, option)
    raise MachineError(
        f"the nodes would not find launch by {sys.executable} outside of {Path.cwd()}: install it there,"
        " `python -m pip install -e FOLDER`"
    )


def _print_submitted(paths: Sequence[Path], numbers: Sequence[str], job_id: str, chosen: JobOptions) -> None:
    """Print the job, the run directories, and the commands to go on with."""
    told, is_one = ("nodes", "gpus-per-node", "cpus-per-task", "mem"), len(paths) == 1
    shown = [option.render() for name in told for option in chosen.options if option.name == name]
    what = "job" if is_one else f"array of {len(paths)} jobs,"
    lines = [f"submitted {what} {job_id} ({' '.join(shown)})"]
    lines += [
        f"{'run directory' if is_one else number} {path}" for path, number in zip(paths, numbers, strict=True)
    ]
    first, is_default = paths[0], (Path.cwd() / "runs") == paths[0].parents[1]
    run = quote_word(f"{first.parent.name}/{first.name}" if is_default else str(first))
    whole = job_id if is_default else run
    lines += [f"follow with  launch status {whole}", f"             launch logs -f {run}"]
    print_text("\n".join([*lines, f"             launch cancel {whole}"]) + "\n")


def _plan_snapshot(spec: JobSpec, chosen: JobOptions) -> "Plan | None":
    """Return the plan of a node as `cluster.machine` or `machine` describes it; None if neither does."""
    config = spec.config
    snapshot = config.cluster.machine or config.machine.snapshot
    if snapshot is None:
        return None
    ranks = config.nproc_per_node
    if ranks in ("auto", "gpu"):
        ranks = sbatch.parse_gpus(chosen.get("gpus-per-node") or 0)[1] or ranks
    machine_config = replace(config.machine, root="/", snapshot=snapshot)
    return plan_node(replace(config, machine=machine_config, nproc_per_node=ranks), spec.environ)


def _judge_partition(spec: JobSpec, chosen: JobOptions) -> None:
    """Judge a job by the types of its GPUs, if SLURM names them all; raises MachineError if it cannot fit.

    Of several types that the job may get, the one with most memory counts: nothing that could run is refused.
    What is auto is for the first node to choose, which knows its GPUs: an `h100` may have 80 or 94 GB.
    """
    from launcher.config.training import FitJob, settle_training
    from launcher.fit.gpus import find_largest_gpu
    from launcher.fit.training import NodeResources
    from launcher.plan.model import Gpu

    config, gpus = spec.config, sbatch.parse_gpus(chosen.get("gpus-per-node") or 0)[1]
    fitting = [kind for kind in chosen.kinds if gpus and kind.count_gpus() >= gpus]
    types = [find_largest_gpu(name or "") for kind in fitting for name, _ in kind.gpus]
    largest = max(filter(None, types), key=lambda one: one.memory_mib, default=None)
    if largest is None or None in types:
        return
    kind = max(fitting, key=lambda kind: kind.memory_mib)
    share = gpus / kind.count_gpus()
    node = NodeResources(
        cores=max(1, int(kind.cores * share)),
        memory_kib=int(kind.memory_mib * share) << 10,
        num_workers=config.dataloader.num_workers,
        worker_gib=float(config.dataloader.worker_gib),
    )
    there = (Gpu(0, "", "", name=largest.name, memory_mib=largest.memory_mib),)
    ranks = parse_nproc(config.nproc_per_node, gpus) or gpus
    job = FitJob(config, spec.fit_model, spec.cluster.min_nodes, ranks, there, node)
    settle_training(job, chooses=False)


def _judge_plan(spec: JobSpec, plan: "Plan", nodes: int) -> JobSpec:
    """Judge a job whose nodes have this plan, and return it without the model that needs no more judgement.

    Raises MachineError if it cannot fit.
    """
    from launcher.config.training import FitJob, settle_job, settle_training

    job = FitJob.of_plan(spec.config, plan, spec.fit_model, nodes, spec.environ)
    return replace(settle_job(spec, settle_training(job)), fit_model=None)


# In a SLURM job, in salloc's shell or a job script


def run_allocation(spec: JobSpec, argv: Sequence[str]) -> int:
    """Run a job over the nodes of the SLURM job that this is; returns the exit code, raises LaunchError."""
    if spec.config.cluster.requeue.allocation and not spec.config.dry_run:
        return _run_own_job(spec, argv)
    hosts = list_job_hosts(os.environ)[: spec.cluster.max_nodes]
    is_here = name_host(os.environ) in hosts
    # The nodes read that they are in an allocation, however the job was asked for.
    spec = _set_kind(spec, spec.cluster.kind)
    if spec.config.dry_run:
        if is_here:
            _show_plan(plan_node(spec.config, spec.environ), spec)
        else:
            logger.info(f"{', '.join(hosts)} plan for themselves: this machine is none of them")
        request = make_job_request(spec, argv)
        placed = first_node.order_job_nodes(os.environ, request).assign(request.max_nodes)
        attempt = Attempt(request, RunDir(spec.run_path), os.environ, Run(attempts=[placed]), requeues=False)
        sys.stderr.flush()
        print_text(join_words(first_node.describe_node_step(attempt).render(os.environ)) + "\n")
        return 0
    if spec.fit_model and is_here:  # else its first node judges
        nodes = min(spec.cluster.min_nodes, len(hosts))
        spec = _judge_plan(spec, plan_node(spec.config, spec.environ), nodes)
    run, _ = prepare_run(spec, argv, hosts)
    request = make_job_request(spec, argv)
    secrets = write_job_request(request, run.path)
    environ = {**os.environ, **_carry({str(run.path): secrets})}
    return first_node.run_attempt(request, run, environ, requeues=False)


def _set_kind(spec: JobSpec, kind: str) -> JobSpec:
    """Return the same job with a kind of cluster in its configuration."""
    cluster = replace(spec.config.cluster, kind=kind)
    return replace(spec, config=replace(spec.config, cluster=cluster))


def _run_own_job(spec: JobSpec, argv: Sequence[str]) -> int:
    """Run one attempt of the job whose batch script this process is, as one of a submitted job.

    The first attempt does what a submission would have done before.
    """
    spec, job_id = _set_kind(spec, "slurm"), name_job(os.environ)
    if read_manifest(spec.run_path).job_id == job_id:
        secrets: Mapping[str, object] = write_job_request(make_job_request(spec, argv), spec.run_path)
    else:
        with contextlib.ExitStack() as undo:
            secrets = stage_run(spec, argv, describe_sources(Path.cwd()), undo)
            write_job_id(spec.run_path, job_id)
            undo.pop_all()
    os.environ.update(_carry({str(spec.run_path): secrets}))
    return first_node.run_batch_script(spec.run_path)
