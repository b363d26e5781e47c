"""sbatch, called through submitit."""

import contextlib
import io
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor, SlurmJob
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.helpers import CommandFunction

from launcher.errors import MachineError, SchedulerError, UsageError
from launcher.files import LARGEST, read_file
from launcher.launch.job import JobSpec
from launcher.launch.local_run import prepare_run, refuse_run
from launcher.protocol import LAUNCH_SECRETS
from launcher.runs.manifest import read_manifest, write_manifest
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import RunDir, write_private
from launcher.runs.secrets import mask_words
from launcher.slurm.batch_script import (
    SCRIPT,
    Script,
    check_syntax,
    describe_member,
    render_dry_run,
    render_script,
)
from launcher.slurm.first_node import run_batch_script
from launcher.slurm.job_options import JobOptions, choose_job_options, explain_refusal
from launcher.slurm.job_request import REQUEST_FILE, hold_manifest, make_job_request, write_job_request
from launcher.slurm.slurm_environ import clean_for_sbatch
from launcher.text import print_text, quote_word

logger = logging.getLogger(__name__)

WRITTEN_FILES = ("config.yaml", "manifest.json", REQUEST_FILE, SCRIPT)
"""What a submission writes."""
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - to warn of
PACKAGE = Path(__file__).parents[1] / "__init__.py"
ISOLATED = ("-I", "-P")
"""Ways to keep Python from importing what lies in the working directory, the first that finds us winning.

-I leaves PYTHONPATH out too, whose empty entries are the working directory, and which modules set.
"""


class BatchScriptExecutor(SlurmExecutor):
    """submitit's executor for SLURM, which submits a batch script that is there already.

    `submit` and the `SlurmJob` that it returns are submitit's own, so the run directory works as the job's
    folder: `submitit.SlurmJob(RUN_DIR, JOB_ID)`. Its parameters and its own way to submit do not fit:
    it pickles a function, and writes a script that starts `python -m submitit.core._submit` in a step; it
    replaces %j in the folder's name, passes this process's environment on as it is, gives all members of an
    array one folder, and requeues by its own rules. So the method that every executor implements is another
    one here: it runs sbatch for our script, in the environment that the job is to have.
    """

    def __init__(self, script: Path, environ: Mapping[str, str]) -> None:
        super().__init__(script.parent)
        self.script, self.environ = script, dict(environ)

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[DelayedSubmission]
    ) -> list[Job[Any]]:
        """Run sbatch; the script says what runs, so the functions are not pickled."""
        sbatch = CommandFunction(["sbatch", str(self.script)], verbose=False, env=self.environ)
        # submitit prints sbatch's complaints, which are to be part of one error.
        with contextlib.redirect_stderr(io.StringIO()):
            output = sbatch()
        job_id = self._get_job_id_from_submission_command(output)
        return [SlurmJob(self.folder, job_id, tasks=[0]) for _ in delayed_submissions]


def submit_script(script: Path, environ: Mapping[str, str]) -> str:
    """Submit a script in this environment, which the job gets too, and return the job's id.

    Raises SchedulerError with what sbatch complained of, in one line.
    """
    try:
        return BatchScriptExecutor(script, environ).submit(run_batch_script, script.parent).job_id
    except FailedJobError as error:
        cause, lines = error.__cause__, dict.fromkeys(str(error).splitlines())
        words = ("sbatch: ", "error: ", "fatal: ")
        for word in words:
            lines = dict.fromkeys(line.strip().removeprefix(word) for line in lines if line.strip())
        code = cause.returncode if isinstance(cause, subprocess.CalledProcessError) else "an error"
        told = "; ".join(lines) or f"ended with {code}, and said nothing"
        raise SchedulerError(f"sbatch: {told}") from None
    except FailedSubmissionError as error:
        raise SchedulerError(f"sbatch: {' '.join(str(error).split())}") from None
    except OSError as error:  # as a rule an environment that is larger than the kernel allows
        total = sum(len(name) + len(value) for name, value in environ.items()) >> 10
        name = max(environ, key=lambda name: len(environ[name]), default="")
        raise SchedulerError(
            f"sbatch cannot be started ({error.strerror}: the environment has {total} KiB, of which {name}"
            f" has most, {len(environ.get(name, '')) >> 10} KiB): unset what the job does not need"
        ) from None
    except RuntimeError:  # submitit looks for srun, too
        raise SchedulerError("there is no srun on PATH beside sbatch: load SLURM's module") from None


@dataclass(frozen=True, slots=True)
class StagedRun:
    """A run directory that is ready for its job."""

    run: RunDir
    spec: JobSpec
    secrets: Mapping[str, object]
    """What `job.json` must not hold."""

    def write_job_id(self, job_id: str) -> None:
        """Add the job's number to the manifest, unless the job has done so; raises OSError or KeyError."""
        with hold_manifest(self.run.path):
            found = read_manifest(self.run.path)
            if found["outcome"]["state"] == "submitted":
                write_manifest(self.run, {**found, "slurm": {"job_id": job_id}})


def submit_jobs(specs: Sequence[JobSpec], argv: Sequence[str]) -> int:
    """Submit a job, or several as one job array, and say how to go on; returns the exit code.

    With dry_run=true, show the script and the plan. Raises LaunchError, leaving no new run directory.
    """
    dry_run = any(spec.config.dry_run for spec in specs)
    # What takes a process each is asked for at the same time.
    with ThreadPoolExecutor() as pool:
        sources = None if dry_run else pool.submit(describe_sources, Path.cwd())
        python = pool.submit(find_python)
        chosen = choose_job_options(specs, os.environ, dry_run=dry_run)
        if any(spec.fit_model for spec in specs):
            from launcher.slurm.submission_fit import judge_submission

            specs = [judge_submission(spec, chosen) for spec in specs]
        made_by = f"Made by: {shlex.join(mask_words(['launch', *argv]))}"
        script = Script(chosen.options, made_by, tuple(specs[0].config.cluster.setup), python.result())
        if sources is None:
            for warning in chosen.warnings:
                logger.warning(warning)
            return preview_submission(specs, argv, chosen, script)
        with contextlib.ExitStack() as undo:
            staged = stage_all(specs, argv, sources.result(), undo)
            job_id = send_script(staged, chosen, script)
            undo.pop_all()
    path = staged[0].run.path
    for warning in chosen.warnings:  # if a job is refused, its error alone is said
        logger.warning(warning)
    for folder in NODE_LOCAL:
        if path.is_relative_to(folder):
            logger.warning(
                f"the run directory {path} is below {folder}, which every node has its own of as a rule:"
                " runs_dir=DIR chooses a shared one"
            )
    numbers = [job_id] if len(staged) == 1 else [f"{job_id}_{number}" for number in range(len(staged))]
    jobs = dict(zip(numbers, staged, strict=True))
    for number, each in jobs.items():
        try:
            each.write_job_id(number)
        except (OSError, KeyError) as error:
            logger.warning(f"{each.run.manifest_path} does not tell the job's number {number} ({error})")
    print_submitted(jobs, job_id, chosen)
    if not any(spec.config.follow for spec in specs):
        return 0
    from launcher.slurm.follow import follow_jobs

    sys.stdout.flush()
    return follow_jobs([(each.run.path, number) for number, each in jobs.items()])


def preview_submission(
    specs: Sequence[JobSpec], argv: Sequence[str], chosen: JobOptions, script: Script
) -> int:
    """Show the plan on stderr and the script on stdout; returns the exit code."""
    from launcher.slurm.submission_fit import plan_snapshot

    members = [describe_member(spec, argv) for spec in specs]
    text = render_dry_run(script, members, str(Path.cwd()))
    check_syntax(text, script.setup)
    if plan := plan_snapshot(specs[0], chosen):
        from launcher.report.console import make_console
        from launcher.report.placement import print_placement

        print_placement(make_console(), plan, explain=specs[0].config.explain)
    else:
        logger.info(
            "each node makes its own plan: cluster.machine=NAME shows it for a shipped machine or for a"
            " snapshot that `launch topo save=FILE` wrote on such a node"
        )
    if secrets := sorted({name for member in members for name in member.secrets}):
        logger.info(f"the script leaves out {', '.join(secrets)}: export them before sbatch")
    sys.stderr.flush()
    print_text(text)
    return 0


def stage_all(
    specs: Sequence[JobSpec], argv: Sequence[str], sources: Mapping[str, object], undo: contextlib.ExitStack
) -> list[StagedRun]:
    """Make all run directories; `undo` leaves things as they were."""
    paths = [spec.run_path for spec in specs]
    if len(paths) > len(set(paths)):
        raise UsageError(
            f"{specs[0].run_key}={paths[0]} is one directory for {len(paths)} jobs of a sweep: leave it out,"
            " and each gets its own"
        )
    return [stage_run(spec, argv, sources, undo) for spec in specs]


def stage_run(
    spec: JobSpec, argv: Sequence[str], sources: Mapping[str, object], undo: contextlib.ExitStack
) -> StagedRun:
    """Make or open the run directory, with configuration, manifest and request in it; raises MachineError.

    `sources` is for the manifest.
    """
    is_new = spec.run_key == "runs_dir"
    folders = (spec.run_path, *spec.run_path.parents)
    fresh, before = [folder for folder in folders if not folder.exists()], {}
    for name in () if is_new else WRITTEN_FILES:
        with contextlib.suppress(OSError):
            before[name] = read_file(spec.run_path / name, LARGEST).decode("utf-8", "surrogateescape")
    run, manifest = prepare_run(spec, argv, [])
    undo.callback(restore_files, run.path, before, fresh)
    try:
        secrets = write_job_request(make_job_request(spec, argv), run.path)
        write_manifest(run, {**manifest, **sources, "outcome": {"state": "submitted"}})
    except OSError as error:
        raise refuse_run(spec, error) from None
    return StagedRun(run, spec, secrets)


def restore_files(run: Path, before: Mapping[str, str], fresh: Sequence[Path]) -> None:
    """Leave a run directory as it was: its files, and which folders there were, the innermost first."""
    with contextlib.suppress(OSError):
        for name in WRITTEN_FILES:
            if name in before:
                write_private(run / name, before[name])
            else:
                (run / name).unlink(missing_ok=True)
    for folder in fresh:
        with contextlib.suppress(OSError):
            (shutil.rmtree if folder == run else Path.rmdir)(folder)


def send_script(staged: Sequence[StagedRun], chosen: JobOptions, script: Script) -> str:
    """Write the script into each run directory, submit it, and return the job's id."""
    text = render_script(script, [str(each.run.path) for each in staged])
    check_syntax(text, script.setup)
    try:
        for each in staged:
            write_private(each.run.path / SCRIPT, text)
    except OSError as error:
        raise refuse_run(staged[0].spec, error) from None
    environ = clean_for_sbatch(os.environ, [option.name for option in chosen.options])
    secrets = {str(each.run.path): each.secrets for each in staged if each.secrets}
    values = list(secrets.values())
    if len(values) == len(staged) > 1 and all(value == values[0] for value in values):
        secrets = {"": values[0]}  # one value for all
    carried = {LAUNCH_SECRETS: json.dumps(secrets)} if secrets else {}
    try:
        return submit_script(staged[0].run.path / SCRIPT, {**environ, **carried})
    except SchedulerError as error:
        raise explain_refusal(str(error), chosen.options, chosen.partitions, chosen.kinds, environ) from None


def find_python() -> tuple[str, ...]:
    """Return this interpreter, and the option by which it finds this very package; raises MachineError."""
    code = "import os, launcher; print(os.fsencode(launcher.__file__).hex())"
    for option in ISOLATED:
        argv = [sys.executable, option, "-c", code]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.stdout.split() == [os.fsencode(PACKAGE).hex().encode()]:
            return (sys.executable, option)
    raise MachineError(
        f"the nodes would not find launch by {sys.executable} outside of {Path.cwd()}: install it there,"
        " `python -m pip install -e FOLDER`"
    )


def print_submitted(jobs: Mapping[str, StagedRun], job_id: str, chosen: JobOptions) -> None:
    """Print the job, the run directories, and the commands to go on with."""
    told = ("nodes", "gpus-per-node", "cpus-per-task", "mem")
    shown = [option.render() for name in told for option in chosen.options if option.name == name]
    what = "job" if len(jobs) == 1 else f"array of {len(jobs)} jobs,"
    print_text(f"submitted {what} {job_id} ({' '.join(shown)})\n")
    for number, each in jobs.items():
        print_text(f"{'run directory' if len(jobs) == 1 else number} {each.run.path}\n")
    first = next(iter(jobs.values()))
    default = (Path.cwd() / "runs") == first.run.path.parents[1]
    run = f"{first.run.path.parent.name}/{first.run.id}" if default else str(first.run.path)
    whole = job_id if default else run
    print_text(f"follow with  launch status {quote_word(whole)}\n")
    print_text(f"             launch logs -f {quote_word(run)}\n")
    print_text(f"             launch cancel {quote_word(whole)}\n")
